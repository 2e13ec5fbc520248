"""The forward of a dense decoder: few, fused operators over the rows of a batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor
from torch.nn import functional

from dlite_agent.config import Quantization
from dlite_agent.errors import CapacityError
from dlite_agent.kernels.large_pages import LargePageMemory
from dlite_agent.kernels.norm import RMSNorm
from dlite_agent.kernels.rotary import RotaryTable
from dlite_agent.kernels.row_kernels import HeadShape, RowKernels
from dlite_agent.kernels.row_linear import RowLinear
from dlite_agent.models.head import VocabularyHead
from dlite_agent.models.kv_pool import KVCache, KVPool
from dlite_agent.models.layer_weights import ReadWeight, load_layer
from dlite_agent.models.layers import BatchPart, DecoderLayers, TorchLayers, joined
from dlite_agent.models.native_layers import NativeLayers
from dlite_agent.models.target import ForwardRows, TargetConfig, TargetHidden, TargetOutput

__all__ = ["DenseTransformer"]


class DenseTransformer:
    """A dense decoder with its KV pool; implements `models.target.TargetModel`.

    Args:
        config: Shape of the checkpoint.
        read: Gives a tensor by its Hugging Face name (`weight_shapes`), of the right shape, any
            floating type.
        dtype: Type of weights, activations, keys and values.
        device: Where everything is.
        max_kv_bytes: Budget of the KV pool.
        quantize: As in `EngineConfig`.

    Raises:
        ConfigurationError: The pool cannot be reserved, or `dtype` cannot be quantized.
    """

    def __init__(
        self,
        config: TargetConfig,
        read: ReadWeight,
        *,
        dtype: torch.dtype,
        device: torch.device,
        max_kv_bytes: int,
        quantize: Quantization | None = None,
    ) -> None:
        self.config = config
        self.fingerprint = ""
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
        embedding = load("model.embed_tokens.weight").clone()
        self._embedding: Tensor | RowLinear = embedding
        self._layers = [
            load_layer(config, load, layer, quantize) for layer in range(config.num_layers)
        ]
        self._final_norm = RMSNorm(load("model.norm.weight"), config.rms_norm_eps, dtype)
        head = embedding if config.tie_word_embeddings else load("lm_head.weight").clone()
        self._head = VocabularyHead(head, quantize)
        self._kernels: RowKernels | None = None
        self._weight_dtype = dtype if quantize is None else torch.int8
        linears = (
            linear
            for layer in self._layers
            for linear in (layer.qkv, layer.out, layer.gate_up, layer.down)
        )
        self.weight_bytes = sum(linear.nbytes for linear in linears) + self._head.nbytes
        """Of all weights that a decode step reads."""
        self._run: DecoderLayers = TorchLayers(config, self._layers, self._like)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    @property
    def uses_kernels(self) -> bool:
        """Whether the layers run through compiled kernels."""
        return isinstance(self._run, NativeLayers)

    def use_kernels(self, kernels: RowKernels | None) -> bool:
        """Compute with compiled kernels from now on, for good: they take over the weights.

        Returns:
            The kernels are used: they are there, and know this type, device and shape.
        """
        config = self.config
        shape = HeadShape(config.num_heads, config.num_kv_heads, config.head_dim)
        if (
            kernels is None
            or not kernels.supports(self.dtype, self.device, shape)
            or not NativeLayers.fits(config, self._weight_dtype)
        ):
            return False
        rows = self._head.use_kernels(kernels, LargePageMemory())
        if config.tie_word_embeddings and rows is not None:
            self._embedding = rows  # once in memory
        self._kernels = kernels
        self._run = NativeLayers(kernels, self._layers, self.pool.layers, config)
        return True

    def audit(self) -> None:
        """From now on, a row's result does not depend on its place in a draft, nor on pages.

        That holds for forwards of one shape (`StopRules.fixed_rows`). Not behind `use_kernels`.
        """
        self._run = TorchLayers(self.config, self._layers, self._like, is_audit=True)

    def new_cache(self) -> KVCache:
        """An empty cache of this model's pool."""
        return self.pool.new_cache()

    def close(self) -> None:
        """Give weights and KV memory back. The model cannot be used afterwards. Idempotent."""
        self.pool.close()
        self._layers = []
        self._run = TorchLayers(self.config, [], self._like)
        self._embedding = torch.empty(0)
        self._head = VocabularyHead(torch.empty(0, 0))

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
        parts = _parts(batch)
        rotation = joined([self._rotary.rows(part.kv.length, part.num_rows) for part in parts])
        x = self.embed(joined([rows.token_ids for rows in batch]))
        wanted = frozenset(tap for rows in batch for tap in rows.taps)
        x, tapped = self._run.run(x, rotation, parts, wanted)  # [Q, E], all sessions' rows
        self.rows_computed += x.shape[0]
        pairs = list(zip(batch, parts, strict=True))
        asked = [part.first_row + row for rows, part in pairs for row in rows.logits_for]
        logits = self._logits(x, asked).split([len(rows.logits_for) for rows in batch])
        hidden = [_hidden(rows.taps, tapped, part) for rows, part in pairs]
        return [TargetOutput(*output) for output in zip(logits, hidden, strict=True)]

    @torch.no_grad()
    def embed(self, token_ids: Tensor) -> Tensor:
        """Input embeddings [n, E]; see `TargetModel.embed`."""
        embedding = self._embedding
        if isinstance(embedding, RowLinear):
            return embedding.rows(token_ids)
        return functional.embedding(token_ids, embedding)

    @torch.no_grad()
    def final_states(self, residual: Tensor) -> Tensor:
        """What the head reads, [n, E]; see `TargetModel.final_states`."""
        norm = self._final_norm
        if self._kernels is None:
            return norm(residual)
        rows = residual.contiguous()
        states = torch.empty_like(rows)
        self._kernels.norm(rows, None, norm.weight, norm.eps, states)
        return states

    @torch.no_grad()
    def project(self, states: Tensor) -> Tensor:
        """Logits [n, V]; see `TargetModel.project`."""
        return self._head(states)

    def _logits(self, x: Tensor, rows: Sequence[int]) -> Tensor:
        """Logits [R, V] of some rows of the last residual stream [Q, E]."""
        if not rows:
            return torch.empty(0, self.config.vocab_size, dtype=self._wide, device=self.device)
        if list(rows) == list(range(rows[0], rows[0] + len(rows))):
            chosen = x.narrow(0, rows[0], len(rows))
        else:
            chosen = x[list(rows)]
        return self.project(self.final_states(chosen))


def _parts(batch: Sequence[ForwardRows]) -> list[BatchPart]:
    parts: list[BatchPart] = []
    start = 0
    for rows in batch:
        parts.append(BatchPart(rows.kv, start, rows.token_ids.shape[0]))
        start += rows.token_ids.shape[0]
    return parts


def _reserve(batch: Sequence[ForwardRows]) -> None:
    """Room for all rows, or for none."""
    try:
        for rows in batch:
            rows.kv.reserve(rows.token_ids.shape[0])
    except CapacityError:
        for rows in batch:
            rows.kv.commit(0)
        raise


def _hidden(
    taps: tuple[int, ...], tapped: dict[int, Tensor], part: BatchPart
) -> TargetHidden | None:
    if not taps:
        return None
    layer_ids = tuple(sorted(set(taps)))
    states = [tapped[layer].narrow(0, part.first_row, part.num_rows) for layer in layer_ids]
    return TargetHidden(torch.stack(states), layer_ids)
