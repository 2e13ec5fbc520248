"""Drafters by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from dlite_agent.drafters.dlite import check_dlite_fits
from dlite_agent.drafters.drafter import Drafter
from dlite_agent.drafters.lookup import LookupDrafter
from dlite_agent.drafters.null import NullDrafter
from dlite_agent.drafters.suffix import SuffixDrafter
from dlite_agent.drafters.workspace import Workspace
from dlite_agent.errors import DLiteError, DrafterMismatchError
from dlite_agent.models.cost_table import MAX_ROWS
from dlite_agent.models.dlite_files import read_dlite_config
from dlite_agent.models.target import TargetConfig
from dlite_agent.models.weights import fingerprint

__all__ = ["drafter_beside", "drafter_folder", "explain_drafter", "load_drafter"]

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


def drafter_folder(name: str, checkpoint: Path | None = None) -> Path | None:
    """The folder of the drafter that `name` is, or None.

    Args:
        name: A folder, or `"dlite"`: the one in the checkpoint's folder.
        checkpoint: As in `drafter_beside`.
    """
    if name == BESIDE_NAME:
        return drafter_beside(checkpoint)
    folder = Path(name)
    return folder if (folder / "config.json").is_file() else None


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


def load_drafter(
    name: str,
    target_config: TargetConfig,
    workspace: Callable[[], Workspace] | None = None,
) -> Drafter:
    """Make the drafter that an option names.

    Args:
        name: `"auto"`, `"null"`, `"lookup"` or `"suffix"`.
        target_config: The target that it must fit; these fit every target.
        workspace: Gives what the tenant's other sessions know; read by `"auto"` and `"suffix"`.

    Raises:
        DrafterMismatchError: No drafter has this name.
    """
    explain_drafter(name, target_config)
    if name == "null":
        return NullDrafter()
    if name == "auto":  # whoever runs it decides how much of a block pays
        return SuffixDrafter(max_block=MAX_ROWS - 1, min_reached=_MIN_REACHED, workspace=workspace)
    return SuffixDrafter(workspace=workspace) if name == "suffix" else LookupDrafter()


def explain_drafter(name: str, target_config: TargetConfig, checkpoint: Path | None = None) -> str:
    """Which drafter an engine makes and why, for a start-up line.

    Args:
        name: As `EngineConfig.drafter`: one of `load_drafter`'s, or a folder.
        target_config: The target.
        checkpoint: Where it lies; None: unknown.

    Raises:
        DrafterMismatchError: No drafter has this name.
    """
    if name == "auto" and checkpoint is not None:
        return _explain_auto(target_config, checkpoint)
    if name not in _REASONS and drafter_folder(name, checkpoint) is not None:
        return f"dlite: {name}, as asked for"
    try:
        return _REASONS[name]
    except KeyError:
        raise DrafterMismatchError(
            f"there is no drafter {name!r} for {target_config.architecture}; "
            f"use one of {', '.join(map(repr, _REASONS))}, 'dlite' where the checkpoint has one, "
            "or the folder of one"
        ) from None


def _explain_auto(target_config: TargetConfig, checkpoint: Path) -> str:
    folder = drafter_beside(checkpoint)
    if folder is None:
        return _REASONS["auto"]
    try:
        check_dlite_fits(read_dlite_config(folder), target_config, fingerprint(checkpoint))
    except DrafterMismatchError as error:
        return f"suffix: where it pays; the one in {BESIDE_NAME}/ is left out: {error}"
    return _BESIDE
