"""A call that is being read, and what was said of it so far."""

from __future__ import annotations

from dlite_agent.chat.call_json import CallScanner
from dlite_agent.chat.call_xml import XmlCallScanner
from dlite_agent.chat.messages import ToolCallDelta

__all__ = ["OpenCall"]


class OpenCall:
    """One call of a turn.

    Args:
        scanner: Reads it.
        call_id: Its id.
    """

    def __init__(self, scanner: CallScanner | XmlCallScanner, call_id: str) -> None:
        self.scanner = scanner
        self.call_id = call_id
        self._index: int | None = None

    def delta(self, next_index: int) -> ToolCallDelta | None:
        """What is new since the last call; the first one has the name, and takes `next_index`."""
        if self.scanner.name is None:
            return None
        arguments = self.scanner.take_arguments()
        if self._index is None:
            self._index = next_index
            return ToolCallDelta(next_index, arguments, self.call_id, self.scanner.name)
        return ToolCallDelta(self._index, arguments) if arguments else None
