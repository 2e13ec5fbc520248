"""The store: which session a prompt continues, and that no request hurts another."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlite_agent.config import SamplingParams
from dlite_agent.decoding.stopping import StopRules
from dlite_agent.drafters.null import NullDrafter
from dlite_agent.errors import (
    CapacityError,
    RequestError,
    SessionBusyError,
    SessionNotFoundError,
)
from dlite_agent.models.kv_pool import PAGE_ROWS
from dlite_agent.models.transformer import DenseTransformer
from dlite_agent.sampling import KeyedNoise, Sampler
from dlite_agent.sessions.session import Session
from dlite_agent.sessions.store import Origin, SessionStore
from dlite_agent.testing import FaultyTarget, tiny_qwen3

GREEDY = Sampler(SamplingParams(temperature=0.0, top_k=0, top_p=1.0), KeyedNoise(0))


class Clock:
    """Seconds that pass when they are told to."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@dataclass(frozen=True)
class Turn:
    session: Session
    origin: Origin
    prefilled: int
    token_ids: list[int]  # prompt and answer


PAGE_BYTES = PAGE_ROWS * 2 * 2 * 2 * 16 * 4  # of `tiny_qwen3` in float32


def open_store(num_pages: int = 200, **options: Any) -> tuple[DenseTransformer, SessionStore]:
    target = tiny_qwen3(max_kv_bytes=num_pages * PAGE_BYTES)
    return target, SessionStore(target, NullDrafter(), **options)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(clock: Clock) -> Iterator[SessionStore]:
    with open_store(clock=clock)[1] as store:
        yield store


def ids(start: int, count: int) -> list[int]:
    """Ids that nobody else uses: `start` marks them."""
    return [(start * 61 + i * 7) % 509 for i in range(count)]


def run(
    store: SessionStore,
    prompt: Sequence[int],
    *,
    num_answer: int = 4,
    tool: bool = False,
    **how: Any,
) -> Turn:
    """One whole turn, greedy."""
    session, origin = store.acquire(prompt, **how)
    try:
        report = session.sync(prompt)
        rounds = session.decode(GREEDY, StopRules(frozenset(), num_answer))
        store.make_room(session, 1)
        for _ in rounds:
            store.make_room(session, 1)
    finally:
        store.release(session, waits_for_tool=tool)
    session.check_invariants()
    return Turn(session, origin, report.prefilled, list(session.token_ids))


# --- reuse ------------------------------------------------------------------------------------


def test_first_prompt_is_cold_and_the_next_turn_continues_it_in_place(store: SessionStore) -> None:
    first = run(store, ids(1, 300))
    second = run(store, first.token_ids + ids(2, 20))
    assert (first.origin, second.origin) == ("cold", "prefix")
    assert second.session is first.session
    assert second.prefilled == 21, "what is new, and the pending token"
    assert len(store) == 1


def test_two_interleaved_agents_with_one_system_prompt_and_no_ids_prefill_only_what_is_new(
    store: SessionStore,
) -> None:
    system = ids(0, 280)
    prompts = {name: system + ids(name, 15) for name in (1, 2)}
    sessions: dict[int, Session] = {}
    for number in range(5):
        for name in (1, 2):
            turn = run(store, prompts[name], num_answer=6, tool=True)
            if number:
                assert turn.session is sessions[name]
                assert turn.prefilled == 12 + 1
            sessions[name] = turn.session
            prompts[name] = turn.token_ids + ids(10 * name + number, 12)
    assert len(store) == 2
    assert sessions[2].kv.pages[0] == sessions[1].kv.pages[0], "the system prompt's page is shared"


@settings(max_examples=15)
@given(st.lists(st.integers(0, 3), min_size=8, max_size=14))
def test_any_interleaving_of_agents_prefills_only_what_is_new(order: list[int]) -> None:
    _, store = open_store()
    system = ids(0, 300)
    prompts = {name: system + ids(name + 1, 5 + name) for name in range(4)}
    is_first = True
    for step, name in enumerate(order):
        num_new = len(prompts[name]) - len(system)
        turn = run(store, prompts[name], num_answer=3, tool=True)
        expected = len(prompts[name]) if is_first else min(num_new, 9)
        assert turn.prefilled == expected
        is_first = False
        prompts[name] = turn.token_ids + ids(20 + step, 8)
    store.close()


def test_fork_leaves_the_donor_its_tokens_and_its_answers(store: SessionStore) -> None:
    donor = run(store, ids(0, 300) + ids(1, 40), tool=True)
    fork = run(store, ids(0, 300) + ids(2, 40))
    assert fork.session is not donor.session
    assert donor.session.token_ids == donor.token_ids
    again = run(store, donor.token_ids + ids(3, 5), num_answer=12)
    assert again.session is donor.session
    with open_store()[1] as cold:
        assert run(cold, donor.token_ids + ids(3, 5), num_answer=12).token_ids == again.token_ids


def test_same_prompt_again_forks_a_session_that_waits_for_its_tool(store: SessionStore) -> None:
    first = run(store, ids(1, 60), tool=True)
    second = run(store, ids(1, 60), num_answer=9)
    assert second.session is not first.session
    assert second.prefilled == 1, "at least one prompt token is always forwarded"
    assert first.session.token_ids == first.token_ids


def test_same_prompt_again_regenerates_a_finished_answer_in_place(store: SessionStore) -> None:
    first = run(store, ids(1, 60))
    second = run(store, ids(1, 60), num_answer=9)
    assert second.session is first.session
    assert second.prefilled == 1


def test_what_follows_the_generation_prompt_belongs_to_the_answer(store: SessionStore) -> None:
    first = run(store, [*ids(1, 60), 5, 6, 7], turn_start=60)  # [5, 6, 7]: an empty thought
    second = run(store, ids(1, 60) + ids(2, 9))
    assert second.session is first.session


def test_prompt_that_leaves_before_the_last_answer_forks(store: SessionStore) -> None:
    first = run(store, ids(1, 60))
    second = run(store, ids(1, 59) + ids(2, 9))
    assert second.session is not first.session
    assert first.session.token_ids == first.token_ids


@pytest.mark.parametrize("how", [{}, {"hint_session_id": "gone"}, {"in_place_ids": {"gone"}}])
def test_hints_that_name_nothing_change_nothing(store: SessionStore, how: dict[str, Any]) -> None:
    first = run(store, ids(1, 60))
    second = run(store, first.token_ids + ids(2, 5), **how)
    assert (second.session, second.origin, second.prefilled) == (first.session, "prefix", 6)


def test_wrong_hint_does_not_beat_the_tokens(store: SessionStore) -> None:
    first, other = run(store, ids(1, 60)), run(store, ids(2, 60))
    second = run(store, first.token_ids + ids(3, 5), hint_session_id=other.session.session_id)
    assert (second.session, second.origin) == (first.session, "prefix")
    assert other.session.token_ids == other.token_ids


def test_hint_without_a_common_token_is_cold(store: SessionStore) -> None:
    other = run(store, ids(2, 60))
    turn = run(store, ids(1, 60), hint_session_id=other.session.session_id)
    assert turn.origin == "cold"


@pytest.mark.parametrize(
    ("named", "tool", "cut", "is_taken_over"),
    [
        (None, False, 150, False),
        ("hint_session_id", False, 150, True),
        ("hint_session_id", False, 103, True),
        ("hint_session_id", False, 101, False),  # more would be lost than kept
        ("hint_session_id", True, 150, False),  # a title under the same thread id
        ("hint_session_id", True, 200, True),  # the client asks for another answer
        ("in_place_ids", False, 150, True),
        ("in_place_ids", True, 150, False),  # a summary that carries the same history
        ("in_place_ids", True, 200, True),
        (None, True, 200, False),
    ],
)
def test_only_a_named_session_is_rewound_further_and_none_that_waits(
    store: SessionStore, named: str | None, tool: bool, cut: int, is_taken_over: bool
) -> None:
    first = run(store, ids(1, 200), tool=tool)
    session_id = first.session.session_id
    how: dict[str, Any] = {}
    if named is not None:
        how[named] = {session_id} if named == "in_place_ids" else session_id
    second = run(store, ids(1, cut) + ids(2, 5), **how)
    assert (second.session is first.session) == is_taken_over
    assert (first.session.token_ids == first.token_ids) != is_taken_over
    assert second.prefilled == 5
    names = {None: "prefix", "hint_session_id": "hint", "in_place_ids": "tool_call"}
    assert second.origin == names[named]


@pytest.mark.parametrize("how", ["prefix", "hint_session_id", "in_place_ids"])
def test_nobody_finds_the_tokens_of_another_tenant(store: SessionStore, how: str) -> None:
    theirs = run(store, ids(1, 300), tenant="them")
    session_id = theirs.session.session_id
    named: dict[str, dict[str, Any]] = {
        "prefix": {},
        "hint_session_id": {"hint_session_id": session_id},
        "in_place_ids": {"in_place_ids": {session_id}},
    }
    ours = run(store, ids(1, 300), tenant="us", **named[how])
    assert (ours.origin, ours.prefilled) == ("cold", 300)
    assert [info.tenant for info in store.sessions()] == ["them", "us"]
    assert not set(ours.session.kv.pages) & set(theirs.session.kv.pages)
    session, _ = store.acquire(ids(2, 300), tenant="them")
    assert store.coming_prefix(ids(2, 300), "us") is None
    assert store.coming_prefix(ids(2, 300), "them") is not None
    store.release(session)


def test_pending_token_is_nobodys_loss(store: SessionStore) -> None:
    first = run(store, ids(1, 60), tool=True)
    turn = run(store, first.token_ids[:-1] + ids(2, 5))
    assert (turn.session, turn.prefilled) == (first.session, 5)


def test_session_whose_pending_token_starts_a_page_is_continued(store: SessionStore) -> None:
    first = run(store, ids(1, PAGE_ROWS - 3), num_answer=4)
    assert (len(first.token_ids), first.session.kv.length) == (PAGE_ROWS + 1, PAGE_ROWS)
    assert run(store, first.token_ids + ids(2, 5)).prefilled == 6


def test_of_equal_prefixes_the_one_that_can_be_continued_is_taken(store: SessionStore) -> None:
    waiting = run(store, ids(1, 90) + ids(2, 50), tool=True)
    done = run(store, ids(1, 90))
    waiting = run(store, waiting.token_ids + ids(3, 5), tool=True)  # the latest used
    turn = run(store, ids(1, 90) + ids(4, 8))
    assert turn.session is done.session
    assert turn.prefilled == 8
    assert waiting.session.token_ids == waiting.token_ids


def test_of_equal_prefixes_the_named_one_is_taken(store: SessionStore) -> None:
    first = run(store, ids(0, 80) + ids(1, 10))
    run(store, ids(0, 80) + ids(2, 10))
    turn = run(store, ids(0, 80) + ids(3, 10), hint_session_id=first.session.session_id)
    assert turn.origin == "hint"


@pytest.mark.parametrize("tool", [False, True])
def test_session_that_was_rewound_by_its_owner_is_matched_by_what_it_holds(
    store: SessionStore, tool: bool
) -> None:
    first = run(store, ids(1, 60), tool=tool)
    store.get(first.session.session_id).rewind(40)
    turn = run(store, ids(1, 60) + ids(2, 5))
    assert turn.session is first.session
    assert turn.prefilled == 25, "the rewound rest and the new tokens"
    assert turn.token_ids[:65] == ids(1, 60) + ids(2, 5)


def test_cancelled_prefill_is_resumed_by_the_same_prompt(clock: Clock) -> None:
    _, store = open_store(clock=clock, prefill_chunk=16)
    prompt = ids(1, 100)
    session, _ = store.acquire(prompt)
    asked = iter(range(100))
    session.sync(prompt, should_stop=lambda: next(asked) >= 3)
    store.release(session)
    kept = len(session.token_ids)
    assert 0 < kept < 100
    again = run(store, prompt)
    assert again.session is session
    assert again.prefilled <= 100 - kept + 1
    store.close()


def test_failed_prefill_leaves_other_sessions_alone_and_is_resumed() -> None:
    target = tiny_qwen3(max_kv_bytes=50 * PAGE_BYTES)
    faults: set[int] = set()
    store = SessionStore(FaultyTarget(target, faults.__contains__), NullDrafter(), prefill_chunk=16)
    other = run(store, ids(0, 40) + ids(1, 40), num_answer=2, tool=True)
    faults.update(range(9, 60))
    with pytest.raises(RuntimeError, match="told to fail"):
        run(store, ids(0, 40) + ids(2, 90), num_answer=2)
    faults.clear()
    assert other.session.token_ids == other.token_ids
    turn = run(store, ids(0, 40) + ids(2, 90), num_answer=2)
    assert turn.prefilled < 90, "chunks that were finished are kept"
    store.close()
    assert target.new_cache().pool.used_bytes == 0


# --- busy sessions ----------------------------------------------------------------------------


def test_second_turn_on_a_busy_session_forks_by_default(store: SessionStore) -> None:
    first = run(store, ids(1, 60))
    prompt = first.token_ids + ids(2, 5)
    session, _ = store.acquire(prompt)
    session.sync(prompt)
    assert session.busy
    rounds = session.decode(GREEDY, StopRules(frozenset(), 8))
    next(rounds)
    second = run(store, prompt, hint_session_id=session.session_id)
    assert second.session is not session
    assert second.token_ids[: len(prompt)] == prompt
    answer = [token_id for round_ in rounds for token_id in round_.token_ids]
    store.release(session)
    assert len(answer) == 7
    assert session.token_ids[: len(prompt)] == prompt
    assert second.token_ids == session.token_ids[: len(second.token_ids)], "both greedy"


@pytest.mark.parametrize("on_conflict", ["error", "wait"])
def test_second_turn_on_a_named_busy_session_is_refused_where_forks_are_not_wanted(
    on_conflict: Any,
) -> None:
    _, store = open_store(on_conflict=on_conflict)
    first = run(store, ids(1, 60))
    session, _ = store.acquire([*first.token_ids, 1])
    with pytest.raises(SessionBusyError, match=f"on_conflict is '{on_conflict}'") as caught:
        store.acquire([*first.token_ids, 1], hint_session_id=session.session_id)
    assert caught.value.retryable
    other = run(store, [*first.token_ids, 2])
    assert other.session is not session, "whoever only shares a prefix forks"
    store.release(session)
    again = run(store, [*first.token_ids, 1], hint_session_id=session.session_id)
    assert again.session is session
    store.close()


def test_running_turn_is_found_by_what_it_is_sure_to_keep(store: SessionStore) -> None:
    first = run(store, ids(1, 60))
    session, _ = store.acquire(ids(1, 60) + ids(2, 5), hint_session_id=first.session.session_id)
    other = run(store, first.token_ids + ids(3, 5))
    assert other.prefilled == 5 + len(first.token_ids) - 60, "its old tail counts no more"
    store.release(session)


# --- memory -----------------------------------------------------------------------------------


def fill(store: SessionStore, names: Sequence[int], **how: Any) -> dict[int, Turn]:
    """One session of exactly one page for each name."""
    return {name: run(store, ids(name, 250), **how) for name in names}


def alive(store: SessionStore) -> set[str]:
    return {info.session_id for info in store.sessions()}


def test_least_recently_used_idle_session_makes_room() -> None:
    _, store = open_store(num_pages=3)
    turns = fill(store, [1, 2, 3])
    run(store, turns[1].token_ids[:252])
    newest = run(store, ids(4, 250))
    assert turns[2].session.session_id not in alive(store)
    assert {turns[1].session.session_id, newest.session.session_id} <= alive(store)
    store.close()


def test_store_budget_may_be_smaller_than_the_pool() -> None:
    target, store = open_store(num_pages=10, max_bytes=2 * PAGE_BYTES)
    fill(store, [1, 2, 3, 4])
    assert len(store) == 2
    assert store.used_bytes == target.new_cache().pool.used_bytes == 2 * PAGE_BYTES
    store.close()


def test_sessions_that_wait_for_a_tool_go_last() -> None:
    _, store = open_store(num_pages=3)
    waiting = fill(store, [1, 2], tool=True)
    done = fill(store, [3])
    run(store, ids(4, 250))
    assert done[3].session.session_id not in alive(store)
    assert {turn.session.session_id for turn in waiting.values()} <= alive(store)
    run(store, ids(5, 250), tool=True)
    run(store, ids(6, 250))
    assert waiting[1].session.session_id not in alive(store), "an agent of its size may go on"
    store.close()


def test_small_foreign_request_neither_evicts_nor_shortens_a_session_that_waits(
    clock: Clock,
) -> None:
    _, store = open_store(num_pages=1, clock=clock)
    main = run(store, ids(1, 240), tool=True)
    title = ids(1, 20) + ids(2, 10)
    with pytest.raises(CapacityError, match="1 sessions that wait for a tool"):
        store.acquire(title)
    assert main.session.token_ids == main.token_ids
    assert not main.session.busy
    after = run(store, main.token_ids + ids(3, 2), num_answer=2, tool=True)
    assert after.prefilled == 3

    clock.now_s += 59
    with pytest.raises(CapacityError, match="try again in a minute"):
        store.acquire(title)
    clock.now_s += 2
    assert run(store, title).prefilled == 10, "nobody came back: its prefix is reused"
    store.close()


def test_prompt_that_cannot_fit_is_refused_with_numbers_and_evicts_nothing() -> None:
    _, store = open_store(num_pages=2)
    turns = fill(store, [1, 2])
    with pytest.raises(CapacityError) as caught:
        store.acquire(ids(3, 800))
    message = str(caught.value)
    assert f"needs {4 * PAGE_BYTES} more bytes of KV (1024 tokens)" in message
    assert f"max_kv_bytes is {2 * PAGE_BYTES}" in message
    assert "raise max_kv_bytes" in message
    assert caught.value.retryable
    assert alive(store) == {turn.session.session_id for turn in turns.values()}
    store.close()


def test_running_turns_are_never_evicted() -> None:
    _, store = open_store(num_pages=1)
    session, _ = store.acquire(ids(1, 100))
    session.sync(ids(1, 100))
    with pytest.raises(CapacityError, match="1 running turns"):
        store.acquire(ids(2, 100))
    with pytest.raises(CapacityError, match="1 running turns"):
        store.acquire(ids(1, 50) + ids(2, 100))  # would fork it
    store.release(session)
    assert run(store, ids(2, 100)).origin == "cold"
    store.close()


def test_donor_is_kept_while_others_can_go() -> None:
    _, store = open_store(num_pages=3)
    donor = run(store, ids(0, 200) + ids(1, 50))
    others = fill(store, [2, 3])
    fork = run(store, ids(0, 200) + ids(4, 40))
    assert fork.prefilled == 40
    assert {donor.session.session_id, others[3].session.session_id} <= alive(store)
    assert others[2].session.session_id not in alive(store)
    store.close()


def test_donor_gives_its_tail_where_nothing_else_can_go() -> None:
    _, store = open_store(num_pages=1)
    donor = run(store, ids(0, 200) + ids(1, 40))
    turn = run(store, ids(0, 200) + ids(2, 40))
    assert turn.session is donor.session
    assert turn.prefilled == 40
    store.close()


def test_continuing_does_not_evict_for_pages_that_the_session_has() -> None:
    _, store = open_store(num_pages=2)
    turns = fill(store, [1, 2])
    run(store, [*turns[1].token_ids, 1], num_answer=1)
    assert len(store) == 2
    store.close()


def test_rewinding_pays_for_growing_again() -> None:
    _, store = open_store(num_pages=3)
    first = run(store, ids(1, 300), num_answer=290)  # three pages
    turn = run(store, ids(1, 300) + ids(2, 300))
    assert (turn.session, turn.prefilled) == (first.session, 300)
    store.close()


def test_prompt_that_a_shared_page_holds_gets_room_for_the_copy() -> None:
    _, store = open_store(num_pages=4)
    other = fill(store, [1])[1]
    donor = run(store, ids(0, 256) + ids(2, 10), tool=True)  # two pages
    turn = run(store, ids(0, 256))  # one for the copy, one to grow
    assert turn.prefilled == 1
    assert {info.session_id for info in store.sessions()} == {
        donor.session.session_id,
        turn.session.session_id,
    }
    assert other.session.is_closed
    store.close()


def test_rewinding_into_a_shared_page_gets_room_for_the_copy() -> None:
    _, store = open_store(num_pages=4)
    other = fill(store, [1])[1]
    donor = run(store, ids(0, 256) + ids(2, 10))
    fork = run(store, ids(0, 256) + ids(3, 10), tool=True)
    named = {"hint_session_id": donor.session.session_id}
    turn = run(store, ids(0, 250) + ids(4, 60), **named)
    assert (turn.session, turn.prefilled) == (donor.session, 60)
    assert other.session.is_closed
    assert fork.session.token_ids == fork.token_ids
    store.close()


def test_shared_page_is_not_counted_as_room() -> None:
    _, store = open_store(num_pages=3)
    idle = run(store, ids(0, 256) + ids(1, 10))
    prompt = ids(0, 256) + ids(2, 10)
    busy, _ = store.acquire(prompt)
    busy.sync(prompt)
    with pytest.raises(CapacityError):
        store.acquire(ids(3, 300))  # evicting would free one page of the two
    assert idle.session.session_id in alive(store)
    store.release(busy)
    store.close()


def test_page_shared_with_a_fork_counts_once_and_is_copied_before_it_is_written() -> None:
    _, store = open_store(num_pages=6)
    donor = run(store, ids(0, 256) + ids(1, 10), tool=True)
    fork = run(store, ids(0, 256) + ids(2, 10), tool=True)
    assert fork.session.kv.pages[0] == donor.session.kv.pages[0]
    assert store.used_bytes == 3 * PAGE_BYTES
    clash = run(store, ids(0, 256), hint_session_id=None)  # 255 rows of the shared page, written
    assert clash.prefilled == 1
    assert donor.session.token_ids == donor.token_ids
    again = run(store, donor.token_ids + ids(3, 5), num_answer=8, tool=True)
    with open_store()[1] as cold:
        assert run(cold, donor.token_ids + ids(3, 5), num_answer=8).token_ids == again.token_ids
    store.close()


def test_room_for_growth_is_made_by_evicting_others() -> None:
    _, store = open_store(num_pages=2)
    idle = fill(store, [1])[1]
    session, _ = store.acquire(ids(2, 250))
    session.sync(ids(2, 250))
    store.make_room(session, 6)
    assert idle.session.session_id in alive(store), "the page had room"
    store.make_room(session, 7)
    assert alive(store) == {session.session_id}
    with pytest.raises(CapacityError, match="1 running turns"):
        store.make_room(session, 300)
    store.release(session)
    store.close()


# --- lifetime ---------------------------------------------------------------------------------


def test_sessions_are_listed_least_recently_used_first(store: SessionStore, clock: Clock) -> None:
    first = run(store, ids(1, 60), tool=True)
    clock.now_s += 2
    session, _ = store.acquire(ids(2, 50))
    clock.now_s += 3
    waiting, busy = store.sessions()
    assert (waiting.session_id, waiting.num_tokens) == (first.session.session_id, 64)
    assert (waiting.is_busy, waiting.waits_for_tool, waiting.idle_s) == (False, True, 5.0)
    assert waiting.nbytes > 0
    assert (busy.session_id, busy.is_busy, busy.idle_s) == (session.session_id, True, 0.0)
    assert not busy.waits_for_tool
    store.release(session)


def test_session_is_found_by_its_id_and_a_missing_one_is_an_error(store: SessionStore) -> None:
    turn = run(store, ids(1, 60))
    assert store.get(turn.session.session_id) is turn.session
    with pytest.raises(SessionNotFoundError, match=r"no session has the id 'nope'.*longest prefix"):
        store.get("nope")


def test_session_that_stayed_empty_is_forgotten(store: SessionStore) -> None:
    session, _ = store.acquire(ids(1, 60))
    store.release(session)
    assert len(store) == 0
    assert session.is_closed


def test_discarded_session_is_closed_and_forgotten(store: SessionStore) -> None:
    session, _ = store.acquire(ids(1, 60))
    session.sync(ids(1, 60))
    store.discard(session)
    assert (len(store), store.used_bytes) == (0, 0)
    assert run(store, ids(1, 60)).origin == "cold"


def test_session_that_was_closed_meanwhile_is_forgotten(store: SessionStore) -> None:
    session, _ = store.acquire(ids(1, 60))
    session.sync(ids(1, 60))
    session.close()
    store.release(session)
    assert len(store) == 0


def test_close_gives_everything_back_even_from_busy_sessions() -> None:
    target, store = open_store()
    fill(store, [1, 2])
    busy, _ = store.acquire(ids(3, 50))
    busy.sync(ids(3, 50))
    store.close()
    store.close()
    assert target.new_cache().pool.used_bytes == 0
    assert busy.is_closed
    store.release(busy)
    with pytest.raises(CapacityError, match="store is closed"):
        store.acquire([1])


@pytest.mark.parametrize(
    ("prompt", "says"), [([], "no tokens"), ([2**40], "no token id"), (["a"], "no token id")]
)
def test_bad_prompt_is_refused(store: SessionStore, prompt: list[Any], says: str) -> None:
    with pytest.raises(RequestError, match=says):
        store.acquire(prompt)
    assert len(store) == 0


# --- everything at once -----------------------------------------------------------------------

KINDS = ["continue", "continue", "cut", "title", "again", "hint", "owned"]
steps = st.tuples(
    st.integers(0, 3),  # which agent
    st.integers(1, 120),  # new tokens
    st.booleans(),  # its turn ends in a call
    st.sampled_from(KINDS),
)


def request(
    kind: str, prompt: list[int], newest: Turn | None, number: int
) -> tuple[list[int], dict[str, Any]]:
    """A client's next prompt and its hints."""
    if kind == "cut":
        return prompt[: max(1, len(prompt) - 40)] + ids(50 + number, 5), {}
    if kind == "title":
        return prompt[:100] + ids(70 + number, 10), {}
    if newest is None or kind == "continue":
        return prompt, {}
    if kind == "again":
        return newest.token_ids[:-4], {}
    session_id = newest.session.session_id
    if kind == "hint":
        return prompt, {"hint_session_id": session_id}
    return prompt, {"in_place_ids": {session_id}}


def check(store: SessionStore, kept: dict[Session, list[int]]) -> None:
    assert store.used_bytes <= store.max_bytes
    for info in store.sessions():
        store.get(info.session_id).check_invariants()
    for session, token_ids in kept.items():
        if not session.is_closed:
            assert session.token_ids == token_ids, "no request changes another's session"


Traffic = list[tuple[int, int, bool, str]]


def run_traffic(store: SessionStore, traffic: Traffic) -> dict[int, Turn]:
    """Run it, look at everything after every step, and return each agent's newest turn.

    With nothing else to evict, an idle session serves whoever needs its pages, so the turn of an
    agent whose session another request took over is not among them.
    """
    prompts = {name: ids(0, 200) + ids(name + 1, 30) for name in range(4)}
    newest: dict[int, Turn] = {}
    for number, (name, num_new, tool, kind) in enumerate(traffic):
        prompt, how = request(kind, prompts[name], newest.get(name), number)
        kept = {turn.session: turn.token_ids for turn in newest.values()}
        try:
            turn = run(store, prompt, tool=tool, **how)
        except CapacityError:  # its history is longer than the pool: it begins anew
            prompts[name] = ids(0, 200) + ids(name + 1, 30)
            newest.pop(name, None)
            continue
        assert turn.token_ids[: len(prompt)] == prompt
        kept.pop(turn.session, None)
        check(store, kept)
        newest = {n: other for n, other in newest.items() if other.session is not turn.session}
        if kind != "title":
            newest[name] = turn
            prompts[name] = turn.token_ids + ids(100 + number, num_new)
    return newest


@settings(max_examples=15)
@given(st.lists(steps, min_size=3, max_size=14))
def test_any_traffic_within_a_small_budget_keeps_sessions_valid_and_memory_bounded(
    traffic: Traffic,
) -> None:
    target, store = open_store(num_pages=5)
    newest = run_traffic(store, traffic)
    with SessionStore(tiny_qwen3(), NullDrafter()) as cold:
        for turn in newest.values():
            assert run(cold, turn.token_ids[:-4]).token_ids == turn.token_ids, "same answer"
    store.close()
    assert target.new_cache().pool.used_bytes == 0


# --- branches that were dropped -----------------------------------------------------------------


def test_a_retry_that_goes_back_to_a_dropped_branch_finds_it(store: SessionStore) -> None:
    first = run(store, ids(1, 300))
    bad = run(store, first.token_ids + ids(2, 40), num_answer=40)
    named = {"hint_session_id": first.session.session_id}
    again = run(store, first.token_ids + ids(5, 40), **named)  # asks in other words
    assert again.session is bad.session, "in place: it goes on under its name"
    assert again.prefilled == 40
    back = run(store, bad.token_ids + ids(3, 20))
    assert back.prefilled == 21, "what is new, and the pending token"
    forth = run(store, again.token_ids + ids(4, 20))
    assert forth.prefilled == 21
    assert forth.session is again.session
    assert len(store) == 2


def test_a_dropped_branch_goes_after_a_while_and_a_short_one_at_once(
    store: SessionStore, clock: Clock
) -> None:
    first = run(store, ids(1, 300), num_answer=40)
    run(store, ids(1, 300), num_answer=4)
    assert [info.is_sibling for info in store.sessions()] == [True, False]
    clock.now_s += 301.0
    run(store, ids(1, 300))
    assert [info.is_sibling for info in store.sessions()] == [False], "and 4 tokens are not kept"
    assert run(store, first.token_ids).prefilled > 30


def test_dropped_branches_take_no_memory_from_anybody() -> None:
    """Two of three pages hold a session: its answer that is dropped would need another two."""
    target, store = open_store(num_pages=3)
    run(store, ids(1, 450), num_answer=40)
    run(store, ids(1, 450), num_answer=41)
    assert len(store) == 1
    store.close()
    target, store = open_store(num_pages=5)
    kept: list[Session] = []
    store.on_evict = kept.append
    run(store, ids(1, 450), num_answer=40)
    run(store, ids(1, 450), num_answer=41)
    assert len(store) == 2
    run(store, ids(2, 600))
    assert len(store) == 2, "it went first"
    assert not any(info.is_sibling for info in store.sessions())
    assert kept == [], "and is not written anywhere"
    store.close()
    assert target.pool.used_bytes == 0
