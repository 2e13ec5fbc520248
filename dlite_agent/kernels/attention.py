"""Grouped-query attention over a list of spans, without ever repeating keys or values.

The G query heads that share a kv head are folded into rows: q `[K, G·M, D]` against k `[K, S, D]`,
rows ordered (g, m). Which way a shape takes is decided by `choose_path` from measurements (`python
-m dlite_agent.bench.attention`):

- `matmul`: scores of all spans side by side, one softmax, one product per span. Best for few rows.
- `flash`: torch's CPU flash attention for what all rows see, which returns the log-sum-exp; two
  plain products for the queries' own rows, which need a mask; merged. Best, and the only one with
  bounded memory, for a prefill chunk behind a long history.

Softmax statistics are float32 (float64 for float64 inputs) on every path.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

__all__ = [
    "AttentionPath",
    "attend",
    "attend_flash",
    "attend_matmul",
    "choose_path",
    "merge_partials",
]

AttentionPath = Literal["matmul", "flash"]
KeysValues = tuple[Tensor, Tensor]

_MAX_MATMUL_ROWS = 32  # queries; more take the flash path when the history is long


def attend(q: Tensor, spans: Sequence[KeysValues], *, causal_tail: int) -> Tensor:
    """Softmax(q·kᵀ / √D)·v of M queries whose own rows are the last of the cache.

    Args:
        q: [M, H, D].
        spans: Keys and values [K, S_i, D] each, in the order of positions; H is a multiple G of K.
        causal_tail: M. The last M cached rows are the queries' own: row i of the tail is seen by
            queries i, i + 1, …; all rows before the tail are seen by every query.

    Returns:
        [M, H, D] in the type of `q`.
    """
    num_rows, num_heads, head_dim = q.shape
    num_kv_heads = spans[0][0].shape[0]
    assert causal_tail == num_rows, "the tail is the queries' own rows"
    grouped = q.view(num_rows, num_kv_heads, num_heads // num_kv_heads, head_dim)
    folded = grouped.permute(1, 2, 0, 3).reshape(num_kv_heads, -1, head_dim)  # [K, G·M, D]
    num_cached = sum(keys.shape[1] for keys, _ in spans)
    if choose_path(num_rows, num_cached, q.device) == "matmul":
        out = attend_matmul(folded, spans, num_rows)
    else:
        out = attend_flash(folded, spans, num_rows)
    return (
        out.view(num_kv_heads, -1, num_rows, head_dim)
        .permute(2, 0, 1, 3)
        .reshape(num_rows, num_heads, head_dim)
    )


def choose_path(num_rows: int, num_cached: int, device: torch.device) -> AttentionPath:
    """The faster path for M rows against S cached ones (docs/benchmarks/attention.csv)."""
    if device.type == "cpu" and num_rows > _MAX_MATMUL_ROWS and num_cached >= 2 * num_rows:
        return "flash"
    return "matmul"


def attend_matmul(folded: Tensor, spans: Sequence[KeysValues], num_rows: int) -> Tensor:
    """Scores of all spans side by side, one softmax. `folded` and the result are [K, G·M, D]."""
    scores = _joined_scores(folded, spans)
    if num_rows > 1:
        _mask_tail(scores, num_rows)
    weights = scores.softmax(dim=-1, dtype=_statistics(folded.dtype))
    return _weighted_values(weights.to(folded.dtype), spans)


def attend_flash(folded: Tensor, spans: Sequence[KeysValues], num_rows: int) -> Tensor:
    """Flash attention before the tail, two products for the tail, merged; [K, G·M, D]."""
    before, tail = _split_tail(spans, num_rows)
    partials = [_flash_partial(folded, keys, values) for keys, values in before]
    partials.append(_tail_partial(folded, tail, num_rows))
    return merge_partials(partials).to(folded.dtype)


def merge_partials(partials: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """Join attention outputs over disjoint spans by their log-sum-exp.

    Args:
        partials: Per span the normalised output [K, R, D] and the log-sum-exp [K, R] of its scores.

    Returns:
        [K, R, D] in the type of the log-sum-exp: Σ exp(lse_i − lse)·out_i, where lse is the
        log-sum-exp of all.
    """
    if len(partials) == 1:
        return partials[0][0]
    weights = (
        torch.stack([lse for _, lse in partials]).softmax(dim=0).unsqueeze(-1)
    )  # [spans, K, R, 1]
    merged = partials[0][0].to(weights.dtype) * weights[0]
    for (out, _), weight in zip(partials[1:], weights[1:], strict=True):
        merged = merged.addcmul_(out.to(weights.dtype), weight)
    return merged


def _joined_scores(folded: Tensor, spans: Sequence[KeysValues]) -> Tensor:
    """q·kᵀ/√D, [K, R, S]."""
    query = folded * folded.shape[-1] ** -0.5
    parts = [torch.bmm(query, keys.transpose(1, 2)) for keys, _ in spans]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)


def _mask_tail(scores: Tensor, num_rows: int) -> None:
    """Hide, in place, what the queries must not see of the last M columns of [K, G·M, S]."""
    tail = scores.view(scores.shape[0], -1, num_rows, scores.shape[-1])[
        ..., -num_rows:
    ]  # [K, G, M, M]
    hidden = torch.ones(num_rows, num_rows, dtype=torch.bool, device=scores.device).triu_(1)
    tail.masked_fill_(hidden, float("-inf"))


def _weighted_values(weights: Tensor, spans: Sequence[KeysValues]) -> Tensor:
    """Σ over spans of weights·v, [K, R, D]."""
    if len(spans) == 1:
        return torch.bmm(weights, spans[0][1])
    parts = torch.split(weights, [values.shape[1] for _, values in spans], dim=-1)
    out = torch.bmm(parts[0], spans[0][1])
    for part, (_, values) in zip(parts[1:], spans[1:], strict=True):
        out.baddbmm_(part, values)
    return out


def _split_tail(
    spans: Sequence[KeysValues], num_rows: int
) -> tuple[list[KeysValues], list[KeysValues]]:
    """Cut the last M cached rows off: (spans before, spans of the tail), both in order."""
    before = list(spans)
    tail: list[KeysValues] = []
    missing = num_rows
    while missing > 0:
        keys, values = before.pop()
        rest = keys.shape[1] - missing
        if rest > 0:
            before.append((keys[:, :rest], values[:, :rest]))
            keys, values = keys[:, rest:], values[:, rest:]
        tail.insert(0, (keys, values))
        missing -= keys.shape[1]
    return before, tail


def _flash_partial(folded: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        folded[None], keys[None], values[None]
    )
    return out[0], lse[0]


def _tail_partial(
    folded: Tensor, tail: Sequence[KeysValues], num_rows: int
) -> tuple[Tensor, Tensor]:
    scores = _joined_scores(folded, tail).to(_statistics(folded.dtype))
    _mask_tail(scores, num_rows)
    lse = scores.logsumexp(dim=-1)
    weights = (scores - lse.unsqueeze(-1)).exp_()
    return _weighted_values(weights.to(folded.dtype), tail), lse


def _statistics(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32
