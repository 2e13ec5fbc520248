"""Any sequence of operations, cancels and errors keeps I1 to I5; every answer equals a cold one."""

from __future__ import annotations

from collections.abc import Callable

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from dlite_agent.config import SamplingParams
from dlite_agent.decoding.stopping import StopRules
from dlite_agent.drafters.drafter import Drafter
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
from tests.sessions.tapped_lookup import TappedLookup

VOCAB = 12  # so few that n-grams come back: drafts are proposed, accepted and rejected
TARGET = tiny_qwen3(dtype="float64", vocab_size=VOCAB)
SAMPLERS = {
    "greedy": Sampler(SamplingParams(temperature=0.0, top_k=0, top_p=1.0), KeyedNoise(1)),
    "sampled": Sampler(SamplingParams(temperature=0.7, top_k=5, top_p=0.9), KeyedNoise(2)),
}
NEW_IDS = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=12)
FEW = st.integers(0, 4)
CUT = st.floats(0, 1)
STOPS = st.sets(st.integers(0, VOCAB - 1), max_size=2)
SAMPLER_NAMES = st.sampled_from(sorted(SAMPLERS))


def countdown(polls: int | None) -> Callable[[], bool]:
    if polls is None:
        return lambda: False
    left = iter([False] * polls)
    return lambda: next(left, True)


class SessionMachine(RuleBasedStateMachine):
    """A few sessions on one pool; what one holds must not depend on the others."""

    def __init__(self) -> None:
        super().__init__()
        self.sessions: list[Session] = []
        self.fails_in: int | None = None
        self.target = FaultyTarget(TARGET, self._fails)

    def _fails(self, number: int) -> bool:
        if self.fails_in is None:
            return False
        self.fails_in -= 1
        return self.fails_in < 0

    def _pick(self, which: int) -> tuple[Session, list[int]]:
        session = self.sessions[which % len(self.sessions)]
        return session, list(session.token_ids)

    @initialize(drafter=st.sampled_from(["taps", "taps", "adversarial"]), prompt=NEW_IDS)
    def open_session(self, drafter: str, prompt: list[int]) -> None:
        made: Drafter = TappedLookup(sizes=(2, 1))
        if drafter == "adversarial":
            made = AdversarialDrafter(vocab_size=VOCAB, favourites=(1, 2, 3))
        self.sessions.append(Session(self.target, made, session_id="0", prefill_chunk=4))
        self.sessions[0].sync(prompt)

    @rule(which=FEW, cut=CUT, new_ids=NEW_IDS)
    def sync(self, which: int, cut: float, new_ids: list[int]) -> None:
        session, before = self._pick(which)
        prompt = before[: round(cut * len(before))] + new_ids
        report = session.sync(prompt)
        assert report.is_complete
        assert report.cached + report.prefilled == len(prompt)
        assert session.token_ids == prompt

    @rule(which=FEW, cut=CUT, new_ids=NEW_IDS, polls=FEW, is_error=st.booleans())
    def sync_in_vain(
        self, which: int, cut: float, new_ids: list[int], polls: int, is_error: bool
    ) -> None:
        session, before = self._pick(which)
        prompt = before[: round(cut * len(before))] + new_ids
        self.fails_in = polls if is_error else None
        try:
            report = session.sync(prompt, should_stop=countdown(None if is_error else polls))
        except RuntimeError:
            assert session.token_ids == prompt[: len(session.token_ids)]
        else:
            is_untouched = not report.is_complete and not report.prefilled
            kept = before if is_untouched else prompt[: report.cached + report.prefilled]
            assert session.token_ids == kept
        self.fails_in = None

    @rule(which=FEW, sampler=SAMPLER_NAMES, max_tokens=st.integers(1, 20), stops=STOPS)
    def decode(self, which: int, sampler: str, max_tokens: int, stops: set[int]) -> None:
        session, before = self._pick(which)
        if before:
            limits = StopRules(frozenset(stops), max_tokens)
            wanted = before + cold_decode(TARGET, before, SAMPLERS[sampler], limits)
            rounds = list(session.decode(SAMPLERS[sampler], limits))
            assert session.token_ids == wanted
            assert rounds[-1].finish is not None

    @rule(
        which=FEW, sampler=SAMPLER_NAMES, polls=FEW, end=st.sampled_from(["stop", "fail", "close"])
    )
    def decode_in_vain(self, which: int, sampler: str, polls: int, end: str) -> None:
        session, before = self._pick(which)
        if not before:
            return
        limits = StopRules(frozenset(), 12)
        wanted = before + cold_decode(TARGET, before, SAMPLERS[sampler], limits)
        given = list(before)
        self.fails_in = polls if end == "fail" else None
        should_stop = countdown(polls if end == "stop" else None)
        rounds = session.decode(SAMPLERS[sampler], limits, should_stop)
        try:
            for number, round_ in enumerate(rounds):
                given += round_.token_ids
                session.check_invariants()
                if end == "close" and number == polls:
                    rounds.close()
        except RuntimeError:
            assert end == "fail"
        self.fails_in = None
        assert session.token_ids == given == wanted[: len(given)]

    @rule(which=FEW, cut=CUT)
    def rewind(self, which: int, cut: float) -> None:
        session, before = self._pick(which)
        session.rewind(round(cut * len(before)))
        assert session.token_ids == before[: round(cut * len(before))]

    @precondition(lambda self: len(self.sessions) < 3)
    @rule(which=FEW, cut=st.none() | CUT)
    def fork(self, which: int, cut: float | None) -> None:
        session, before = self._pick(which)
        at = None if cut is None else round(cut * len(before))
        self.sessions.append(session.fork(at))
        assert self.sessions[-1].token_ids == before[:at]
        assert session.token_ids == before

    @precondition(lambda self: len(self.sessions) > 1)
    @rule(which=FEW)
    def close(self, which: int) -> None:
        self.sessions.pop(which % len(self.sessions)).close()

    @invariant()
    def sessions_are_valid(self) -> None:
        for session in self.sessions:
            session.check_invariants()  # I1, I3, I5
            ids = session.token_ids
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


SessionMachine.TestCase.settings = settings(max_examples=8, stateful_step_count=25, deadline=None)
TestSessionMachine = SessionMachine.TestCase
