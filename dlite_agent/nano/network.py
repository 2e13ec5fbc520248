"""The network of nano while it learns: Qwen3's architecture, written for small batches on a CPU.

Parameters carry Hugging Face's names, so saving them is exporting them. `tests/nano` holds this
forward equal to transformers' `Qwen3ForCausalLM`.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from dlite_agent.nano.copying import start_copying
from dlite_agent.nano.shape import NanoConfig

__all__ = ["Network", "compile_layers"]


class _Layer(nn.Module):
    def __init__(self, config: NanoConfig) -> None:
        super().__init__()
        hidden, dim = config.hidden_size, config.head_dim
        queries, keys = config.num_attention_heads * dim, config.num_key_value_heads * dim
        self.input_layernorm = nn.RMSNorm(hidden, config.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(hidden, config.rms_norm_eps)
        self.self_attn = nn.ModuleDict(
            {
                "q_proj": nn.Linear(hidden, queries, bias=False),
                "k_proj": nn.Linear(hidden, keys, bias=False),
                "v_proj": nn.Linear(hidden, keys, bias=False),
                "o_proj": nn.Linear(queries, hidden, bias=False),
                "q_norm": nn.RMSNorm(dim, config.rms_norm_eps),
                "k_norm": nn.RMSNorm(dim, config.rms_norm_eps),
            }
        )
        self.mlp = nn.ModuleDict(
            {
                "gate_proj": nn.Linear(hidden, config.intermediate_size, bias=False),
                "up_proj": nn.Linear(hidden, config.intermediate_size, bias=False),
                "down_proj": nn.Linear(config.intermediate_size, hidden, bias=False),
            }
        )
        self._dim = dim

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Map [B, S, E] to [B, S, E]; cos and sin are [B or 1, 1, S, D]."""
        attention, mlp = self.self_attn, self.mlp
        rows, length, _ = x.shape
        y = self.input_layernorm(x)
        shape = (rows, length, -1, self._dim)
        q = attention["q_norm"](attention["q_proj"](y).view(shape).float()).transpose(1, 2)
        k = attention["k_norm"](attention["k_proj"](y).view(shape).float()).transpose(1, 2)
        v = attention["v_proj"](y).view(shape).transpose(1, 2)
        q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + attention["o_proj"](y.transpose(1, 2).reshape(rows, length, -1))
        y = self.post_attention_layernorm(x)
        result: Tensor = x + mlp["down_proj"](
            functional.silu(mlp["gate_proj"](y)) * mlp["up_proj"](y)
        )
        return result


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    low, high = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-high, low], dim=-1) * sin


class _Body(nn.Module):
    def __init__(self, config: NanoConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(_Layer(config) for _ in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)


class Network(nn.Module):
    """Qwen3 with a tied head.

    Args:
        config: Its shape.
        generator: Source of the initial weights.
    """

    def __init__(self, config: NanoConfig, generator: torch.Generator) -> None:
        super().__init__()
        self.model = _Body(config)
        steps = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
        self._frequencies = config.rope_theta**-steps  # [D / 2]
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if parameter.dim() == 2:
                    # Outputs start at zero, so the small embedding is what every layer sees at
                    # first.
                    is_output = name.endswith(("o_proj.weight", "down_proj.weight"))
                    std = 0.02 if "embed" in name else parameter.shape[1] ** -0.5
                    parameter.normal_(0.0, 0.0 if is_output else std, generator=generator)
            start_copying(dict(self.named_parameters()), config, self._frequencies, generator)

    def hidden(self, ids: Tensor, positions: Tensor) -> Tensor:
        """Run the layers and the final norm.

        Args:
            ids: [B, S] int64, padded at the right.
            positions: [B, S] int64; gaps are allowed.

        Returns:
            [B, S, E].
        """
        angles = positions[:, None, :, None].float() * self._frequencies  # [B, 1, S, D / 2]
        angles = torch.cat([angles, angles], dim=-1)
        x = self.model.embed_tokens(ids)
        cos, sin = angles.cos(), angles.sin()
        for layer in self.model.layers:
            x = layer(x, cos, sin)
        normed: Tensor = self.model.norm(x)
        return normed

    def logits(self, hidden: Tensor) -> Tensor:
        """Project normed hidden states, [N, E], on the vocabulary, [N, V]."""
        return functional.linear(hidden, self.model.embed_tokens.weight)


def compile_layers() -> None:
    """Compile the layers of networks made from now on; each shape of a batch costs seconds.

    Changes this process for good, so only the recipe's command calls it.
    """
    torch._dynamo.config.recompile_limit = 64  # one entry for each width of the corpus
    _Layer.forward = torch.compile(_Layer.forward, dynamic=False)  # type: ignore[method-assign]
