"""What opens and closes the regions of a turn."""

from __future__ import annotations

__all__ = ["CALL", "CALL_END", "FUNCTION", "THINK", "THINK_END"]

THINK, THINK_END, CALL, CALL_END = "<think>", "</think>", "<tool_call>", "</tool_call>"
FUNCTION = "<function="
