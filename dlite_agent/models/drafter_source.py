"""A public drafter by folder or hub name: its config first, its weights once that is accepted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from dlite_agent.errors import UnsupportedCheckpointError
from dlite_agent.models.block_config import BlockConfig, block_shapes
from dlite_agent.models.checkpoint_source import FolderSource, HubSource, Progress, open_source
from dlite_agent.models.drafter_format import DrafterFormat, read_format
from dlite_agent.models.drafter_shapes import block_config_of, check_manifest, eagle3_config_of
from dlite_agent.models.drafter_tensors import DrafterTensors
from dlite_agent.models.eagle3_network import Eagle3Config
from dlite_agent.models.target import TargetConfig

__all__ = ["DrafterSource", "OpenDrafter", "find_drafter", "open_drafter", "read_block_drafter"]


@dataclass(frozen=True, slots=True)
class OpenDrafter:
    """A drafter whose tensors are all there, of the right names and shapes, and not yet read."""

    found: DrafterFormat
    config: BlockConfig | Eagle3Config
    tensors: DrafterTensors


@dataclass(frozen=True, slots=True)
class DrafterSource:
    """A drafter whose weights may still be far away.

    Attributes:
        name: As the user named it.
        files: Where they are.
        config: Content of its `config.json`.
    """

    name: str
    files: FolderSource | HubSource
    config: Mapping[str, object]

    @property
    def architecture(self) -> object:
        """The first of `architectures`, or None."""
        names = self.config.get("architectures")
        return names[0] if isinstance(names, list) and names else None

    def fetch(self, progress: Progress | None) -> Path:
        """A local folder with config and weights; raises as `CheckpointSource.fetch`."""
        if isinstance(self.files, HubSource):
            return self.files.fetch(progress, weights_only=True)
        return self.files.fetch(progress)


def find_drafter(name: str) -> DrafterSource:
    """Find a drafter and read its config.

    Args:
        name: A folder or a hub name.

    Raises:
        ModelNotFoundError: Nothing has this name.
        UnsupportedCheckpointError: It has no config or no safetensors (pickles are never read).
    """
    files = open_source(name, None)
    config = files.read_json("config.json")
    if config is None or not isinstance(files, FolderSource | HubSource):
        raise UnsupportedCheckpointError(
            f"{name!r} is no folder of config.json and *.safetensors, and drafters are read from "
            "those only; convert it, or use another"
        )
    return DrafterSource(name, files, config)


def open_drafter(
    source: DrafterSource, target: TargetConfig, progress: Progress | None = None
) -> OpenDrafter:
    """Open a public drafter.

    Args:
        source: Where it is.
        target: Its target.
        progress: Called with `"download"` and a fraction.

    Raises:
        ModelNotFoundError: A file is missing.
        UnsupportedCheckpointError: It is of a kind that is not read, or a tensor is missing,
            unknown or of a wrong shape.
        DrafterMismatchError: It is for another target; no weights were downloaded.
        CapacityError: The disk has no room for it.
    """
    found = read_format(source.config, source.name, target)
    tensors = DrafterTensors(source.fetch(progress), source.name)
    make = eagle3_config_of if found.family == "eagle3" else block_config_of
    config: BlockConfig | Eagle3Config = make(found, tensors.shapes)
    check_manifest(config, found, tensors.shapes)
    return OpenDrafter(found, config, tensors)


def read_block_drafter(name: str, target: TargetConfig) -> tuple[BlockConfig, dict[str, Tensor]]:
    """The tensors of a DSpark, DFlash or DFlash2 drafter, e.g. to start another from.

    Args:
        name: A folder or a hub name.
        target: Its target.

    Returns:
        Its config, and the tensors of `block_shapes` as they are stored.

    Raises:
        UnsupportedCheckpointError: It is of another kind; or as in `open_drafter`.
        DrafterMismatchError: It is for another target.
    """
    opened = open_drafter(find_drafter(name), target)
    if not isinstance(opened.config, BlockConfig):
        raise UnsupportedCheckpointError(
            f"{name!r} is an {opened.found.family} drafter, and a DSpark or DFlash one is wanted"
        )
    names = block_shapes(opened.config)
    return opened.config, {tensor: opened.tensors.read(tensor) for tensor in names}
