"""Turns that share forwards: what each says alone, in fair turns, and none hurts another."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate, pairwise

import pytest

from dlite_agent.backend import ChatRequest
from dlite_agent.chat.messages import Message
from dlite_agent.config import SamplingParams
from dlite_agent.engine.scheduler import mixed_chunk_rows
from dlite_agent.engine.service import ModelService
from dlite_agent.engine.tasks import Event, Failure, Finished
from dlite_agent.errors import CapacityError, ConfigurationError
from dlite_agent.models.target import ForwardRows, TargetOutput
from dlite_agent.outputs import Generation, GenerationChunk
from dlite_agent.sampling import KeyedNoise, Sampler
from dlite_agent.testing import cold_forward
from tests.conversations import Agent, sampled

Load = Callable[..., ModelService]
PAGE_BYTES = 256 * 2 * 2 * 2 * 16 * 8  # of the tiny checkpoint in float64
GREEDY = SamplingParams(temperature=0.0, max_tokens=40)


@pytest.fixture
def load(load: Load) -> Load:
    return partial(load, prefill_chunk=64)


@dataclass(eq=False)
class Reader:
    """Asks for a turn and keeps what comes."""

    submitted_s: float = field(default_factory=time.perf_counter)
    is_cancelled: bool = False
    is_parked: bool = False
    events: list[Event] = field(default_factory=list)

    def put(self, event: Event) -> None:
        assert not self.is_over, "nothing comes after the last event"
        self.events.append(event)

    @property
    def is_over(self) -> bool:
        return bool(self.events) and isinstance(self.events[-1], Failure | Finished)

    @property
    def error(self) -> BaseException | None:
        last = self.events[-1] if self.events else None
        return last.error if isinstance(last, Failure) else None

    @property
    def token_ids(self) -> tuple[int, ...]:
        chunks = [event for event in self.events if isinstance(event, GenerationChunk)]
        return tuple(i for chunk in chunks for i in chunk.token_ids)

    @property
    def generation(self) -> Generation:
        if self.error is not None:
            raise self.error
        found = [e.generation for e in self.events if isinstance(e, GenerationChunk)]
        assert found, "the turn was cancelled"
        assert found[-1] is not None
        return found[-1]


def add(service: ModelService, request: ChatRequest) -> Reader:
    reader = Reader()
    service.add(request, reader)
    return reader


def step(service: ModelService) -> None:
    service.step()
    for info in service.model.sessions.sessions():
        service.model.sessions.get(info.session_id).check_invariants()


def finish(service: ModelService, max_steps: int = 3000) -> None:
    for _ in range(max_steps):
        if not service.num_turns:
            return
        step(service)
    pytest.fail("the turns never end")


def together(service: ModelService, requests: Sequence[ChatRequest]) -> list[Generation]:
    readers = [add(service, request) for request in requests]
    finish(service)
    return [reader.generation for reader in readers]


def alone(service: ModelService, request: ChatRequest) -> Generation:
    return together(service, [request])[0]


def requests_of(count: int, **sampling: object) -> list[ChatRequest]:
    """Different tasks, prompts and lengths, with copies in them that lookup finds."""
    found = []
    for number in range(count):
        agent = Agent(f"mend part {number} " + f"of all {number % 3} parts " * (3 + number))
        params = replace(sampled(number, 20 + 5 * number), **sampling)  # type: ignore[arg-type]
        found.append(replace(agent.request(), sampling=params))
    return found


class Spy:
    """Sees the rows of every shared forward, and may make it fail."""

    def __init__(self, service: ModelService, monkeypatch: pytest.MonkeyPatch) -> None:
        self.batches: list[list[tuple[int, bool]]] = []  # rows, and whether they are a chunk
        self.fails: Callable[[Sequence[ForwardRows]], Exception | None] = lambda batch: None
        self._forward = service.model.target.forward_batch
        monkeypatch.setattr(service.model.target, "forward_batch", self)

    def __call__(self, batch: Sequence[ForwardRows]) -> list[TargetOutput]:
        error = self.fails(batch)
        if error is not None:
            raise error
        shapes = [(len(rows.token_ids), len(rows.logits_for)) for rows in batch]
        self.batches.append([(rows, rows != logits) for rows, logits in shapes])
        return self._forward(batch)


# --- the same tokens ---------------------------------------------------------------------------


@pytest.mark.parametrize("drafter", ["null", "lookup"])
@pytest.mark.parametrize("temperature", [0.0, 1.0], ids=["greedy", "sampled"])
def test_eight_turns_together_say_what_each_says_alone(
    load: Load, drafter: str, temperature: float
) -> None:
    requests = requests_of(8, temperature=temperature)
    found = together(load(drafter=drafter), requests)
    assert max(generation.stats.batch_size for generation in found) > 2
    plain = load(drafter="null", reuse="none")
    for request, generation in zip(requests, found, strict=True):
        expected = alone(plain, request)
        assert generation.prompt_token_ids == expected.prompt_token_ids
        assert generation.token_ids == expected.token_ids
        assert expected.stats.batch_size == 1.0


@pytest.mark.parametrize("drafter", ["null", "lookup"])
@pytest.mark.parametrize("temperature", [0.0, 1.0], ids=["greedy", "sampled"])
def test_float32_turns_together_differ_from_each_alone_at_near_ties_only(
    load: Load, drafter: str, temperature: float
) -> None:
    requests = requests_of(8, temperature=temperature, top_k=0, top_p=1.0)
    found = together(load(drafter=drafter, dtype="float32"), requests)
    plain = load(drafter="null", reuse="none", dtype="float32")
    near_ties = 0
    for request, generation in zip(requests, found, strict=True):
        expected = alone(plain, request)
        pairs = list(zip(generation.token_ids, expected.token_ids, strict=False))
        place = next((i for i, (ours, theirs) in enumerate(pairs) if ours != theirs), None)
        if place is None:
            assert generation.token_ids == expected.token_ids
            continue
        ids = [*expected.prompt_token_ids, *expected.token_ids[:place]]
        noise = KeyedNoise.derive(generation.stats.seed, 0, expected.prompt_token_ids)
        params = SamplingParams(temperature=temperature, top_k=0, top_p=1.0)
        sampler = Sampler(params.with_defaults(plain.model.defaults), noise)
        with cold_forward(plain.model.target, ids) as (output, _):
            logits = output.logits[0]
        assert any(sampler.is_near_tie(logits, len(ids), other) for other in pairs[place])
        near_ties += 1
    print(f"{near_ties} of {len(requests)} differ, each at a near-tie")
    assert near_ties <= 1


def test_conversations_that_run_together_prefill_nothing_twice(load: Load) -> None:
    service, plain = load(), load(reuse="none")
    agents = [Agent(f"task {number}") for number in range(4)]
    copies = [Agent(f"task {number}") for number in range(4)]
    for turn in range(3):
        for agent, generation in zip(
            agents, together(service, [agent.request() for agent in agents]), strict=True
        ):
            agent.take(generation)
            stats = generation.stats
            if turn:
                assert stats.prefilled_tokens == stats.new_tokens + 1
    for agent, copy in zip(agents, copies, strict=True):
        for generation in agent.turns:
            copy.take(alone(plain, copy.request()))
            assert copy.turns[-1].token_ids == generation.token_ids


# --- fairness, in forwards ---------------------------------------------------------------------


def test_a_turn_that_decodes_is_in_every_forward(
    load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = load(drafter="null")
    service.model.stop_token_ids = frozenset()
    spy = Spy(service, monkeypatch)
    first = add(service, Agent("decode").request(max_tokens=400))
    while len(first.token_ids) < 2:
        step(service)
    later = [add(service, Agent(f"{n} " + "x" * 900).request(max_tokens=3)) for n in range(4)]
    before, num_forwards = len(first.token_ids), len(spy.batches)
    while not all(reader.is_over for reader in later):
        step(service)
    assert len(first.token_ids) - before == len(spy.batches) - num_forwards
    for batch in spy.batches[num_forwards:]:
        chunks = [rows for rows, is_chunk in batch if is_chunk]
        assert len(chunks) <= 1, "at most one chunk in a forward"
        assert sum(chunks) <= mixed_chunk_rows("cpu", len(batch) - 1)
    first.is_cancelled = True
    finish(service)


def test_chunks_are_large_while_nobody_decodes_and_go_round(
    load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = load(drafter="null")
    spy = Spy(service, monkeypatch)
    tasks = [Agent(f"{n}" * 500, system=f"{n} alone").request(max_tokens=1) for n in range(4)]
    readers = [add(service, request) for request in tasks]
    held: list[list[int]] = []
    while service.num_turns == 4:
        step(service)
        held.append([info.num_tokens for info in service.model.sessions.sessions()])
    assert all(len(batch) == 1 and batch[0][0] <= 64 for batch in spy.batches)
    assert [batch[0][0] for batch in spy.batches[:4]] == [64] * 4
    for lengths in held[4:-1]:
        assert max(lengths) - min(lengths) <= 64, "nobody is a chunk ahead of the one behind"
    finish(service)
    assert all(reader.generation for reader in readers)


def test_the_seventeenth_turn_waits_for_memory_and_none_waits_beyond_three_times_its_fair_time(
    load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twenty arrive, memory is planned for sixteen; time is counted in rows of forwards."""
    service = load(drafter="null", max_kv_bytes=16 * PAGE_BYTES, max_batch=20)
    service.model.stop_token_ids = frozenset()
    spy = Spy(service, monkeypatch)
    tasks = [Message("user", f"{number}: mend it") for number in range(20)]
    requests = [ChatRequest((task,), sampling=sampled(n, 40)) for n, task in enumerate(tasks)]
    readers = [add(service, request) for request in requests]
    seen = [[0] for _ in readers]  # number of the forward behind each token
    first_ended = 0
    while service.num_turns:
        step(service)
        for reader, forwards in zip(readers, seen, strict=True):
            forwards += [len(spy.batches)] * (len(reader.token_ids) + 1 - len(forwards))
        if not first_ended and any(reader.is_over for reader in readers):
            first_ended = len(spy.batches)
    starts = [forwards[1] for forwards in seen]
    assert max(starts[:16]) <= first_ended, "sixteen run together"
    assert min(starts[16:]) >= first_ended, "the others wait until one has ended, and in order"
    assert starts == sorted(starts)
    rows = [0, *accumulate(sum(count for count, _ in batch) for batch in spy.batches)]
    assert max(len(batch) for batch in spy.batches) == 16
    for forwards in seen:
        waits = [rows[after] - rows[before] for before, after in pairwise(forwards[1:])]
        # while sixteen decode, a fair token is due every sixteen rows
        assert max(waits) <= 3 * 16
        assert {b - a for a, b in pairwise(forwards[1:])} == {1}, "in every forward"
    assert all(reader.generation for reader in readers)


def test_more_turns_than_places_wait_and_begin_in_order(load: Load) -> None:
    service = load(max_batch=3)
    assert service.num_free == 3
    for request in requests_of(3):
        add(service, request)
    assert service.num_free == 0
    finish(service)
    assert service.num_free == 3


# --- one turn's trouble is its own -------------------------------------------------------------


def test_cancelled_turns_end_within_one_forward_and_the_others_go_on(load: Load) -> None:
    requests = requests_of(6)
    expected = together(load(), requests)
    service = load()
    readers = [add(service, request) for request in requests]
    for _ in range(10):
        step(service)
    assert not any(reader.is_over for reader in readers)
    for reader in readers[:3]:
        reader.is_cancelled = True
    step(service)
    assert [reader.is_over for reader in readers] == [True] * 3 + [False] * 3
    finish(service)
    for reader, generation in zip(readers, expected, strict=True):
        assert reader.token_ids == generation.token_ids[: len(reader.token_ids)]
    assert [r.generation.token_ids for r in readers[3:]] == [g.token_ids for g in expected[3:]]
    again = together(service, requests[:3])
    assert [g.token_ids for g in again] == [g.token_ids for g in expected[:3]]


def test_a_request_that_is_refused_does_not_disturb_the_batch(load: Load) -> None:
    requests = requests_of(3)
    expected = together(load(), requests)
    service = load()
    readers = [add(service, request) for request in requests]
    bad = add(service, ChatRequest(()))
    finish(service)
    assert "at least one message" in str(bad.error)
    assert [r.generation.token_ids for r in readers] == [g.token_ids for g in expected]


@pytest.mark.parametrize("number", [0, 3, 9, 14])
def test_a_forward_that_fails_is_computed_turn_by_turn(
    load: Load, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    requests = requests_of(4)
    expected = together(load(), requests)
    service = load()
    spy = Spy(service, monkeypatch)
    spy.fails = lambda batch: (
        MemoryError("too many rows") if len(batch) > 1 and len(spy.batches) >= number else None
    )
    found = together(service, requests)
    assert [g.token_ids for g in found] == [g.token_ids for g in expected]


def test_only_the_turn_whose_rows_fail_alone_as_well_fails(
    load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = requests_of(5)
    expected = together(load(), requests)
    service = load()
    spy = Spy(service, monkeypatch)
    readers = [add(service, request) for request in requests]
    for _ in range(16):
        step(service)
    assert len(spy.batches[-1]) > 2
    culprit = next(info.session_id for info in service.model.sessions.sessions())
    kv = service.model.sessions.get(culprit).kv

    def fails(batch: Sequence[ForwardRows]) -> Exception | None:
        return MemoryError("no") if any(rows.kv is kv for rows in batch) else None

    spy.fails = fails
    finish(service)
    failed = [number for number, reader in enumerate(readers) if reader.error is not None]
    assert len(failed) == 1
    assert isinstance(readers[failed[0]].error, CapacityError)
    for number, (reader, generation) in enumerate(zip(readers, expected, strict=True)):
        if number not in failed:
            assert reader.generation.token_ids == generation.token_ids
    spy.fails = lambda batch: None
    again = alone(service, requests[failed[0]])
    assert again.token_ids == expected[failed[0]].token_ids
    assert again.stats.cached_tokens > 0, "what was prefilled before the failure is kept"


def test_logits_of_one_turn_that_are_no_numbers_fail_only_that_turn(
    load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = requests_of(4)
    expected = together(load(), requests)
    service = load()
    forward = service.model.target.forward_batch
    broken: list[object] = []

    def forward_batch(batch: Sequence[ForwardRows]) -> list[TargetOutput]:
        outputs = forward(batch)
        for rows, output in zip(batch, outputs, strict=True):
            if len(batch) == 4 and not broken:
                broken.append(rows.kv)
            if broken and rows.kv is broken[0]:
                output.logits.fill_(float("nan"))
        return outputs

    monkeypatch.setattr(service.model.target, "forward_batch", forward_batch)
    readers = [add(service, request) for request in requests]
    finish(service)
    errors = [reader.error for reader in readers]
    assert sum(isinstance(error, ConfigurationError) for error in errors) == 1
    for reader, generation in zip(readers, expected, strict=True):
        if reader.error is None:
            assert reader.generation.token_ids == generation.token_ids


# --- prefixes and sessions ---------------------------------------------------------------------


def test_turns_that_start_together_prefill_a_common_prompt_once(load: Load) -> None:
    system = "You mend programs. " * 40
    requests = [Agent(f"task {n}", system=system).request(max_tokens=8) for n in range(5)]
    service = load()
    found = together(service, requests)
    lengths = [generation.stats.prompt_tokens for generation in found]
    shared = min(lengths) - 60
    rows = sum(generation.stats.prefilled_tokens for generation in found)
    assert rows < max(lengths) + 4 * 80, "the system prompt is computed once"
    assert all(generation.stats.cached_tokens >= shared for generation in found[1:])
    stats = [generation.stats for generation in found]
    assert [s.new_tokens for s in stats] == [s.prefilled_tokens for s in stats], "and is new once"
    pages = [set(service.model.sessions.get(g.stats.session_id).kv.pages) for g in found]
    assert len(set.intersection(*pages)) >= shared // 256, "and is held once"
    plain = load(reuse="none")
    for request, generation in zip(requests, found, strict=True):
        assert alone(plain, request).token_ids == generation.token_ids


def test_who_waits_for_a_prefix_computes_it_when_the_other_is_cancelled(load: Load) -> None:
    system = "You mend programs. " * 40
    service = load()
    first = add(service, Agent("one", system=system).request(max_tokens=4))
    second = add(service, Agent("two", system=system).request(max_tokens=4))
    step(service)
    assert len(service.model.sessions) == 1
    first.is_cancelled = True
    finish(service)
    expected = alone(load(), Agent("two", system=system).request(max_tokens=4))
    assert second.generation.token_ids == expected.token_ids


def test_the_baseline_without_reuse_shares_nothing(load: Load) -> None:
    found = together(load(reuse="none"), requests_of(4))
    for generation in found:
        assert generation.stats.cached_tokens == 0
        assert generation.stats.prefilled_tokens == generation.stats.prompt_tokens


def test_two_turns_that_want_one_session_fork_it(load: Load) -> None:
    service = load()
    agent = Agent("fix it", hint="thread")
    agent.take(alone(service, agent.request()))
    held = service.model.sessions.get(agent.turns[0].stats.session_id).token_ids[:]
    other = replace(agent.request(), sampling=sampled(77))
    found = together(service, [agent.request(), other])
    first, second = (generation.stats.session_id for generation in found)
    assert first != second
    plain = load(reuse="none")
    for request, generation in zip([agent.request(), other], found, strict=True):
        assert generation.stats.prefilled_tokens < generation.stats.prompt_tokens - len(held) + 8
        cold = alone(plain, replace(request, session_hint=None))
        if cold.prompt_token_ids == generation.prompt_token_ids:
            assert cold.token_ids == generation.token_ids


# --- memory ------------------------------------------------------------------------------------


def sub_agents(count: int, max_tokens: int = 60) -> list[ChatRequest]:
    return [
        Agent(f"sub-agent {n} " + "word " * 60, system=f"{n}").request(max_tokens=max_tokens)
        for n in range(count)
    ]


@pytest.mark.parametrize(
    "num_pages",
    [3, pytest.param(7, marks=pytest.mark.soak), pytest.param(14, marks=pytest.mark.soak)],
)
def test_twenty_sub_agents_on_a_small_budget_queue_and_all_end(load: Load, num_pages: int) -> None:
    requests = sub_agents(20)
    service = load(max_kv_bytes=num_pages * PAGE_BYTES, max_batch=20)
    found = together(service, requests)
    assert service.model.target.pool.used_bytes <= num_pages * PAGE_BYTES
    plain = load(reuse="none")
    for request, generation in zip(requests, found, strict=True):
        assert generation.token_ids == alone(plain, request).token_ids
        assert generation.stats.prefilled_tokens <= generation.stats.prompt_tokens, "no thrashing"
    if num_pages > 3:
        assert max(generation.stats.batch_size for generation in found) > 1.5


def test_who_waits_for_memory_is_not_overtaken(load: Load) -> None:
    service = load(max_kv_bytes=7 * PAGE_BYTES)
    running = add(service, sub_agents(1, max_tokens=200)[0])
    step(service)
    large = add(service, Agent("y" * 700, system="large").request(max_tokens=200))
    step(service)
    assert service.num_free == 0, "those that come later stay in the queue"
    finish(service)
    assert running.generation.token_ids
    assert large.generation.stats.queue_s > 0.0


def test_turns_that_come_at_once_begin_in_order_when_memory_is_short(load: Load) -> None:
    service = load(max_kv_bytes=7 * PAGE_BYTES)
    small, other = sub_agents(2)
    large = Agent("y" * 700, system="large").request(max_tokens=200)
    readers = [add(service, request) for request in (small, large, other)]
    step(service)
    assert len(service.model.sessions) == 1, "the third would fit, and does not overtake"
    finish(service)
    assert all(reader.generation for reader in readers)


def test_a_prompt_that_grows_into_what_others_took_waits_in_the_middle(
    load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = load(max_kv_bytes=12 * PAGE_BYTES)
    requests = sub_agents(3)
    expected = together(load(), requests)
    spy = Spy(service, monkeypatch)
    readers = [add(service, request) for request in requests]
    for _ in range(3):
        step(service)
    pool = service.model.target.pool
    held = pool.take(pool.free_bytes // PAGE_BYTES, None)  # as if a plan had been wrong
    for _ in range(20):
        step(service)
    pool.drop(held)
    finish(service)
    for batch in spy.batches:
        assert sum(is_chunk for _, is_chunk in batch) <= 1
    answered = [reader for reader in readers if reader.error is None]
    assert answered, "the youngest gave way"
    for reader, generation in zip(readers, expected, strict=True):
        if reader.error is None:
            assert reader.generation.token_ids == generation.token_ids
        else:
            assert isinstance(reader.error, CapacityError)


def two_that_outgrow_their_plans(service: ModelService) -> tuple[list[ChatRequest], list[Reader]]:
    """Prompts of a page, and answers of 1,100 tokens, on nine pages."""
    service.model.stop_token_ids = frozenset()
    params = replace(GREEDY, max_tokens=1100)
    requests = [replace(Agent(f"{n}", system=f"{n}").request(), sampling=params) for n in range(2)]
    readers = [add(service, request) for request in requests]
    finish(service)
    return requests, readers


def test_answers_beyond_their_plan_wait_and_the_youngest_gives_way(load: Load) -> None:
    service = load(max_kv_bytes=9 * PAGE_BYTES, drafter="null")
    requests, readers = two_that_outgrow_their_plans(service)
    assert len(readers[0].generation.token_ids) == 1100
    assert isinstance(readers[1].error, CapacityError)
    assert len(readers[1].token_ids) > 512, "it had its plan"
    assert readers[1].error.retryable
    short = replace(requests[1], sampling=replace(GREEDY, max_tokens=5))
    assert alone(service, short).token_ids == readers[1].token_ids[:5]


def test_drafts_take_no_memory_that_is_planned_for_others(load: Load) -> None:
    service = load(max_kv_bytes=9 * PAGE_BYTES, drafter="lookup")
    _, readers = two_that_outgrow_their_plans(service)
    for reader in readers:
        if reader.error is not None:
            assert isinstance(reader.error, CapacityError)
        assert len(reader.token_ids) >= 512, "it had its plan"


def test_closing_in_the_middle_of_a_batch_gives_the_memory_back(load: Load) -> None:
    service = load()
    readers = [add(service, request) for request in requests_of(6)]
    for _ in range(12):
        step(service)
    pool = service.model.target.pool
    assert pool.used_bytes > 0
    service.close(ConfigurationError("closed"))
    assert pool.used_bytes == 0
    assert [str(reader.error) for reader in readers] == ["closed"] * 6
    assert service.num_turns == 0


# --- everything at once ------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [1, *(pytest.param(n, marks=pytest.mark.soak) for n in (0, 2, 3))])
def test_random_arrivals_cancels_and_failures_keep_every_session_valid(
    load: Load, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    rng = random.Random(seed)
    service = load(max_kv_bytes=rng.choice([6, 10, 60]) * PAGE_BYTES, max_batch=5)
    plain = load(reuse="none", drafter="null")
    spy = Spy(service, monkeypatch)
    spy.fails = lambda batch: RuntimeError("a fault") if rng.random() < 0.02 else None
    agents = [Agent(f"task {n} " + "part " * (20 * n), hint=f"thread {n % 3}") for n in range(5)]
    running: list[tuple[Agent, ChatRequest, Reader]] = []
    num_checked = num_failed = 0
    for _ in range(250):
        if service.num_free and rng.random() < 0.3:
            agent = rng.choice(agents)
            request = agent.request(max_tokens=rng.choice([1, 7, 40]))
            running.append((agent, request, add(service, request)))
        if running and rng.random() < 0.05:
            rng.choice(running)[2].is_cancelled = True
        step(service)
        over = [entry for entry in running if entry[2].is_over]
        running = [entry for entry in running if not entry[2].is_over]
        for agent, request, reader in over:
            if reader.error is not None:
                assert isinstance(reader.error, RuntimeError), reader.error
                num_failed += 1
            elif not reader.is_cancelled:
                generation = reader.generation
                cold = alone(plain, replace(request, session_hint=None))
                if cold.prompt_token_ids == generation.prompt_token_ids:
                    assert cold.token_ids == generation.token_ids
                    num_checked += 1
                if len(agent.turns) == 0:
                    agent.take(generation)
    finish(service)
    assert num_checked > 5
    service.close()
    assert service.model.target.pool.used_bytes == 0
