"""Inverse frequencies of the rotary embedding, plain and stretched.

All in float32 and in transformers' order of operations, whatever the model's type: that is what
checkpoints were trained with, and a last bit of a frequency turns position 100,000 by 0.01 radians.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dlite_agent.rope_scaling import RopeScaling

__all__ = ["rope_frequencies"]


def rope_frequencies(head_dim: int, theta: float, scaling: RopeScaling) -> tuple[Tensor, float]:
    """Radians a position of each pair of elements, and what cosines and sines are multiplied by.

    `default`: f_j = theta^(-2j/D). Su et al. 2021 (arXiv:2104.09864), section 3.2.2.
    `linear`: f_j / s. Chen et al. 2023 (arXiv:2306.15595), section 2.3, equation 4.
    `yarn` and `llama3`: see `_yarn` and `_llama3`.

    Args:
        head_dim: D, even.
        theta: Base of the frequencies, above 1, where `scaling` names none.
        scaling: How they are stretched; `original_max_position_embeddings` is there for yarn and
            llama3.

    Returns:
        Frequencies [D/2] float32, and the attention factor, 1 but for yarn.
    """
    theta = scaling.rope_theta or theta
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).to(torch.float32) / head_dim
    periods = theta**exponents
    if scaling.rope_type == "yarn":
        return _yarn(periods, theta, scaling), _yarn_attention_factor(scaling)
    plain = 1.0 / periods
    if scaling.rope_type == "llama3":
        return _llama3(plain, scaling), 1.0
    return (plain / scaling.factor if scaling.rope_type == "linear" else plain), 1.0


def _llama3(plain: Tensor, scaling: RopeScaling) -> Tensor:
    """Long wavelengths are stretched, short ones are not, and between them the share is linear.

    With turns(f) = original length · f / 2π, the kept share is
    clamp((turns - low) / (high - low), 0, 1).

    Source: `apply_scaling` in `models/llama3/model.py` of meta-llama/llama-models (Llama 3.1).
    """
    original = scaling.original_max_position_embeddings
    assert original is not None, "the config's reader fills it in"
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    wavelengths = 2 * math.pi / plain
    kept = ((original / wavelengths - low) / (high - low)).clamp(0, 1)
    return (1 - kept) * plain / scaling.factor + kept * plain


def _yarn(periods: Tensor, theta: float, scaling: RopeScaling) -> Tensor:
    """Stretch what turns seldom within the original length, by a ramp over the pairs.

    Pair j turns original length / (2π · theta^(2j/D)) times; solved for j, the ramp runs from the
    pair of `beta_fast` turns to that of `beta_slow`.

    Source: Peng et al. 2023 (arXiv:2309.00071), section 3.2, "NTK-by-parts"; the range is rounded
    outwards as in the authors' code, unless `truncate` is off.
    """
    original = scaling.original_max_position_embeddings
    assert original is not None, "the config's reader fills it in"
    num_pairs = periods.shape[0]

    def pair_of(turns: float) -> float:
        return num_pairs * math.log(original / (turns * 2 * math.pi)) / math.log(theta)

    first, last = pair_of(scaling.beta_fast), pair_of(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * num_pairs - 1)
    if first == last:
        last += 0.001  # a step instead of a ramp
    pairs = torch.arange(num_pairs, dtype=torch.float32)
    kept = 1 - ((pairs - first) / (last - first)).clamp(0, 1)
    return 1.0 / (scaling.factor * periods) * (1 - kept) + 1.0 / periods * kept


def _yarn_attention_factor(scaling: RopeScaling) -> float:
    """√(1/t) = 0.1 · ln s + 1 of the paper's section 3.3, equation 22.

    Where `mscale` and `mscale_all_dim` are given, the quotient of 0.1 · m · ln s + 1 over both, as
    in DeepSeek-V2's code.
    """
    if scaling.attention_factor is not None:
        return scaling.attention_factor

    def factor(weight: float) -> float:
        return 0.1 * weight * math.log(scaling.factor) + 1.0

    if scaling.mscale and scaling.mscale_all_dim:
        return factor(scaling.mscale) / factor(scaling.mscale_all_dim)
    return factor(1.0)
