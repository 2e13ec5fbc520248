"""What a tenant's other sessions have read and written, for sessions that have not seen it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b

import numpy as np

from dlite_agent.drafters.suffix_index import SuffixIndex
from dlite_agent.errors import ConfigurationError

__all__ = ["Workspace", "WorkspaceIndex"]

_SIZES = (8, 3)
_MIN_SPAN = 8
_BETWEEN = -1
"""No token's id; stands behind every span, so that no match and no copy crosses its end."""


class _Generation:
    """Spans that came one after the other."""

    def __init__(self) -> None:
        self.index = SuffixIndex(_SIZES)
        self.digests: set[bytes] = set()

    @property
    def nbytes(self) -> int:
        return self.index.nbytes + 100 * len(self.digests)


class Workspace:
    """One tenant's spans in two generations, of which the older one is forgotten as a whole.

    A span that is added again while it is in the older generation moves to the younger one.
    """

    def __init__(self) -> None:
        self._young = _Generation()
        self._old = _Generation()

    @property
    def nbytes(self) -> int:
        """Bytes of the index and of the spans' digests."""
        return self._young.nbytes + self._old.nbytes

    @property
    def young_nbytes(self) -> int:
        """Bytes of the younger generation."""
        return self._young.nbytes

    @property
    def num_tokens(self) -> int:
        """Tokens held, one for the end of each span included."""
        return self._young.index.length + self._old.index.length

    def add(self, token_ids: Sequence[int]) -> bool:
        """Index a span, e.g. one tool result; False for one that is known or very short."""
        ids = np.asarray(token_ids, dtype=np.int32)
        digest = blake2b(ids.tobytes(), digest_size=16).digest()
        if len(ids) < _MIN_SPAN or digest in self._young.digests:
            return False
        self._young.digests.add(digest)
        self._young.index.append([*token_ids, _BETWEEN])
        return True

    def age(self) -> None:
        """Forget the older generation; the younger becomes the older."""
        self._old, self._young = self._young, _Generation()

    def copies(
        self, context: Sequence[int], max_probes: int, count: int
    ) -> list[tuple[int, list[int]]]:
        """What followed the places that end like a context, in at least 3 tokens; longest first.

        Args:
            context: Tokens of any session of this tenant, the newest last.
            max_probes: As for `SuffixIndex.find`.
            count: Most tokens of each; none goes further than its span.

        Returns:
            How many tokens agree, and at least one that followed.
        """
        found: list[tuple[int, list[int]]] = []
        for index in (self._young.index, self._old.index):
            for length, position in index.find(context, max_probes):
                copy = index.continuation(position, count)
                if copy := copy[: copy.index(_BETWEEN)] if _BETWEEN in copy else copy:
                    found.append((length, copy))
        return sorted(found, key=lambda item: -item[0])


class WorkspaceIndex:
    """The workspaces of all tenants. Nothing of one is ever found by another.

    Used by one thread at a time.

    Args:
        max_bytes: Budget of all of them. A generation of one tenant takes half of it at most; where
            all of them exceed it, the least recently used tenant forgets its older generation.

    Raises:
        ConfigurationError: The budget is not positive.
    """

    def __init__(self, max_bytes: int = 32 * 2**20) -> None:
        if max_bytes < 1:
            raise ConfigurationError(f"max_bytes is {max_bytes!r}; use at least 1")
        self._max_bytes = max_bytes
        self._tenants: OrderedDict[str, Workspace] = OrderedDict()

    @property
    def nbytes(self) -> int:
        """Bytes of all workspaces."""
        return sum(workspace.nbytes for workspace in self._tenants.values())

    def of(self, tenant: str = "") -> Workspace:
        """A tenant's workspace; it becomes the most recently used one."""
        workspace = self._tenants.setdefault(tenant, Workspace())
        self._tenants.move_to_end(tenant)
        return workspace

    def add(self, token_ids: Sequence[int], *, tenant: str = "") -> None:
        """Index a span for a tenant's sessions, and keep to the budget."""
        workspace = self.of(tenant)
        if not workspace.add(token_ids):
            return
        if 2 * workspace.young_nbytes > self._max_bytes:
            workspace.age()
        while self.nbytes > self._max_bytes:
            self._shrink()

    def _shrink(self) -> None:
        oldest = next(iter(self._tenants))
        workspace = self._tenants[oldest]
        workspace.age()
        if not workspace.num_tokens:
            del self._tenants[oldest]
