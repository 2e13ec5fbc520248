"""A prompt that looks for a session: what it shares with one, and what it is going to need."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Literal

from dlite_agent.errors import RequestError
from dlite_agent.sessions.budget import Need
from dlite_agent.sessions.public import PUBLIC
from dlite_agent.sessions.resident import Resident
from dlite_agent.sessions.session import Session
from dlite_agent.sessions.token_trail import TokenTrail

__all__ = ["ComingPrefix", "Origin", "PrefixRequest", "make_request"]

Origin = Literal["tool_call", "hint", "prefix", "cold"]


@dataclass(frozen=True, slots=True)
class ComingPrefix:
    """Prompt tokens that a running turn is about to compute.

    Attributes:
        session: The session that will hold them.
        length: How many there will be.
    """

    session: Session
    length: int

    @property
    def is_over(self) -> bool:
        """Whether they are there, or are not to be expected any more."""
        session = self.session
        return session.is_closed or not session.busy or len(session.token_ids) >= self.length


@dataclass(frozen=True, slots=True)
class PrefixRequest:
    """What `SessionStore.acquire` is asked for.

    Attributes:
        prompt: All ids.
        trail: The same ids.
        hint_id: A session that the client suggests.
        owned_ids: Sessions that it proved to know.
        answer_rows: KV rows that the answer is expected to need.
        drops_answers: It may take the place of an earlier answer to the same prompt.
        tenant: It finds sessions of this tenant, and public ones.
    """

    prompt: list[int]
    trail: TokenTrail
    hint_id: str | None
    owned_ids: Set[str]
    answer_rows: int
    drops_answers: bool = True
    tenant: str = ""

    @property
    def num_planned(self) -> int:
        """KV rows at the end of its turn."""
        return len(self.prompt) + self.answer_rows

    def need(self, to_pages: Callable[[int], int], keep: Resident | None = None) -> Need:
        """Pages for the prompt and its first token now, and for the planned rows."""
        num_rows = len(self.prompt) + 1
        return Need(to_pages(num_rows), to_pages(self.num_planned), num_rows, keep)

    def shared_with(self, entry: Resident, *, more_than: int) -> int:
        """See `Resident.shared_with`."""
        return entry.shared_with(self.prompt, self.trail, more_than=more_than)

    def search_order(self, entries: Mapping[str, Resident]) -> Iterator[Resident]:
        """Its tenant's sessions: the named ones first, then the latest used; then public ones."""
        named = dict.fromkeys((*sorted(self.owned_ids), self.hint_id))
        for session_id in named:
            entry = entries.get(session_id) if session_id is not None else None
            if entry is not None and entry.tenant == self.tenant:
                yield entry
        latest = list(entries.items())[::-1]
        for session_id, entry in latest:
            if session_id not in named and entry.tenant == self.tenant:
                yield entry
        if self.tenant != PUBLIC:
            yield from (entry for _, entry in latest if entry.tenant == PUBLIC)

    def origin(self, entry: Resident) -> Origin:
        """Why a session with a common prefix is chosen."""
        if entry.session.session_id in self.owned_ids:
            return "tool_call"
        return "hint" if entry.session.session_id == self.hint_id else "prefix"


def make_request(
    prompt_ids: Sequence[int],
    hint_id: str | None = None,
    owned_ids: Set[str] = frozenset(),
    answer_rows: int = 1,
) -> PrefixRequest:
    """Check the ids of a prompt.

    Raises:
        RequestError: It is empty or holds something that is no token id.
    """
    prompt = list(prompt_ids)
    if not prompt:
        raise RequestError("the prompt has no tokens; send at least one")
    try:
        return PrefixRequest(prompt, TokenTrail(prompt), hint_id, owned_ids, answer_rows)
    except (OverflowError, TypeError, ValueError) as error:
        raise RequestError(
            f"the prompt holds what is no token id: {error}; use the model's own tokenizer"
        ) from error
