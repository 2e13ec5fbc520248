"""The student computes what the drafter computes."""

from __future__ import annotations

import pytest
import torch

from dlite_agent.drafters.copy_hint import copy_hints
from dlite_agent.drafters.dlite import DLiteDrafter
from dlite_agent.models.dlite_network import DLiteNetwork
from dlite_agent.models.target import TargetHidden
from dlite_agent.sampling import KeyedNoise
from dlite_agent.testing import tiny_qwen3
from dlite_agent.training.frozen import FrozenEnds
from dlite_agent.training.student import Student, StudentInput, new_weights
from tests.dlite_models import dlite_config, random_weights
from tests.kernels.native_library import row_kernels

CHOICES: dict[str, dict[str, object]] = {
    "default": {},
    "feature": {"composition": "feature"},
    "four-positions": {"context_positions": 4},
    "feature-four": {"composition": "feature", "context_positions": 4},
    "token-head": {"head": "token"},
    "no-head": {"head": "none"},
    "log-absolute": {"position_feature": "log-absolute"},
}


@pytest.mark.parametrize("choices", CHOICES)
def test_backbone_is_the_drafters(choices: str) -> None:
    target = tiny_qwen3(dtype="float64")
    config = dlite_config(target.config, **CHOICES[choices])
    weights = random_weights(config)
    network = DLiteNetwork(
        config, weights.__getitem__, dtype=torch.float64, device=torch.device("cpu")
    )
    generator = torch.Generator().manual_seed(5)
    taps = torch.randn(3, 2, config.context_positions, 64, generator=generator, dtype=torch.float64)
    anchors = torch.tensor([4, 9, 11])
    positions = torch.tensor([3, 70, 4000])
    student = Student(config, weights, target.embed)
    given = StudentInput(taps, anchors, anchors.unsqueeze(1).expand(-1, 7), positions)
    batched = student.backbone(given)
    for row in range(3):
        single = network.block_states(
            taps[row], target.embed(anchors[row : row + 1]), int(positions[row])
        )
        torch.testing.assert_close(batched[row], single, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_compiled_kernels_compute_the_same_states(kind: torch.dtype) -> None:
    kernels = row_kernels()
    config = dlite_config(tiny_qwen3().config, num_layers=3, position_feature="log-absolute")
    read = random_weights(config).__getitem__
    device = torch.device("cpu")
    plain = DLiteNetwork(config, read, dtype=kind, device=device)
    native = DLiteNetwork(config, read, dtype=kind, device=device, kernels=kernels)
    for seed in (1, 2):
        generator = torch.Generator().manual_seed(seed)
        taps = torch.randn(2, 1, 64, generator=generator).to(kind)
        anchor = torch.randn(1, 64, generator=generator).to(kind)
        expected, found = (net.block_states(taps, anchor, 9) for net in (plain, native))
        tolerance = 1e-4 if kind == torch.float32 else 0.1
        torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("head", ["recurrent", "token"])
def test_corrected_states_give_the_drafters_logits(head: str) -> None:
    target = tiny_qwen3(dtype="float32")
    config = dlite_config(target.config, head=head)
    weights = {name: tensor.float() for name, tensor in random_weights(config).items()}
    drafter = DLiteDrafter(config, weights, target, shortlist=None)
    student = Student(config, weights, target.embed)
    taps = torch.randn(1, 2, 1, 64, generator=torch.Generator().manual_seed(6))
    anchor = torch.tensor([4])
    hidden = TargetHidden(taps[0], config.taps)
    block = drafter.propose(None, 4, hidden, 3, KeyedNoise(1), 7)
    previous_ids = torch.tensor([[4, *block.token_ids[:-1]]])
    ends = FrozenEnds.of(target)
    with torch.no_grad():
        states = student.states(StudentInput(taps, anchor, previous_ids, torch.tensor([3])))
        base = student.backbone(StudentInput(taps, anchor, previous_ids, torch.tensor([3])))
    folded = drafter.head.logits(target.project(base[0]), base[0], previous_ids[0].tolist())
    torch.testing.assert_close(ends.logits(states[0]), folded, atol=1e-4, rtol=1e-4)
    assert folded.argmax(dim=-1).tolist() == list(block.token_ids)


@pytest.mark.parametrize("tied", [False, True])
def test_frozen_ends_are_the_targets(tied: bool) -> None:
    from dlite_agent.testing import tiny_config

    target = tiny_qwen3(config=tiny_config(tie_word_embeddings=tied))
    ends = FrozenEnds.of(target)
    residual = torch.randn(3, 64, generator=torch.Generator().manual_seed(7))
    states = target.final_states(residual)
    torch.testing.assert_close(ends.target_states(residual), states, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(ends.logits(states), target.project(states), atol=1e-4, rtol=1e-4)
    ids = torch.tensor([0, 7, 511])
    assert torch.equal(ends.embed(ids), target.embed(ids))
    assert (ends.head is ends.embedding) == tied


def test_new_student_draws_from_its_generator_alone() -> None:
    config = dlite_config(tiny_qwen3().config)
    first, again, other = (
        new_weights(config, torch.Generator().manual_seed(seed)) for seed in (1, 1, 2)
    )
    name = "layers.0.mlp.up_proj.weight"
    assert torch.equal(first[name], again[name])
    assert not torch.equal(first[name], other[name])
    gain = torch.arange(64.0)
    scaled = new_weights(config, torch.Generator().manual_seed(1), gain)
    assert torch.equal(scaled["norm.weight"], gain)


@pytest.mark.parametrize("shortlist", [None, 8])
def test_copying_student_gives_the_drafters_block(shortlist: int | None) -> None:
    target = tiny_qwen3(dtype="float32")
    config = dlite_config(target.config, head="copy")
    weights = {name: tensor.float() for name, tensor in random_weights(config).items()}
    weights["head.copy_bias"] = torch.linspace(0.0, 4.0, 9)  # copies now and then
    drafter = DLiteDrafter(config, weights, target, shortlist=shortlist)
    student = Student(config, weights, target.embed)
    order = torch.randperm(target.config.vocab_size, generator=torch.Generator().manual_seed(2))
    history = [*order.tolist(), 4]
    at = len(history) - 1
    taps = torch.randn(1, 2, 1, 64, generator=torch.Generator().manual_seed(6))
    block = drafter.propose(
        drafter.start(history), 4, TargetHidden(taps[0], config.taps), at, KeyedNoise(1), 7
    )
    ids = [*history, *block.token_ids]
    hints = torch.from_numpy(copy_hints(ids, range(at, at + 7))).long().unsqueeze(0)
    previous_ids = torch.tensor([ids[at : at + 7]])
    given = StudentInput(taps, previous_ids[:, 0], previous_ids, torch.tensor([at]), hints)
    ends = FrozenEnds.of(target)
    logits = student.logits(given, ends)[0]
    assert (hints[0, :, 1] > 0).sum() > 4
    if shortlist is None:
        assert logits.argmax(dim=-1).tolist() == list(block.token_ids)
        chosen = logits.softmax(dim=-1).amax(dim=-1)
        torch.testing.assert_close(chosen, torch.tensor(block.confidence), atol=1e-4, rtol=1e-4)
    else:
        base = ends.logits(student.backbone(given))[0]
        allowed = base.topk(shortlist, dim=-1).indices
        for slot, token_id in enumerate(block.token_ids):
            others = {
                *allowed[slot].tolist(),
                *([int(hints[0, slot, 0])] if hints[0, slot, 1] else []),
            }
            assert token_id == max(others, key=lambda at: float(logits[slot, at]))
