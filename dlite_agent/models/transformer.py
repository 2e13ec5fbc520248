"""The forward of a dense decoder: few, fused operators over the rows of a batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Self

import torch
from torch import Tensor
from torch.nn import functional

from dlite_agent.errors import CapacityError
from dlite_agent.kernels.attention import AttentionPlan, attend, plan_attention
from dlite_agent.kernels.norm import RMSNorm
from dlite_agent.kernels.rotary import RotaryTable, rotate
from dlite_agent.models.kv_pool import KVCache, KVPool
from dlite_agent.models.layer_weights import LayerWeights, ReadWeight, load_layer
from dlite_agent.models.linear import make_linear
from dlite_agent.models.target import ForwardRows, TargetConfig, TargetHidden, TargetOutput

__all__ = ["DenseTransformer"]


class _Part(NamedTuple):
    """The rows of one session: [first_row, first_row + num_rows) of a forward's."""

    kv: KVCache
    plan: AttentionPlan
    first_row: int
    num_rows: int


class DenseTransformer:
    """A dense decoder with its KV pool; implements `models.target.TargetModel`.

    Args:
        config: Shape of the checkpoint.
        read: Gives a tensor by its Hugging Face name (`weight_shapes`), of the right shape, any
            floating type.
        dtype: Type of weights, activations, keys and values.
        device: Where everything is.
        max_kv_bytes: Budget of the KV pool.

    Raises:
        ConfigurationError: The pool cannot be reserved.
    """

    def __init__(
        self,
        config: TargetConfig,
        read: ReadWeight,
        *,
        dtype: torch.dtype,
        device: torch.device,
        max_kv_bytes: int,
    ) -> None:
        self.config = config
        self.device = device
        self.dtype = dtype
        self.rows_computed = 0
        self.pool = KVPool(config, dtype=dtype, device=device, max_bytes=max_kv_bytes)
        self._wide = torch.float64 if dtype == torch.float64 else torch.float32
        self._like = torch.empty(0, config.head_dim, dtype=dtype, device=device)
        self._rotary = RotaryTable(
            config.head_dim,
            config.rope_theta,
            dtype=self._wide,
            device=device,
            scaling=config.rope_scaling,
        )

        def load(name: str) -> Tensor:
            return read(name).to(device=device, dtype=dtype)

        # A copy, since what was read may be a map of the file.
        self._embedding = load("model.embed_tokens.weight").clone()
        self._layers = [load_layer(config, load, layer) for layer in range(config.num_layers)]
        self._final_norm = RMSNorm(load("model.norm.weight"), config.rms_norm_eps, dtype)
        head = self._embedding if config.tie_word_embeddings else load("lm_head.weight")
        self._head = make_linear(head)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights that a decode step reads."""
        linears = [
            linear
            for layer in self._layers
            for linear in (layer.qkv, layer.out, layer.gate_up, layer.down)
        ]
        return sum(linear.nbytes for linear in [*linears, self._head])

    def new_cache(self) -> KVCache:
        """An empty cache of this model's pool."""
        return self.pool.new_cache()

    def close(self) -> None:
        """Give weights and KV memory back. The model cannot be used afterwards. Idempotent."""
        self.pool.close()
        self._layers = []
        self._embedding = torch.empty(0)
        self._head = make_linear(torch.empty(0, 0))

    def forward(
        self, token_ids: Tensor, kv: KVCache, *, logits_for: Sequence[int], taps: Sequence[int] = ()
    ) -> TargetOutput:
        """Compute Q rows behind `kv.length`; see `TargetModel.forward`."""
        return self.forward_batch([ForwardRows(token_ids, kv, logits_for, tuple(taps))])[0]

    @torch.no_grad()
    def forward_batch(self, batch: Sequence[ForwardRows]) -> list[TargetOutput]:
        """Compute the rows of several sessions; see `TargetModel.forward_batch`."""
        num_layers = self.config.num_layers
        assert all(0 <= tap < num_layers for rows in batch for tap in rows.taps), "taps are layers"
        assert len({id(rows.kv) for rows in batch}) == len(batch), "caches are distinct"
        _reserve(batch)
        parts = self._parts(batch)
        rotation = _joined([self._rotary.rows(part.kv.length, part.num_rows) for part in parts])
        x = functional.embedding(_joined([rows.token_ids for rows in batch]), self._embedding)
        wanted = {tap for rows in batch for tap in rows.taps}
        tapped: dict[int, Tensor] = {}
        for index, layer in enumerate(self._layers):
            x = self._decoder_layer(
                layer, index, x, (rotation, parts)
            )  # [Q, E], all sessions' rows
            if index in wanted:
                tapped[index] = x
        self.rows_computed += x.shape[0]
        pairs = list(zip(batch, parts, strict=True))
        asked = [part.first_row + row for rows, part in pairs for row in rows.logits_for]
        logits = self._logits(x, asked).split([len(rows.logits_for) for rows in batch])
        hidden = [_hidden(rows.taps, tapped, part) for rows, part in pairs]
        return [TargetOutput(*output) for output in zip(logits, hidden, strict=True)]

    def _parts(self, batch: Sequence[ForwardRows]) -> list[_Part]:
        parts: list[_Part] = []
        start = 0
        for rows in batch:
            count = rows.token_ids.shape[0]
            shape = (count, self.config.num_heads, self.config.num_kv_heads)
            plan = plan_attention(shape, rows.kv.span_rows(), self._like)
            parts.append(_Part(rows.kv, plan, start, count))
            start += count
        return parts

    def _decoder_layer(
        self, layer: LayerWeights, index: int, x: Tensor, shared: tuple[Tensor, list[_Part]]
    ) -> Tensor:
        config, num_rows = self.config, x.shape[0]
        rotation, parts = shared
        num_heads, num_kv_heads = config.num_heads, config.num_kv_heads
        heads = layer.qkv(layer.input_norm(x))
        heads = heads.view(num_rows, -1, config.head_dim)  # [Q, H + 2K, D]
        turned, values = heads.split_with_sizes([num_heads + num_kv_heads, num_kv_heads], 1)
        turned = layer.head_norm(turned)
        q, keys = rotate(turned, rotation).split_with_sizes([num_heads, num_kv_heads], 1)
        keys, values = keys.transpose(0, 1), values.transpose(0, 1)  # [K, Q, D]
        mixed: list[Tensor] = []
        for kv, plan, start, count in parts:
            kv.write(index, keys.narrow(1, start, count), values.narrow(1, start, count))
            mixed.append(attend(q.narrow(0, start, count), kv.spans(index), plan))
        x = layer.out.add_to(x, _joined(mixed))
        gate, up = layer.gate_up(layer.ffn_norm(x)).chunk(2, dim=-1)
        return layer.down.add_to(x, functional.silu(gate).mul_(up))

    @torch.no_grad()
    def embed(self, token_ids: Tensor) -> Tensor:
        """Input embeddings [n, E]; see `TargetModel.embed`."""
        return functional.embedding(token_ids, self._embedding)

    @torch.no_grad()
    def final_states(self, residual: Tensor) -> Tensor:
        """What the head reads, [n, E]; see `TargetModel.final_states`."""
        return self._final_norm(residual)

    @torch.no_grad()
    def project(self, states: Tensor) -> Tensor:
        """Logits [n, V]; see `TargetModel.project`."""
        return self._head(states).to(self._wide)

    def _logits(self, x: Tensor, rows: Sequence[int]) -> Tensor:
        """Logits [R, V] of some rows of the last residual stream [Q, E]."""
        if not rows:
            return torch.empty(0, self.config.vocab_size, dtype=self._wide, device=self.device)
        if list(rows) == list(range(rows[0], rows[0] + len(rows))):
            chosen = x.narrow(0, rows[0], len(rows))
        else:
            chosen = x[list(rows)]
        return self.project(self.final_states(chosen))


def _reserve(batch: Sequence[ForwardRows]) -> None:
    """Room for all rows, or for none."""
    try:
        for rows in batch:
            rows.kv.reserve(rows.token_ids.shape[0])
    except CapacityError:
        for rows in batch:
            rows.kv.commit(0)
        raise


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def _hidden(taps: tuple[int, ...], tapped: dict[int, Tensor], part: _Part) -> TargetHidden | None:
    if not taps:
        return None
    layer_ids = tuple(sorted(set(taps)))
    states = [tapped[layer].narrow(0, part.first_row, part.num_rows) for layer in layer_ids]
    return TargetHidden(torch.stack(states), layer_ids)
