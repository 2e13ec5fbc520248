"""Bias and penalties against transformers and OpenAI's formula, at any size."""

from __future__ import annotations

import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import MinPLogitsWarper, RepetitionPenaltyLogitsProcessor

from dlite_agent.config import SamplingParams
from dlite_agent.sampling import KeyedNoise, Sampler, TokenHistory


def make_sampler(**options: object) -> Sampler:
    params = {"temperature": 0.0, "top_k": 0, "top_p": 1.0} | options
    return Sampler(SamplingParams(**params), KeyedNoise(0))  # type: ignore[arg-type]  # a table


@given(
    st.lists(st.integers(0, 30)),
    st.lists(st.integers(0, 30), max_size=200),
    st.lists(st.integers(0, 30), max_size=9),
)
def test_history_counts_what_was_sampled_and_knows_the_prompt(
    prompt: list[int], sampled: list[int], drafted: list[int]
) -> None:
    history = TokenHistory(prompt)
    for token_id in sampled:
        history.extend([token_id])
    for drafts in (drafted, []):
        ids, counts = history.counted(drafts)
        assert len(set(ids.tolist())) == len(ids)
        wanted = {i: float([*sampled, *drafts].count(i)) for i in {*prompt, *sampled, *drafts}}
        assert dict(zip(ids.tolist(), counts.tolist(), strict=True)) == wanted


def test_repetition_penalty_is_that_of_transformers() -> None:
    logits = torch.randn(500, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    prompt, sampled = [1, 2, 3, 3], [4, 4, 9]
    sampler = make_sampler(repetition_penalty=1.3)
    history = sampler.new_history(prompt)
    assert history is not None
    history.extend(sampled[:2])
    got = sampler.adjusted(logits, history, sampled[2:])
    theirs = RepetitionPenaltyLogitsProcessor(1.3)
    wanted = theirs(torch.tensor([[*prompt, *sampled]]), logits[None])[0]
    torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("min_p", [0.01, 0.1, 0.5, 1.0])
def test_min_p_keeps_what_transformers_keeps(min_p: float) -> None:
    logits = 2.0 * torch.randn(500, generator=torch.Generator().manual_seed(1))
    ids, _ = make_sampler(temperature=1.0, min_p=min_p).candidates(logits)
    kept = MinPLogitsWarper(min_p)(torch.zeros(1, 0), logits[None])[0].isfinite()
    assert sorted(ids.tolist()) == kept.nonzero()[:, 0].tolist()


def test_presence_and_frequency_are_openais_formula_and_leave_the_prompt_alone() -> None:
    logits = torch.zeros(10)
    sampler = make_sampler(presence_penalty=0.5, frequency_penalty=0.25)
    history = sampler.new_history([1, 1, 2])
    assert history is not None
    history.extend([2, 3, 3])
    got = sampler.adjusted(logits, history, [3, 5])
    wanted = torch.zeros(10)
    wanted[[2, 3, 5]] = torch.tensor([-0.75, -1.25, -0.75])
    assert torch.equal(got, wanted)


def test_bias_comes_before_penalties() -> None:
    sampler = make_sampler(logit_bias={1: 2.0}, repetition_penalty=2.0)
    got = sampler.adjusted(torch.tensor([1.0, 1.0, -1.0]), sampler.new_history([1, 2]))
    assert got.tolist() == [1.0, 1.5, -2.0]


def test_without_bias_and_penalties_logits_stay_themselves_and_no_history_is_kept() -> None:
    sampler = make_sampler(temperature=1.0, top_k=20, min_p=0.1)
    logits = torch.zeros(10)
    assert sampler.adjusted(logits) is logits
    assert sampler.new_history([1]) is None


def test_excluded_tokens_stay_excluded() -> None:
    sampler = make_sampler(logit_bias={0: 100.0}, repetition_penalty=2.0, presence_penalty=-2.0)
    history = sampler.new_history([0])
    assert history is not None
    history.extend([0])
    assert sampler.sample(torch.tensor([-float("inf"), -5.0]), 0, history) == 1


def test_ten_thousand_biases_are_the_right_answer_and_fast() -> None:
    logits = torch.randn(151_936, generator=torch.Generator().manual_seed(2))
    biases = dict.fromkeys(logits.topk(10000).indices.tolist(), -100.0)
    sampler = make_sampler(logit_bias=biases)
    expected = logits.clone()
    expected[list(biases)] -= 100.0
    assert sampler.sample(logits, 0) == int(expected.argmax())
    began_s = time.thread_time()
    for position in range(20):
        sampler.sample(logits, position)
    assert (time.thread_time() - began_s) / 20 < 0.02  # seconds a row; measured 0.0003
