"""Which drafters are known for a model: beside it, by fingerprint, and public ones, by name.

A public drafter is never used unless it is named; this list says what could be.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from dlite_agent.drafters.block import check_block_fits
from dlite_agent.drafters.dlite import check_dlite_fits
from dlite_agent.errors import DLiteError
from dlite_agent.models.block_config import BlockConfig
from dlite_agent.models.checkpoint_source import read_json_file
from dlite_agent.models.dlite_config import ARCHITECTURE
from dlite_agent.models.dlite_files import read_dlite_config
from dlite_agent.models.drafter_source import find_drafter, open_drafter
from dlite_agent.models.target import TargetConfig

__all__ = ["KnownDrafter", "drafters_beside", "public_drafters"]


@dataclass(frozen=True, slots=True)
class KnownDrafter:
    """A drafter and what is known of it.

    Attributes:
        name: What to write as `drafter=`.
        family: `dlite`, `dspark`, `dflash`, `dflash2` or `eagle3`.
        fits: It was made for this model, as far as its files or its name tell.
        why: What tells.
    """

    name: str
    family: str
    fits: bool
    why: str


@dataclass(frozen=True, slots=True)
class _Public:
    name: str
    family: str
    target: str
    source: str


_DEEPSPEC = "github.com/deepseek-ai/DeepSpec"
_ZLAB = "github.com/z-lab/dflash"
_ANGELSLIM = "angelslim.readthedocs.io"
_SPECULATORS = "github.com/vllm-project/speculators"
_PUBLIC = (
    _Public("deepseek-ai/dspark_qwen3_4b_block7", "dspark", "Qwen/Qwen3-4B", _DEEPSPEC),
    _Public("deepseek-ai/dspark_qwen3_8b_block7", "dspark", "Qwen/Qwen3-8B", _DEEPSPEC),
    _Public("deepseek-ai/dspark_qwen3_14b_block7", "dspark", "Qwen/Qwen3-14B", _DEEPSPEC),
    _Public("deepseek-ai/dflash_qwen3_4b_block7", "dflash", "Qwen/Qwen3-4B", _DEEPSPEC),
    _Public("deepseek-ai/dflash_qwen3_8b_block7", "dflash", "Qwen/Qwen3-8B", _DEEPSPEC),
    _Public("deepseek-ai/dflash_qwen3_14b_block7", "dflash", "Qwen/Qwen3-14B", _DEEPSPEC),
    _Public("deepseek-ai/eagle3_qwen3_4b_ttt7", "eagle3", "Qwen/Qwen3-4B", _DEEPSPEC),
    _Public("deepseek-ai/eagle3_qwen3_8b_ttt7", "eagle3", "Qwen/Qwen3-8B", _DEEPSPEC),
    _Public("deepseek-ai/eagle3_qwen3_14b_ttt7", "eagle3", "Qwen/Qwen3-14B", _DEEPSPEC),
    _Public("z-lab/Qwen3-4B-DFlash-b16", "dflash", "Qwen/Qwen3-4B", _ZLAB),
    _Public("z-lab/Qwen3-8B-DFlash-b16", "dflash", "Qwen/Qwen3-8B", _ZLAB),
    _Public("RedHatAI/Qwen3-8B-speculator.dflash2", "dflash2", "Qwen/Qwen3-8B", _SPECULATORS),
    _Public("RedHatAI/Qwen3-8B-speculator.dflash", "dflash", "Qwen/Qwen3-8B", _SPECULATORS),
    _Public("RedHatAI/Qwen3-8B-speculator.eagle3", "eagle3", "Qwen/Qwen3-8B", _SPECULATORS),
    _Public("RedHatAI/Qwen3-32B-speculator.eagle3", "eagle3", "Qwen/Qwen3-32B", _SPECULATORS),
    _Public("AngelSlim/Qwen3-1.7B_eagle3", "eagle3", "Qwen/Qwen3-1.7B", _ANGELSLIM),
    _Public("AngelSlim/Qwen3-4B_eagle3", "eagle3", "Qwen/Qwen3-4B", _ANGELSLIM),
    _Public("AngelSlim/Qwen3-8B_eagle3", "eagle3", "Qwen/Qwen3-8B", _ANGELSLIM),
    _Public("AngelSlim/Qwen3-14B_eagle3", "eagle3", "Qwen/Qwen3-14B", _ANGELSLIM),
)
"""As they were announced; none of them was loaded by us."""
_SHAPES = {
    (2048, 28): "Qwen/Qwen3-1.7B",
    (2560, 36): "Qwen/Qwen3-4B",
    (4096, 36): "Qwen/Qwen3-8B",
    (5120, 40): "Qwen/Qwen3-14B",
    (5120, 64): "Qwen/Qwen3-32B",
}
"""Hidden size and layers of Qwen3 checkpoints with 151,936 ids."""
_QWEN3_VOCABULARY = 151_936


def drafters_beside(checkpoint: Path, target: TargetConfig, fingerprint: str) -> list[KnownDrafter]:
    """The drafters in the folders beside a checkpoint's files, in the order of their names.

    Args:
        checkpoint: The checkpoint's folder or GGUF file.
        target: Its shape.
        fingerprint: Of its weights, as they are stored.
    """
    folder = checkpoint if checkpoint.is_dir() else checkpoint.parent
    found = (_read(child, target, fingerprint) for child in sorted(folder.iterdir()))
    return [drafter for drafter in found if drafter is not None]


def public_drafters(model: str, target: TargetConfig) -> list[KnownDrafter]:
    """Public drafters for a model by its name, or by its shape.

    Args:
        model: A hub name, or a folder that ends in one's last part.
        target: Its shape.
    """
    name = model.rstrip("/").rsplit("/", 1)[-1].lower()
    shape = target.hidden_size, target.num_layers
    like = _SHAPES.get(shape) if target.vocab_size == _QWEN3_VOCABULARY else None
    return list(_public(name, like))


def _public(name: str, like: str | None) -> Iterable[KnownDrafter]:
    for drafter in _PUBLIC:
        if drafter.target.rsplit("/", 1)[-1].lower() == name:
            why = f"for {drafter.target}, says {drafter.source}"
            yield KnownDrafter(drafter.name, drafter.family, True, why)
        elif drafter.target == like:
            why = f"for {like}, which has this shape and maybe other weights, says {drafter.source}"
            yield KnownDrafter(drafter.name, drafter.family, False, why)


def _read(folder: Path, target: TargetConfig, fingerprint: str) -> KnownDrafter | None:
    """The drafter in a folder; None where there is none."""
    path = folder / "config.json"
    if not path.is_file():
        return None
    family = "unknown"
    try:
        if read_json_file(path, str(folder)).get("architectures") == [ARCHITECTURE]:
            family = "dlite"
            config = read_dlite_config(folder)
            check_dlite_fits(config, target, fingerprint)
            own = config.target_fingerprint
        else:
            opened = open_drafter(find_drafter(str(folder)), target)
            family, own = opened.found.family, ""
            if isinstance(opened.config, BlockConfig):
                check_block_fits(opened.config, target, fingerprint)
                own = opened.config.target_fingerprint
    except DLiteError as error:
        return KnownDrafter(str(folder), family, False, str(error))
    why = "made for this checkpoint, by fingerprint" if own else "made for a target of this shape"
    return KnownDrafter(str(folder), family, True, why)
