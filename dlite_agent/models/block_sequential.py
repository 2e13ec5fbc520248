"""What the sequential heads of block drafters make of the tokens before a slot, with gradients."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from dlite_agent.models.block_config import BlockConfig
from dlite_agent.models.layer_weights import ReadWeight

__all__ = ["confidence_logits", "head_states"]


def head_states(
    config: BlockConfig, read: ReadWeight, previous_ids: Tensor, hidden: Tensor
) -> Tensor:
    """The g of every slot with the given tokens before it, [N, B, r]; logits gain g·Pᵀ.

    P is `markov_w2` or `successor_codebook`. Differentiable; `drafters.block_cells` has the same
    slot by slot, with the tokens that it chose.

    Args:
        config: Its shape; `head` is not `none`.
        read: Gives a tensor by its name.
        previous_ids: [N, B] int64: the token before each slot, the anchor first.
        hidden: [N, B, E], the slots' states.
    """
    if config.head == "selector":
        table = read("candidate_selector.predecessor_codebook")
        weight = read("candidate_selector.hidden_projection.weight")
        return functional.embedding(previous_ids, table) * functional.linear(hidden, weight)
    tokens = functional.embedding(previous_ids, read("markov_head.markov_w1.weight"))
    if config.head == "vanilla":
        return tokens
    if config.head == "gated":
        weight, bias = read("markov_head.gate_proj.weight"), read("markov_head.gate_proj.bias")
        gate = functional.linear(torch.cat([hidden, tokens], dim=-1), weight, bias).sigmoid()
        return gate * tokens
    weight, bias = read("markov_head.joint_proj.weight"), read("markov_head.joint_proj.bias")
    state = torch.zeros_like(tokens[:, 0])
    outputs: list[Tensor] = []
    for slot in range(hidden.shape[1]):
        given = torch.cat([state, tokens[:, slot], hidden[:, slot]], dim=-1)
        gate, candidate, output = functional.linear(given, weight, bias).chunk(3, dim=-1)
        gate = gate.sigmoid()
        state = gate * state + (1 - gate) * candidate.tanh()
        outputs.append(output.tanh())
    return torch.stack(outputs, dim=1)


def confidence_logits(
    config: BlockConfig, read: ReadWeight, previous_ids: Tensor, hidden: Tensor
) -> Tensor:
    """Logits of every slot's chance to be accepted, given that those before it are, [N, B].

    Args:
        config: Its shape; `confidence` is not `none`.
        read: Gives a tensor by its name.
        previous_ids: As in `head_states`.
        hidden: [N, B, E], the slots' states.
    """
    if config.confidence == "token":
        tokens = functional.embedding(previous_ids, read("markov_head.markov_w1.weight"))
        hidden = torch.cat([hidden, tokens.to(hidden.dtype)], dim=-1)
    weight, bias = read("confidence_head.proj.weight"), read("confidence_head.proj.bias")
    return functional.linear(hidden.to(weight.dtype), weight, bias)[..., 0]
