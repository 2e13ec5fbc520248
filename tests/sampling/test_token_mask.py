"""Masks choose among what is allowed, as if the rest had no logits."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from dlite_agent.config import SamplingParams
from dlite_agent.sampling import KeyedNoise, Sampler, TokenMask
from tests.sampling.fixed_masks import FixedMasks

CPU = torch.device("cpu")
PARAMS = {
    "greedy": SamplingParams(temperature=0.0, top_k=0, top_p=1.0),
    "penalised": SamplingParams(temperature=0.0, top_k=0, top_p=1.0, logit_bias={3: 2.0}),
    "plain": SamplingParams(temperature=1.0, top_k=0, top_p=1.0),
    "top-k": SamplingParams(temperature=0.8, top_k=5, top_p=0.9),
    "nucleus": SamplingParams(temperature=1.2, top_k=0, top_p=0.8),
    "min-p": SamplingParams(temperature=1.0, top_k=30, top_p=1.0, min_p=0.05),
}


@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS)
@pytest.mark.parametrize("share", [0.005, 0.2, 0.9, 0.999])
@pytest.mark.parametrize("size", [40, 333, 5000])
def test_the_rest_might_as_well_have_no_logits(
    params: SamplingParams, share: float, size: int
) -> None:
    generator = torch.Generator().manual_seed(size)
    sampler = Sampler(params, KeyedNoise(3))
    for position in range(6):
        logits = torch.randn(3, size, generator=generator) * 3
        allowed = torch.rand(3, size, generator=generator) < share
        allowed[:, -1] = True
        if position % 2:  # the best tokens are refused
            allowed.scatter_(1, logits.topk(size // 3).indices, value=False)
            allowed[:, 0] = True
        before = logits.clone()
        expected = list(sampler.sample_each(logits.masked_fill(~allowed, -math.inf), position))
        got = sampler.sample_each(logits, position, masks=FixedMasks(allowed))
        assert list(got) == expected
        assert torch.equal(logits, before)


def test_a_mask_knows_its_ids() -> None:
    allowed = torch.zeros(1, 75, dtype=torch.bool)
    allowed[0, [0, 7, 8, 31, 32, 74]] = True
    mask = FixedMasks(allowed).row(0)
    assert mask.ids(CPU).tolist() == [0, 7, 8, 31, 32, 74]
    assert mask.holds(torch.tensor([7, 9, 74, 1000])).tolist() == [True, False, True, False]
    assert mask.ban(torch.zeros(75)).isfinite().nonzero()[:, 0].tolist() == mask.ids(CPU).tolist()


def test_ids_without_a_bit_are_not_allowed_and_bits_without_a_column_are_nothing() -> None:
    everything = np.full(1, -1, dtype=np.int32)
    assert TokenMask(everything, 100).ban(torch.zeros(100)).isfinite().sum() == 32
    assert len(TokenMask(everything, 20).ids(CPU)) == 20
    assert TokenMask(everything, 20).ban(torch.zeros(20)).isfinite().all()
    assert not TokenMask(np.zeros(1, np.int32), 20).ban(torch.zeros(20)).isfinite().any()


def test_a_mask_that_leaves_nothing_is_an_error() -> None:
    nothing = FixedMasks(torch.zeros(1, 64, dtype=torch.bool))
    for params in (PARAMS["greedy"], PARAMS["top-k"], PARAMS["plain"]):
        sampler = Sampler(params, KeyedNoise(0))
        with pytest.raises(FloatingPointError, match="a mask excludes every token"):
            list(sampler.sample_each(torch.zeros(1, 64), 0, masks=nothing))
