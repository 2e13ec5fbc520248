"""The decode loop through a session: lossless, within its limits, and stoppable anywhere."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from dlite_agent.config import SamplingParams
from dlite_agent.decoding.loop import Round
from dlite_agent.decoding.stopping import StopRules
from dlite_agent.drafters.drafter import DraftBlock, Drafter, DraftState, Requires
from dlite_agent.drafters.lookup import LookupDrafter
from dlite_agent.drafters.null import NullDrafter
from dlite_agent.drafters.suffix import SuffixDrafter
from dlite_agent.errors import CapacityError
from dlite_agent.models.kv_pool import PAGE_ROWS
from dlite_agent.models.target import TargetHidden
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
    cold_forward,
    tiny_config,
    tiny_qwen3,
)


class BoundlessDrafter(NullDrafter):
    """Right, and with more tokens than the budget allows."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        self._token_ids = tuple(token_ids)

    def propose(
        self,
        state: DraftState | None,
        pending: int,
        hidden: TargetHidden | None,
        position: int,
        noise: KeyedNoise,
        budget: int,
    ) -> DraftBlock:
        return DraftBlock(self._token_ids[position + 1 : position + 3 + budget])


class SleepyDrafter(NullDrafter):
    """Reads taps, and wants those of every third forward."""

    requires = Requires((0, 1), "last")

    def __init__(self) -> None:
        self.had_taps: list[bool] = []

    def propose(
        self,
        state: DraftState | None,
        pending: int,
        hidden: TargetHidden | None,
        position: int,
        noise: KeyedNoise,
        budget: int,
    ) -> DraftBlock:
        self.had_taps.append(hidden is not None)
        return DraftBlock(wants_taps=len(self.had_taps) % 3 == 0)


PROMPT = [3, 14, 15, 9, 26, 5, 35, 8, 97, 93] * 3 + [3, 14, 15]
NUM_TOKENS = 48
SAMPLINGS = {
    "greedy": SamplingParams(temperature=0.0, top_k=0, top_p=1.0),
    "sharp": SamplingParams(temperature=0.8, top_k=4, top_p=0.9),
    "flat": SamplingParams(temperature=1.0, top_k=0, top_p=1.0),
    "greedy-penalties": SamplingParams(
        temperature=0.0,
        top_k=0,
        top_p=1.0,
        repetition_penalty=1.3,
        presence_penalty=0.4,
        frequency_penalty=0.2,
        logit_bias={7: 2.0, 93: -100.0},
    ),
    "everything": SamplingParams(
        temperature=0.9,
        top_k=60,
        top_p=0.97,
        min_p=0.02,
        repetition_penalty=1.1,
        presence_penalty=-0.5,
        frequency_penalty=0.6,
        logit_bias={token_id: (token_id % 7) / 3 for token_id in range(0, 512, 3)},
        logprobs=True,
        top_logprobs=2,
    ),
}
MakeDrafter = Callable[[Sequence[int]], Drafter]
DRAFTERS: dict[str, MakeDrafter] = {
    "null": lambda ids: NullDrafter(),
    "lookup": lambda ids: LookupDrafter(),
    "lookup-1": lambda ids: LookupDrafter(sizes=(1,), max_block=1),
    "lookup-33": lambda ids: LookupDrafter(sizes=(17, 2, 1), max_block=33),
    "suffix": lambda ids: SuffixDrafter(),
    "suffix-whole": lambda ids: SuffixDrafter(max_block=40, min_reached=0.0),
    "oracle-1": lambda ids: OracleDrafter(ids, max_block=1),
    "oracle-7": OracleDrafter,
    "oracle-40": lambda ids: OracleDrafter(ids, max_block=40),
    "boundless": BoundlessDrafter,
    "noisy": lambda ids: NoisyDrafter(ids, vocab_size=512),
    "scripted": lambda ids: ScriptedDrafter([ids[34:37], [1, 2, 3], ids[38:50], ()]),
    "adversarial": lambda ids: AdversarialDrafter(vocab_size=512, favourites=ids[-3:]),
}


@pytest.fixture(scope="module")
def target() -> DenseTransformer:
    return tiny_qwen3(dtype="float64")


@pytest.fixture(scope="module")
def answers(target: DenseTransformer) -> dict[str, list[int]]:
    """Cold, cacheless answers."""
    limits = StopRules(frozenset(), NUM_TOKENS)
    return {
        name: cold_decode(target, PROMPT, make_sampler(params), limits)
        for name, params in SAMPLINGS.items()
    }


def make_sampler(params: SamplingParams) -> Sampler:
    return Sampler(params, KeyedNoise.derive(1, 0, PROMPT))


def run(
    target: DenseTransformer, drafter: Drafter, sampler: Sampler, limits: StopRules
) -> tuple[Session, list[Round]]:
    session = Session(target, drafter, session_id="test", prefill_chunk=16)
    session.sync(PROMPT)
    rounds = list(session.decode(sampler, limits))
    session.check_invariants()
    committed = [token_id for round_ in rounds for token_id in round_.token_ids]
    assert session.token_ids == PROMPT + committed
    return session, rounds


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_output_is_that_of_a_cold_run_without_a_cache(
    target: DenseTransformer, answers: dict[str, list[int]], drafter: str, sampling: str
) -> None:
    expected = PROMPT + answers[sampling]
    sampler = make_sampler(SAMPLINGS[sampling])
    limits = StopRules(frozenset(), NUM_TOKENS)
    session, rounds = run(target, DRAFTERS[drafter](expected), sampler, limits)
    assert session.token_ids == expected
    assert rounds[-1].finish == "length"
    assert all(round_.finish is None for round_ in rounds[:-1])
    assert_kv_is_of(target, session.kv, session.token_ids, tolerance=1e-10)
    session.close()


def test_a_forward_has_taps_where_the_drafter_wants_them(
    target: DenseTransformer, answers: dict[str, list[int]]
) -> None:
    drafter = SleepyDrafter()
    limits = StopRules(frozenset(), 8)
    session, _ = run(target, drafter, make_sampler(SAMPLINGS["greedy"]), limits)
    assert session.token_ids == PROMPT + answers["greedy"][:8]
    # the prompt's last chunk has them, then every third of the seven forwards
    assert drafter.had_taps == [True, False, False, True, False, False, True]
    session.close()


def first_difference(left: Sequence[int], right: Sequence[int]) -> int | None:
    pairs = zip(left, right, strict=True)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), None)


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_float32_output_differs_at_near_ties_only(sampling: str) -> None:
    small = tiny_qwen3(dtype="float32")
    sampler = make_sampler(SAMPLINGS[sampling])
    limits = StopRules(frozenset(), 100)
    plain, _ = run(small, NullDrafter(), sampler, limits)
    near_ties = 0
    for make in DRAFTERS.values():
        session, _ = run(small, make(plain.token_ids), sampler, limits)
        place = first_difference(plain.token_ids, session.token_ids)
        if place is not None:
            history = sampler.new_history(PROMPT)
            with cold_forward(small, plain.token_ids[:place]) as (output, _):
                sampled = plain.token_ids[len(PROMPT) : place]
                logits = sampler.adjusted(output.logits[0], history, sampled)
            others = {plain.token_ids[place], session.token_ids[place]}
            assert any(sampler.is_near_tie(logits, place, other) for other in others)
            near_ties += 1
        session.close()
    print(f"{sampling}: {near_ties} of {len(DRAFTERS)} runs differ, each at a near-tie")
    assert near_ties <= 2


def test_oracle_drafts_are_all_accepted(
    target: DenseTransformer, answers: dict[str, list[int]]
) -> None:
    expected = PROMPT + answers["flat"]
    rows_before = target.rows_computed
    sampler = make_sampler(SAMPLINGS["flat"])
    limits = StopRules(frozenset(), NUM_TOKENS)
    session, rounds = run(target, OracleDrafter(expected), sampler, limits)
    # the first token costs no forward, then eight a round, and the last round gets what is left
    assert [len(round_.token_ids) for round_ in rounds] == [1, 8, 8, 8, 8, 8, 7]
    assert rounds[0].source == "prefill"
    assert {round_.source for round_ in rounds[1:]} == {"oracle"}
    assert all(round_.num_accepted == round_.num_drafted for round_ in rounds)
    assert target.rows_computed - rows_before == len(PROMPT) + NUM_TOKENS - 1
    session.close()


def test_rejected_drafts_leave_no_kv_row(
    target: DenseTransformer, answers: dict[str, list[int]]
) -> None:
    wrong = PROMPT + [(token_id + 1) % 512 for token_id in answers["greedy"]]
    sampler = make_sampler(SAMPLINGS["greedy"])
    session, rounds = run(target, OracleDrafter(wrong), sampler, StopRules(frozenset(), 8))
    assert [round_.num_drafted for round_ in rounds] == [0, 6, 5, 4, 3, 2, 1, 0]
    assert [round_.num_accepted for round_ in rounds] == [0] * 8
    assert session.kv.length == len(PROMPT) + 7
    assert session.kv.num_tentative == 0
    session.close()


@pytest.mark.parametrize("place", [0, 1, 4, 8, 9, 20])
def test_stop_token_inside_an_accepted_run_ends_the_turn(
    target: DenseTransformer, answers: dict[str, list[int]], place: int
) -> None:
    answer = answers["flat"]
    stop = answer[place]
    answer = answer[: answer.index(stop) + 1]
    drafter = OracleDrafter(PROMPT + answers["flat"])
    limits = StopRules(frozenset({stop}), NUM_TOKENS)
    session, rounds = run(target, drafter, make_sampler(SAMPLINGS["flat"]), limits)
    assert session.token_ids == PROMPT + answer
    assert rounds[-1].finish == "stop"
    assert session.kv.length == len(session.token_ids) - 1
    assert rounds[-1].num_drafted == rounds[-1].num_accepted  # no row past the stop token
    is_drafted = (len(answer) - 1) % 8 != 0  # else it is the token that a round adds
    assert rounds[-1].num_accepted == len(rounds[-1].token_ids) - (not is_drafted)
    session.close()


@pytest.mark.parametrize("max_tokens", range(1, 12))
@pytest.mark.parametrize("make", [OracleDrafter, BoundlessDrafter])
def test_max_tokens_is_exact_and_no_row_is_wasted(
    target: DenseTransformer, answers: dict[str, list[int]], make: MakeDrafter, max_tokens: int
) -> None:
    rows_before = target.rows_computed
    drafter = make(PROMPT + answers["greedy"])
    sampler = make_sampler(SAMPLINGS["greedy"])
    session, rounds = run(target, drafter, sampler, StopRules(frozenset(), max_tokens))
    assert session.token_ids == PROMPT + answers["greedy"][:max_tokens]
    assert rounds[-1].finish == "length"
    assert target.rows_computed - rows_before == len(PROMPT) + max_tokens - 1
    session.close()


def test_stop_wins_over_length_in_the_last_round(
    target: DenseTransformer, answers: dict[str, list[int]]
) -> None:
    answer = answers["flat"]
    place = next(i for i, token_id in enumerate(answer) if answer.index(token_id) == i > 3)
    limits = StopRules(frozenset({answer[place]}), place + 1)
    drafter = OracleDrafter(PROMPT + answer)
    session, rounds = run(target, drafter, make_sampler(SAMPLINGS["flat"]), limits)
    assert rounds[-1].finish == "stop"
    session.close()


@pytest.mark.parametrize("drafter", ["null", "oracle-7"])
def test_full_pool_goes_on_without_drafts_and_then_says_so(drafter: str) -> None:
    page_bytes = PAGE_ROWS * tiny_config().kv_bytes_per_token(8)
    small = tiny_qwen3(dtype="float64", max_kv_bytes=page_bytes)
    prompt = [i % 7 for i in range(PAGE_ROWS - 6)]
    sampler = make_sampler(SAMPLINGS["greedy"])
    roomy = Session(tiny_qwen3(dtype="float64"), NullDrafter(), session_id="roomy")
    roomy.sync(prompt)
    list(roomy.decode(sampler, StopRules(frozenset(), 40)))
    session = Session(small, DRAFTERS[drafter](roomy.token_ids), session_id="small")
    session.sync(prompt)
    rounds: list[Round] = []
    with pytest.raises(CapacityError, match="max_kv_bytes"):
        rounds.extend(session.decode(sampler, StopRules(frozenset(), 40)))
    session.check_invariants()
    assert session.kv.length == PAGE_ROWS
    assert session.token_ids == roomy.token_ids[: PAGE_ROWS + 1]
    assert_kv_is_of(roomy._target, session.kv, session.token_ids, tolerance=1e-10)


def test_next_choice_of_a_request_is_another_answer(target: DenseTransformer) -> None:
    limits = StopRules(frozenset(), 12)
    results = []
    for choice in (0, 1, 0):
        noise = KeyedNoise.derive(1, choice, PROMPT)
        session, _ = run(target, LookupDrafter(), Sampler(SAMPLINGS["flat"], noise), limits)
        results.append(list(session.token_ids))
        session.close()
    assert results[0] == results[2] != results[1]
