"""The controller as a drafter: its sources, its state, and what it says of itself."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dlite_agent.decoding.controller import Controller, ControllerState, Source
from dlite_agent.drafters.drafter import DraftBlock, DraftState, Requires
from dlite_agent.drafters.lookup import LookupDrafter, LookupState
from dlite_agent.errors import ConfigurationError
from dlite_agent.models.target import TargetHidden
from dlite_agent.sampling import KeyedNoise
from tests.decoding.simulated import FLAT, NOISE, STEEP, ChancySource, Turn, random_text


def always(position: int) -> float:
    return 1.0


def never(position: int) -> float:
    return 0.0


class SureSource(ChancySource):
    """Proposes four tokens, as sure of them as it is told to be."""

    confidence: tuple[float, ...] = (0.99,) * 4

    def propose(
        self,
        state: DraftState | None,
        pending: int,
        hidden: TargetHidden | None,
        position: int,
        noise: KeyedNoise,
        budget: int,
    ) -> DraftBlock:
        block = super().propose(state, pending, hidden, position, noise, min(budget, 4))
        return DraftBlock(block.token_ids, self.confidence, self.name)


def over(*drafters: ChancySource | LookupDrafter) -> Controller:
    return Controller([Source(drafter) for drafter in drafters], FLAT, clock=None)


def propose(
    drafter: Controller, state: ControllerState, ids: Sequence[int], budget: int = 32
) -> DraftBlock:
    return drafter.propose(state, ids[-1], None, len(ids) - 1, NOISE, budget)


def test_a_controller_without_sources_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="at least one source"):
        Controller([], FLAT)


def test_the_better_of_two_sources_drafts() -> None:
    text = random_text(800)
    good = ChancySource(text, lambda position: 0.9, name="good")
    bad = ChancySource(text, lambda position: 0.2, name="bad")
    for order in ((good, bad), (bad, good)):
        turn = Turn(over(*order), text).run(FLAT)
        late = [source for source in turn.sources[60:] if source != "null"]
        assert late.count("good") > 0.9 * len(late)


def test_a_source_that_gains_nothing_more_is_asked_less() -> None:
    text = random_text(3000)
    good = ChancySource(text, lambda position: 0.9, name="good")
    bad = ChancySource(text, lambda position: 0.2, name="bad")
    turn = Turn(over(good, bad), text).run(FLAT)
    assert bad.num_asked < 0.5 * len(turn.lengths)
    assert bad.num_asked >= len(turn.lengths) // 40  # and not given up for ever


def test_one_source_extends_the_block_of_another() -> None:
    text = random_text(600)
    short = ChancySource(text, always, max_block=3, name="short")
    long = ChancySource(text, lambda position: 0.97, name="long")
    drafter = over(short, long)
    turn = Turn(drafter, text).run(FLAT)
    assert "short+long" in turn.sources
    joined = [n for n, source in zip(turn.lengths, turn.sources, strict=True) if "+" in source]
    assert max(joined) > 3
    alone = Turn(over(ChancySource(text, always, max_block=3)), text).run(FLAT)
    assert turn.seconds < 0.7 * alone.seconds


def test_a_source_is_asked_behind_a_block_as_if_it_had_been_committed() -> None:
    """Lookup continues a phrase from where the other source's block ends."""
    phrase = list(range(100, 140))
    ids = [*phrase, 7, 8, 9]
    text = [*ids, *phrase[:30]]
    first = SureSource(text, always, name="first")
    drafter = over(first, LookupDrafter(max_block=16))
    state = drafter.start(ids)
    block = propose(drafter, state, ids)
    assert block.source == "first+lookup"
    assert list(block.token_ids) == phrase[: len(block.token_ids)]
    assert len(block.token_ids) > 4
    # and the lookup's state is as it was
    lookup = state.parts[1].drafts
    assert isinstance(lookup, LookupState)
    assert lookup.length == len(ids)


def test_a_source_that_needs_taps_does_not_extend() -> None:
    text = random_text(300)
    short = ChancySource(text, always, max_block=3, name="short")

    class Tapped(ChancySource):
        requires = Requires((1,), "last")

    turn = Turn(over(short, Tapped(text, always, name="tapped")), text).run(FLAT)
    assert not any("+" in source for source in turn.sources)


def test_taps_are_those_of_all_sources_and_each_gets_its_own() -> None:
    seen: dict[str, TargetHidden | None] = {}

    class Reader(ChancySource):
        def __init__(self, name: str, requires: Requires) -> None:
            super().__init__([0] * 50, always, name=name)
            self.requires = requires

        def propose(
            self,
            state: DraftState | None,
            pending: int,
            hidden: TargetHidden | None,
            position: int,
            noise: KeyedNoise,
            budget: int,
        ) -> DraftBlock:
            seen[self.name] = hidden
            return DraftBlock()

    readers = [
        Reader("none", Requires()),
        Reader("two", Requires((1, 5), "last")),
        Reader("all", Requires((0, 1, 5), "all")),
    ]
    drafter = over(*readers)
    assert drafter.requires == Requires((0, 1, 5), "all")
    assert over(*readers[:2]).requires == Requires((1, 5), "last")
    assert over(*readers[:1]).requires == Requires()
    hidden = TargetHidden(torch.arange(3.0)[:, None, None].expand(3, 1, 4), (0, 1, 5))
    drafter.propose(drafter.start([1, 2]), 2, hidden, 1, NOISE, 8)
    assert seen["none"] is None
    assert seen["all"] is hidden
    two = seen["two"]
    assert two is not None
    assert two.layer_ids == (1, 5)
    assert two.states[:, 0, 0].tolist() == [1.0, 2.0]


def test_nothing_is_proposed_or_asked_without_a_budget() -> None:
    text = random_text(50)
    source = ChancySource(text, always)
    drafter = over(source)
    state = drafter.start(text[:3])
    assert propose(drafter, state, text[:3], budget=0) == DraftBlock()
    assert source.num_asked == 0
    assert len(propose(drafter, state, text[:3], budget=2).token_ids) <= 2


def test_blocks_without_a_confidence_for_every_token_are_taken_without_any() -> None:
    text = random_text(50)
    source = SureSource(text, always)
    drafter = over(source)
    source.confidence = (0.9, 0.9, 0.9, 0.9)
    block = propose(drafter, drafter.start(text[:3]), text[:3])
    assert block.confidence == (0.9,) * len(block.token_ids) != ()
    source.confidence = (0.01, 0.9, 0.9, 0.9)
    assert propose(drafter, drafter.start(text[:3]), text[:3]) == DraftBlock()
    source.confidence = (0.9,)
    block = propose(drafter, drafter.start(text[:3]), text[:3])
    assert block.token_ids
    assert block.confidence == ()


def test_confidence_that_is_wrong_is_calibrated() -> None:
    class Boaster(ChancySource):
        def propose(
            self,
            state: DraftState | None,
            pending: int,
            hidden: TargetHidden | None,
            position: int,
            noise: KeyedNoise,
            budget: int,
        ) -> DraftBlock:
            block = super().propose(state, pending, hidden, position, noise, budget)
            return DraftBlock(block.token_ids, (0.99,) * len(block.token_ids), self.name)

    text = random_text(1000)
    turn = Turn(Controller([Source(Boaster(text, never))], STEEP, clock=None), text).run(STEEP)
    assert sum(turn.lengths[100:]) == 0


def test_prompts_of_the_next_turn_are_no_verdict_on_the_last_draft() -> None:
    text = random_text(100)
    drafter = over(ChancySource(text, always))
    state = drafter.start(text[:10])
    block = propose(drafter, state, text[:10])
    assert block.token_ids
    drafter.truncate_to(state, 10)  # the turn was cancelled in its forward
    drafter.commit(state, [1, 3, 5])
    counts = state.parts[0].record.counts
    assert sum(counts.trials) == 0.0


def test_rewinding_keeps_what_was_learnt_and_forgets_the_ids() -> None:
    text = random_text(400)
    drafter = over(ChancySource(text, always))
    turn = Turn(drafter, text).run(FLAT)
    state = turn.state
    assert isinstance(state, ControllerState)
    learnt = sum(state.parts[0].record.counts.trials)
    assert learnt > 0
    drafter.truncate_to(state, 5)
    assert state.length == 5
    assert sum(state.parts[0].record.counts.trials) == learnt
    drafter.truncate_to(state, 50)  # more than there is
    assert state.length == 5


def test_a_fork_goes_its_own_way() -> None:
    text = random_text(400)
    drafter = over(ChancySource(text, always))
    turn = Turn(drafter, text[:100]).run(FLAT)
    assert isinstance(turn.state, ControllerState)
    fork = drafter.fork(turn.state)
    learnt = sum(fork.parts[0].record.counts.trials)
    drafter.commit(fork, [1, 2, 3])
    assert fork.length == turn.state.length + 3
    for _ in range(20):
        propose(drafter, turn.state, text[:101])
        drafter.commit(turn.state, [text[101]])
    assert sum(fork.parts[0].record.counts.trials) == learnt
    assert fork.nbytes > 0


@settings(max_examples=60)
@given(seed=st.integers(0, 1000))
def test_any_history_of_edits_leaves_a_source_as_if_it_had_heard_all(seed: int) -> None:
    """Ids reach a source late; whenever it is asked, its state is that of a fresh start."""
    rng = random.Random(seed)
    asked: list[list[int]] = []

    class Checked(LookupDrafter):
        def propose(
            self,
            state: DraftState | None,
            pending: int,
            hidden: TargetHidden | None,
            position: int,
            noise: KeyedNoise,
            budget: int,
        ) -> DraftBlock:
            block = super().propose(state, pending, hidden, position, noise, budget)
            fresh = self.start(ids)
            assert block == super().propose(fresh, pending, hidden, position, noise, budget)
            assert isinstance(state, LookupState)
            assert state.length == len(ids)
            asked.append(list(ids))
            return block

    ids = [rng.randrange(4) for _ in range(20)]
    drafter = over(Checked(max_probes=1000))  # finds what stands behind all that was rewound
    state = drafter.start(ids)
    for _ in range(40):
        match rng.randrange(5):
            case 0:
                more = [rng.randrange(4) for _ in range(rng.randrange(1, 300))]
                ids += more
                drafter.commit(state, more)
            case 1:
                length = rng.randrange(1, len(ids) + 1)
                del ids[length:]
                drafter.truncate_to(state, length)
            case 2:
                state = drafter.fork(state)
            case _:
                propose(drafter, state, ids, 8)
                more = [rng.randrange(4)]
                ids += more
                drafter.commit(state, more)
    assert state.length == len(ids)
    assert asked


def test_time_passes_only_where_a_clock_is_given() -> None:
    """Host time and rounds are measured; a frozen controller does the same twice."""
    ticks = iter(range(10**9))
    text = random_text(500)

    def lengths(clock: Callable[[], float] | None) -> list[int]:
        source = ChancySource(text, lambda position: 0.5)
        return Turn(Controller([Source(source)], FLAT, clock=clock), text).run(FLAT).lengths

    assert lengths(None) == lengths(None)
    assert lengths(lambda: next(ticks) * 1e-2) != lengths(None)


def test_taps_are_captured_one_round_before_their_reader_may_be_asked() -> None:
    text = random_text(600)
    reader = ChancySource(text, never, name="reader")
    reader.requires = Requires((0, 2), "last")
    drafter = over(ChancySource(text, never), reader)
    state, ids = drafter.start(text[:1]), text[:1]
    reader_asked, taps = [], []
    for number in range(500):
        num_before = reader.num_asked
        taps.append(propose(drafter, state, ids).wants_taps)
        if reader.num_asked > num_before:
            reader_asked.append(number)
        drafter.commit(state, [text[len(ids)]])
        ids.append(text[len(ids)])
    later = [number for number in reader_asked if number]
    assert later, "it is asked again"
    assert all(taps[number - 1] for number in later)
    assert sum(taps) < 4 * len(reader_asked) + 8
    assert reader.num_asked < 100


def test_a_prompt_wakes_every_source() -> None:
    text = random_text(400)
    drafter = over(ChancySource(text, never))
    state, ids = drafter.start(text[:1]), text[:1]
    while state.wakes_at <= state.round_number + 1:
        propose(drafter, state, ids)
        drafter.commit(state, [text[len(ids)]])
        ids.append(text[len(ids)])
    drafter.commit(state, text[len(ids) : len(ids) + 30])  # nobody proposed in between
    assert state.wakes_at <= state.round_number
    assert state.parts[0].record.wakes_at == 0
