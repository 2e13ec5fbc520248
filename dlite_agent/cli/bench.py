"""`dlite-agent bench [NAME ...]`: measure, and say under which conditions."""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, cast

from dlite_agent.cli.bench_report import bench_json, bench_text
from dlite_agent.cli.bench_turns import add_turns_arguments, run_turns
from dlite_agent.cli.console import LoadingNote, note, write
from dlite_agent.cli.model_options import add_model_options
from dlite_agent.config import DType, EngineConfig
from dlite_agent.errors import ConfigurationError

if TYPE_CHECKING:
    from dlite_agent.bench.report import BenchResult

__all__ = ["BENCHES", "add_arguments", "run"]


def _step(arguments: argparse.Namespace) -> BenchResult:
    from dlite_agent.bench.step import bench_step

    return bench_step(
        arguments.model,
        dtype=cast(DType, arguments.dtype),
        contexts=[256] if arguments.quick else _numbers("--contexts", arguments.contexts),
        rows=_numbers("--rows", arguments.rows),
        repeats=arguments.repeats,
        with_transformers=not arguments.ours_only,
    )


def _attention(arguments: argparse.Namespace) -> BenchResult:
    from dlite_agent.bench.attention import bench_attention

    return bench_attention(repeats=arguments.repeats, is_quick=arguments.quick)


def _throughput(arguments: argparse.Namespace) -> BenchResult:
    from dlite_agent.bench.throughput import bench_throughput

    with closing(LoadingNote()) as progress:
        return bench_throughput(
            _config(arguments),
            concurrency=_numbers("--concurrency", arguments.concurrency),
            repeats=max(1, arguments.repeats // 5),
            is_quick=arguments.quick,
            report=progress,
        )


def _decode(arguments: argparse.Namespace) -> BenchResult:
    from dlite_agent.bench.decode import bench_decode

    with closing(LoadingNote()) as progress:
        return bench_decode(
            _config(arguments),
            repeats=max(1, arguments.repeats // 4),
            is_quick=arguments.quick,
            transcripts=arguments.transcripts,
            synthetic_acceptance=arguments.synthetic_acceptance,
            report=progress,
        )


def _acceptance(arguments: argparse.Namespace) -> BenchResult:
    from dlite_agent.bench.acceptance import AcceptanceOptions, bench_acceptance
    from dlite_agent.bench.acceptance_figures import read_result
    from dlite_agent.bench.acceptance_plots import plot_acceptance

    if arguments.from_csv is not None:
        result = read_result(arguments.from_csv)
    else:
        options = AcceptanceOptions(
            suite=arguments.suite,
            drafters=arguments.drafters.split(",") if arguments.drafters else (),
            temperature=arguments.temperature,
            seed=arguments.seed,
            max_tokens=arguments.max_tokens,
            is_quick=arguments.quick,
        )
        kind = cast(DType, arguments.dtype)
        result = bench_acceptance(arguments.model, dtype=kind, options=options)
    if arguments.plots is not None:
        for path in plot_acceptance(result.samples, arguments.plots):
            note(f"wrote {path}")
    return result


def _history(arguments: argparse.Namespace) -> BenchResult:
    from dlite_agent.bench.history import HISTORIES, bench_history, plot_history

    result = bench_history(
        "random-20M" if arguments.model == "nano" else arguments.model,
        dtype=arguments.dtype,
        histories=HISTORIES[:2] if arguments.quick else HISTORIES,
        repeats=arguments.repeats,
    )
    if arguments.plots is not None:
        note(f"wrote {plot_history(result.rows, arguments.plots)}")
    return result


def _replay(arguments: argparse.Namespace) -> BenchResult:
    from dlite_agent.bench.replay import bench_replay

    return bench_replay(
        arguments.tokenizer or arguments.model,
        transcripts=arguments.transcripts,
        is_quick=arguments.quick,
    )


def _config(arguments: argparse.Namespace) -> EngineConfig:
    """The model that is measured as its engine would run it."""
    return EngineConfig(
        model=arguments.model,
        dtype=cast(DType, arguments.dtype),
        quantize=arguments.quantize,
        rope_scaling=arguments.rope_scaling,
    )


def _numbers(option: str, text: str) -> list[int]:
    """Whole numbers from text such as `1,4,16`."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ConfigurationError(
            f"{option} is {text!r}; use whole numbers with commas, e.g. 1,4,16"
        ) from None


def _quality(arguments: argparse.Namespace) -> BenchResult:
    from dlite_agent.bench.quality import bench_quality

    with closing(LoadingNote()) as progress:
        return bench_quality(
            arguments.model, text=arguments.text, is_quick=arguments.quick, report=progress
        )


def _overhead(arguments: argparse.Namespace) -> BenchResult:
    from dlite_agent.bench.overhead import bench_overhead

    with closing(LoadingNote()) as progress:
        return bench_overhead(
            _config(arguments),
            concurrency=_numbers("--concurrency", arguments.concurrency),
            repeats=arguments.repeats,
            is_quick=arguments.quick,
            report=progress,
        )


def _restore(arguments: argparse.Namespace) -> BenchResult:
    from dlite_agent.bench.restore import bench_restore

    num_tokens, repeats = arguments.tokens, max(1, arguments.repeats // 4)
    with closing(LoadingNote()) as progress:
        return bench_restore(_config(arguments), num_tokens, repeats, report=progress)


BENCHES: Mapping[str, tuple[str, Callable[[argparse.Namespace], BenchResult]]] = {
    "step": ("a decode step against transformers' and the time to read the weights", _step),
    "decode": ("tokens a second with each drafter, over those without drafts", _decode),
    "acceptance": ("how far each drafter is accepted: fresh, forked and restored", _acceptance),
    "history": ("a round behind 100 to 30,000 tokens, with a random model and drafter", _history),
    "replay": ("drafts that transcripts would have accepted; no model computes", _replay),
    "turns": (
        "rows that each turn of a transcript computes: clients by modes",
        lambda arguments: run_turns(arguments, _config(arguments)),
    ),
    "throughput": ("turns at once, with and without drafts, and how long each waits", _throughput),
    "restore": ("a session that comes back from disk against its prefill", _restore),
    "overhead": ("what drafting costs on random text and prose: paired runs", _overhead),
    "quality": ("perplexity and agreement of int8 and float32 with bfloat16", _quality),
    "attention": ("why each shape of attention takes its path", _attention),
}
"""Name → what it measures, and how."""
_ENGINE_BENCHES = ("decode", "turns", "throughput", "restore", "overhead")
"""Those that load a model as an engine does."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    listed = "; ".join(f"{name}: {about}" for name, (about, _) in BENCHES.items())
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"{listed} (default: all)")
    parser.add_argument(
        "--model", default="nano", help="nano, smollm2, a folder, a GGUF file or a hub name"
    )
    parser.add_argument(
        "--dtype",
        default="auto",
        choices=("auto", "float32", "bfloat16", "float64"),
        help="for all but attention, quality and replay, which take what they compare",
    )
    add_model_options(parser)
    parser.add_argument(
        "--repeats",
        type=int,
        default=20,
        help="timed calls a figure; a fifth for throughput, a quarter for decode and restore",
    )
    parser.add_argument(
        "--concurrency",
        default="1,4,16",
        help="for throughput and overhead: turns at once (default: 1,4,16)",
    )
    parser.add_argument(
        "--contexts", default="128,1024,8192", help="for step: cached rows (default: 128,1024,8192)"
    )
    parser.add_argument("--rows", default="1,8", help="for step: rows a forward (default: 1,8)")
    parser.add_argument("--ours-only", action="store_true", help="for step: without transformers")
    parser.add_argument(
        "--transcripts",
        type=Path,
        nargs="+",
        action="extend",
        default=[],
        metavar="PATH",
        help="for decode, turns and replay: files in OpenAI's form, folders of *.json (default: a "
        "built-in one)",
    )
    parser.add_argument(
        "--tokenizer", help="for replay: a folder with a tokenizer (default: the model's)"
    )
    parser.add_argument(
        "--synthetic-acceptance",
        type=float,
        metavar="X",
        help="for decode: also a drafter that knows the text and is right with this chance",
    )
    parser.add_argument("--tokens", type=int, default=2000, help="for restore (default: 2000)")
    _add_acceptance_arguments(parser)
    add_turns_arguments(parser)
    parser.add_argument("--threads", type=int, help="compute threads; default: torch's")
    parser.add_argument(
        "--text",
        type=Path,
        metavar="PATH",
        help="for quality: a file or a folder of Markdown (default: this project's docs)",
    )
    _add_form_arguments(parser)


def _add_form_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--quick", action="store_true", help="a few small shapes only")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--csv", type=Path, metavar="FOLDER", help="also write FOLDER/NAME.csv")


def _add_acceptance_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("acceptance")
    group.add_argument(
        "--suite",
        type=Path,
        metavar="FILE.jsonl",
        help='a line is {"messages": [...], "tools": [...]} or {"prompt": "..."}; every message of '
        "an assistant is answered again (default: agents on held-out tasks, for nano)",
    )
    group.add_argument(
        "--drafters",
        metavar="A,B",
        help="names or folders (default: suffix, dlite where the checkpoint has one, auto)",
    )
    group.add_argument("--temperature", type=float, default=0.0, help="default: 0, greedy")
    group.add_argument("--seed", type=int, default=0, help="of the noise")
    group.add_argument("--max-tokens", type=int, default=256, help="of an answer (default: 256)")
    group.add_argument(
        "--plots", type=Path, metavar="FOLDER", help="also write PNG files; of history, turns too"
    )
    group.add_argument(
        "--from-csv", type=Path, metavar="FILE", help="measure nothing; read what --csv wrote"
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the benches that are named, all by default."""
    names = arguments.names or list(BENCHES)
    _check(arguments, names)
    if arguments.threads is not None:
        import torch

        torch.set_num_threads(arguments.threads)
    for option, folder in (("--csv", arguments.csv), ("--plots", arguments.plots)):
        if folder is not None:
            _make_folder(option, folder)
    results = []
    for name in names:
        result = BENCHES[name][1](arguments)
        results.append(result)
        if arguments.csv is not None:
            note(f"wrote {result.write_csv(arguments.csv)}")
        if not arguments.json:
            write(bench_text(result) + "\n")
    if arguments.json:
        write(json.dumps(bench_json(results)))
    return 0


def _make_folder(option: str, folder: Path) -> None:
    """Make the folder before anything is measured for it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigurationError(
            f"{option} is {str(folder)!r}: {error.strerror}; name a folder that can be written"
        ) from error


def _check(arguments: argparse.Namespace, names: list[str]) -> None:
    """Refuse what would be ignored, before anything is measured."""
    unknown = [name for name in names if name not in BENCHES]
    if unknown:
        raise ConfigurationError(
            f"there is no bench {unknown[0]!r}; use one of {', '.join(map(repr, BENCHES))}"
        )
    for path in arguments.transcripts:
        if not path.exists():
            advice = "name benches before --transcripts" if str(path) in BENCHES else "name another"
            raise ConfigurationError(f"--transcripts: there is no {str(path)!r}; {advice}")
    for name in ("repeats", "threads", "tokens", "bfcl_limit"):
        value = getattr(arguments, name)
        if value is not None and value < 1:
            option = name.replace("_", "-")
            raise ConfigurationError(f"--{option} is {value}; use at least 1")
    for name in ("quantize", "rope_scaling"):
        others = [bench for bench in names if bench not in _ENGINE_BENCHES]
        if getattr(arguments, name) is not None and others:
            raise ConfigurationError(
                f"--{name.replace('_', '-')} changes nothing in {others[0]!r}; use it with "
                f"{', '.join(_ENGINE_BENCHES)}"
            )
