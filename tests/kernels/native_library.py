"""Kernels for tests, compiled once a machine."""

from __future__ import annotations

import shutil
from functools import cache

import pytest

from dlite_agent.config import EngineConfig
from dlite_agent.kernels.ngram_kernels import NgramKernels, load_ngram_kernels
from dlite_agent.kernels.row_kernels import RowKernels, load_row_kernels

__all__ = ["ngram_kernels", "row_kernels"]


@cache
def row_kernels(*, uses_tiles: bool = True) -> RowKernels:
    """The kernels; skips the test where there is no compiler.

    Args:
        uses_tiles: Let the processor's matrix unit compute products, where it has one.
    """
    if shutil.which("gcc") is None:
        pytest.skip("no gcc to compile the kernels with")
    kernels = load_row_kernels(EngineConfig().cache_folder())
    assert kernels is not None, "gcc is here, so the kernels compile"
    kernels.has_tiles = kernels.has_tiles and uses_tiles
    return kernels


@cache
def ngram_kernels() -> NgramKernels:
    """The kernels of suffix drafting; skips the test where there is no compiler."""
    if shutil.which("gcc") is None:
        pytest.skip("no gcc to compile the kernels with")
    kernels = load_ngram_kernels(EngineConfig().cache_folder())
    assert kernels is not None, "gcc is here, so the kernels compile"
    return kernels
