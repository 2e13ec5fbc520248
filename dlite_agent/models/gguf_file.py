"""GGUF files: metadata and tensor table now, tensors one at a time and dequantised when asked for.

Layout: github.com/ggml-org/ggml, docs/gguf.md. Everything that the file says about lengths and
offsets is checked against its size before it is used. Blocks are dequantised by the `gguf` package.
(transformers' own loader keeps every tensor in float32 at once, and passes over rope scaling, the
kind of pre-tokenizer and llama's rope factors.)
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from dlite_agent.errors import (
    MissingDependencyError,
    ModelNotFoundError,
    UnsupportedCheckpointError,
)

__all__ = ["GGUFFile", "StoredTensor", "StringArray"]

_SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_STRING, _ARRAY = 8, 9
_MAX_DIMS = 4
_F32, _F16, _F64, _BF16 = 0, 1, 28, 30
_FLOATS = {_F32: torch.float32, _F16: torch.float16, _F64: torch.float64, _BF16: torch.bfloat16}


class StringArray(NamedTuple):
    """Where an array of strings lies; a vocabulary is only decoded by who needs it."""

    offset: int
    num_strings: int


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of the file.

    Attributes:
        shape: As in torch, slowest dimension first.
        kind: ggml's number of the type.
        kind_name: Its name, e.g. `Q4_K`.
        offset: First byte in the file.
        nbytes: Bytes in the file.
    """

    shape: tuple[int, ...]
    kind: int
    kind_name: str
    offset: int
    nbytes: int


class GGUFFile:
    """The header of a GGUF file; the file stays mapped while this lives.

    Args:
        path: The file.
        name: The model as the user named it, for messages.

    Attributes:
        metadata: Values by key; arrays of strings are `StringArray`.
        tensors: What it holds, by ggml's names.

    Raises:
        MissingDependencyError: The package `gguf` is not installed.
        ModelNotFoundError: The file cannot be opened.
        UnsupportedCheckpointError: It is no GGUF file, truncated, damaged, or of a kind that is not
            supported.
    """

    def __init__(self, path: Path, name: str) -> None:
        try:
            import gguf  # noqa: F401 - asked for before anything is read
        except ImportError as error:
            raise MissingDependencyError(
                f"{name!r} is a GGUF file, and the package gguf is not installed; run: "
                'pip install "dlite-agent[gguf]"'
            ) from error
        self.path = path
        self._name = name
        try:
            with path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:  # an empty file cannot be mapped
            raise ModelNotFoundError(
                f"{name!r} cannot be read ({error}); check the path, or download it again"
            ) from error
        self.metadata: dict[str, object] = {}
        self.tensors: dict[str, StoredTensor] = {}
        try:
            self._read_header()
        except (struct.error, UnicodeDecodeError, _DamagedError) as error:
            raise UnsupportedCheckpointError(
                f"{name!r} is a truncated or damaged GGUF file ({error}); download it again"
            ) from error

    @property
    def architecture(self) -> str:
        """llama.cpp's name for the kind of model."""
        return str(self.metadata.get("general.architecture", ""))

    @property
    def header(self) -> bytes:
        """All bytes before the tensors."""
        return self._map[: self._data_start]

    def strings(self, key: str) -> list[str]:
        """An array of strings; empty where there is none."""
        array = self.metadata.get(key)
        if not isinstance(array, StringArray):
            return []
        cursor = _Cursor(self._map, array.offset)
        return [cursor.string() for _ in range(array.num_strings)]

    def read(self, name: str) -> Tensor:
        """A tensor in the float type it has in the file, or in float32 where it is quantised.

        Raises:
            UnsupportedCheckpointError: Its blocks cannot be dequantised.
        """
        from gguf.constants import GGMLQuantizationType
        from gguf.quants import dequantize

        stored = self.tensors[name]
        raw = np.frombuffer(self._map, np.uint8, stored.nbytes, stored.offset)
        if stored.kind in _FLOATS:
            # a copy: the map is read-only
            return torch.from_numpy(raw.copy()).view(_FLOATS[stored.kind]).view(stored.shape)
        kind = GGMLQuantizationType(stored.kind)
        rows = raw.reshape(math.prod(stored.shape[:-1]), -1)
        try:
            values = dequantize(rows, kind)
        except (NotImplementedError, ValueError) as error:
            raise self._cannot_read(name, stored.kind_name) from error
        return torch.from_numpy(values).view(stored.shape)

    def check_kinds(self) -> None:
        """Refuse types that cannot be dequantised, by one block of zeros each.

        Raises:
            UnsupportedCheckpointError: There is such a type.
        """
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
        from gguf.quants import dequantize

        one_of_each = {stored.kind: name for name, stored in self.tensors.items()}
        for number, name in one_of_each.items():
            if number in _FLOATS:
                continue
            kind = GGMLQuantizationType(number)
            try:
                dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
            except NotImplementedError as error:
                raise self._cannot_read(name, kind.name) from error

    def _cannot_read(self, name: str, kind: str) -> UnsupportedCheckpointError:
        return UnsupportedCheckpointError(
            f"{self._name!r}: tensor {name!r} is stored as {kind}, which cannot be dequantised; "
            "use a file of another quantisation, e.g. Q8_0 or Q4_K_M"
        )

    def _read_header(self) -> None:
        if self._map[:4] != b"GGUF":
            raise UnsupportedCheckpointError(
                f"{self._name!r} is no GGUF file: it begins with {self._map[:4]!r}; check the path"
            )
        cursor = _Cursor(self._map, 4)
        version = int(cursor.scalar("I"))
        if version not in (2, 3):
            is_swapped = version & 0xFFFF == 0
            what = "of big-endian byte order" if is_swapped else f"of version {version}"
            raise UnsupportedCheckpointError(
                f"{self._name!r} is a GGUF file {what}; convert the checkpoint again with a "
                "current llama.cpp, on a little-endian machine"
            )
        num_tensors, num_values = int(cursor.scalar("Q")), int(cursor.scalar("Q"))
        for _ in range(num_values):
            key = cursor.string()
            self.metadata[key] = cursor.value(int(cursor.scalar("I")))
        stored = [self._tensor_info(cursor) for _ in range(num_tensors)]
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise _DamagedError(f"general.alignment is {alignment!r}")
        self._data_start = -(-cursor.offset // alignment) * alignment
        for name, info in stored:
            self._place(name, info)

    def _tensor_info(self, cursor: _Cursor) -> tuple[str, tuple[tuple[int, ...], int, int]]:
        name = cursor.string()
        num_dims = int(cursor.scalar("I"))
        if not 1 <= num_dims <= _MAX_DIMS:
            raise _DamagedError(f"tensor {name!r} has {num_dims} dimensions")
        shape = tuple(int(cursor.scalar("Q")) for _ in range(num_dims))[::-1]
        return name, (shape, int(cursor.scalar("I")), int(cursor.scalar("Q")))

    def _place(self, name: str, info: tuple[tuple[int, ...], int, int]) -> None:
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

        shape, number, offset = info
        try:
            kind = GGMLQuantizationType(number)
        except ValueError:
            raise UnsupportedCheckpointError(
                f"{self._name!r}: tensor {name!r} is of ggml type {number}, which is unknown here; "
                "use a file of another quantisation, or a newer gguf package"
            ) from None
        block, block_bytes = GGML_QUANT_SIZES[kind]
        if name in self.tensors or shape[-1] % block:
            raise _DamagedError(f"tensor {name!r} is there twice, or its rows are no whole blocks")
        nbytes = math.prod(shape) // block * block_bytes
        start = self._data_start + offset
        if start + nbytes > len(self._map):
            raise _DamagedError(
                f"tensor {name!r} ends at byte {start + nbytes}, the file at byte {len(self._map)}"
            )
        self.tensors[name] = StoredTensor(shape, number, kind.name, start, nbytes)


class _DamagedError(Exception):
    """The file contradicts itself."""


class _Cursor:
    """Reads values one behind the other; `struct.error` where the file ends."""

    def __init__(self, data: mmap.mmap, offset: int) -> None:
        self._data = data
        self.offset = offset

    def scalar(self, code: str) -> int | float | bool:
        (value,) = struct.unpack_from("<" + code, self._data, self.offset)
        self.offset += struct.calcsize("<" + code)
        return value  # type: ignore[no-any-return]  # struct is untyped

    def string(self) -> str:
        start, end = self._string_range()
        self.offset = end
        return self._data[start:end].decode("utf-8")

    def value(self, kind: int) -> object:
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind])
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            raise _DamagedError(f"a value is of the unknown type {kind}")
        item_kind, count = int(self.scalar("I")), int(self.scalar("Q"))
        if item_kind == _STRING:
            array = StringArray(self.offset, count)
            for _ in range(count):
                _, self.offset = self._string_range()
            return array
        code = _SCALARS.get(item_kind)
        if code is None:
            raise _DamagedError(f"an array's items are of the unknown type {item_kind}")
        nbytes = count * struct.calcsize("<" + code)
        self._check_end(self.offset + nbytes)
        values = struct.unpack_from(f"<{count}{code}", self._data, self.offset)
        self.offset += nbytes
        return list(values)

    def _string_range(self) -> tuple[int, int]:
        (length,) = struct.unpack_from("<Q", self._data, self.offset)
        start = self.offset + 8
        self._check_end(start + length)
        return start, start + length

    def _check_end(self, end: int) -> None:
        if end > len(self._data):
            raise _DamagedError(f"something ends at byte {end}, the file at byte {len(self._data)}")
