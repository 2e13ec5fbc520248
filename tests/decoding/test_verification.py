"""`verify`: which tokens are committed, and that they have the target's distribution."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from dlite_agent.config import SamplingParams
from dlite_agent.decoding.verification import RowContext, verify
from dlite_agent.drafters.drafter import DraftBlock
from dlite_agent.sampling import KeyedNoise, Sampler
from tests.sampling.fixed_masks import FixedMasks

GREEDY = Sampler(SamplingParams(temperature=0.0, top_k=0, top_p=1.0), KeyedNoise(0))


def sharp(*token_ids: int, vocab_size: int = 32) -> Tensor:
    """Logits whose greedy tokens are these."""
    logits = torch.zeros(len(token_ids), vocab_size)
    logits[torch.arange(len(token_ids)), torch.tensor(token_ids)] = 9.0
    return logits


def test_no_draft_gives_one_token() -> None:
    verified = verify(DraftBlock(), sharp(5), GREEDY, 0)
    assert verified.token_ids == (5,)
    assert verified.num_accepted == 0
    assert verified.hidden_row == 0
    assert not verified.is_terminal


def test_full_draft_is_accepted_with_a_bonus_token() -> None:
    verified = verify(DraftBlock((5, 6, 7)), sharp(5, 6, 7, 8), GREEDY, 0)
    assert verified.token_ids == (5, 6, 7, 8)
    assert verified.num_accepted == 3
    assert verified.hidden_row == 3


def test_first_miss_is_replaced_and_ends_the_round() -> None:
    verified = verify(DraftBlock((5, 9, 7)), sharp(5, 6, 7, 8), GREEDY, 0)
    assert verified.token_ids == (5, 6)
    assert verified.num_accepted == 1
    assert verified.hidden_row == 1


def test_drafted_stop_token_ends_the_round_without_a_bonus() -> None:
    logits = sharp(5, 2, 7)
    logits[2] = float("nan")  # nothing is evaluated past the stop token
    verified = verify(DraftBlock((5, 2)), logits, GREEDY, 0, RowContext(frozenset({2})))
    assert verified.token_ids == (5, 2)
    assert verified.num_accepted == 2
    assert verified.is_terminal
    assert verified.hidden_row == 1


def test_drafted_stop_token_that_the_target_does_not_choose_is_a_miss() -> None:
    verified = verify(
        DraftBlock((5, 2, 7)), sharp(5, 6, 7, 8), GREEDY, 0, RowContext(frozenset({2}))
    )
    assert verified.token_ids == (5, 6)
    assert not verified.is_terminal


def test_stop_token_of_the_target_ends_the_round() -> None:
    for draft in ((), (5, 6)):
        stops = RowContext(frozenset({2}))
        verified = verify(DraftBlock(draft), sharp(*draft, 2), GREEDY, 0, stops)
        assert verified.token_ids == (*draft, 2)
        assert verified.num_accepted == len(draft)
        assert verified.is_terminal


def test_masked_tokens_are_not_chosen() -> None:
    masks = torch.ones(3, 32, dtype=torch.bool)
    masks[1, 6] = False
    logits = sharp(5, 6, 7)
    logits[1, 20] = 4.0
    before = logits.clone()
    verified = verify(DraftBlock((5, 6)), logits, GREEDY, 0, RowContext(masks=FixedMasks(masks)))
    assert verified.token_ids == (5, 20)
    assert torch.equal(logits, before)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_under_a_mask_the_tokens_are_those_of_logits_without_the_others(temperature: float) -> None:
    generator = torch.Generator().manual_seed(4)
    sampler = Sampler(SamplingParams(temperature=temperature, top_k=0, top_p=1.0), KeyedNoise(3))
    for _ in range(20):
        logits = torch.randn(1, 45, generator=generator)
        allowed = torch.rand(1, 45, generator=generator) < 0.3
        allowed[0, 44] = True
        masked = logits.masked_fill(~allowed, -math.inf)
        expected = verify(DraftBlock(()), masked, sampler, 7)
        rows = RowContext(masks=FixedMasks(allowed))
        assert verify(DraftBlock(()), logits, sampler, 7, rows) == expected


def test_rows_without_a_mask_are_not_evaluated() -> None:
    logits = sharp(5, 6, 7, 8)
    logits[2:] = float("nan")
    masks = torch.ones(2, 32, dtype=torch.bool)
    verified = verify(DraftBlock((5, 6, 7)), logits, GREEDY, 0, RowContext(masks=FixedMasks(masks)))
    assert verified.token_ids == (5, 6)
    assert verified.num_accepted == 2
    assert verified.hidden_row == 1


@pytest.mark.parametrize("num_masks", [0, 3])
def test_wrong_number_of_masks_is_refused(num_masks: int) -> None:
    masks = torch.ones(num_masks, 32, dtype=torch.bool)
    with pytest.raises(ValueError, match="masks"):
        verify(DraftBlock((5,)), sharp(5, 6), GREEDY, 0, RowContext(masks=FixedMasks(masks)))


@pytest.mark.parametrize("num_rows", [1, 3])
def test_wrong_number_of_rows_is_refused(num_rows: int) -> None:
    with pytest.raises(ValueError, match="row of logits"):
        verify(DraftBlock((5,)), sharp(*range(num_rows)), GREEDY, 0)


def test_tokens_do_not_depend_on_the_draft() -> None:
    """Whatever is drafted, token i is what a draw at position i gives."""
    logits = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
    sampler = Sampler(SamplingParams(temperature=1.0, top_k=0, top_p=1.0), KeyedNoise(5))
    plain = sampler.sample_rows(logits, 100).tolist()
    for cut in range(8):
        for wrong in (0, 1):
            draft = [*plain[:cut], *[(t + wrong) % 64 for t in plain[cut:7]]]
            verified = verify(DraftBlock(tuple(draft)), logits, sampler, 100)
            assert list(verified.token_ids) == plain[: len(verified.token_ids)]
            assert len(verified.token_ids) == (cut + 1 if wrong and cut < 7 else 8)


def statistic_in_sigmas(counts: Tensor, probabilities: Tensor) -> float:
    """Chi-square as a normal deviate (Wilson-Hilferty); rare tokens are one bin."""
    expected = probabilities * counts.sum()
    common = expected >= 5.0
    observed = torch.cat([counts[common], counts[~common].sum()[None]])
    wanted = torch.cat([expected[common], expected[~common].sum()[None]])
    possible = wanted > 0.0
    assert int(observed[~possible].sum()) == 0, "an impossible token was committed"
    value = float(((observed - wanted)[possible] ** 2 / wanted[possible]).sum())
    freedom = int(possible.sum()) - 1
    spread = 2.0 / (9.0 * freedom)
    return ((value / freedom) ** (1 / 3) - (1 - spread)) / math.sqrt(spread)


def test_a_row_counts_the_drafted_tokens_before_it() -> None:
    """Greedy rows that all prefer token 5: a penalty moves the second one to 6, the third to 7."""
    logits = torch.zeros(4, 32)
    logits[:, 5], logits[:, 6], logits[:, 7] = 3.0, 2.9, 2.8
    params = SamplingParams(temperature=0.0, top_k=0, top_p=1.0, presence_penalty=1.0)
    sampler = Sampler(params, KeyedNoise(0))
    before = logits.clone()
    for draft in ((5, 6, 7), (5, 5, 5), (5, 6, 6), (9, 6, 7)):
        history = sampler.new_history([5, 6, 7])  # the prompt does not count
        verified = verify(DraftBlock(draft), logits, sampler, 0, RowContext(history=history))
        wanted = (5, 6, 7, 5)
        assert verified.token_ids == wanted[: len(verified.token_ids)]
        assert verified.num_accepted == sum(
            draft[: i + 1] == wanted[: i + 1] for i in range(len(draft))
        )
    assert torch.equal(logits, before)


def test_penalties_without_a_history_are_refused() -> None:
    params = SamplingParams(temperature=0.0, top_k=0, top_p=1.0, frequency_penalty=1.0)
    with pytest.raises(ValueError, match="new_history"):
        verify(DraftBlock(), sharp(5), Sampler(params, KeyedNoise(0)), 0)


def test_forced_tokens_are_committed_unread_and_the_next_row_is_sampled() -> None:
    logits = sharp(5, 6, 7)
    logits[:2] = float("nan")
    verified = verify(DraftBlock((20, 21)), logits, GREEDY, 0, RowContext(forced=(20, 21)))
    assert verified.token_ids == (20, 21, 7)
    assert verified.num_accepted == 2


def test_a_draft_that_is_not_what_is_forced_is_a_miss() -> None:
    verified = verify(DraftBlock((5, 6)), sharp(5, 6, 7), GREEDY, 0, RowContext(forced=(20, 21)))
    assert verified.token_ids == (20,)
    assert verified.num_accepted == 0


def test_more_forced_tokens_than_rows_fill_the_rows() -> None:
    verified = verify(DraftBlock((20,)), sharp(5, 6), GREEDY, 0, RowContext(forced=(20, 21, 22)))
    assert verified.token_ids == (20, 21)


@pytest.mark.parametrize("draft", [(), (5,), (5, 6, 7), (5, 9)])
def test_logprobs_are_those_of_the_raw_logits_for_drafted_tokens_too(
    draft: tuple[int, ...],
) -> None:
    logits = sharp(5, 6, 7, 8)[: len(draft) + 1] + torch.arange(32) / 100
    params = SamplingParams(
        temperature=0.0, top_k=0, top_p=1.0, logit_bias={3: 20.0, 4: -3.0}, logprobs=True
    )
    sampler = Sampler(params, KeyedNoise(0))
    masks = torch.ones(1, 32, dtype=torch.bool)
    masks[0, 0] = False
    for context in (
        RowContext(num_top_logprobs=2),
        RowContext(num_top_logprobs=2, masks=FixedMasks(masks)),
        RowContext(num_top_logprobs=2, forced=(5,)),
    ):
        verified = verify(DraftBlock(draft), logits, sampler, 0, context)
        raw = torch.log_softmax(logits.double(), dim=-1)
        assert [entry.token_id for entry in verified.logprobs] == list(verified.token_ids)
        for row, entry in enumerate(verified.logprobs):
            assert entry.logprob == pytest.approx(float(raw[row, entry.token_id]), abs=1e-5)
            best = raw[row].topk(2)
            assert [token_id for token_id, _ in entry.top] == best.indices.tolist()
            assert [value for _, value in entry.top] == pytest.approx(
                best.values.tolist(), abs=1e-5
            )


def test_logprobs_are_not_computed_unless_asked_for() -> None:
    assert verify(DraftBlock((5,)), sharp(5, 6), GREEDY, 0).logprobs == ()
    verified = verify(DraftBlock((5,)), sharp(5, 6), GREEDY, 0, RowContext(num_top_logprobs=0))
    assert [entry.top for entry in verified.logprobs] == [(), ()]


ALL_RULES = {
    "min_p": 0.05,
    "repetition_penalty": 1.2,
    "presence_penalty": 0.7,
    "frequency_penalty": 0.4,
}
SEEN = [3, 3, 100, 5]


def reference_distribution(params: SamplingParams, row: Tensor, sampled: list[int]) -> Tensor:
    """p of one row by the definitions, in float64, over the whole vocabulary."""
    logits = row.double().clone()
    for token_id, bias in dict(params.logit_bias).items():
        logits[token_id] += bias
    repetition = params.repetition_penalty or 1.0
    for token_id in {*PROMPT, *sampled}:
        value = float(logits[token_id])
        logits[token_id] = value * repetition if value < 0 else value / repetition
    for token_id in set(sampled):
        count = sampled.count(token_id)
        logits[token_id] -= params.frequency_penalty * count + params.presence_penalty
    assert params.temperature is not None
    assert params.top_p is not None
    p = torch.softmax(logits / params.temperature, dim=0)
    order = p.argsort(descending=True, stable=True)
    if params.top_k:
        p[order[params.top_k :]] = 0.0
    p /= p.sum()
    before = p[order].cumsum(0) - p[order]
    p[order[before >= params.top_p]] = 0.0
    p[p < (params.min_p or 0.0) * p.max()] = 0.0
    return p / p.sum()


PROMPT = [1, 2, 3, 400]


@pytest.mark.parametrize(
    ("vocab_size", "num_seeds", "options"),
    [
        (512, 2500, {"top_k": 0, "top_p": 1.0} | ALL_RULES),
        (512, 2500, {"top_k": 0, "top_p": 1.0, "min_p": 0.02}),
        (512, 2500, {"top_k": 40, "top_p": 0.9, "logit_bias": {7: 4.0, 9: 3.5}} | ALL_RULES),
        (151_936, 500, {"top_k": 20, "top_p": 0.95} | ALL_RULES),
    ],
)
def test_committed_tokens_have_the_distribution_that_all_rules_define(
    vocab_size: int, num_seeds: int, options: dict[str, object]
) -> None:
    """Over seeds, against an independent reference; the second row counts the drafted token."""
    logits = 2.0 * torch.randn(2, vocab_size, generator=torch.Generator().manual_seed(3))
    params = SamplingParams(temperature=0.8, **options)  # type: ignore[arg-type]  # a table
    best = int(reference_distribution(params, logits[0], SEEN).argmax())
    logits[1, best] = logits[1].max()  # so that its penalties can be seen
    counts = torch.zeros(2, vocab_size, dtype=torch.float64)
    for seed in range(num_seeds):
        sampler = Sampler(params, KeyedNoise.derive(seed, 0, PROMPT))
        history = sampler.new_history(PROMPT)
        if history is not None:
            history.extend(SEEN)
        context = RowContext(history=history)
        for row, token_id in enumerate(
            verify(DraftBlock((best,)), logits, sampler, 4, context).token_ids
        ):
            counts[row, token_id] += 1
    assert counts[1].sum() > 100
    for row, sampled in ((0, SEEN), (1, [*SEEN, best])):
        p = reference_distribution(params, logits[row], sampled)
        assert statistic_in_sigmas(counts[row], p) < 4.26  # 1e-5


@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (20, 0.95)])
def test_committed_tokens_have_the_target_distribution(top_k: int, top_p: float) -> None:
    """Over seeds, at V = 512: the first token, and the second given that the draft was right."""
    logits = 2.5 * torch.randn(2, 512, generator=torch.Generator().manual_seed(1))
    params = SamplingParams(temperature=1.0, top_k=top_k, top_p=top_p)
    draft = DraftBlock((int(logits[0].argmax()),))
    first, second = torch.zeros(2, 512, dtype=torch.float64)
    for seed in range(4000):
        sampler = Sampler(params, KeyedNoise.derive(seed, 0, [1, 2, 3]))
        token_ids = verify(draft, logits, sampler, 3).token_ids
        first[token_ids[0]] += 1
        if len(token_ids) == 2:
            second[token_ids[1]] += 1
    assert second.sum() > 200
    for counts, row in ((first, 0), (second, 1)):
        ids, weights = Sampler(params, KeyedNoise(0)).candidates(logits[row])
        p = torch.zeros(512, dtype=torch.float64)
        p[ids] = weights / weights.sum()
        assert statistic_in_sigmas(counts, p) < 4.26  # 1e-5


def test_committed_tokens_have_the_target_distribution_at_a_vocabulary_of_152k() -> None:
    logits = 2.0 * torch.randn(2, 151_936, generator=torch.Generator().manual_seed(2))
    params = SamplingParams(temperature=0.7, top_k=20, top_p=0.95)
    draft = DraftBlock((int(logits[0].argmax()),))
    ids, weights = Sampler(params, KeyedNoise(0)).candidates(logits[0])
    counts = torch.zeros(151_936, dtype=torch.float64)
    for seed in range(1000):
        sampler = Sampler(params, KeyedNoise.derive(seed, 1, []))
        counts[verify(draft, logits, sampler, 0).token_ids[0]] += 1
    p = torch.zeros(151_936, dtype=torch.float64)
    p[ids] = weights / weights.sum()
    assert statistic_in_sigmas(counts, p) < 4.26
