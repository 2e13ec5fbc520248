"""The compiled functions over chains of n-grams: a microsecond where Python takes twenty."""

from __future__ import annotations

import ctypes
from pathlib import Path

from dlite_agent.kernels.native import build_library

__all__ = ["MAX_PROBES", "NgramKernels", "NgramStruct", "load_ngram_kernels"]

MAX_PROBES = 64
"""Most places of a search."""

_pointer, _count = ctypes.c_void_p, ctypes.c_int64


class NgramStruct(ctypes.Structure):
    """A table's arrays, for `ngram_kernels.c`. Whoever makes it owns what it points to."""

    _fields_ = [
        *((name, _pointer) for name in ("last", "previous", "sizes", "multipliers")),
        *((name, _count) for name in ("num_sizes", "capacity", "start", "shift")),
    ]


class NgramKernels:
    """The functions; used by one thread at a time.

    They keep the interpreter lock, since taking it back would cost more than they do.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        holding = ctypes.PyDLL(library._name)
        self.enter = holding.dlite_enter_ngrams
        self.enter.argtypes = [_pointer, _pointer, _count, _count]
        self.enter.restype = None
        self._find = holding.dlite_find_ngrams
        self._find.argtypes = [*[_pointer] * 2, _count, *[_pointer] * 2, *[_count] * 3]
        self._find.argtypes += [_pointer] * 2
        self._find.restype = _count
        self._lengths = (_count * MAX_PROBES)()
        self._positions = (_count * MAX_PROBES)()

    def find(
        self,
        tables: tuple[object, object, int],
        ids: int,
        context: tuple[int, int],
        before: int,
        max_probes: int,
    ) -> list[tuple[int, int]]:
        """Earlier places of the end of a context, as `SuffixIndex.find`.

        Args:
            tables: Arrays of addresses of `NgramStruct`, and of the ends of what counts of each;
                how many.
            ids: Address of all ids, int32.
            context: Address and number of the context's ids, int32.
            before: Only positions before this one.
            max_probes: At most `MAX_PROBES`.

        Returns:
            How many tokens agree, and where the last of them stands.
        """
        lengths, positions = self._lengths, self._positions
        count = self._find(*tables, ids, *context, before, max_probes, lengths, positions)
        return list(zip(lengths[:count], positions[:count], strict=True)) if count else []


def load_ngram_kernels(folder: Path | None) -> NgramKernels | None:
    """The kernels, compiled for this machine's processor; see `kernels.native.build_library`."""
    library = build_library(folder)
    return None if library is None else NgramKernels(library)
