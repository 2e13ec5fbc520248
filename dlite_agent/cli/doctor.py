"""`dlite-agent doctor [MODEL] [TRANSCRIPT...]`: this machine, a model, or recorded requests.

Of a model by its config, and of requests by the model's tokenizer: no weights are read.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import platform
import shutil
import sys
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

from dlite_agent.cli.console import size, styled, write
from dlite_agent.cli.model_report import ModelReport, inspect_model
from dlite_agent.cli.transcript_report import (
    as_json,
    inspect_transcripts,
    is_transcript,
    print_transcripts,
)
from dlite_agent.config import EngineConfig
from dlite_agent.errors import ConfigurationError, MissingDependencyError

if TYPE_CHECKING:
    import torch

__all__ = ["MachineReport", "add_arguments", "inspect_machine", "run"]

_GIB = 1024**3
_PACKAGES = (
    "dlite-agent",
    "torch",
    "transformers",
    "tokenizers",
    "langchain-core",
    "langchain",
    "litellm",
    "llguidance",
    "gguf",
    "fastapi",
    "uvicorn",
)


@dataclass(frozen=True, slots=True)
class MachineReport:
    """What this machine has.

    Attributes:
        versions: Package versions; None where one is not installed.
        device: Where `device="auto"` computes.
        processor: Name of the device.
        dtypes: Types that it computes in at speed; each may be asked for as `dtype=`.
        free_bytes: Memory of the device that is free now.
        threads: Compute threads that torch would use, and with which the bandwidth was measured.
        read_bandwidth_bytes_s: See `bench.machine.read_bandwidth`.
        compiler: Compiles the row kernels of a CPU; None where torch's operators have to do.
        cache_folder: Where kernels, cost tables and, if asked for, sessions are kept; None where
            there is none.
        warnings: For a person, each with an action.
    """

    versions: dict[str, str | None]
    device: str
    processor: str
    dtypes: list[str]
    free_bytes: int
    threads: int
    read_bandwidth_bytes_s: float
    compiler: str | None = None
    cache_folder: str | None = None
    warnings: list[str] = field(default_factory=list)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    parser.add_argument(
        "names",
        nargs="*",
        metavar="MODEL|TRANSCRIPT",
        help="nano, a folder in the Hugging Face layout, a GGUF file, or a hub name; and files of "
        "recorded requests (*.json, *.jsonl), which cost what this says",
    )
    parser.add_argument(
        "--vram", type=float, metavar="GIB", help="plan for a GPU with this much free memory"
    )
    parser.add_argument(
        "--dtype",
        default="auto",
        choices=("auto", "float32", "bfloat16", "float64"),
        help="of weights and KV",
    )
    parser.add_argument(
        "--quantize", choices=("int8",), help="plan for weights that are quantized at load"
    )
    parser.add_argument(
        "--rope-scaling", metavar="JSON", help="plan for stretched positions, as in config.json"
    )
    parser.add_argument(
        "--history",
        default="auto",
        choices=("auto", "as_generated", "template"),
        help="how the transcripts' earlier answers come back",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Print the reports; 0 when the model, if one was named, can run. Transcripts go alone."""
    vram = arguments.vram
    if vram is not None and not 0 < vram < float("inf"):
        raise ConfigurationError(
            f"--vram is {vram!r}; name the device's memory in GiB, e.g. --vram 24"
        )
    _check_options(arguments)
    if importlib.util.find_spec("torch") is None:
        raise MissingDependencyError("torch is not installed; run: pip install dlite-agent")
    named = [name for name in arguments.names if not is_transcript(name)]
    paths = [name for name in arguments.names if is_transcript(name)]
    if len(named) > 1:
        raise ConfigurationError(f"{named!r} are several models; name one, and *.json or *.jsonl")
    if paths:
        reports = inspect_transcripts(paths, named[0] if named else "nano", arguments.history)
        if arguments.json:
            write(json.dumps({"transcripts": as_json(reports)}, indent=2))
        else:
            print_transcripts(reports)
        return 0
    model = None
    if named:
        config = EngineConfig(
            model=named[0],
            dtype=arguments.dtype,
            quantize=arguments.quantize,
            rope_scaling=arguments.rope_scaling,
        )
        model = _inspect_model(config, vram)
    machine = inspect_machine()
    if arguments.json:
        verdict = None if model is None else asdict(model) | {"runs_here": model.runs_here}
        found = {"machine": asdict(machine), "model": verdict}
        write(json.dumps(found, indent=2))
    else:
        _print_machine(machine)
        if model is not None:
            _print_model(model)
    return 0 if model is None or model.runs_here else 1


def _check_options(arguments: argparse.Namespace) -> None:
    """Refuse an option that would do nothing."""
    are_transcripts = any(is_transcript(name) for name in arguments.names)
    given = {
        "--vram": arguments.vram is not None,
        "--dtype": arguments.dtype != "auto",
        "--quantize": arguments.quantize is not None,
        "--rope-scaling": arguments.rope_scaling is not None,
    }
    idle = [option for option, is_given in given.items() if is_given]
    if idle and are_transcripts:
        raise ConfigurationError(f"{idle[0]} says nothing of transcripts; leave it out")
    if idle and not arguments.names:
        raise ConfigurationError(f"{idle[0]} plans for a model; name one: doctor MODEL {idle[0]} …")
    if arguments.history != "auto" and not are_transcripts:
        raise ConfigurationError("--history is for transcripts; name files *.json or *.jsonl")


def inspect_machine() -> MachineReport:
    """Look at packages, device and memory, and measure the read bandwidth (about a second)."""
    import torch

    from dlite_agent.bench.machine import (
        BUFFER_BYTES,
        package_version,
        processor_name,
        read_bandwidth,
    )
    from dlite_agent.models.device import free_memory_bytes, resolve_device

    device = resolve_device("auto")
    is_cuda = device.type == "cuda"
    free_bytes = free_memory_bytes(device)  # before the bandwidth's buffer takes some
    versions: dict[str, str | None] = {"python": platform.python_version()}
    versions |= {name: package_version(name) for name in _PACKAGES}
    compiler = shutil.which("gcc") if sys.platform == "linux" else None
    cache = EngineConfig().cache_folder()
    return MachineReport(
        versions=versions,
        device=str(device),
        processor=torch.cuda.get_device_name(device) if is_cuda else processor_name(),
        dtypes=_dtypes(device),
        free_bytes=free_bytes,
        threads=torch.get_num_threads(),
        read_bandwidth_bytes_s=read_bandwidth(
            device, buffer_bytes=min(BUFFER_BYTES, free_bytes // 8)
        ),
        compiler=compiler,
        cache_folder=None if cache is None else str(cache),
        warnings=_warnings(versions, compiler, is_cuda=is_cuda),
    )


def _inspect_model(config: EngineConfig, vram: float | None) -> ModelReport:
    if vram is not None:
        return inspect_model(config, memory_bytes=int(vram * _GIB), is_planned=True)
    from dlite_agent.models.device import free_memory_bytes, resolve_device

    memory_bytes = free_memory_bytes(resolve_device(config.device))
    return inspect_model(config, memory_bytes=memory_bytes)


def _dtypes(device: torch.device) -> list[str]:
    from dlite_agent.models.device import resolve_dtype

    large = 10**12  # weights; small models have a type of their own
    fast = str(resolve_dtype("auto", device, large)).removeprefix("torch.")
    return list(dict.fromkeys([fast, "float32", "float64"]))


def _warnings(versions: dict[str, str | None], compiler: str | None, *, is_cuda: bool) -> list[str]:
    warnings = []
    if compiler is None and not is_cuda:
        warnings.append("no gcc: decoding is slower without compiled kernels; install gcc")
    if is_cuda:
        warnings.append("CUDA has not been tested with this version; please report what you see")
    if versions["langchain"] is None:
        warnings.append('the demo needs langchain; run: pip install "dlite-agent[demo]"')
    if versions["fastapi"] is None or versions["uvicorn"] is None:
        warnings.append('serve and run need more; run: pip install "dlite-agent[server]"')
    return warnings


def _print_machine(report: MachineReport) -> None:
    for name, version in report.versions.items():
        _line(name, version or "not installed")
    _line("device", f"{report.device}: {report.processor}")
    _line("memory", f"{size(report.free_bytes)} free")
    _line("dtypes", ", ".join(report.dtypes))
    bandwidth = report.read_bandwidth_bytes_s / 1e9
    threads = "thread" if report.threads == 1 else "threads"
    _line("bandwidth", f"{bandwidth:.1f} GB/s read, measured with {report.threads} {threads}")
    _line("compiler", report.compiler or "none")
    _line("cache", report.cache_folder or "none")
    for warning in report.warnings:
        _line("warning", warning, "yellow")


def _print_model(report: ModelReport) -> None:
    write()
    _line("model", report.model)
    if not report.supported:
        _line("refused", report.refusal or "", "red")
        return
    _line("architecture", f"{report.architecture}, {report.parameters / 1e6:,.1f}M parameters")
    kind = f"{report.quantize} (computed in {report.dtype})" if report.quantize else report.dtype
    stored = f", dequantised from {report.stored}" if report.stored else ""
    _line("weights", f"{size(report.weight_bytes)} in {kind}{stored}")
    _line("KV", f"{report.kv_bytes_per_token:,} bytes a token")
    _line(
        "context",
        f"{report.context_that_fits:,} tokens fit into {size(report.memory_bytes)}; "
        f"rope limit {report.rope_limit:,}",
    )
    if report.rope_scaling:
        _line("rope scaling", report.rope_scaling)
    for name, what in report.drafters.items():
        _line("drafter", what if what.startswith(name) else f"{name}: {what}")
    for advice in report.advice:
        _line("advice", advice)


def _line(name: str, text: str, style: str = "") -> None:
    write(f"{styled(f'{name:<14}', 'bold')} {styled(text, style)}")
