"""Noise keyed to (key, position, token id): the same for whoever asks, in any order."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

__all__ = ["KeyedNoise"]

_MASK64 = (1 << 64) - 1
# SplitMix64 (Steele, Lea and Flood 2014): a Weyl sequence through Stafford's finaliser "mix13".
_GAMMA = 0x9E3779B97F4A7C15
_MULTIPLIER_1 = 0xBF58476D1CE4E5B9
_MULTIPLIER_2 = 0x94D049BB133111EB
# An odd step of its own for positions (xxHash64's second prime), so that they are no token ids.
_POSITION_STEP = 0xC2B2AE3D27D4EB4F


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
