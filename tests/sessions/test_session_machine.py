"""Any sequence of operations, cancels and errors keeps I1 to I5; every answer equals a cold one."""

from __future__ import annotations

from collections.abc import Callable

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from dlite_agent.config import SamplingParams
from dlite_agent.decoding.stopping import StopRules
from dlite_agent.drafters.drafter import Drafter, Requires
from dlite_agent.drafters.lookup import LookupDrafter
from dlite_agent.sampling import KeyedNoise, Sampler
from dlite_agent.sessions.session import Session
from dlite_agent.testing import (
    AdversarialDrafter,
    FaultyTarget,
    assert_kv_is_of,
    cold_decode,
    cold_forward,
    tiny_qwen3,
)

VOCAB = 64  # small, so that tokens come back and drafts are accepted
TARGET = tiny_qwen3(dtype="float64", vocab_size=VOCAB)
SAMPLERS = {
    "greedy": Sampler(SamplingParams(temperature=0.0, top_k=0, top_p=1.0), KeyedNoise(1)),
    "sampled": Sampler(SamplingParams(temperature=0.7, top_k=5, top_p=0.9), KeyedNoise(2)),
}
NEW_IDS = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=12)
FEW = st.integers(0, 4)


class TappedLookup(LookupDrafter):
    """Asks for taps, so that I3 is about something."""

    requires = Requires((0, 1), "last")


def countdown(polls: int | None) -> Callable[[], bool]:
    if polls is None:
        return lambda: False
    left = iter([False] * polls)
    return lambda: next(left, True)


class SessionMachine(RuleBasedStateMachine):
    """A few sessions on one pool, each with what it must hold."""

    def __init__(self) -> None:
        super().__init__()
        self.sessions: list[Session] = []
        self.expected: list[list[int]] = []
        self.fails_in: int | None = None
        self.target = FaultyTarget(TARGET, self._fails)

    def _fails(self, number: int) -> bool:
        if self.fails_in is None:
            return False
        self.fails_in -= 1
        return self.fails_in < 0

    @initialize(is_adversarial=st.booleans())
    def open_session(self, is_adversarial: bool) -> None:
        drafter: Drafter = TappedLookup(sizes=(2, 1))
        if is_adversarial:
            drafter = AdversarialDrafter(vocab_size=VOCAB, favourites=(1, 2, 3))
        self.sessions.append(Session(self.target, drafter, session_id="0", prefill_chunk=4))
        self.expected.append([])

    @rule(
        which=FEW,
        cut=st.floats(0, 1),
        new_ids=NEW_IDS,
        polls=st.none() | FEW,
        fails=st.none() | FEW,
    )
    def sync(
        self, which: int, cut: float, new_ids: list[int], polls: int | None, fails: int | None
    ) -> None:
        which %= len(self.sessions)
        session, before = self.sessions[which], self.expected[which]
        prompt = before[: round(cut * len(before))] + new_ids
        self.fails_in = fails
        try:
            report = session.sync(prompt, in_place=True, should_stop=countdown(polls))
        except RuntimeError:
            assert session.token_ids == prompt[: len(session.token_ids)]
        else:
            if report.is_complete:
                assert session.token_ids == prompt
                assert report.cached + report.prefilled == len(prompt)
            elif report.prefilled or session.token_ids != before:
                assert session.token_ids == prompt[: report.cached + report.prefilled]
        self.fails_in = None
        self.expected[which] = list(session.token_ids)

    @rule(
        which=FEW,
        sampler=st.sampled_from(sorted(SAMPLERS)),
        max_tokens=st.integers(1, 10),
        stops=st.sets(st.integers(0, VOCAB - 1), max_size=3),
        polls=st.none() | FEW,
        fails=st.none() | FEW,
        close_after=st.none() | FEW,
    )
    def decode(
        self,
        which: int,
        sampler: str,
        max_tokens: int,
        stops: set[int],
        polls: int | None,
        fails: int | None,
        close_after: int | None,
    ) -> None:
        which %= len(self.sessions)
        session, before = self.sessions[which], self.expected[which]
        if not before:
            return
        limits = StopRules(frozenset(stops), max_tokens)
        wanted = before + cold_decode(TARGET, before, SAMPLERS[sampler], limits)
        self.fails_in = fails
        is_whole = False
        rounds = session.decode(SAMPLERS[sampler], limits, countdown(polls))
        try:
            for number, round_ in enumerate(rounds):
                session.check_invariants()
                is_whole = round_.finish is not None
                if number == close_after:
                    rounds.close()  # type: ignore[attr-defined]  # a generator
        except RuntimeError:
            assert fails is not None
        self.fails_in = None
        assert session.token_ids == wanted[: len(session.token_ids)]
        assert len(session.token_ids) >= len(before)
        assert not is_whole or session.token_ids == wanted
        self.expected[which] = list(session.token_ids)

    @rule(which=FEW, cut=st.floats(0, 1))
    def rewind(self, which: int, cut: float) -> None:
        which %= len(self.sessions)
        ids = self.expected[which]
        length = round(cut * len(ids))
        self.sessions[which].rewind(length)
        self.expected[which] = ids[:length]

    @precondition(lambda self: len(self.sessions) < 4)
    @rule(which=FEW, cut=st.none() | st.floats(0, 1))
    def fork(self, which: int, cut: float | None) -> None:
        which %= len(self.sessions)
        ids = self.expected[which]
        at = None if cut is None else round(cut * len(ids))
        self.sessions.append(self.sessions[which].fork(at))
        self.expected.append(ids[:at])

    @precondition(lambda self: len(self.sessions) > 1)
    @rule(which=FEW)
    def close(self, which: int) -> None:
        which %= len(self.sessions)
        self.sessions.pop(which).close()
        self.expected.pop(which)

    @invariant()
    def sessions_are_valid(self) -> None:
        for session, ids in zip(self.sessions, self.expected, strict=True):
            assert session.token_ids == ids
            session.check_invariants()  # I1, I3, I5
            assert_kv_is_of(TARGET, session.kv, ids, tolerance=1e-10)  # I2
            if session.hidden is not None:  # I3, by value
                with cold_forward(TARGET, ids[: session.kv.length], taps=(0, 1)) as (output, _):
                    assert output.hidden is not None
                    wanted = output.hidden.row(session.kv.length - 1).states
                torch.testing.assert_close(session.hidden.states, wanted, rtol=0.0, atol=1e-10)

    def teardown(self) -> None:
        for session in self.sessions:
            session.close()
        assert TARGET.pool.used_bytes == 0


SessionMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=20, deadline=None)
TestSessionMachine = SessionMachine.TestCase
