"""What lower precision costs in quality: perplexity, and how often the best token stays so."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from dlite_agent.bench.report import BenchResult, conditions
from dlite_agent.config import Quantization
from dlite_agent.engine.tasks import Progress, unheard
from dlite_agent.errors import ConfigurationError
from dlite_agent.models.transformer import DenseTransformer
from dlite_agent.models.weights import (
    fingerprint,
    load_target,
    resolve_checkpoint,
    stored_format,
)
from dlite_agent.tokenizer import load_tokenizer

__all__ = ["bench_quality"]

_WINDOW = 512
_CHUNK = 128  # rows of one forward: logits of a large vocabulary take 0.6 MB a row
_MAX_WINDOWS = 16
_QUICK_WINDOWS = 2
_VARIANTS: tuple[tuple[Literal["float32", "bfloat16"], Quantization | None], ...] = (
    ("bfloat16", None),
    ("bfloat16", "int8"),
    ("float32", None),
)
_ABOUT = (
    "every token of a text given those before it in its window: perplexity = exp of the mean "
    "negative log-probability; to_bfloat16 = over that of bfloat16; agreement = share of tokens "
    "before which the best next token is that of bfloat16"
)


@dataclass(frozen=True, slots=True)
class _Scores:
    """Of each token but the first of its window."""

    log_probabilities: Tensor  # of the text's token, [N] float64
    best: Tensor  # [N] int64


def bench_quality(
    model: str,
    *,
    text: Path | None = None,
    is_quick: bool = False,
    report: Progress = unheard,
) -> BenchResult:
    """Score a text with a model's weights in bfloat16, int8 and float32.

    Args:
        model: As for `EngineConfig.model`.
        text: A file, or a folder of Markdown; None: this project's documentation.
        is_quick: Two windows only.
        report: Hears which weights are scored, and how much of the text is done.

    Raises:
        ConfigurationError: There is no text, or not enough for a window.
    """
    folder = resolve_checkpoint(model)
    source, content = _read(text)
    ids = load_tokenizer(str(folder)).encode_untrusted(content)
    windows = list(_windows(ids, _QUICK_WINDOWS if is_quick else _MAX_WINDOWS))
    if not windows:
        raise ConfigurationError(
            f"{source} has {len(ids)} tokens; a window takes {_WINDOW}, name a longer text"
        )
    found: list[dict[str, str | int | float | None]] = []
    baseline: _Scores | None = None
    device = ""
    for dtype, quantize in _VARIANTS:
        with load_target(model, dtype=dtype, quantize=quantize) as target:
            weight_bytes, device = target.weight_bytes, str(target.device)
            scores = _score(target, windows, partial(report, quantize or dtype))
        baseline = baseline or scores
        perplexity = _perplexity(scores)
        found.append(
            {
                "weights": quantize or dtype,
                "step_bytes": weight_bytes,
                "perplexity": round(perplexity, 4),
                "to_bfloat16": round(perplexity / _perplexity(baseline), 4),
                "agreement": round(float((scores.best == baseline.best).double().mean()), 4),
            }
        )
    told = conditions(
        model=model,
        fingerprint=fingerprint(folder),
        text=source,
        tokens=len(windows) * (_WINDOW - 1),
        windows=len(windows),
        window=_WINDOW,
        stored=stored_format(model) or "safetensors",
        device=device,
    )
    return BenchResult("quality", _ABOUT, told, found)


def _read(text: Path | None) -> tuple[str, str]:
    """What the text is called, and its content."""
    path = Path(__file__).parents[2] / "docs" if text is None else text
    files = sorted(path.rglob("*.md")) if path.is_dir() else [path]
    if not files or not all(file.is_file() for file in files):
        raise ConfigurationError(
            f"there is no text at {str(path)!r}; name a file, or a folder of Markdown, with --text"
        )
    name = "docs/**/*.md of this project" if text is None else text.name
    return name, "\n".join(file.read_text(encoding="utf-8") for file in files)


def _windows(ids: list[int], most: int) -> Iterator[Tensor]:
    """Pieces of the text that do not overlap, evenly spread over it, each [W] int64."""
    count = min(most, len(ids) // _WINDOW)
    for number in range(count):
        start = number * (len(ids) - _WINDOW) // max(1, count - 1)
        yield torch.tensor(ids[start : start + _WINDOW])


def _score(
    target: DenseTransformer, windows: list[Tensor], report: Callable[[float], None]
) -> _Scores:
    log_probabilities, best = [], []
    for number, window in enumerate(windows):
        report(number / len(windows))
        with target.new_cache() as kv:
            for chunk in window.split(_CHUNK):
                start = kv.length
                wanted = window[start + 1 : start + 1 + len(chunk)]  # the last has no successor
                rows = range(len(wanted))
                logits = target.forward(chunk.to(target.device), kv, logits_for=rows).logits.cpu()
                kv.commit(len(chunk))
                chosen = logits.gather(1, wanted[:, None]).squeeze(1).double()
                log_probabilities.append(chosen - logits.double().logsumexp(1))
                best.append(logits.argmax(1))
    return _Scores(torch.cat(log_probabilities), torch.cat(best))


def _perplexity(scores: _Scores) -> float:
    return math.exp(-float(scores.log_probabilities.mean()))
