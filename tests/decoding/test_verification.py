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
    verified = verify(DraftBlock((5, 6)), logits, GREEDY, 0, RowContext(masks=masks))
    assert verified.token_ids == (5, 20)
    assert torch.equal(logits, before)


def test_rows_without_a_mask_are_not_evaluated() -> None:
    logits = sharp(5, 6, 7, 8)
    logits[2:] = float("nan")
    masks = torch.ones(2, 32, dtype=torch.bool)
    verified = verify(DraftBlock((5, 6, 7)), logits, GREEDY, 0, RowContext(masks=masks))
    assert verified.token_ids == (5, 6)
    assert verified.num_accepted == 2
    assert verified.hidden_row == 1


@pytest.mark.parametrize("num_masks", [0, 3])
def test_wrong_number_of_masks_is_refused(num_masks: int) -> None:
    masks = torch.ones(num_masks, 32, dtype=torch.bool)
    with pytest.raises(ValueError, match="masks"):
        verify(DraftBlock((5,)), sharp(5, 6), GREEDY, 0, RowContext(masks=masks))


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
