"""The backbone of block drafters: what is written out by hand, for one block and for many."""

from __future__ import annotations

import pytest
import torch

from dlite_agent.errors import ConfigurationError
from dlite_agent.models.block_config import BlockConfig, block_shapes, spread_taps
from dlite_agent.models.block_network import BlockNetwork, LearningLinear
from dlite_agent.models.block_sequential import confidence_logits, head_states
from dlite_agent.testing import tiny_config
from tests.block_models import block_config, block_weights, naive_states

CPU = torch.device("cpu")
CHOICES: dict[str, dict[str, object]] = {
    "dspark": {},
    "dflash2": {"head": "selector", "conv_size": 2, "embedding_scale": 0.7},
    "windows": {"windows": (4, 0)},
    "windows both ways": {"windows": (4, 9), "is_window_causal": False},
}


def random(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("choices", CHOICES)
def test_states_are_those_written_out(choices: str) -> None:
    config = block_config(tiny_config(), **CHOICES[choices])
    weights = block_weights(config)
    network = BlockNetwork(config, weights.__getitem__, dtype=torch.float64, device=CPU)
    taps, embeddings = random(2, 12, 64), random(7, 64, seed=2)
    anchor = torch.tensor([12])
    states = network.states(embeddings.unsqueeze(0), anchor, network.history(taps, 0))[0]
    torch.testing.assert_close(
        states, naive_states(config, weights, taps, embeddings, 12), atol=1e-5, rtol=0
    )
    # a history that begins later: the same positions, fewer of them
    part = network.states(embeddings.unsqueeze(0), anchor, network.history(taps[:, 5:], 5))[0]
    torch.testing.assert_close(
        part, naive_states(config, weights, taps[:, 5:], embeddings, 12), atol=1e-5, rtol=0
    )
    seen = network.states(embeddings.unsqueeze(0), anchor, network.history(taps, 0), window=7)[0]
    torch.testing.assert_close(seen, part)


@pytest.mark.parametrize("choices", CHOICES)
def test_blocks_over_one_history_are_those_of_each_alone_and_learn(choices: str) -> None:
    config = block_config(tiny_config(), **CHOICES[choices])
    weights = {name: value.requires_grad_() for name, value in block_weights(config).items()}
    network = BlockNetwork(
        config, weights.__getitem__, dtype=torch.float64, device=CPU, linear=LearningLinear
    )
    served = BlockNetwork(config, weights.__getitem__, dtype=torch.float64, device=CPU)
    taps, embeddings = random(2, 12, 64), random(3, 7, 64, seed=2)
    anchors = torch.tensor([3, 12, 8])
    states = network.states(embeddings, anchors, network.history(taps, 0))
    with torch.no_grad():
        for block, anchor in enumerate(anchors.tolist()):
            history = served.history(taps[:, :anchor], 0)
            alone = served.states(
                embeddings[block : block + 1], anchors[block : block + 1], history
            )
            torch.testing.assert_close(states[block : block + 1], alone)
    previous_ids = torch.randint(0, 512, (3, 7), generator=torch.Generator().manual_seed(0))
    loss = states.square().sum()
    if config.head != "none":
        loss = loss + head_states(config, weights.__getitem__, previous_ids, states).sum()
        factor = "successor_codebook" if config.head == "selector" else "markov_w2.weight"
        loss = loss + sum(v.sum() for name, v in weights.items() if name.endswith(factor))
    loss.backward()
    assert all(value.grad is not None for value in weights.values())
    assert all(bool(value.grad.abs().sum() > 0) for value in weights.values())


def test_confidence_reads_state_and_token() -> None:
    hidden, ids = random(1, 7, 64), torch.arange(7).unsqueeze(0)
    for kind in ("hidden", "token"):
        config = block_config(tiny_config(), confidence=kind)
        weights = block_weights(config)
        logits = confidence_logits(config, weights.__getitem__, ids, hidden)
        given = hidden[0, 3]
        if kind == "token":
            given = torch.cat([given, weights["markov_head.markov_w1.weight"][3]])
        weight, bias = (weights[f"confidence_head.proj.{name}"] for name in ("weight", "bias"))
        torch.testing.assert_close(logits[0, 3], weight[0] @ given + bias[0])


def test_shapes_are_the_public_checkpoints() -> None:
    config = BlockConfig(
        "dspark", 151_936, 2560, (1, 9, 17, 25, 33), 151_669, head="vanilla", rank=256,
        confidence="token",
    )  # fmt: skip
    shapes = block_shapes(config)
    assert shapes["fc.weight"] == (2560, 12_800)
    assert shapes["layers.4.self_attn.q_proj.weight"] == (4096, 2560)
    assert shapes["markov_head.markov_w2.weight"] == (151_936, 256)
    assert shapes["confidence_head.proj.weight"] == (1, 2816)
    assert config.num_drafts == 7
    assert spread_taps(36, 5) == config.taps
    assert spread_taps(40, 5) == (1, 10, 19, 28, 37)


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"taps": (-1, 0)}, "taps is"),
        ({"rank": 0}, "rank is 0"),
        ({"head": "lstm"}, "head='lstm'"),
        ({"head": "none", "confidence": "token"}, "name a head"),
        ({"num_kv_heads": 3}, "do not fit together"),
        ({"windows": (4,)}, "one for each layer"),
        ({"conv_size": 2, "conv_group": 7}, "conv_group is 7"),
        ({"block_size": 0}, "block_size is 0"),
        ({"blocks": 3}, "no choice 'blocks'"),
    ],
)
def test_config_that_cannot_be_is_refused(choices: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        block_config(tiny_config(), **choices)
