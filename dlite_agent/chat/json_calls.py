"""How a request's calls in the hermes JSON form are read."""

from __future__ import annotations

from collections.abc import Sequence

from dlite_agent.chat.call_json import CallScanner
from dlite_agent.chat.call_values import resolved
from dlite_agent.chat.messages import ToolSpec

__all__ = ["JsonCalls"]


class JsonCalls:
    """Knows which of a request's tools may be called without arguments.

    Args:
        tools: The request's. A tool that is not among them may.
    """

    def __init__(self, tools: Sequence[ToolSpec] = ()) -> None:
        self._needy = frozenset(
            tool.name
            for tool in tools
            if resolved(dict(tool.parameters), tool.parameters).get("required")
        )

    def scanner(self) -> CallScanner:
        """A scanner of one region."""
        return CallScanner(self._needy)
