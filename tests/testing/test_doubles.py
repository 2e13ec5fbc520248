"""The doubles do what their names say."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

import dlite_agent.testing
from dlite_agent.drafters.drafter import Drafter
from dlite_agent.sampling import KeyedNoise
from dlite_agent.testing import (
    AdversarialDrafter,
    FaultyTarget,
    NoisyDrafter,
    OracleDrafter,
    ScriptedDrafter,
    assert_kv_is_of,
    tiny_qwen3,
)

IDS = list(range(100, 150))
NOISE = KeyedNoise(0)


def blocks(drafter: Drafter, positions: range = range(10, 40), budget: int = 5) -> list[list[int]]:
    state = drafter.start(IDS[:11])
    return [
        list(drafter.propose(state, IDS[i], None, i, NOISE, budget).token_ids) for i in positions
    ]


def test_names_are_lazy() -> None:
    code = (
        "import sys, dlite_agent.testing as t; t.ByteTokenizer; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    assert dir(dlite_agent.testing) == sorted(dlite_agent.testing.__all__)
    for name in dlite_agent.testing.__all__:
        assert getattr(dlite_agent.testing, name).__name__ == name
    with pytest.raises(AttributeError, match="nothing"):
        dlite_agent.testing.nothing  # noqa: B018


def test_oracle_is_always_right_and_ends_with_what_it_knows() -> None:
    assert blocks(OracleDrafter(IDS), range(10, 12)) == [IDS[11:16], IDS[12:17]]
    assert blocks(OracleDrafter(IDS, max_block=2), range(10, 11)) == [IDS[11:13]]
    assert blocks(OracleDrafter(IDS), range(47, 50)) == [IDS[48:], IDS[49:], []]


def test_noisy_drafter_errs_at_its_rate_and_always_alike() -> None:
    drafter = NoisyDrafter(IDS, vocab_size=512, error_rate=0.3)
    given = blocks(drafter, budget=1)
    assert given == blocks(drafter, budget=1)
    wrong = sum(block != [IDS[i + 1]] for block, i in zip(given, range(10, 40), strict=True))
    assert 3 <= wrong <= 15
    assert blocks(NoisyDrafter(IDS, vocab_size=512, error_rate=0.0)) == blocks(OracleDrafter(IDS))


def test_adversary_breaks_every_rule() -> None:
    drafter = AdversarialDrafter(vocab_size=512, favourites=(7,))
    given = blocks(drafter)
    assert given == blocks(drafter)
    assert all(len(block) > 5 for block in given)
    assert any(7 in block for block in given)
    assert any(not 0 <= token_id < 512 for block in given for token_id in block)


def test_scripted_blocks_come_in_order_for_each_session() -> None:
    drafter = ScriptedDrafter([[1, 2], [], [3] * 9])
    assert blocks(drafter, range(4)) == [[1, 2], [], [3] * 5, []]
    assert blocks(drafter, range(1)) == [[1, 2]]
    state = drafter.start([])
    drafter.propose(state, 0, None, 0, NOISE, 5)
    other = drafter.fork(state)
    drafter.truncate_to(state, 0)
    drafter.commit(state, [1])
    for one in (state, other):
        assert drafter.propose(one, 0, None, 0, NOISE, 5).token_ids == ()
        assert one is not None
        assert one.nbytes == 0


def test_faulty_target_fails_after_it_has_written() -> None:
    target = FaultyTarget(tiny_qwen3(), lambda number: number == 1)
    with target.new_cache() as kv:
        target.forward(torch.tensor([1, 2]), kv, logits_for=[1])
        kv.commit(2)
        with pytest.raises(RuntimeError, match="forward 1"):
            target.forward(torch.tensor([3]), kv, logits_for=[0])
        assert kv.num_tentative == 1
        assert target.rows_computed == 3
        kv.truncate_to(2)
        assert_kv_is_of(target, kv, [1, 2], tolerance=1e-6)
        with pytest.raises(AssertionError):
            assert_kv_is_of(target, kv, [2, 1], tolerance=1e-6)


def test_an_empty_cache_is_of_anything() -> None:
    target = tiny_qwen3()
    with target.new_cache() as kv:
        assert_kv_is_of(target, kv, [], tolerance=0.0)


def test_tiny_target_is_the_same_for_the_same_seed() -> None:
    logits = []
    for seed in (0, 0, 1):
        target = tiny_qwen3(seed=seed)
        with target.new_cache() as kv:
            logits.append(target.forward(torch.tensor([5, 6]), kv, logits_for=[1]).logits)
    assert torch.equal(logits[0], logits[1])
    assert not torch.equal(logits[0], logits[2])
