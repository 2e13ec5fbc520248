"""Turns that run at once on one pool: what each of them may take, and what is worth waiting for."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from dlite_agent.config import SamplingParams
from dlite_agent.decoding.steps import Pause
from dlite_agent.decoding.stopping import StopRules
from dlite_agent.drafters.null import NullDrafter
from dlite_agent.errors import CapacityError
from dlite_agent.models.kv_pool import PAGE_ROWS
from dlite_agent.models.target import ForwardRows
from dlite_agent.models.transformer import DenseTransformer
from dlite_agent.sampling import KeyedNoise, Sampler
from dlite_agent.sessions.store import SessionStore
from dlite_agent.testing import tiny_qwen3

PAGE_BYTES = PAGE_ROWS * 2 * 2 * 2 * 16 * 4  # of `tiny_qwen3` in float32
GREEDY = Sampler(SamplingParams(temperature=0.0, top_k=0, top_p=1.0), KeyedNoise(0))


def open_store(num_pages: int) -> tuple[DenseTransformer, SessionStore]:
    target = tiny_qwen3(max_kv_bytes=num_pages * PAGE_BYTES)
    return target, SessionStore(target, NullDrafter(), prefill_chunk=64)


@pytest.fixture
def store() -> Iterator[SessionStore]:
    with open_store(50)[1] as store:
        yield store


def ids(name: int, count: int) -> list[int]:
    return [(name * 61 + i * 7) % 509 for i in range(count)]


def test_a_turn_is_let_in_only_where_all_plans_fit() -> None:
    _, store = open_store(4)
    first, _ = store.acquire(ids(1, 200), answer_rows=500)  # three pages, none of them taken yet
    assert store.used_bytes == 0
    with pytest.raises(CapacityError, match="1 running turns"):
        store.acquire(ids(2, 200), answer_rows=100)
    second, _ = store.acquire(ids(2, 200), answer_rows=40)
    for session, name in ((first, 1), (second, 2)):
        session.sync(ids(name, 200))
    store.make_room(first, 500)
    store.make_room(second, 40)
    with pytest.raises(CapacityError):
        store.make_room(second, 100)  # its plan is over, and the rest belongs to the other one
    store.release(first)
    store.make_room(second, 100)
    store.release(second)
    store.close()


def test_alone_a_turn_needs_room_for_its_prompt_only() -> None:
    _, store = open_store(1)
    session, _ = store.acquire(ids(1, 200), answer_rows=5000)
    session.sync(ids(1, 200))
    store.release(session)
    store.close()


def test_idle_sessions_count_as_room_of_a_plan_and_go_when_it_is_needed() -> None:
    _, store = open_store(4)
    idle, _ = store.acquire(ids(9, 250))
    idle.sync(ids(9, 250))
    store.release(idle)
    first, _ = store.acquire(ids(1, 200), answer_rows=200)
    second, _ = store.acquire(ids(2, 200), answer_rows=200)
    assert not idle.is_closed
    for session, name in ((first, 1), (second, 2)):
        session.sync(ids(name, 200))
        store.make_room(session, 200)
        session.sync(ids(name, 400))
    assert idle.is_closed
    store.close()


def test_a_donor_that_runs_keeps_its_plan_when_it_is_forked() -> None:
    _, store = open_store(3)
    donor, _ = store.acquire(ids(1, 200), answer_rows=300)
    donor.sync(ids(1, 200))
    with pytest.raises(CapacityError):
        store.acquire(ids(1, 150) + ids(2, 100), answer_rows=200)
    fork, origin = store.acquire(ids(1, 150) + ids(2, 50), answer_rows=20)
    assert (origin, fork.token_ids) == ("prefix", ids(1, 150))
    store.close()


def test_a_running_session_is_forked_at_what_it_holds_already(store: SessionStore) -> None:
    prompt = ids(1, 200)
    running, _ = store.acquire(prompt)
    steps = running.sync_steps(prompt, chunk_rows=lambda: 64)
    assert steps.send(None) == Pause("prefill")
    rows = steps.send(None)
    assert isinstance(rows, ForwardRows)
    steps.send(store._target.forward_batch([rows])[0])
    assert len(running.token_ids) == 64
    other, _ = store.acquire(prompt + ids(2, 5))
    assert other.token_ids == ids(1, 64)
    report = other.sync(prompt + ids(2, 5))
    assert report.cached == 64
    store.release(other)
    steps.close()
    store.release(running)


def test_a_session_that_has_not_dropped_its_old_tail_is_found_by_what_it_keeps(
    store: SessionStore,
) -> None:
    first, _ = store.acquire(ids(1, 100))
    first.sync(ids(1, 100))
    store.release(first)
    running, _ = store.acquire(ids(1, 60) + ids(2, 80), hint_session_id=first.session_id)
    assert running is first
    other, _ = store.acquire(ids(1, 60) + ids(2, 80) + ids(3, 5))
    assert other.token_ids == ids(1, 60)


def test_what_a_running_turn_is_about_to_hold_is_worth_waiting_for(store: SessionStore) -> None:
    prompt = ids(1, 200)
    assert store.coming_prefix(prompt) is None
    running, _ = store.acquire(prompt)
    coming = store.coming_prefix(ids(1, 150) + ids(2, 9))
    assert coming is not None
    assert (coming.session, coming.length) == (running, 150)
    assert store.coming_prefix(ids(1, 20) + ids(2, 9)) is None, "it is prefilled sooner"
    assert store.coming_prefix(ids(3, 150)) is None
    whole = store.coming_prefix(prompt)
    assert whole is not None
    assert whole.length == 199, "the last prompt token is always forwarded"
    assert not coming.is_over
    running.sync(ids(1, 150))
    assert coming.is_over
    assert not whole.is_over
    running.sync(prompt)
    assert whole.is_over
    assert store.coming_prefix(prompt) is None, "it is there"
    store.release(running)


@pytest.mark.parametrize("end", ["release", "discard"])
def test_waiting_for_a_prefix_ends_with_the_turn_that_computes_it(
    store: SessionStore, end: str
) -> None:
    running, _ = store.acquire(ids(1, 200))
    coming = store.coming_prefix(ids(1, 150))
    assert coming is not None
    getattr(store, end)(running)
    assert coming.is_over


def test_a_turn_that_must_not_reuse_gets_an_empty_session(store: SessionStore) -> None:
    first, _ = store.acquire(ids(1, 100))
    first.sync(ids(1, 100))
    store.release(first)
    session = store.acquire_new(ids(1, 100), answer_rows=9)
    assert session.token_ids == []
    assert session.busy


def test_a_cancelled_turn_is_found_by_what_it_came_to(store: SessionStore) -> None:
    session, _ = store.acquire(ids(1, 100))
    session.sync(ids(1, 100))
    rounds = session.decode(GREEDY, StopRules(frozenset(), 20))
    next(rounds)
    rounds.close()
    store.release(session)
    again, _ = store.acquire([*session.token_ids, 5])
    assert again is session
