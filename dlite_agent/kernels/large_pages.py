"""Large memory pages for what every step reads.

A decode step reads all weights and the whole cache once. In pages of 4 KiB the processor spends
much of that time on address translation, most of all in a virtual machine: read bandwidth of one
core was 7.4 GB/s that way and 24.5 GB/s in pages of 2 MiB, and a packed product of 6144 x 1024 took
1,490 µs and 1,140 µs (2026-11-30, a machine that others used too).

Linux only; elsewhere, and where the kernel declines, nothing happens.
"""

from __future__ import annotations

import ctypes
import logging
import sys

import torch
from torch import Tensor

__all__ = [
    "LARGE_PAGE_BYTES",
    "LargePageMemory",
    "gather_pages",
    "prefer_large_pages",
    "return_freed",
]

logger = logging.getLogger(__name__)

LARGE_PAGE_BYTES = 2 * 2**20
_BLOCK_BYTES = 64 * 2**20
_WORTHWHILE_BYTES = LARGE_PAGE_BYTES // 8
_MADV_HUGEPAGE = 14
_MADV_COLLAPSE = 25  # Linux 6.1


class LargePageMemory:
    """Hands out pieces of large pages, one behind the other, for what lives equally long.

    Memory is reserved in blocks and taken from the system when it is first written; it goes back
    with the last piece of a block.
    """

    def __init__(self) -> None:
        self._block = torch.empty(0, dtype=torch.uint8)
        self._blocks: list[Tensor] = []
        self._used = 0

    def take(self, num_bytes: int) -> Tensor:
        """A piece [num_bytes] uint8 that starts at a multiple of 64 bytes; its content is open."""
        if self._used + num_bytes > self._block.shape[0]:
            size = max(num_bytes, _BLOCK_BYTES)
            block = torch.empty(size + LARGE_PAGE_BYTES, dtype=torch.uint8)
            prefer_large_pages(block)
            self._block = block.narrow(0, -block.data_ptr() % LARGE_PAGE_BYTES, size)
            self._blocks.append(self._block)
            self._used = 0
        piece = self._block.narrow(0, self._used, num_bytes)
        self._used += num_bytes + -num_bytes % 64
        return piece

    def close(self) -> None:
        """Nothing more will be taken: what small pages the system gave become large ones."""
        for block in self._blocks:
            is_last = block is self._block
            gather_pages(block.narrow(0, 0, self._used) if is_last else block)
        self._blocks = []


def gather_pages(tensor: Tensor) -> None:
    """Move what a tensor holds into large pages; its neighbours in those pages come along."""
    if tensor.device.type != "cpu":
        return
    if tensor.is_mkldnn:
        address, nbytes = torch.ops.mkldnn.data_ptr(tensor), torch.ops.mkldnn._nbytes(tensor)
    else:
        address, nbytes = tensor.data_ptr(), tensor.nbytes
    _advise(address, nbytes, _MADV_COLLAPSE)


def prefer_large_pages(tensor: Tensor) -> None:
    """Ask for large pages when memory that is only reserved so far is first written."""
    if tensor.device.type == "cpu":
        _advise(tensor.data_ptr(), tensor.nbytes, _MADV_HUGEPAGE)


def return_freed() -> None:
    """Give memory that was freed in between back to the system, as far as the C library can."""
    if sys.platform == "linux" and hasattr(ctypes.CDLL(None), "malloc_trim"):
        ctypes.CDLL(None).malloc_trim(0)


def _advise(address: int, nbytes: int, advice: int) -> None:
    if sys.platform != "linux" or nbytes < _WORTHWHILE_BYTES:
        return
    start = address // LARGE_PAGE_BYTES * LARGE_PAGE_BYTES
    end = -(-(address + nbytes) // LARGE_PAGE_BYTES) * LARGE_PAGE_BYTES
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    if madvise(start, end - start, advice):  # no whole page of ours, or a kernel that cannot
        logger.debug("large_pages=declined bytes=%s", nbytes)
