"""From logits to a token: temperature, top-k, top-p, and noise keyed to (key, position, token id).

The token at position i is `argmin_t E_t / p_t` over the kept tokens, where E_t is exponential noise
keyed to (key, i, t): the Gumbel-max trick in its exponential form. Whoever evaluates the same
logits at the same position draws the same token, whatever was drafted, batched or cached.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dlite_agent.config import SamplingParams

__all__ = ["KeyedNoise", "Sampler"]

_MASK64 = (1 << 64) - 1
# SplitMix64 (Steele, Lea and Flood 2014): a Weyl sequence through Stafford's finaliser "mix13".
_GAMMA = 0x9E3779B97F4A7C15
_MULTIPLIER_1 = 0xBF58476D1CE4E5B9
_MULTIPLIER_2 = 0x94D049BB133111EB
# An odd step of its own for positions (xxHash64's second prime), so that they are no token ids.
_POSITION_STEP = 0xC2B2AE3D27D4EB4F
# Cuts of the vocabulary into blocks whose maxima bound the k-th logit from below.
_MAX_BLOCK = 64
_BLOCKS_PER_CANDIDATE = 8
# Sizes that a nucleus is looked for in before the whole vocabulary is sorted.
_NUCLEUS_SIZES = (256, 4096)


@dataclass(frozen=True, slots=True)
class KeyedNoise:
    """Noise without a state: one number for each (key, position, token id), in any order.

    Attributes:
        key: 64 bits.
    """

    key: int

    @classmethod
    def derive(cls, seed: int, choice_index: int, prompt_ids: Sequence[int]) -> KeyedNoise:
        """Hash a request to a key: blake2b-64 of (seed, choice index, prompt ids).

        Args:
            seed: Any integer.
            choice_index: Which of several answers to the same prompt; a regenerate uses the next
                one.
            prompt_ids: All ids of the prompt.
        """
        digest = hashlib.blake2b(digest_size=8)
        for number in (seed, choice_index):
            raw = number.to_bytes(number.bit_length() // 8 + 1, "little", signed=True)
            digest.update(len(raw).to_bytes(8, "little") + raw)
        digest.update(np.asarray(prompt_ids, dtype="<i8").tobytes())
        return cls(int.from_bytes(digest.digest(), "little"))

    def exponential(self, position: int, token_ids: Tensor) -> Tensor:
        """Exponential noise of rate 1 for some tokens of one position.

        Args:
            position: Absolute position of the token to be sampled.
            token_ids: Ids in the target's vocabulary, [n] of any integer type.

        Returns:
            `E = -log1p(-u)`, [n] float64 on the ids' device, where u holds the 53 high bits of the
            hash; in [0, 36.8).
        """
        row_key = _mix((_mix(self.key) + position * _POSITION_STEP) & _MASK64)
        hashed = token_ids.to(torch.int64, copy=True)
        hashed.mul_(_signed(_GAMMA)).add_(_signed((row_key + _GAMMA) & _MASK64))
        _mix_in_place(hashed)
        uniform = _shift_right(hashed, 11).to(torch.float64).mul_(2.0**-53)
        return uniform.neg_().log1p_().neg_()


class Sampler:
    """Turns logits into tokens: temperature, top-k, top-p and noise, for targets and drafters.

    Args:
        params: Resolved: temperature, top_k and top_p are set.
        noise: The turn's noise; not drawn from when temperature is 0.

    Raises:
        ValueError: A parameter is None.
    """

    def __init__(self, params: SamplingParams, noise: KeyedNoise) -> None:
        if params.temperature is None or params.top_k is None or params.top_p is None:
            raise ValueError(f"{params!r} is not resolved; fill it with `with_defaults` first")
        self.params = params
        self.noise = noise
        self._temperature = params.temperature
        self._top_k = params.top_k
        self._top_p = params.top_p

    @property
    def is_greedy(self) -> bool:
        """Whether the most probable token is taken (the lowest id of equals), without noise."""
        return self._temperature == 0.0

    def sample(self, logits: Tensor, position: int) -> int:
        """Choose the token of one position. One host sync or more.

        Args:
            logits: [V]; -inf excludes a token.
            position: Absolute position of the token to be chosen.

        Raises:
            FloatingPointError: No finite logit is left, or one is NaN or +inf.
        """
        return next(self.sample_each(logits[None], position))

    def sample_rows(self, logits: Tensor, first_position: int) -> Tensor:
        """Choose the tokens of R rows [R, V], row i at `first_position + i`; [R] int64, host."""
        return torch.tensor(list(self.sample_each(logits, first_position)), dtype=torch.int64)

    def sample_each(self, logits: Tensor, first_position: int) -> Iterator[int]:
        """Choose tokens row by row, as they are asked for; a row that nobody asks for is free.

        Greedy rows are cheap and are evaluated together, with one host sync.
        """
        if self.is_greedy:
            best, ids = logits.max(dim=-1)  # the first of equals, on every device
            for value, token_id in zip(best.tolist(), ids.tolist(), strict=True):
                _check_finite(value)
                yield token_id
            return
        for row in range(logits.shape[0]):
            yield self._draw(logits[row], first_position + row)

    def candidates(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """The tokens that top-k and top-p keep, for one row [V] of a sampler that is not greedy.

        Order of the filters as in transformers: temperature, top-k, then top-p of what is left.
        Equal logits are ordered by id, lowest first, so exactly k tokens and the smallest
        sufficient nucleus are kept, always the same ones.

        Returns:
            ids [n] int64, and weights [n] float64: p up to a common factor. A weight may be 0.
        """
        if 0 < self._top_k < logits.shape[0]:
            ids = _largest(logits, self._top_k)
            weights = self._weights(logits[ids])
            ids, weights = self._nucleus(ids, weights, weights.sum())
        elif self._top_p < 1.0:
            ids, weights = self._nucleus_of_all(logits)
        else:
            ids = torch.arange(logits.shape[0], device=logits.device)
            weights = self._weights(logits)
        return ids, weights

    def is_near_tie(
        self, logits: Tensor, position: int, other_id: int, tolerance: float = 1e-4
    ) -> bool:
        """Whether `other_id` would have been chosen, had its logit been higher by `tolerance`.

        Two computations of the same logits that differ in their last bits may disagree only there.
        """
        raised = logits.clone()
        raised[other_id] += tolerance
        return self.sample(raised, position) == other_id

    def _draw(self, logits: Tensor, position: int) -> int:
        ids, weights = self.candidates(logits)
        arrival = self.noise.exponential(position, ids).div_(weights)
        arrival.masked_fill_(weights == 0.0, float("inf"))  # E = 0 over p = 0 is no number
        return int(ids[arrival.min(dim=0).indices])  # the first of equals

    def _weights(self, logits: Tensor) -> Tensor:
        highest = logits.max()
        _check_finite(float(highest))
        # the difference first: a tiny temperature would make the quotients infinite
        return logits.to(torch.float64).sub(highest).div_(self._temperature).exp_()

    def _nucleus(self, ids: Tensor, weights: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
        """The shortest prefix of descending weights that holds at least `top_p` of the total."""
        if self._top_p >= 1.0:
            return ids, weights
        num_short = int((weights.cumsum(0) < self._top_p * total).sum())
        return ids[: num_short + 1], weights[: num_short + 1]

    def _nucleus_of_all(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Top-p over the whole vocabulary; sorts as much of it as it needs."""
        all_weights = self._weights(logits)
        total = all_weights.sum()
        for size in _NUCLEUS_SIZES:
            if size >= logits.shape[0]:
                break
            ids = _largest(logits, size)
            weights = all_weights[ids]
            if weights.sum() >= self._top_p * total * (1.0 + 1e-9):
                return self._nucleus(ids, weights, total)
        ids = logits.argsort(descending=True, stable=True)
        return self._nucleus(ids, all_weights[ids], total)


def _largest(logits: Tensor, k: int) -> Tensor:
    """Ids of the k largest of [V], descending; equal ones by ascending id, which `topk` ignores.

    The k-th largest maximum of blocks is at most the k-th largest logit, and cheap to find: what
    lies below it needs no sorting.
    """
    block = max(1, min(_MAX_BLOCK, logits.shape[0] // (_BLOCKS_PER_CANDIDATE * k)))
    num_blocked = logits.shape[0] // block * block
    maxima = torch.cat([logits[:num_blocked].view(-1, block).amax(dim=1), logits[num_blocked:]])
    bounds = maxima.topk(k).values
    _check_finite(float(bounds[0]))
    ids = (logits >= bounds[-1]).nonzero()[:, 0]
    return ids[logits[ids].argsort(descending=True, stable=True)[:k]]


def _check_finite(highest: float) -> None:
    if not -float("inf") < highest < float("inf"):
        raise FloatingPointError(
            f"the largest logit of a row is {highest!r}; the dtype overflows (use float32), "
            "or a mask excludes every token"
        )


def _mix(x: int) -> int:
    """SplitMix64's finaliser on a Python integer in [0, 2**64)."""
    x = ((x ^ (x >> 30)) * _MULTIPLIER_1) & _MASK64
    x = ((x ^ (x >> 27)) * _MULTIPLIER_2) & _MASK64
    return x ^ (x >> 31)


def _mix_in_place(x: Tensor) -> None:
    """The same on int64 tensors, whose multiplication wraps like that of unsigned integers."""
    x.bitwise_xor_(_shift_right(x, 30)).mul_(_signed(_MULTIPLIER_1))
    x.bitwise_xor_(_shift_right(x, 27)).mul_(_signed(_MULTIPLIER_2))
    x.bitwise_xor_(_shift_right(x, 31))


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical shift: torch's `>>` on int64 copies the sign, which the mask removes."""
    return (x >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def _signed(x: int) -> int:
    return x - (1 << 64) if x >> 63 else x
