"""The compiled head drafts what the one of numpy drafts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dlite_agent.drafters.dlite import DLiteDrafter
from dlite_agent.kernels.row_kernels import load_row_kernels
from dlite_agent.models.target import TargetHidden
from dlite_agent.sampling import KeyedNoise
from dlite_agent.testing import tiny_qwen3
from tests.dlite_models import dlite_config, random_weights


@pytest.mark.parametrize("head", ["copy", "recurrent"])
def test_compiled_head_drafts_the_same_block(tmp_path: Path, head: str) -> None:
    kernels = load_row_kernels(tmp_path)
    if kernels is None:
        pytest.skip("there is no compiler")
    target = tiny_qwen3(dtype="float32")
    config = dlite_config(target.config, head=head)
    weights = {name: tensor.float() for name, tensor in random_weights(config).items()}
    generator = torch.Generator().manual_seed(3)
    history = torch.randint(0, 6, (300,), generator=generator).tolist()
    for seed in range(6):
        taps = torch.randn(2, 1, 64, generator=generator)
        hidden = TargetHidden(taps, config.taps)
        chance = 0.0 if seed < 4 else 1e-4
        plain, native = (
            DLiteDrafter(config, weights, target, shortlist=None, min_chance=chance, kernels=each)
            for each in (None, kernels)
        )
        blocks = [
            drafter.propose(drafter.start(history), history[-1], hidden, 299, KeyedNoise(1), 7)
            for drafter in (plain, native)
        ]
        assert blocks[1].token_ids == blocks[0].token_ids
        assert blocks[1].confidence == pytest.approx(blocks[0].confidence, rel=1e-3)
        history.append(blocks[0].token_ids[0] if blocks[0].token_ids else 1)
