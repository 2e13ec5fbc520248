"""Which device and type a target uses, and how much memory is free there."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import torch

from dlite_agent.errors import ConfigurationError

__all__ = ["device_name", "free_memory_bytes", "processor_name", "resolve_device", "resolve_dtype"]

_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float64": torch.float64,
}
_SMALL_NUM_WEIGHTS = 32_000_000
"""Up to here float32 beats bfloat16 on a CPU: a packed bf16 product takes 20 µs to start."""


def resolve_device(name: str) -> torch.device:
    """The device that `EngineConfig.device` names; `"auto"` is CUDA where there is one.

    Raises:
        ConfigurationError: There is no such device, or it is not supported.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigurationError(
            f"device is {name!r}; use 'auto', 'cpu', 'cuda' or 'cuda:N'"
        ) from None
    if device.type not in ("cpu", "cuda"):
        raise ConfigurationError(f"device is {name!r}; use 'auto', 'cpu', 'cuda' or 'cuda:N'")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigurationError(
            f"device is {name!r}, but torch {torch.__version__} sees {torch.cuda.device_count()} "
            "CUDA devices; use device='cpu' or install a CUDA build of torch"
        )
    return device


def resolve_dtype(name: str, device: torch.device, num_weights: int) -> torch.dtype:
    """The type that `EngineConfig.dtype` names.

    `"auto"` is bfloat16 where the device computes in it, else float32; on a CPU also float32 for
    models so small that it is faster there.

    Raises:
        ConfigurationError: Nothing has this name.
    """
    if name in _DTYPES:
        return _DTYPES[name]
    if name != "auto":
        raise ConfigurationError(f"dtype is {name!r}; use 'auto', {', '.join(map(repr, _DTYPES))}")
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float32
    computes_bf16 = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return torch.bfloat16 if computes_bf16 and num_weights > _SMALL_NUM_WEIGHTS else torch.float32


def device_name(device: torch.device) -> str:
    """The GPU or the processor as it calls itself."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else processor_name()


def processor_name() -> str:
    """The processor as it calls itself, or what Python knows of it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())


def free_memory_bytes(device: torch.device) -> int:
    """Bytes that can be allocated now: of the GPU, or of this machine and its control group."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    free = [_available_bytes()]
    limit, used = (_read_number(f"/sys/fs/cgroup/memory.{name}") for name in ("max", "current"))
    if limit is not None and used is not None:
        free.append(max(0, limit - used))
    return min(free)


def _available_bytes() -> int:
    """`MemAvailable` on Linux, elsewhere half of the memory."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))


def _read_number(path: str) -> int | None:
    try:
        return int(Path(path).read_text(encoding="ascii"))
    except (OSError, ValueError):  # not Linux, or "max" for no limit
        return None
