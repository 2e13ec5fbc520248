"""Which of a store's sessions a prompt continues: the longest prefix, held already or soon."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from dlite_agent.sessions.public import PUBLIC
from dlite_agent.sessions.request import ComingPrefix, PrefixRequest
from dlite_agent.sessions.resident import Resident

__all__ = ["WORTH_WAITING", "PrefixSearch"]

WORTH_WAITING = 32
"""Fewer tokens are prefilled sooner than waited for, or kept."""


class PrefixSearch:
    """Looks at sessions and changes none.

    Args:
        entries: Of a store, by id, the least recently used first.
        clock: The store's.
    """

    def __init__(self, entries: Mapping[str, Resident], clock: Callable[[], float]) -> None:
        self._entries = entries
        self._clock = clock

    def longest(self, request: PrefixRequest) -> tuple[Resident | None, int]:
        """Whose tokens the prompt repeats furthest, and how far.

        Of several that tie: one that can be taken over, else a named one, else the latest used.
        """
        best: Resident | None = None
        common = 0
        for entry in request.search_order(self._entries):
            shared = request.shared_with(entry, more_than=common)
            if shared > common:
                best, common = entry, shared
        if best is None or self.may_take_over(best, common, request):
            return best, common
        for entry in request.search_order(self._entries):
            may_take_over = self.may_take_over(entry, common, request)
            if may_take_over and request.shared_with(entry, more_than=common - 1) == common:
                return entry, common
        return best, common

    def may_take_over(self, entry: Resident, common: int, request: PrefixRequest) -> bool:
        """Whether the request may rewind a session to `common` tokens rather than fork it."""
        if entry.tenant != request.tenant:
            return False  # what is public belongs to everybody
        is_named = request.origin(entry) != "prefix"
        return entry.may_be_taken_over(
            common, self._clock(), is_named=is_named, drops_answers=request.drops_answers
        )

    def coming(self, request: PrefixRequest) -> ComingPrefix | None:
        """The longest prefix that a running turn will hold soon, if waiting for it pays."""
        _, best = self.longest(request)
        best += WORTH_WAITING - 1
        coming = None
        for entry in self._entries.values():
            if not entry.session.busy or entry.tenant not in (request.tenant, PUBLIC):
                continue
            promised = entry.trail.common_prefix(request.trail, more_than=best)
            promised = min(promised, len(request.prompt) - 1)
            if promised > best:
                best, coming = promised, ComingPrefix(entry.session, promised)
        return coming
