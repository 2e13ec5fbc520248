"""Drafters by name."""

from __future__ import annotations

from collections.abc import Callable

from dlite_agent.drafters.drafter import Drafter
from dlite_agent.drafters.lookup import LookupDrafter
from dlite_agent.drafters.null import NullDrafter
from dlite_agent.drafters.suffix import SuffixDrafter
from dlite_agent.drafters.workspace import Workspace
from dlite_agent.errors import DrafterMismatchError
from dlite_agent.models.cost_table import MAX_ROWS
from dlite_agent.models.target import TargetConfig

__all__ = ["explain_drafter", "load_drafter"]

_MIN_REACHED = 0.02

_REASONS = {
    "auto": "suffix: where it pays; no trained drafter is known for this checkpoint, and copying "
    "costs no forward",
    "null": "null: plain decoding, as asked for",
    "lookup": "lookup: copies what followed the last few tokens, as asked for",
    "suffix": "suffix: copies from all that the session has held, as asked for",
}


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


def explain_drafter(name: str, target_config: TargetConfig) -> str:
    """Which drafter `load_drafter` makes and why, for a start-up line.

    Raises:
        DrafterMismatchError: No drafter has this name.
    """
    try:
        return _REASONS[name]
    except KeyError:
        raise DrafterMismatchError(
            f"there is no drafter {name!r} for {target_config.architecture}; "
            f"use one of {', '.join(map(repr, _REASONS))}"
        ) from None
