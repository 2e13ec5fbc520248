"""The compiled row kernels as functions of tensors.

Each result depends on its own row only: bit for bit the same in any batch, for any number of
threads. bfloat16 and float32 on a CPU; everything is computed in float32. The small ones keep the
interpreter lock, since taking it back from a busy thread of the host costs more than they do.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from dlite_agent.kernels.native import build_library

__all__ = ["HeadNorm", "HeadShape", "PartRows", "RowKernels", "RowPlan", "load_row_kernels"]

_CHUNK = 512  # keys of a task; CHUNK in row_kernels.c
_MAX_ROWS = 128  # query rows of a part that share a kv head; MAX_ROWS in row_kernels.c
_MAX_HEAD_DIM = 256
_FEW_ROWS = 16
_FEW_ELEMENTS = 2**16  # up to here one thread is faster

_pointer, _count = ctypes.c_void_p, ctypes.c_int64


class _Heads(ctypes.Structure):
    _fields_ = [
        *((name, _count) for name in ("num_heads", "num_kv_heads", "head_dim", "head_stride")),
        *(
            (name, _pointer)
            for name in ("weight", "rotation", "slots", "keys", "values", "queries")
        ),
        ("eps", ctypes.c_float),
        *((name, ctypes.c_int) for name in ("is_normed", "is_bf16", "threads")),
    ]


class _Attention(ctypes.Structure):
    _fields_ = [
        *((name, _count) for name in ("num_heads", "num_kv_heads", "head_dim", "head_stride")),
        *((name, _pointer) for name in ("queries", "keys", "values", "out", "parts", "spans")),
        *((name, _pointer) for name in ("tasks", "partial", "partial_at")),
        *((name, _count) for name in ("num_parts", "num_tasks")),
        *((name, ctypes.c_int) for name in ("is_bf16", "uses_tiles", "threads")),
    ]


class HeadNorm(Protocol):
    """Norm or scale of all query and key heads; the attention's 1/√D is in the weight."""

    weight: Tensor
    """[H + K, D] float32, contiguous."""
    eps: float
    is_normed: bool


class HeadShape(NamedTuple):
    """H query heads over K kv heads of D elements."""

    num_heads: int
    num_kv_heads: int
    head_dim: int


class PartRows(NamedTuple):
    """A session's query rows in a forward, and where its keys lie.

    Attributes:
        first_row: Of its queries among all.
        num_rows: Its queries; the last keys are their own.
        runs: (first row in the pool, rows) of its keys, in the order of positions.
    """

    first_row: int
    num_rows: int
    runs: Sequence[tuple[int, int]]


class RowKernels:
    """The compiled functions; see `row_kernels.c`."""

    def __init__(self, library: ctypes.CDLL) -> None:
        holding = ctypes.PyDLL(library._name)  # keeps the interpreter lock
        self._norm = holding.dlite_norm
        self._norm.argtypes = [*[_pointer] * 5, _count, _count, ctypes.c_float, *[ctypes.c_int] * 2]
        self._swiglu = holding.dlite_swiglu
        self._swiglu.argtypes = [_pointer, _pointer, _count, _count, ctypes.c_int, ctypes.c_int]
        self.heads = holding.dlite_heads
        self.heads.argtypes = [_pointer, _pointer, _count]
        self.attend = library.dlite_attend
        self.attend.argtypes = [_pointer]
        self.pack = library.dlite_pack
        self.pack.argtypes = [_pointer, _pointer, _pointer, ctypes.c_int]
        self.unpack_rows = library.dlite_unpack_rows
        self.unpack_rows.argtypes = [_pointer, _pointer, _count, _pointer]
        self.linear = library.dlite_linear
        self.linear.argtypes = [_pointer, _pointer, _count, *[_pointer] * 4, ctypes.c_int]
        self.attention_half = library.dlite_attention_half
        self.ffn_half = library.dlite_ffn_half
        self.attention_half.argtypes = self.ffn_half.argtypes = [_pointer, _pointer]
        self.draft = library.dlite_draft
        self.draft.argtypes = [
            *[_pointer] * 3,
            _count,
            _pointer,
            _count,
            ctypes.c_float,
            *[_pointer] * 2,
        ]
        self.draft.restype = _count
        self.layers = library.dlite_tapped_layers
        self.layers.argtypes = [_pointer, _count, _pointer, ctypes.c_char_p, _pointer, _count]
        for function in (
            *(self._norm, self._swiglu, self.heads, self.attend, self.pack),
            *(self.linear, self.attention_half, self.ffn_half, self.layers),
        ):
            function.restype = None
        self.has_tiles = bool(library.dlite_tiles())
        """The processor's matrix unit computes the products; this process may use it."""

    def supports(self, dtype: torch.dtype, device: torch.device, shape: HeadShape) -> bool:
        """The kernels compute in this type, there, with heads of this size."""
        is_known = dtype in (torch.bfloat16, torch.float32) and device.type == "cpu"
        return is_known and shape.head_dim <= _MAX_HEAD_DIM and shape.head_dim % 2 == 0

    def norm(
        self, x: Tensor, delta: Tensor | None, weight: Tensor, eps: float, out: Tensor
    ) -> None:
        """Put RMSNorm(x)·weight into `out`; with a delta, x becomes x + delta first.

        Args:
            x: [M, N]; changed in place where there is a delta.
            delta: [M, N] or None.
            weight: [N] float32.
            eps: Epsilon of the norm.
            out: [M, N].
        """
        rows, size = x.shape
        address = x.data_ptr()
        self._norm(
            address,
            None if delta is None else delta.data_ptr(),
            weight.data_ptr(),
            address,
            out.data_ptr(),
            rows,
            size,
            eps,
            x.dtype == torch.bfloat16,
            _threads(rows * size),
        )

    def swiglu(self, gate_up: Tensor, out: Tensor) -> None:
        """Put silu(gate)·up [M, N] of `gate_up` [M, 2N] into `out`."""
        rows, size = out.shape
        is_bf16 = out.dtype == torch.bfloat16
        threads = _threads(rows * size)
        self._swiglu(gate_up.data_ptr(), out.data_ptr(), rows, size, is_bf16, threads)


class RowPlan:
    """What the layers of one forward share: its queries' buffer, and where every row lies.

    Args:
        kernels: Compute.
        shape: Heads of the model.
        rotation: Of every row, [M, D/2] complex64, contiguous; kept.
        slots: Row of the pool that each of the M rows takes.
        parts: Sessions whose attention `attend` computes; `fits` says which can be.
    """

    def __init__(
        self,
        kernels: RowKernels,
        shape: HeadShape,
        rotation: Tensor,
        slots: Sequence[int],
        parts: Sequence[PartRows],
    ) -> None:
        num_rows = len(slots)
        self.queries = torch.empty(num_rows, shape.num_heads, shape.head_dim)  # float32
        self._kernels = kernels
        self._rotation = rotation
        layout = _Layout(shape, parts)
        lists = (slots, layout.parts, layout.spans, layout.tasks, layout.partial_at)
        self._index = np.array([number for numbers in lists for number in numbers], dtype=np.int64)
        self._partial = torch.empty(layout.partial_size)
        address = self._index.ctypes.data
        at = [address + 8 * sum(map(len, lists[:i])) for i in range(len(lists))]
        queries = self.queries.data_ptr()
        self._heads = _Heads(*shape, slots=at[0], rotation=rotation.data_ptr(), queries=queries)
        self._heads.threads = _threads(self.queries.numel())
        self._attention = _Attention(*shape, queries=queries, num_parts=len(parts))
        self._attention.parts, self._attention.spans, self._attention.tasks = at[1:4]
        self._attention.partial, self._attention.partial_at = self._partial.data_ptr(), at[4]
        self._attention.num_tasks = len(layout.partial_at)
        self._attention.uses_tiles = kernels.has_tiles
        self._attention.threads = _threads(layout.work)

    @staticmethod
    def fits(shape: HeadShape, num_rows: int) -> bool:
        """A session's rows are few enough for `attend`; more are faster elsewhere."""
        shared = num_rows * shape.num_heads // shape.num_kv_heads
        return num_rows <= _FEW_ROWS and shared <= _MAX_ROWS

    @property
    def addresses(self) -> tuple[int, int]:
        """Of the structs `heads` and `attention`, for `kernels.row_layers`."""
        return ctypes.addressof(self._heads), ctypes.addressof(self._attention)

    def place(self, qkv: Tensor, pool: tuple[Tensor, Tensor], norm: HeadNorm) -> None:
        """Norm and rotate the heads: queries to `queries`, keys and values to their pool rows.

        Args:
            qkv: [M, (H + 2K)·D], contiguous, in the pool's type.
            pool: Keys and values [K, P, D] of a layer.
            norm: Of query and key heads.
        """
        keys, values = pool
        heads = self._heads
        heads.head_stride = keys.stride(0)
        heads.keys, heads.values = keys.data_ptr(), values.data_ptr()
        heads.weight, heads.eps, heads.is_normed = norm.weight.data_ptr(), norm.eps, norm.is_normed
        heads.is_bf16 = qkv.dtype == torch.bfloat16
        self._kernels.heads(qkv.data_ptr(), ctypes.addressof(heads), qkv.shape[0])

    def attend(self, pool: tuple[Tensor, Tensor], out: Tensor) -> None:
        """Attention of the sessions that were named, into their rows of `out` [M, H·D]."""
        keys, values = pool
        attention = self._attention
        attention.head_stride = keys.stride(0)
        attention.keys, attention.values = keys.data_ptr(), values.data_ptr()
        attention.out, attention.is_bf16 = out.data_ptr(), out.dtype == torch.bfloat16
        self._kernels.attend(ctypes.addressof(attention))


class _Layout:
    """Sessions cut into tasks, as numbers that the kernels read."""

    def __init__(self, shape: HeadShape, parts: Sequence[PartRows]) -> None:
        self.parts: list[int] = []  # first row, rows, keys, first span, first task; of each
        self.spans: list[int] = []  # row of the pool, keys; of each
        self.tasks: list[int] = []  # part, chunk; of each
        self.partial_at: list[int] = []
        self.partial_size = 0
        self.work = 0  # elements that are read, times the rows that read them
        for number, (first_row, num_rows, runs) in enumerate(parts):
            num_keys = sum(count for _, count in runs)
            first = (len(self.spans) // 2, len(self.partial_at))
            self.parts += [first_row, num_rows, num_keys, *first]
            self.spans += [number for run in runs for number in run]
            for chunk in range(-(-num_keys // _CHUNK)):
                self.tasks += [number, chunk]
                self.partial_at.append(self.partial_size)
                self.partial_size += shape.num_heads * num_rows * (shape.head_dim + 2)
            self.work += num_keys * shape.num_heads * shape.head_dim * num_rows


def load_row_kernels(folder: Path | None) -> RowKernels | None:
    """The kernels, compiled for this machine's processor; see `kernels.native.build_library`."""
    library = build_library(folder)
    return None if library is None else RowKernels(library)


def _threads(elements: int) -> int:
    return torch.get_num_threads() if elements > _FEW_ELEMENTS else 1
