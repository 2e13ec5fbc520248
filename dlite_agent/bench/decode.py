"""Decoding with each drafter against decoding without, on texts of three kinds.

A text is given (`TextSampler`): an agent's transcript, prose, or random ids. All drafters decode
the same answers behind the same prompts, one after the other, in another order at every repeat;
only the decoding is timed. Drafters that are named draft whatever they find; `auto` weighs costs.

With `synthetic_acceptance` one more drafter knows the text and errs: each token that it proposes is
right with that probability. It separates the engine from the drafter: what an acceptance is worth
on this machine, whoever reaches it. It is no drafter that anybody could use.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from pydoc_data.topics import topics

from dlite_agent.bench.given_text import TextSampler
from dlite_agent.bench.machine import bench_clock
from dlite_agent.bench.report import BenchResult, Value, conditions
from dlite_agent.bench.transcripts import built_in_transcripts, load_transcripts
from dlite_agent.config import EngineConfig
from dlite_agent.decoding.load import Load
from dlite_agent.decoding.stopping import StopRules
from dlite_agent.drafters.drafter import Drafter
from dlite_agent.engine.drafting import make_drafter
from dlite_agent.engine.loading import load_engine_target
from dlite_agent.engine.tasks import Progress, unheard
from dlite_agent.errors import ConfigurationError
from dlite_agent.models.transformer import DenseTransformer
from dlite_agent.models.weights import resolve_checkpoint
from dlite_agent.sessions.session import Session
from dlite_agent.testing import NoisyDrafter
from dlite_agent.tokenizer import CheckpointTokenizer, load_tokenizer

__all__ = ["DRAFTERS", "bench_decode"]

DRAFTERS = ("null", "lookup", "suffix", "auto")
_NUM_PROMPT, _NUM_ANSWER = 256, 256
_QUICK_PROMPT, _QUICK_ANSWER = 64, 32
_SYNTHETIC_BLOCK = 7
_TEXT_S = 75.0
_ABOUT = (
    "the text is given, so tau is that of a target that writes it; tau = committed tokens a round, "
    "the prefill's left out; rows_per_token = rows verified for each; to_null = tokens a second "
    "over those without drafts, median of interleaved repeats, low and high the extremes; "
    "synthetic: knows the text and errs at a stated rate"
)


@dataclass(frozen=True, slots=True)
class _Text:
    """Ids of a session, and [start, stop) of what is decoded; the rest is prefilled."""

    token_ids: tuple[int, ...]
    answers: tuple[tuple[int, int], ...]


@dataclass(slots=True)
class _Figures:
    """What one drafter did with one kind of text, by repeat."""

    decode_s: list[float] = field(default_factory=list)
    num_tokens: int = 0
    num_rounds: int = 0
    num_rows: int = 0


Make = Callable[[_Text], Drafter]


def bench_decode(
    config: EngineConfig,
    *,
    repeats: int = 10,
    is_quick: bool = False,
    transcripts: Sequence[Path] = (),
    synthetic_acceptance: float | None = None,
    report: Progress = unheard,
) -> BenchResult:
    """Measure every drafter on every kind of text.

    Args:
        config: Names the model; its drafter is not used.
        repeats: Interleaved runs; fewer where those of a text take longer than 75 seconds.
        is_quick: Short texts, one answer of one transcript.
        transcripts: Files in OpenAI's form, and folders of `*.json`; none: a built-in one.
        synthetic_acceptance: Chance of each token of the synthetic drafter; None: without it.
        report: Hears which text is measured, and how much of it is done.

    Raises:
        ConfigurationError: The chance is none, or there is no transcript.
    """
    if synthetic_acceptance is not None and not 0.0 <= synthetic_acceptance <= 1.0:
        raise ConfigurationError(
            f"synthetic_acceptance is {synthetic_acceptance!r}; use a chance between 0 and 1"
        )
    folder = resolve_checkpoint(config.model, config.revision)
    rows: list[dict[str, Value]] = []
    with load_engine_target(config, unheard) as target:
        makes = _makes(config, target, synthetic_acceptance)
        tokenizer = load_tokenizer(str(folder))
        for kind, texts in _texts(tokenizer, target.config.vocab_size, transcripts, is_quick):
            rows += _measured(kind, _Run(target, makes, texts), repeats, report)
        told = conditions(
            model=config.model,
            fingerprint=target.fingerprint,
            dtype=str(target.dtype).removeprefix("torch."),
            device=str(target.device),
            concurrency=1,
            sampling="greedy, then the text's token",
            transcripts="given" if transcripts else "built-in",
            synthetic_acceptance=synthetic_acceptance,
            synthetic_block=None if synthetic_acceptance is None else _SYNTHETIC_BLOCK,
            warmup=1,
            repeats=f"{repeats}, or what 75 seconds allow",
        )
    return BenchResult("decode", _ABOUT, told, rows)


def _makes(
    config: EngineConfig, target: DenseTransformer, synthetic: float | None
) -> dict[str, Make]:
    def named(name: str) -> Make:
        drafter = make_drafter(replace(config, drafter=name), target, Load(), unheard)
        return lambda _: drafter

    makes = {name: named(name) for name in DRAFTERS}
    if synthetic is not None:
        makes[f"synthetic({synthetic:g})"] = lambda text: NoisyDrafter(
            text.token_ids,
            vocab_size=target.config.vocab_size,
            error_rate=1.0 - synthetic,
            max_block=_SYNTHETIC_BLOCK,
        )
    return makes


def _texts(
    tokenizer: CheckpointTokenizer, vocab_size: int, transcripts: Sequence[Path], is_quick: bool
) -> list[tuple[str, list[_Text]]]:
    """An agent's sessions, a passage of Python's language reference, and random ids."""
    found = load_transcripts(transcripts, tokenizer) or built_in_transcripts(tokenizer)
    agent = [_Text(one.token_ids, one.answers[:1] if is_quick else one.answers) for one in found]
    num_prompt = _QUICK_PROMPT if is_quick else _NUM_PROMPT
    length = num_prompt + (_QUICK_ANSWER if is_quick else _NUM_ANSWER)
    passage = "\n".join(topics.values())[: 12 * length]
    rng = random.Random(0)
    prose = tokenizer.encode_untrusted(passage)[:length]
    noise = [rng.randrange(vocab_size) for _ in range(length)]
    single = ((num_prompt, length),)
    return [
        ("agent", agent[:1] if is_quick else agent),
        ("prose", [_Text(tuple(prose), single)]),
        ("random", [_Text(tuple(noise), single)]),
    ]


@dataclass(frozen=True, slots=True)
class _Run:
    """What decodes which texts."""

    target: DenseTransformer
    makes: dict[str, Make]
    texts: Sequence[_Text]


def _measured(kind: str, run: _Run, repeats: int, report: Progress) -> list[dict[str, Value]]:
    figures = {name: _Figures() for name in run.makes}
    names = list(run.makes)
    began_s = time.perf_counter()
    for number in range(repeats + 1):
        if number > 1 and time.perf_counter() - began_s > _TEXT_S:
            break
        report(kind, number / (repeats + 1))
        turned = number % len(names)
        for name in (*names[turned:], *names[:turned]):
            counts = figures[name] if number else _Figures()  # the first run warms up
            counts.decode_s.append(0.0)
            for text in run.texts:
                _decode(run.target, run.makes[name](text), text, counts)
    plain = figures["null"].decode_s
    found: list[dict[str, Value]] = []
    for name, counts in figures.items():
        ratios = [a / b for a, b in zip(plain, counts.decode_s, strict=True)]
        answered = counts.num_tokens / len(ratios)
        found.append(
            {
                "text": kind,
                "drafter": name,
                "repeats": len(ratios),
                "tokens": round(answered),
                "tau": round(counts.num_tokens / counts.num_rounds, 3),
                "rows_per_token": round(counts.num_rows / counts.num_tokens, 2),
                "tokens_per_s": round(answered / statistics.median(counts.decode_s), 1),
                "to_null": round(statistics.median(ratios), 3),
                "low": round(min(ratios), 3),
                "high": round(max(ratios), 3),
            }
        )
    return found


def _decode(target: DenseTransformer, drafter: Drafter, text: _Text, counts: _Figures) -> None:
    """All answers of one session; adds to the last repeat."""
    clock, _ = bench_clock()
    sampler = TextSampler(text.token_ids)
    session = Session(target, drafter, session_id="bench")
    try:
        for start, stop in text.answers:
            session.sync(text.token_ids[:start])
            limits = StopRules(frozenset(), stop - start)
            began_s = clock()
            rounds = list(session.decode(sampler, limits))
            counts.decode_s[-1] += clock() - began_s
            drafted = [round_ for round_ in rounds if round_.source != "prefill"]
            counts.num_tokens += sum(len(round_.token_ids) for round_ in drafted)
            counts.num_rounds += len(drafted)
            counts.num_rows += sum(round_.num_drafted + 1 for round_ in drafted)
        assert tuple(session.token_ids) == text.token_ids[: text.answers[-1][1]]
    finally:
        session.close()
