"""Deltas of a stream, joined."""

from __future__ import annotations

from collections.abc import Iterable

from dlite_agent.chat.messages import Delta, ReasoningDelta, TextDelta, ToolCallDelta

__all__ = ["merge_deltas"]


def merge_deltas(deltas: Iterable[Delta]) -> list[Delta]:
    """Join neighbours of one kind (and one call): streams are equal when these are."""
    merged: list[Delta] = []
    for delta in deltas:
        last = merged[-1] if merged else None
        if isinstance(delta, TextDelta) and isinstance(last, TextDelta):
            merged[-1] = TextDelta(last.text + delta.text)
        elif isinstance(delta, ReasoningDelta) and isinstance(last, ReasoningDelta):
            merged[-1] = ReasoningDelta(last.text + delta.text)
        elif (
            isinstance(delta, ToolCallDelta)
            and isinstance(last, ToolCallDelta)
            and delta.name is None
            and delta.index == last.index
        ):
            merged[-1] = ToolCallDelta(
                last.index, last.arguments + delta.arguments, last.id, last.name
            )
        else:
            merged.append(delta)
    return merged
