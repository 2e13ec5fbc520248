"""Grouped-query attention over a list of spans, without ever repeating keys or values.

How a shape is computed is decided once per forward by `plan_attention`, from measurements that
`dlite-agent bench attention` repeats. On a CPU:

- `matmul`: the G query heads that share a kv head are folded into rows, q `[K, G·M, D]` against k
  `[K, S, D]`, rows ordered (g, m); scores of all spans side by side, one softmax, one product a
  span. One row of float32 behind a short history. (In bfloat16, such a product re-orders the keys
  at every call, and rounds the scores.)
- `folded`: torch's flash attention over the same folded rows. Few rows, whose cost is reading keys
  and values: once instead of G times. Many rows behind a long history.
- `grouped`: torch's flash attention over the heads as they are. Everything else: no copies to fold
  and unfold, one call.

On other devices `matmul` while the scores are small, else `blocks`: plain products over blocks of
columns. All but `matmul` compute a part for each span and merge the parts by log-sum-exp. Softmax
statistics are float32 (float64 for float64 inputs) on every path.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

__all__ = [
    "AttentionPath",
    "AttentionPlan",
    "attend",
    "attend_apart",
    "merge_partials",
    "plan_attention",
]

AttentionPath = Literal["matmul", "folded", "grouped", "blocks"]
KeysValues = tuple[Tensor, Tensor]

_FEW_ROWS = 32  # up to here, reading keys and values is what costs
_CACHED_BYTES = 3 * 2**20  # keys and values of a layer that the core's own cache holds
_LONG_HISTORY = 2048  # rows
_MAX_SCORES = 4 * 2**20  # elements
_BLOCK_COLUMNS = 4096


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """How one forward's attention is computed; the same for all of its layers.

    Attributes:
        path: See the module's docstring.
        num_rows: M queries; the last M cached rows are their own.
        mask: Added to the scores of the last columns, 0 or -inf; None for one row. [M, M] on the
            `matmul` path, else [M or G·M, columns of the last part].
        is_tail_apart: The queries' own rows are a part of their own, behind the full spans.
    """

    path: AttentionPath
    num_rows: int
    mask: Tensor | None
    is_tail_apart: bool


def plan_attention(
    query_shape: tuple[int, int, int],
    span_rows: Sequence[int],
    like: Tensor,
    path: AttentionPath | None = None,
) -> AttentionPlan:
    """Choose the path and make the mask.

    Args:
        query_shape: M, H, K: query rows, query heads, kv heads.
        span_rows: Cached rows of each span; their sum is at least M.
        like: A tensor of the type, device and last dimension D of the queries.
        path: Take this one instead of the one that was measured fastest.
    """
    num_rows, num_heads, num_kv_heads = query_shape
    path = path or _choose_path(query_shape, span_rows, like)
    if num_rows == 1:
        return AttentionPlan(path, 1, None, is_tail_apart=False)
    if path == "matmul":
        return AttentionPlan(path, num_rows, _causal_mask(num_rows, num_rows, like), False)
    is_apart = span_rows[-1] < num_rows or path == "blocks"
    is_apart = is_apart or (path == "folded" and num_rows > _FEW_ROWS)  # a large mask costs more
    mask = _causal_mask(num_rows, num_rows if is_apart else span_rows[-1], like)
    if path != "grouped":
        mask = mask.repeat(num_heads // num_kv_heads, 1)
    return AttentionPlan(path, num_rows, mask, is_apart)


def attend(q: Tensor, spans: Sequence[KeysValues], plan: AttentionPlan) -> Tensor:
    """Softmax(q·kᵀ)·v of M queries whose own rows are the last of the cache.

    Row i of the last M cached ones is seen by queries i, i + 1, …; all rows before by every query.

    Args:
        q: [M, H, D], already scaled by 1/√D; cast to the type of the keys.
        spans: Keys and values [K, S_i, D] each, in the order of positions; H is a multiple of K.
        plan: Made for these shapes.

    Returns:
        [M, H·D] in the type of the keys.
    """
    num_rows, num_heads, head_dim = q.shape
    keys = spans[0][0]
    if plan.path == "grouped":
        out = _attend_parts(q.transpose(0, 1).to(keys.dtype), spans, plan)  # [H, M, D]
    else:
        folded = _fold(q, keys.shape[0], keys.dtype)
        attend_folded = _attend_matmul if plan.path == "matmul" else _attend_parts
        out = attend_folded(folded, spans, plan).view(num_heads, num_rows, head_dim)
    return out.transpose(0, 1).reshape(num_rows, -1)


def attend_apart(q: Tensor, spans: Sequence[KeysValues]) -> Tensor:
    """`attend`, for audits: a result does not depend on pages, nor on a few queries beside it.

    Copies the history into one span, and computes up to 32 queries one after the other, each as if
    it were alone.

    Args:
        q: [M, H, D], already scaled.
        spans: Keys and values, as for `attend`.

    Returns:
        [M, H·D] in the type of the keys.
    """
    num_rows, num_heads, _ = q.shape
    keys = torch.cat([span[0] for span in spans], dim=1)  # [K, S, D]
    values = torch.cat([span[1] for span in spans], dim=1)
    like = keys[:0, 0]
    if num_rows > _FEW_ROWS:
        plan = plan_attention((num_rows, num_heads, keys.shape[0]), [keys.shape[1]], like)
        return attend(q, [(keys, values)], plan)
    mixed = []
    for row in range(num_rows):
        seen = keys.shape[1] - num_rows + row + 1
        plan = plan_attention((1, num_heads, keys.shape[0]), [seen], like)
        mixed.append(attend(q[row : row + 1], [(keys[:, :seen], values[:, :seen])], plan))
    return torch.cat(mixed)


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
    weights = torch.stack([lse for _, lse in partials]).softmax(dim=0).unsqueeze(-1)
    merged = partials[0][0].to(weights.dtype) * weights[0]  # [K, R, D]
    for (out, _), weight in zip(partials[1:], weights[1:], strict=True):
        merged.addcmul_(out.to(weights.dtype), weight)
    return merged


def _choose_path(
    query_shape: tuple[int, int, int], span_rows: Sequence[int], like: Tensor
) -> AttentionPath:
    num_rows, num_heads, num_kv_heads = query_shape
    num_cached = sum(span_rows)
    if like.device.type != "cpu":
        return "matmul" if num_heads * num_rows * num_cached <= _MAX_SCORES else "blocks"
    is_bfloat16 = like.dtype == torch.bfloat16
    if num_rows > _FEW_ROWS:
        return "folded" if num_cached > _LONG_HISTORY else "grouped"
    if is_bfloat16:
        return "grouped" if num_rows == 1 and num_heads <= 4 * num_kv_heads else "folded"
    kv_bytes = 2 * num_kv_heads * num_cached * like.shape[-1] * like.element_size()
    if kv_bytes > _CACHED_BYTES:
        return "folded"
    return "matmul" if num_rows == 1 else "grouped"


def _fold(q: Tensor, num_kv_heads: int, dtype: torch.dtype) -> Tensor:
    """[M, H, D] to [K, G·M, D], in the type of the keys."""
    num_rows, num_heads, head_dim = q.shape
    num_groups = num_heads // num_kv_heads
    if num_rows == 1:
        return q.reshape(num_kv_heads, num_groups, head_dim).to(dtype)
    folded = q.new_empty((num_kv_heads, num_groups, num_rows, head_dim), dtype=dtype)
    folded.copy_(q.view(num_rows, num_kv_heads, num_groups, head_dim).permute(1, 2, 0, 3))
    return folded.view(num_kv_heads, -1, head_dim)


def _causal_mask(num_rows: int, columns: int, like: Tensor) -> Tensor:
    """[M, columns]: 0 where query i may see, -inf in the last M columns behind its own."""
    mask = like.new_full((num_rows, columns), float("-inf"))
    return mask.triu_(columns - num_rows + 1)


def _attend_matmul(folded: Tensor, spans: Sequence[KeysValues], plan: AttentionPlan) -> Tensor:
    parts = [torch.bmm(folded, keys.transpose(1, 2)) for keys, _ in spans]
    scores = parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)  # [K, G·M, S]
    if plan.mask is not None:
        num_rows = plan.num_rows
        by_row = scores.view(scores.shape[0], -1, num_rows, scores.shape[-1])  # [K, G, M, S]
        by_row.narrow(3, scores.shape[-1] - num_rows, num_rows).add_(plan.mask)
    weights = scores.softmax(dim=-1, dtype=_statistics(scores.dtype)).to(folded.dtype)
    if len(spans) == 1:
        return torch.bmm(weights, spans[0][1])
    shares = torch.split(weights, [values.shape[1] for _, values in spans], dim=-1)
    out = torch.bmm(shares[0], spans[0][1])
    for share, (_, values) in zip(shares[1:], spans[1:], strict=True):
        out.baddbmm_(share, values)
    return out


def _attend_parts(q: Tensor, spans: Sequence[KeysValues], plan: AttentionPlan) -> Tensor:
    """Parts and their merge; q is [K, G·M, D] or, on the `grouped` path, [H, M, D]."""
    parts = _split_tail(spans, plan.num_rows) if plan.is_tail_apart else list(spans)
    partial = _flash_partial
    if plan.path == "blocks":
        partial = _plain_partial
        parts = [*_cut_blocks(parts[:-1]), parts[-1]]
    masks = [None] * (len(parts) - 1) + [plan.mask]
    partials = [partial(q, keys, values, m) for (keys, values), m in zip(parts, masks, strict=True)]
    return merge_partials(partials).to(q.dtype)


def _cut_blocks(spans: Sequence[KeysValues]) -> list[KeysValues]:
    return [
        block
        for keys, values in spans
        for block in zip(
            torch.split(keys, _BLOCK_COLUMNS, 1),
            torch.split(values, _BLOCK_COLUMNS, 1),
            strict=True,
        )
    ]


def _split_tail(spans: Sequence[KeysValues], num_rows: int) -> list[KeysValues]:
    """Spans without the last M cached rows, then those rows as one part."""
    full = list(spans)
    tail: list[KeysValues] = []
    missing = num_rows
    while missing > 0:
        keys, values = full.pop()
        rest = keys.shape[1] - missing
        if rest > 0:
            full.append((keys[:, :rest], values[:, :rest]))
            keys, values = keys[:, rest:], values[:, rest:]
        tail.insert(0, (keys, values))
        missing -= keys.shape[1]
    if len(tail) > 1:  # the queries' own rows lie in two runs of pages
        tail = [(torch.cat([k for k, _ in tail], dim=1), torch.cat([v for _, v in tail], dim=1))]
    return full + tail


def _flash_partial(
    q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q.unsqueeze(0), keys.unsqueeze(0), values.unsqueeze(0), attn_mask=mask, scale=1.0
    )
    return out[0], lse[0]


def _plain_partial(
    q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    scores = torch.bmm(q, keys.transpose(1, 2)).to(_statistics(q.dtype))
    if mask is not None:
        scores += mask
    lse = scores.logsumexp(dim=-1)
    weights = scores.sub_(lse.unsqueeze(-1)).exp_()
    return torch.bmm(weights.to(q.dtype), values), lse


def _statistics(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32
