"""Drafters by name."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

from dlite_agent.drafters.block import BlockDrafter, check_block_fits
from dlite_agent.drafters.dlite import check_dlite_fits, load_dlite
from dlite_agent.drafters.drafter import Drafter
from dlite_agent.drafters.eagle3 import Eagle3Drafter
from dlite_agent.drafters.lookup import LookupDrafter
from dlite_agent.drafters.null import NullDrafter
from dlite_agent.drafters.self_test import self_test
from dlite_agent.drafters.suffix import SuffixDrafter
from dlite_agent.drafters.workspace import Workspace
from dlite_agent.errors import DLiteError, DrafterMismatchError
from dlite_agent.kernels.ngram_kernels import NgramKernels
from dlite_agent.kernels.row_kernels import RowKernels
from dlite_agent.models.block_config import BlockConfig
from dlite_agent.models.checkpoint_source import Progress
from dlite_agent.models.cost_table import MAX_ROWS
from dlite_agent.models.dlite_config import ARCHITECTURE, DLiteConfig
from dlite_agent.models.dlite_files import read_dlite_config
from dlite_agent.models.drafter_ends import ends_of
from dlite_agent.models.drafter_format import read_format
from dlite_agent.models.drafter_source import find_drafter, open_drafter
from dlite_agent.models.target import TargetConfig, TargetModel
from dlite_agent.models.weights import fingerprint

__all__ = [
    "copying_drafter",
    "drafter_beside",
    "explain_drafter",
    "is_loaded_drafter",
    "load_drafter",
    "split_window",
]

logger = logging.getLogger(__name__)

_MIN_REACHED = 0.02

_REASONS = {
    "auto": "suffix: where it pays; no trained drafter is known for this checkpoint, and copying "
    "costs no forward",
    "null": "null: plain decoding, as asked for",
    "lookup": "lookup: copies what followed the last few tokens, as asked for",
    "suffix": "suffix: copies from all that the session has held, as asked for",
}


_BESIDE = (
    "suffix and dlite: where they pay; a DLite drafter was made for this checkpoint, and copying "
    "costs no forward"
)
BESIDE_NAME = "dlite"
"""Folder, in a checkpoint's own, of its DLite drafter."""


def is_loaded_drafter(name: str) -> bool:
    """Whether a name is of a drafter with weights: `dlite`, a folder or a hub name."""
    path, _ = split_window(name)
    folder = Path(path).expanduser()
    return name == BESIDE_NAME or (folder / "config.json").is_file() or path.count("/") == 1


def split_window(name: str) -> tuple[str, int]:
    """`NAME?window=N` as the name and N; 0 without a window.

    Raises:
        DrafterMismatchError: What follows the question mark is no window.
    """
    path, mark, query = name.partition("?")
    if not mark:
        return name, 0
    window = query.removeprefix("window=")
    if window == query or not window.isdecimal() or int(window) < 1:
        raise DrafterMismatchError(
            f"{query!r} of the drafter {name!r} is no window; use e.g. {path + '?window=4096'!r}, "
            "with the number of positions to keep"
        )
    return path, int(window)


def drafter_beside(checkpoint: Path | None) -> Path | None:
    """The DLite drafter in a checkpoint's folder, or None.

    Args:
        checkpoint: Its folder or GGUF file; None: unknown.
    """
    if checkpoint is None:
        return None
    folder = (checkpoint if checkpoint.is_dir() else checkpoint.parent) / BESIDE_NAME
    try:
        read_dlite_config(folder)
    except DLiteError:
        return None
    return folder


def copying_drafter(
    name: str,
    target_config: TargetConfig,
    workspace: Callable[[], Workspace] | None = None,
    kernels: NgramKernels | None = None,
) -> Drafter:
    """Make the drafter without weights that an option names.

    Args:
        name: `"auto"`, `"null"`, `"lookup"` or `"suffix"`.
        target_config: The target that it must fit; these fit every target.
        workspace: Gives what the tenant's other sessions know; read by `"auto"` and `"suffix"`.
        kernels: Of the index that is copied from; None for Python's.

    Raises:
        DrafterMismatchError: No drafter has this name.
    """
    explain_drafter(name, target_config)
    if name == "null":
        return NullDrafter()
    if name == "auto":  # whoever runs it decides how much of a block pays
        return SuffixDrafter(
            max_block=MAX_ROWS - 1,
            min_reached=_MIN_REACHED,
            workspace=workspace,
            kernels=kernels,
        )
    if name == "suffix":
        return SuffixDrafter(workspace=workspace, kernels=kernels)
    return LookupDrafter(kernels=kernels)


def load_drafter(
    name: str,
    target: TargetModel,
    fingerprint: str,
    *,
    kernels: RowKernels | None = None,
    test_prompt: Sequence[int] = (),
    progress: Progress | None = None,
) -> Drafter:
    """Load a drafter with weights: DLite, DSpark, DFlash, DFlash2 or EAGLE-3.

    Args:
        name: A folder or a hub name; behind it may stand `?window=N`, for drafters with a history:
            how many of the last positions they keep and see.
        target: What it is to draft for.
        fingerprint: Of the target's checkpoint, as it is stored (`models.weights.fingerprint`).
        kernels: As in `DLiteNetwork`.
        test_prompt: Ids of a rendered question, with which `self_test` is run; empty: it is not.
        progress: Called with `"download"` and a fraction.

    Raises:
        DrafterMismatchError: It was trained for another target; the message says why.
        ModelNotFoundError: Nothing has this name, or a file is missing.
        UnsupportedCheckpointError: It is of a kind that is not read, or damaged; a tensor that is
            missing, unknown or of a wrong shape is named.
    """
    path, window = split_window(name)
    source = find_drafter(path)
    if source.architecture == ARCHITECTURE:
        if window:
            raise DrafterMismatchError(
                f"{path!r} is a DLite drafter, which keeps no history; name it without a window"
            )
        check_dlite_fits(DLiteConfig.from_json(source.config, path), target.config, fingerprint)
        return load_dlite(source.fetch(progress), target, fingerprint, kernels=kernels)
    opened = open_drafter(source, target.config, progress)
    read = opened.tensors.read
    drafter: BlockDrafter | Eagle3Drafter
    if isinstance(opened.config, BlockConfig):
        check_block_fits(opened.config, target.config, fingerprint)
        ends = ends_of(opened.found, opened.tensors, target)
        drafter = BlockDrafter(opened.config, read, ends, window=window)
    else:
        ends = ends_of(opened.found, opened.tensors, target)
        drafter = Eagle3Drafter(opened.config, read, ends, window=window)
    if test_prompt:
        result = self_test(drafter, target, test_prompt)
        told = " ".join(f"{reading!r}={tau:.2f}" for reading, tau in result.accepted.items())
        logger.info("drafter=%s first_right=%.2f accepted: %s", name, result.first_right, told)
        if result.warning:
            logger.warning("drafter=%s: %s", name, result.warning)
    return drafter


def explain_drafter(name: str, target_config: TargetConfig, checkpoint: Path | None = None) -> str:
    """Which drafter an engine makes and why, for a start-up line.

    Args:
        name: As `EngineConfig.drafter`: one of `copying_drafter`'s, or one of `load_drafter`'s.
        target_config: The target.
        checkpoint: Where it lies; None: unknown.

    Raises:
        DrafterMismatchError: No drafter has this name.
    """
    if name == "auto" and checkpoint is not None:
        return _explain_auto(target_config, checkpoint)
    if is_loaded_drafter(name) and (name != BESIDE_NAME or drafter_beside(checkpoint)):
        return f"{_family(name, target_config)}: {name}, as asked for"
    try:
        return _REASONS[name]
    except KeyError:
        raise DrafterMismatchError(
            f"there is no drafter {name!r} for {target_config.architecture}; "
            f"use one of {', '.join(map(repr, _REASONS))}, 'dlite' where the checkpoint has one, "
            "the folder of one, or its name on the hub"
        ) from None


def _family(name: str, target_config: TargetConfig) -> str:
    """What kind of drafter a folder holds; of the hub's none is known before it is loaded."""
    path = split_window(name)[0]
    if name == BESIDE_NAME:
        return "dlite"
    if not Path(path).expanduser().is_dir():
        return "from the hub"
    source = find_drafter(path)
    if source.architecture == ARCHITECTURE:
        return "dlite"
    return read_format(source.config, name, target_config).family


def _explain_auto(target_config: TargetConfig, checkpoint: Path) -> str:
    folder = drafter_beside(checkpoint)
    if folder is None:
        return _REASONS["auto"]
    try:
        check_dlite_fits(read_dlite_config(folder), target_config, fingerprint(checkpoint))
    except DrafterMismatchError as error:
        return f"suffix: where it pays; the one in {BESIDE_NAME}/ is left out: {error}"
    return _BESIDE
