"""Steps: whoever runs them may mix several, stop anywhere, and throw errors into one of them."""

from __future__ import annotations

from collections.abc import Generator

import pytest

from dlite_agent.config import SamplingParams
from dlite_agent.decoding.loop import Round
from dlite_agent.decoding.steps import Pause, Steps, drive, next_item, run_alone
from dlite_agent.decoding.stopping import StopRules
from dlite_agent.drafters.lookup import LookupDrafter
from dlite_agent.models.target import ForwardRows
from dlite_agent.models.transformer import DenseTransformer
from dlite_agent.sampling import KeyedNoise, Sampler
from dlite_agent.sessions.session import Session, SyncReport
from dlite_agent.testing import FaultyTarget, assert_kv_is_of, cold_decode, tiny_qwen3

SAMPLER = Sampler(SamplingParams(temperature=1.0, top_k=8, top_p=1.0), KeyedNoise(5))
LIMITS = StopRules(frozenset(), 10)
PROMPTS = [[(3 + 7 * name + i * i) % 512 for i in range(20 + name)] for name in range(4)]


@pytest.fixture(scope="module")
def target() -> DenseTransformer:
    return tiny_qwen3(dtype="float64")


def open_session(target: DenseTransformer, name: int = 0) -> Session:
    return Session(target, LookupDrafter(), session_id=str(name), prefill_chunk=8)


def turn(session: Session, prompt: list[int]) -> Steps[Round, SyncReport]:
    report = yield from session.sync_steps(prompt)
    yield from session.decode_steps(SAMPLER, LIMITS)
    return report


def test_turns_that_share_every_forward_say_what_each_says_alone(target: DenseTransformer) -> None:
    sessions = [open_session(target, name) for name in range(len(PROMPTS))]
    running = {name: turn(session, PROMPTS[name]) for name, session in enumerate(sessions)}
    answers: dict[int, list[int]] = {name: [] for name in running}
    steps = {name: next(one) for name, one in running.items()}
    while steps:
        batch = {name: step for name, step in steps.items() if isinstance(step, ForwardRows)}
        outputs = dict(
            zip(batch, target.forward_batch(list(batch.values())) if batch else [], strict=True)
        )
        for name, step in list(steps.items()):
            sessions[name].check_invariants()
            if isinstance(step, Round):
                answers[name] += step.token_ids
            try:
                steps[name] = running[name].send(outputs.get(name))
            except StopIteration:
                del steps[name]
    for name, session in enumerate(sessions):
        assert answers[name] == cold_decode(target, PROMPTS[name], SAMPLER, LIMITS)
        session.check_invariants()
        assert_kv_is_of(target, session.kv, session.token_ids, tolerance=1e-10)
        session.close()
    assert target.pool.used_bytes == 0


@pytest.mark.parametrize("how", ["close", "throw"])
def test_a_turn_may_end_at_every_step(target: DenseTransformer, how: str) -> None:
    expected = cold_decode(target, PROMPTS[0], SAMPLER, LIMITS)
    for num_steps in range(100):
        session = open_session(target)
        is_complete = end_after(num_steps, target, turn(session, PROMPTS[0]), how)
        session.check_invariants()
        assert_kv_is_of(target, session.kv, session.token_ids, tolerance=1e-10)
        whole = PROMPTS[0] + expected
        assert session.token_ids == whole[: len(session.token_ids)]
        session.sync(PROMPTS[0])
        again = [i for round_ in session.decode(SAMPLER, LIMITS) for i in round_.token_ids]
        assert again == expected
        session.close()
        assert target.pool.used_bytes == 0
        if is_complete:
            break
    assert num_steps > 15


def end_after(
    num_steps: int, target: DenseTransformer, steps: Steps[Round, SyncReport], how: str
) -> bool:
    """Run a few steps, with the forward of the last one done, and end; True at the natural end."""
    answer = None
    try:
        for _ in range(num_steps):
            step = steps.send(answer)
            is_rows = isinstance(step, ForwardRows)
            answer = target.forward_batch([step])[0] if is_rows else None  # type: ignore[list-item]
    except StopIteration:
        return True
    if how == "close":
        steps.close()
    else:
        with pytest.raises(RuntimeError, match="struck by lightning"):
            steps.throw(RuntimeError("struck by lightning"))
    return False


def test_a_pause_comes_before_every_chunk_and_its_size_is_asked_after_it(
    target: DenseTransformer,
) -> None:
    session = open_session(target)
    size = [0]
    steps = session.sync_steps(PROMPTS[0], chunk_rows=lambda: size[0])
    seen = []
    answer = None
    for count in (1, 5, 3, 40):
        assert steps.send(answer) == Pause("prefill")
        size[0] = count
        rows = steps.send(None)
        assert isinstance(rows, ForwardRows)
        seen.append(len(rows.token_ids))
        answer = target.forward_batch([rows])[0]
    with pytest.raises(StopIteration) as done:
        steps.send(answer)
    assert seen == [1, 5, 3, 11]
    assert done.value.value == SyncReport(0, 20, 0, "cold", None)
    session.close()


def test_an_error_of_the_forward_is_thrown_into_the_steps(target: DenseTransformer) -> None:
    faulty = FaultyTarget(target, lambda number: True)
    heard = []

    def steps() -> Steps[int, str]:
        rows = ForwardRows(target.new_cache().pool._keys.new_zeros(0), target.new_cache(), [])
        yield 1
        try:
            yield rows
        except Exception as error:  # noqa: BLE001
            heard.append(type(error))
        yield Pause("room")
        return "done"

    driven = drive(faulty, steps())
    assert next(driven) == 1
    with pytest.raises(StopIteration) as done:
        next(driven)
    assert done.value.value == "done"
    assert len(heard) == 1


def test_closing_what_drives_closes_the_steps(target: DenseTransformer) -> None:
    closed = []

    def steps() -> Steps[int, None]:
        try:
            yield 1
            yield 2
        finally:
            closed.append(True)

    driven = drive(target, steps())
    next(driven)
    driven.close()
    assert closed == [True]


def test_what_runs_alone_returns_its_result(target: DenseTransformer) -> None:
    def steps() -> Generator[Pause, None, int]:
        yield Pause("prefix")
        return 3

    assert run_alone(target, steps()) == 3


def test_steps_inside_of_steps_hear_what_is_thrown_and_go_on(target: DenseTransformer) -> None:
    heard = []

    def inner() -> Steps[int, None]:
        try:
            yield Pause("room")
        except RuntimeError as error:
            heard.append(str(error))
        yield 1
        yield Pause("room")

    def outer() -> Steps[str, None]:
        steps = inner()
        while (item := (yield from next_item(steps))) is not None:
            yield f"item {item}"

    steps = outer()
    assert steps.send(None) == Pause("room")
    assert steps.throw(RuntimeError("thrown")) == "item 1"
    assert heard == ["thrown"]
    assert steps.send(None) == Pause("room")
    with pytest.raises(StopIteration):
        steps.send(None)


def test_a_prefill_without_room_pauses_until_there_is_some_or_it_is_stopped(
    target: DenseTransformer,
) -> None:
    for is_stopped in (False, True):
        session = open_session(target)
        sizes, stops = iter([0, 0, 9]), iter([False, False, is_stopped])
        steps = session.sync_steps(
            PROMPTS[0],
            chunk_rows=lambda sizes=sizes: next(sizes),  # type: ignore[misc]
            should_stop=lambda stops=stops: next(stops),  # type: ignore[misc]
        )
        pauses = [Pause("prefill"), *[Pause("room"), Pause("prefill")] * 2]
        assert [steps.send(None) for _ in pauses] == pauses
        if is_stopped:
            with pytest.raises(StopIteration) as done:
                steps.send(None)
            assert done.value.value.prefilled == 0
        else:
            assert isinstance(steps.send(None), ForwardRows)
            steps.close()
        session.check_invariants()
        session.close()
