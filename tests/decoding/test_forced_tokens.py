"""A thinking budget and fixed rows in the decode loop: the same tokens, whoever drafts."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from dlite_agent.config import SamplingParams
from dlite_agent.decoding.loop import Round
from dlite_agent.decoding.stopping import StopRules
from dlite_agent.decoding.thoughts import ThoughtBudget
from dlite_agent.drafters.drafter import Drafter
from dlite_agent.drafters.lookup import LookupDrafter
from dlite_agent.drafters.null import NullDrafter
from dlite_agent.models.transformer import DenseTransformer
from dlite_agent.sampling import KeyedNoise, Sampler
from dlite_agent.sessions.session import Session
from dlite_agent.testing import (
    AdversarialDrafter,
    NoisyDrafter,
    OracleDrafter,
    ScriptedDrafter,
    assert_kv_is_of,
    cold_decode,
    tiny_qwen3,
)

PROMPT = [3, 14, 15, 9, 26, 5] * 4
CLOSE_IDS = (500, 501, 502)
SAMPLER = Sampler(
    SamplingParams(temperature=1.0, top_k=0, top_p=1.0, presence_penalty=0.5),
    KeyedNoise.derive(2, 0, PROMPT),
)
DRAFTERS: dict[str, Callable[[Sequence[int]], Drafter]] = {
    "null": lambda ids: NullDrafter(),
    "lookup": lambda ids: LookupDrafter(sizes=(1,)),
    "oracle": lambda ids: OracleDrafter(ids, max_block=5),
    "noisy": lambda ids: NoisyDrafter(ids, vocab_size=512),
    "scripted": lambda ids: ScriptedDrafter([ids[25:33], [500, 501], ids[34:40]]),
    "adversarial": lambda ids: AdversarialDrafter(vocab_size=512, favourites=(*CLOSE_IDS, ids[30])),
}


@pytest.fixture(scope="module")
def target() -> DenseTransformer:
    return tiny_qwen3(dtype="float64")


def run(
    target: DenseTransformer, drafter: Drafter, limits: StopRules
) -> tuple[Session, list[Round]]:
    session = Session(target, drafter, session_id="test")
    session.sync(PROMPT)
    rounds = list(session.decode(SAMPLER, limits))
    session.check_invariants()
    assert_kv_is_of(target, session.kv, session.token_ids, tolerance=1e-10)
    return session, rounds


@pytest.mark.parametrize("max_tokens", [0, 1, 7, 12])
@pytest.mark.parametrize("starts_open", [True, False])
def test_a_budget_is_lossless_whoever_drafts(
    target: DenseTransformer, max_tokens: int, starts_open: bool
) -> None:
    free = cold_decode(target, PROMPT, SAMPLER, StopRules(frozenset(), 40))
    budget = ThoughtBudget(max_tokens, CLOSE_IDS, free[5], starts_open)
    limits = StopRules(frozenset(), 40, budget)
    expected = PROMPT + cold_decode(target, PROMPT, SAMPLER, limits)
    boundary = len(PROMPT) + max_tokens + (0 if starts_open else 6)
    assert expected[:boundary] == (PROMPT + free)[:boundary]
    assert tuple(expected[boundary : boundary + 3]) == CLOSE_IDS
    for name, make in DRAFTERS.items():
        session, rounds = run(target, make(expected), limits)
        assert session.token_ids == expected, name
        assert any(round_.source == "forced" for round_ in rounds)
        session.close()


@pytest.mark.parametrize("max_tokens", range(1, 9))
def test_a_forced_end_is_cut_by_max_tokens_as_any_answer_is(
    target: DenseTransformer, max_tokens: int
) -> None:
    budget = ThoughtBudget(3, CLOSE_IDS, starts_open=True)
    whole = cold_decode(target, PROMPT, SAMPLER, StopRules(frozenset(), 12, budget))
    limits = StopRules(frozenset(), max_tokens, budget)
    for make in DRAFTERS.values():
        session, rounds = run(target, make(PROMPT + whole), limits)
        assert session.token_ids == PROMPT + whole[:max_tokens]
        assert rounds[-1].finish == "length"
        session.close()


def test_forced_tokens_cost_one_forward_together(target: DenseTransformer) -> None:
    limits = StopRules(frozenset(), 12, ThoughtBudget(3, CLOSE_IDS, starts_open=True))
    _, rounds = run(target, NullDrafter(), limits)
    assert [len(round_.token_ids) for round_ in rounds] == [1, 1, 1, 4, 1, 1, 1, 1, 1]
    assert [round_.source for round_ in rounds[2:5]] == ["null", "forced", "null"]


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_fixed_rows_change_no_token_and_every_round_has_them(
    target: DenseTransformer, drafter: str
) -> None:
    limits = StopRules(frozenset(), 30, fixed_rows=4)
    expected = PROMPT + cold_decode(target, PROMPT, SAMPLER, StopRules(frozenset(), 30))
    rows_before = target.rows_computed
    session = Session(target, DRAFTERS[drafter](expected), session_id="test")
    session.sync(PROMPT)
    rounds = list(session.decode(SAMPLER, limits))
    num_forwards = sum(round_.source != "prefill" for round_ in rounds)
    assert target.rows_computed - rows_before == len(PROMPT) + 4 * num_forwards
    assert session.token_ids == expected
    session.check_invariants()
    assert_kv_is_of(target, session.kv, session.token_ids, tolerance=1e-10)
    session.close()
