"""Tools in the order and spelling in which a tenant sent them first.

Clients shuffle the list of tools and the keys of their schemas from call to call (a set, a map of
another language, several tool servers). Neither has a meaning, but both stand at the head of the
prompt, where any difference costs the whole history.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from dlite_agent.chat.message_keys import seed_key
from dlite_agent.chat.messages import ToolSpec

__all__ = ["ToolForms"]


class ToolForms:
    """Remembers tool lists. Owned by one thread.

    Args:
        max_lists: Most lists to remember, at least 1; the least recently used are forgotten.
    """

    def __init__(self, max_lists: int = 256) -> None:
        self._max_lists = max_lists
        self._lists: OrderedDict[bytes, tuple[ToolSpec, ...]] = OrderedDict()

    def learn(self, other: ToolForms) -> None:
        """Take lists that somebody else has seen first; what is known here stays."""
        for form in other._lists.values():
            self.first_seen(form)

    def first_seen(self, tools: Sequence[ToolSpec]) -> tuple[ToolSpec, ...]:
        """The same tools as they came first: another order, or other keys first, change nothing.

        A list with any other name, description or schema is another list, and returned as it is.
        """
        key = seed_key(tools, {})
        form = self._lists.setdefault(key, tuple(tools))
        self._lists.move_to_end(key)
        if len(self._lists) > self._max_lists:
            self._lists.popitem(last=False)
        return form
