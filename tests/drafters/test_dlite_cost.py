"""What a block costs does not depend on the history: the same work, and nothing kept."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dlite_agent.drafters.dlite import DLiteDrafter
from dlite_agent.models.kv_pool import PAGE_ROWS
from dlite_agent.models.target import TargetHidden
from dlite_agent.models.transformer import DenseTransformer
from dlite_agent.sampling import KeyedNoise
from dlite_agent.testing import tiny_qwen3
from tests.dlite_models import dlite_config, random_weights


class Work(TorchDispatchMode):
    """Notes every operator with the shapes that it reads."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, list[tuple[int, ...]]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        shapes = [tuple(arg.shape) for arg in args if isinstance(arg, torch.Tensor)]
        self.calls.append((str(func), shapes))
        return func(*args, **(kwargs or {}))


def taps_behind(target: DenseTransformer, drafter: DLiteDrafter, history: int) -> TargetHidden:
    """Of one row behind so many cached ones, which are zeros: attention reads all of them."""
    config = target.config
    with target.new_cache() as kv:
        kv.reserve(history)
        zeros = torch.zeros(config.num_kv_heads, history, config.head_dim)
        for layer in range(config.num_layers):
            kv.write(layer, zeros, zeros)
        kv.commit(history)
        last = torch.tensor([5])
        output = target.forward(last, kv, logits_for=[0], taps=drafter.requires.layer_ids)
    assert output.hidden is not None
    return output.hidden


@pytest.mark.parametrize("position_feature", ["none", "log-absolute"])
def test_a_block_is_the_same_work_behind_100_and_30000_tokens(position_feature: str) -> None:
    target = tiny_qwen3(max_kv_bytes=(30_000 // PAGE_ROWS + 4) * PAGE_ROWS * 512)
    config = dlite_config(target.config, position_feature=position_feature)
    drafter = DLiteDrafter(config, random_weights(config), target)
    drafter.propose(None, 5, taps_behind(target, drafter, 1), 1, KeyedNoise(0), 7)  # makes tables
    done: list[list[tuple[str, list[tuple[int, ...]]]]] = []
    for history in (100, 30_000):
        hidden = taps_behind(target, drafter, history)
        assert hidden.states.shape == (2, 1, 64)
        computed, used = target.rows_computed, target.pool.free_bytes
        with Work() as work:
            block = drafter.propose(None, 5, hidden, history, KeyedNoise(0), 7)
        assert len(block.token_ids) == 7
        assert (target.rows_computed, target.pool.free_bytes) == (computed, used)
        done.append(work.calls)
    assert done[0] == done[1]
    assert len(done[0]) > 20


def test_nothing_is_kept_of_a_history() -> None:
    target = tiny_qwen3()
    config = dlite_config(target.config)
    drafter = DLiteDrafter(config, random_weights(config), target)
    state = drafter.start([1] * 30_000)
    drafter.commit(state, [2] * 1000)
    drafter.truncate_to(state, 5)
    assert state is None
    assert drafter.fork(state) is None
