"""Where keys and values lie: views of a pool, never copies."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

__all__ = ["RunViews", "Span"]


class Span(NamedTuple):
    """Contiguous keys and values [K, S, D]; views of the pool, valid until the cache changes."""

    keys: Tensor
    values: Tensor


class RunViews(NamedTuple):
    """Keys and values of a contiguous run of rows, one view [K, S, D] a layer."""

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
