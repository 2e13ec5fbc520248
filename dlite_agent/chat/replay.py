"""Exact replay: splice the token ids that were sampled for a message instead of rendering it again.

What a client sends back is a description of what the model said; the journal has the original. A
turn matches when all messages before it matched, its content and calls are equal (chained keys,
see `dlite_agent.chat.message_keys`), and its reasoning is absent or equal. Reasoning that is
present and different wins over ours. Anything else is an edit and is rendered as sent.

    plan = plan_replay(messages, seed_key(tools, kwargs), journal, handles=handles, mode="auto")
    ...  # render with plan.splices, generate an answer
    for form in turn_forms(plan.key, answer, unparsed):
        journal.record(form.key, JournalRecord(ids, form.reasoning_digest, session_id))
    handles.remember(call_ids, plan.handle(answer, session_id, unparsed))
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from dlite_agent.chat.inline_thought import thought_apart
from dlite_agent.chat.message_keys import chain_keys, reasoning_digest, turn_forms
from dlite_agent.chat.messages import Message, UnparsedToolCall
from dlite_agent.chat.turn_handles import TurnHandle, TurnHandles
from dlite_agent.config import HistoryMode

__all__ = [
    "ReplayIndex",
    "ReplayPlan",
    "ReplayReason",
    "ReplayRecord",
    "TurnReplay",
    "plan_replay",
]

ReplayReason = Literal[
    "reasoning_absent",
    "reasoning_equal",
    "template_history",
    "reasoning_differs",
    "edited_turn",
    "edited_history",
    "unknown",
]


class ReplayRecord(Protocol):
    """One recorded turn, as `dlite_agent.sessions.journal.JournalRecord` has it."""

    @property
    def token_ids(self) -> Sequence[int]:
        """What to splice behind the role header."""
        ...

    @property
    def reasoning_digest(self) -> bytes:
        """`message_keys.reasoning_digest` of the turn's thought."""
        ...

    @property
    def session_id(self) -> str:
        """The session that generated it."""
        ...


class ReplayIndex(Protocol):
    """Where recorded turns are found, e.g. a `Journal`."""

    def find(self, key: bytes) -> Sequence[ReplayRecord]:
        """All records of a key, the newest first."""
        ...


@dataclass(frozen=True, slots=True)
class TurnReplay:
    """How one assistant message gets into the prompt.

    Attributes:
        message_index: Which message of the request.
        token_ids: What to splice in; None: render the message as sent.
        reason: Why. Spliced: `reasoning_absent`, `reasoning_equal`. Rendered: `template_history`
            (the history mode says so), `reasoning_differs` (the client's own thought wins),
            `edited_turn` (we generated this turn and it came back changed), `edited_history`
            (something before it changed), `unknown` (not generated here, or forgotten).
    """

    message_index: int
    token_ids: tuple[int, ...] | None
    reason: ReplayReason

    @property
    def is_spliced(self) -> bool:
        """Whether the original ids are used."""
        return self.token_ids is not None


@dataclass(frozen=True, slots=True)
class ReplayPlan:
    """What a request's history is made of.

    Attributes:
        key: Chained key of the whole request, which the answer's `turn_forms` continue.
        turns: One entry for each assistant message, in order.
        owner_session_id: The session of the newest tool-call id or turn handle of the request that
            we know: the request continues it. A suggestion where to look; tokens decide.
        last_session_id: The session that generated the newest spliced turn, or None.
        keys: Chained key of each message; `keys[i]` covers messages 0..i.
    """

    key: bytes
    turns: tuple[TurnReplay, ...] = ()
    owner_session_id: str | None = None
    last_session_id: str | None = None
    keys: tuple[bytes, ...] = ()

    @property
    def splices(self) -> dict[int, tuple[int, ...]]:
        """Message index → ids to splice, as the renderer takes it."""
        return {
            turn.message_index: turn.token_ids for turn in self.turns if turn.token_ids is not None
        }

    def handle(
        self, answer: Message, session_id: str, unparsed: Sequence[UnparsedToolCall] = ()
    ) -> TurnHandle:
        """What the answer's tool-call ids, and its handle, stand for."""
        return TurnHandle(session_id, turn_forms(self.key, answer, unparsed), self.key)


def plan_replay(
    messages: Sequence[Message],
    seed: bytes,
    index: ReplayIndex,
    *,
    handles: TurnHandles | None = None,
    mode: HistoryMode = "auto",
    strips_thoughts: bool = True,
) -> ReplayPlan:
    """Decide for every assistant message between its original ids and rendering it as sent.

    A turn is spliced when its chained key is known and its reasoning is absent, blank or equal to
    what was generated. Where several turns share a key, the client's reasoning picks one; without
    it, the turn that a tool-call id names, else one of the session of the turn before, else the
    newest.

    Args:
        messages: The request's history, normalised.
        seed: `message_keys.seed_key` of the request.
        index: Recorded turns.
        handles: Known tool-call ids.
        mode: `as_generated` splices whatever matches; `template` nothing; `auto` splices inside the
            current tool loop, and before it only where the template keeps thoughts.
        strips_thoughts: The template drops the thoughts of turns before the last user query.
    """
    handles = TurnHandles() if handles is None else handles
    keys = (seed, *chain_keys(messages, seed))  # keys[i]: of the messages before i
    first_spliced = _first_spliced(messages, mode, strips_thoughts)
    turns: list[TurnReplay] = []
    session_id: str | None = None
    for i, message in enumerate(messages):
        if message.role != "assistant":
            continue
        if i < first_spliced:
            turns.append(TurnReplay(i, None, "template_history"))
            continue
        handle = handles.of_answer(message)
        records = index.find(keys[i + 1])
        digest = reasoning_digest(thought_apart(message).reasoning)
        record = _pick(records, digest, handle, session_id)
        if record is None:
            reason = _why_rendered(bool(records), handle, keys[i], keys[i + 1])
            turns.append(TurnReplay(i, None, reason))
            continue
        session_id = record.session_id
        reason = "reasoning_equal" if digest else "reasoning_absent"
        turns.append(TurnReplay(i, tuple(record.token_ids), reason))
    return ReplayPlan(
        key=keys[-1],
        turns=tuple(turns),
        owner_session_id=_owner(messages, handles),
        last_session_id=session_id,
        keys=keys[1:],
    )


def _first_spliced(messages: Sequence[Message], mode: HistoryMode, strips_thoughts: bool) -> int:
    """Index of the first message that may be spliced."""
    if mode == "template":
        return len(messages)
    if mode == "as_generated" or not strips_thoughts:
        return 0
    queries = (i for i in range(len(messages) - 1, -1, -1) if _is_query(messages[i]))
    return next(queries, 0)


def _is_query(message: Message) -> bool:
    """Whether Qwen3's template takes this for a user's query (a wrapped tool response is none)."""
    text = message.content
    is_wrapped = text.startswith("<tool_response>") and text.endswith("</tool_response>")
    return message.role == "user" and not is_wrapped


def _owner(messages: Sequence[Message], handles: TurnHandles) -> str | None:
    return next(filter(None, map(handles.session_of, reversed(messages))), None)


def _pick(
    records: Sequence[ReplayRecord],
    digest: bytes,
    handle: TurnHandle | None,
    session_id: str | None,
) -> ReplayRecord | None:
    """The record to splice; None when there is none or the client's reasoning is none of ours."""
    if digest:
        records = [record for record in records if record.reasoning_digest == digest]
    elif handle is not None:
        thoughts = {form.reasoning_digest for form in handle.forms}
        records = [r for r in records if r.reasoning_digest in thoughts] or records
    of_session = (record for record in records if record.session_id == session_id)
    return next(of_session, next(iter(records), None))


def _why_rendered(
    is_known: bool, handle: TurnHandle | None, previous: bytes, key: bytes
) -> ReplayReason:
    if is_known:
        return "reasoning_differs"
    if handle is None or any(form.key == key for form in handle.forms):
        return "unknown"
    return "edited_turn" if handle.previous_key == previous else "edited_history"
