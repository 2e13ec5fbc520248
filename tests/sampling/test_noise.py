"""Keyed noise: the documented hash, and exponential."""

from __future__ import annotations

import math

import torch

from dlite_agent.sampling import KeyedNoise

MASK = (1 << 64) - 1


def splitmix(x: int) -> int:
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def reference_exponential(key: int, position: int, token_id: int) -> float:
    row = splitmix((splitmix(key) + position * 0xC2B2AE3D27D4EB4F) & MASK)
    bits = splitmix((row + (token_id + 1) * 0x9E3779B97F4A7C15) & MASK)
    return -math.log1p(-((bits >> 11) / 2**53))


def test_noise_is_the_documented_hash() -> None:
    ids = torch.tensor([0, 1, 17, 151_935])
    for key in (0, 1, MASK, 0x9E3779B97F4A7C15):
        for position in (0, 1, 40_960):
            got = KeyedNoise(key).exponential(position, ids)
            wanted = [reference_exponential(key, position, t) for t in ids.tolist()]
            torch.testing.assert_close(
                got, torch.tensor(wanted, dtype=torch.float64), rtol=1e-14, atol=0.0
            )


def test_noise_of_a_token_does_not_depend_on_the_others() -> None:
    noise = KeyedNoise(3)
    everything = noise.exponential(5, torch.arange(1000))
    some = torch.tensor([999, 3, 500], dtype=torch.int32)
    assert torch.equal(noise.exponential(5, some), everything[some.long()])
    assert some.tolist() == [999, 3, 500]


def test_noise_is_exponential() -> None:
    values = KeyedNoise(12).exponential(2, torch.arange(200_000)).sort().values
    uniform = 1.0 - torch.exp(-values)
    grid = torch.arange(1, 200_001, dtype=torch.float64) / 200_000
    assert float((uniform - grid).abs().max()) < 1.63 / math.sqrt(200_000)  # 1 % level
    assert float(values.max()) < 36.8


def test_neighbouring_positions_are_uncorrelated() -> None:
    noise = KeyedNoise(4)
    rows = torch.stack([noise.exponential(i, torch.arange(50_000)) for i in range(4)])
    off_diagonal = torch.corrcoef(rows) - torch.eye(4, dtype=torch.float64)
    assert float(off_diagonal.abs().max()) < 0.02


def test_key_depends_on_every_part_of_the_request() -> None:
    keys = {
        KeyedNoise.derive(seed, choice, prompt).key
        for seed in (0, 1, -1, 256, 1 << 80)
        for choice in (0, 1, 256)
        for prompt in ([], [1], [1, 2], [2, 1])
    }
    assert len(keys) == 5 * 3 * 4
    assert all(0 <= key <= MASK for key in keys)


def test_key_is_the_same_everywhere() -> None:
    assert KeyedNoise.derive(1, 0, [1, 2, 3]) == KeyedNoise.derive(1, 0, (1, 2, 3))
    assert KeyedNoise.derive(1, 0, [1, 2, 3]).key == 0x2AE3D679F092067
