"""Devices, types and free memory."""

from __future__ import annotations

import pytest
import torch

from dlite_agent.errors import ConfigurationError
from dlite_agent.models.device import free_memory_bytes, resolve_device, resolve_dtype

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", ["gpu", "mps", "meta", "", "cuda:x"])
def test_unknown_device_is_refused(name: str) -> None:
    with pytest.raises(ConfigurationError, match=f"device is '{name}'; use 'auto'"):
        resolve_device(name)


def test_missing_gpu_is_refused_with_the_count() -> None:
    number = torch.cuda.device_count()
    with pytest.raises(ConfigurationError, match=f"sees {number} CUDA devices"):
        resolve_device(f"cuda:{number}")


def test_automatic_device_exists() -> None:
    assert resolve_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")
    assert resolve_device("cpu") == CPU


def test_automatic_dtype_is_float32_for_small_models_on_a_cpu() -> None:
    assert resolve_dtype("auto", CPU, 5_000_000) == torch.float32


@pytest.mark.parametrize("computes", [True, False])
def test_automatic_dtype_of_large_models_follows_the_processor(
    computes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"):
        monkeypatch.setattr(torch.cpu, name, lambda: computes)
    wanted = torch.bfloat16 if computes else torch.float32
    assert resolve_dtype("auto", CPU, 600_000_000) == wanted


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float64"])
def test_named_dtype_is_taken(name: str) -> None:
    assert resolve_dtype(name, CPU, 5_000_000) == getattr(torch, name)


def test_unknown_dtype_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="dtype is 'float16'; use 'auto', 'float32'"):
        resolve_dtype("float16", CPU, 5_000_000)


def test_free_memory_is_a_plausible_number() -> None:
    assert 2**24 < free_memory_bytes(CPU) < 2**46
