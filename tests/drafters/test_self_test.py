"""The self-test tells a config that says otherwise than a drafter was trained."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from dlite_agent.drafters.block import BlockDrafter
from dlite_agent.drafters.eagle3 import Eagle3Drafter
from dlite_agent.drafters.load import load_drafter
from dlite_agent.drafters.self_test import SelfTest, self_test
from dlite_agent.models.block_config import BlockConfig
from dlite_agent.models.block_files import write_block_drafter
from dlite_agent.models.block_network import BlockNetwork, LearningLinear
from dlite_agent.models.drafter_ends import DrafterEnds
from dlite_agent.models.eagle3_network import Eagle3Config, eagle3_shapes
from dlite_agent.models.transformer import DenseTransformer
from dlite_agent.testing import tiny_qwen3
from tests import drafter_folders
from tests.block_models import block_config, block_weights, random_tensors

PROMPT = [3, 14, 15, 9, 26, 5, 35, 8, 97, 93]


@pytest.fixture(scope="module")
def target() -> DenseTransformer:
    return tiny_qwen3(num_layers=6)


@pytest.fixture(scope="module")
def trained(target: DenseTransformer) -> tuple[BlockConfig, dict[str, Tensor]]:
    """A drafter that knows by heart how the prompt goes on from taps 2 and 4.

    From taps of one layer earlier or later it has learnt to expect token 7.
    """
    config = block_config(
        target.config, taps=(2, 4), head="none", family="dflash", num_layers=1, block_size=3
    )
    ids, states = continuation(target, (1, 2, 3, 4, 5))
    weights = {
        name: value.float().requires_grad_() for name, value in block_weights(config).items()
    }
    head = drafter_folders.ends(target)["lm_head.weight"]
    anchors = torch.arange(len(PROMPT), len(ids) - 3, 3)
    masks = torch.full((len(anchors), 3), config.mask_token_id)
    masks[:, 0] = ids[anchors]
    wanted = torch.stack([ids[anchors + 1 + slot] for slot in range(3)], dim=1)
    optimizer = torch.optim.Adam(weights.values(), lr=1e-2)
    for _ in range(40):
        network = BlockNetwork(
            config, weights.__getitem__, dtype=torch.float32, device=target.device,
            linear=LearningLinear,
        )  # fmt: skip
        loss = torch.zeros(())
        for rows in ((1, 3), (0, 2), (2, 4)):  # of the states: taps 2 and 4, and their neighbours
            history = network.history(states[list(rows)], 0)
            found = network.states(target.embed(masks), anchors, history)
            labels = wanted if rows == (1, 3) else torch.full_like(wanted, 7)
            loss = loss + functional.cross_entropy(
                (found @ head.t()).flatten(0, 1), labels.flatten()
            )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return config, {name: value.detach() for name, value in weights.items()}


def continuation(target: DenseTransformer, taps: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    ids, states = list(PROMPT), []
    with target.new_cache() as kv:
        given = ids
        for _ in range(24):
            output = target.forward(torch.tensor(given), kv, logits_for=[len(given) - 1], taps=taps)
            assert output.hidden is not None
            kv.commit(len(given))
            states.append(output.hidden.states)
            given = [int(output.logits[0].argmax())]
            ids = [*ids, *given]
    return torch.tensor(ids), torch.cat(states, dim=1)


def test_drafter_that_is_read_as_trained_gives_no_warning(
    target: DenseTransformer, trained: tuple[BlockConfig, dict[str, Tensor]]
) -> None:
    config, weights = trained
    drafter = BlockDrafter(config, weights.__getitem__, DrafterEnds.of(target))
    result = self_test(drafter, target, PROMPT)
    assert result.warning == ""
    assert result.first_right == 7 / 8  # of the last block two tokens were never seen
    assert len(result.accepted) == 4
    assert max(result.accepted, key=result.accepted.__getitem__) == "as configured"
    assert target.pool.used_bytes == 0


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"taps": (1, 3)}, "taps one layer later"),
        ({"taps": (3, 5)}, "taps one layer earlier"),
        ({"is_anchor_drafted": False}, "the other alignment"),
    ],
)
def test_config_that_says_otherwise_is_found(
    change: dict[str, object],
    told: str,
    target: DenseTransformer,
    trained: tuple[BlockConfig, dict[str, Tensor]],
) -> None:
    config, weights = trained
    wrong = replace(config, **change)  # type: ignore[arg-type]
    drafter = BlockDrafter(wrong, weights.__getitem__, DrafterEnds.of(target))
    assert told in self_test(drafter, target, PROMPT).warning


def test_load_tells_what_the_self_test_found(
    target: DenseTransformer,
    trained: tuple[BlockConfig, dict[str, Tensor]],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    config, weights = trained
    write_block_drafter(tmp_path / "right", config, weights, {})
    write_block_drafter(tmp_path / "wrong", replace(config, taps=(1, 3)), weights, {})
    with caplog.at_level(logging.WARNING):
        load_drafter(str(tmp_path / "right"), target, "", test_prompt=PROMPT)
        assert not caplog.records
        load_drafter(str(tmp_path / "wrong"), target, "", test_prompt=PROMPT)
    assert "taps one layer later" in caplog.text


def test_chain_is_tried_with_other_taps_only(target: DenseTransformer) -> None:
    config = Eagle3Config(512, 64, (1, 2, 5), 4, 2, 16, 96)
    weights = random_tensors(eagle3_shapes(config))
    drafter = Eagle3Drafter(config, weights.__getitem__, DrafterEnds.of(target))
    result = self_test(drafter, target, PROMPT)
    assert list(result.accepted) == ["as configured", "taps one layer earlier"]
    assert "of its first tokens agree" in result.warning


def test_small_differences_are_no_warning() -> None:
    assert SelfTest({"as configured": 2.0, "taps one layer later": 2.4}, 0.6, 8).warning == ""
