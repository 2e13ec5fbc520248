"""`dlite-agent doctor [MODEL]`: what this machine can do, how a model fits. Reads configs only."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import platform
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from dlite_agent.cli.console import size, write
from dlite_agent.errors import ConfigurationError, DLiteError

if TYPE_CHECKING:
    import torch

    from dlite_agent.models.target import TargetConfig

__all__ = [
    "MachineReport",
    "ModelReport",
    "add_arguments",
    "inspect_machine",
    "inspect_model",
    "run",
]

GIB = 1024**3
PACKAGES = (
    "dlite-agent",
    "torch",
    "transformers",
    "tokenizers",
    "langchain-core",
    "litellm",
    "llguidance",
)
SPARE_SHARE = 0.1
"""Share of the memory that is left to activations and the rest of the process."""


@dataclass(frozen=True, slots=True)
class MachineReport:
    """What this machine has.

    Attributes:
        versions: Package versions; None where one is not installed.
        device: Where `device="auto"` would compute.
        dtypes: Types that it computes in; each may be asked for as `dtype=`.
        free_bytes: Memory of the device that is free now.
        threads: Compute threads.
        read_bandwidth_bytes_s: Measured: best of several sums over a buffer larger than the caches.
        warnings: For a person, each with an action.
    """

    versions: dict[str, str | None]
    device: str
    dtypes: list[str]
    free_bytes: int
    threads: int
    read_bandwidth_bytes_s: float
    warnings: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class ModelReport:
    """Whether and how a model fits.

    Attributes:
        model: As asked for.
        supported: Whether this version runs it.
        refusal: Why not, and what to do; None when supported.
        architecture: The checkpoint's own name for it.
        parameters: Number of weights, from the config's shapes.
        weight_bytes: At `dtype`.
        kv_bytes_per_token: At `dtype`.
        dtype: What the sizes are for.
        context_that_fits: Tokens of KV beside the weights, of the rope limit at most; 0 when the
            weights do not fit.
        rope_limit: `max_position_embeddings`.
        advice: For a person.
        drafters: What may be named as `drafter=`, and what each is.
    """

    model: str
    supported: bool
    refusal: str | None = None
    architecture: str = ""
    parameters: int = 0
    weight_bytes: int = 0
    kv_bytes_per_token: int = 0
    dtype: str = ""
    context_that_fits: int = 0
    rope_limit: int = 0
    advice: list[str] = field(default_factory=list)
    drafters: dict[str, str] = field(default_factory=dict)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    parser.add_argument(
        "model", nargs="?", help="nano, a folder in the Hugging Face layout, or a hub name"
    )
    parser.add_argument(
        "--vram", type=float, metavar="GIB", help="plan for a device with this much memory"
    )
    parser.add_argument("--dtype", default="auto", choices=("auto", "float32", "bfloat16"))
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Print the reports; 0 when the model, if one was named, is supported."""
    if arguments.vram is not None and arguments.vram <= 0:
        raise ConfigurationError(
            f"--vram is {arguments.vram!r}; name the device's memory in GiB, e.g. --vram 24"
        )
    machine = inspect_machine()
    model = None
    if arguments.model is not None:
        memory = machine.free_bytes if arguments.vram is None else int(arguments.vram * GIB)
        model = inspect_model(arguments.model, dtype=arguments.dtype, memory_bytes=memory)
    if arguments.json:
        write(
            json.dumps(
                {"machine": asdict(machine), "model": asdict(model) if model else None}, indent=2
            )
        )
    else:
        _print_machine(machine)
        if model is not None:
            _print_model(model)
    return 0 if model is None or model.supported else 1


def inspect_machine() -> MachineReport:
    """Look at packages, device and memory, and measure the read bandwidth (about half a second)."""
    versions = {name: _version(name) for name in PACKAGES}
    versions["python"] = platform.python_version()
    if importlib.util.find_spec("torch") is None:
        raise ConfigurationError("torch is not installed; run: pip install dlite-agent")
    import torch

    from dlite_agent.models.device import free_memory_bytes, resolve_device

    device = resolve_device("auto")
    warnings = []
    if device.type == "cuda":
        warnings.append("CUDA has not been tested with this version; please report what you see")
    return MachineReport(
        versions=versions,
        device=torch.cuda.get_device_name() if device.type == "cuda" else (_processor() or "cpu"),
        dtypes=_dtypes(device),
        free_bytes=free_memory_bytes(device),
        threads=torch.get_num_threads(),
        read_bandwidth_bytes_s=_read_bandwidth(device),
        warnings=warnings,
    )


def inspect_model(name: str, *, dtype: str, memory_bytes: int) -> ModelReport:
    """Read a model's config (never its weights) and say what it takes.

    Args:
        name: As for `EngineConfig.model`.
        dtype: As for `EngineConfig.dtype`.
        memory_bytes: Memory to plan for.
    """
    import torch

    from dlite_agent.models.device import resolve_device, resolve_dtype
    from dlite_agent.models.weights import read_config

    try:
        config = read_config(name)
    except DLiteError as error:
        return ModelReport(model=name, supported=False, refusal=str(error))
    parameters = _num_parameters(config)
    weight_type = resolve_dtype(dtype, resolve_device("auto"), parameters)
    itemsize = torch.empty(0, dtype=weight_type).element_size()
    per_token = config.kv_bytes_per_token(itemsize)
    room = int(memory_bytes * (1 - SPARE_SHARE)) - parameters * itemsize
    fits = max(0, min(room // per_token, config.max_position_embeddings))
    return ModelReport(
        model=name,
        supported=True,
        architecture=config.architecture,
        parameters=parameters,
        weight_bytes=parameters * itemsize,
        kv_bytes_per_token=per_token,
        dtype=str(weight_type).removeprefix("torch."),
        context_that_fits=fits,
        rope_limit=config.max_position_embeddings,
        advice=_advice(config, room, fits),
        drafters={
            "auto": "lookup, since no DLite drafter is known for this checkpoint",
            "lookup": "copies what the session has seen",
            "null": "plain decoding, one token per forward",
        },
    )


def _advice(config: TargetConfig, room: int, fits: int) -> list[str]:
    limit = config.max_position_embeddings
    advice = []
    if room <= 0:
        advice.append(
            "the weights alone do not fit: choose a smaller model or a device with more memory"
        )
    elif fits < limit:
        advice.append(
            f"memory ends before the rope limit: {fits} of {limit} tokens; "
            f"max_context={fits} says so early"
        )
    advice.append(
        f"the rope limit is {limit} tokens (max_position_embeddings of the checkpoint), which "
        "max_context cannot raise: a longer context needs a checkpoint trained for it, or rope "
        "scaling (yarn), which this version does not support"
    )
    return advice


def _num_parameters(config: TargetConfig) -> int:
    """Weights of a dense decoder with q/k norms, from its shapes."""
    heads = config.num_heads * config.head_dim
    kv_heads = config.num_kv_heads * config.head_dim
    attention = config.hidden_size * (2 * heads + 2 * kv_heads) + 2 * config.head_dim
    layer = attention + 3 * config.hidden_size * config.intermediate_size + 2 * config.hidden_size
    embeddings = config.vocab_size * config.hidden_size * (1 if config.tie_word_embeddings else 2)
    return config.num_layers * layer + embeddings + config.hidden_size


def _read_bandwidth(device: torch.device) -> float:
    import torch

    buffer = torch.ones(256 * 1024**2 // 4, dtype=torch.float32, device=device)
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        buffer.sum().item()
        best = min(best, time.perf_counter() - start)
    return buffer.numel() * buffer.element_size() / best


def _dtypes(device: torch.device) -> list[str]:
    from dlite_agent.models.device import resolve_dtype

    large = 10**12
    return (
        ["float32", "float64", "bfloat16"]
        if "bfloat16" in str(resolve_dtype("auto", device, large))
        else ["float32", "float64"]
    )


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor()


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _print_machine(report: MachineReport) -> None:
    write(f"python       {sys.version.split()[0]} on {platform.system()} {platform.machine()}")
    for name in PACKAGES:
        write(f"{name:<12} {report.versions[name] or 'not installed'}")
    write(f"device       {report.device}, {report.threads} threads")
    write(f"memory       {size(report.free_bytes)} free")
    write(f"dtypes       {', '.join(report.dtypes)}")
    write(f"bandwidth    {report.read_bandwidth_bytes_s / 1e9:.1f} GB/s read, measured")
    for warning in report.warnings:
        write(f"warning      {warning}")


def _print_model(report: ModelReport) -> None:
    write("")
    write(f"model        {report.model}")
    if not report.supported:
        write(f"refused      {report.refusal}")
        return
    write(f"architecture {report.architecture}, {report.parameters / 1e6:,.1f}M parameters")
    write(f"weights      {size(report.weight_bytes)} in {report.dtype}")
    write(f"KV           {report.kv_bytes_per_token:,} bytes a token")
    write(f"context      {report.context_that_fits:,} tokens fit; rope limit {report.rope_limit:,}")
    for name, what in report.drafters.items():
        write(f"drafter      {name}: {what}")
    for line in report.advice:
        write(f"advice       {line}")
