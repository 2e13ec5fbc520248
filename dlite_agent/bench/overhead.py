"""What drafting costs where there is nothing to draft: paired runs with and without a drafter.

Both runs of a pair decode the same text in the same order of forwards, one after the other, in
turns who is first. The text is given: the target computes and chooses as ever, and then the text's
next token is taken in place of its choice, so that it can be random, or prose that a small model
would not write. A ratio above 1 says that drafting is slower.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice
from pydoc_data.topics import topics

from dlite_agent.bench.given_text import TextSampler
from dlite_agent.bench.machine import bench_clock
from dlite_agent.bench.report import BenchResult, conditions
from dlite_agent.config import EngineConfig
from dlite_agent.decoding.load import Load
from dlite_agent.decoding.loop import Round
from dlite_agent.decoding.steps import run_together
from dlite_agent.decoding.stopping import StopRules
from dlite_agent.drafters.drafter import Drafter
from dlite_agent.drafters.null import NullDrafter
from dlite_agent.engine.drafting import make_drafter
from dlite_agent.engine.loading import load_engine_target
from dlite_agent.engine.tasks import Progress, unheard
from dlite_agent.models.transformer import DenseTransformer
from dlite_agent.models.weights import resolve_checkpoint
from dlite_agent.sessions.session import Session
from dlite_agent.tokenizer import load_tokenizer

__all__ = ["bench_overhead"]

_NUM_PROMPT = 256
_NUM_TOKENS = 128
_RESAMPLES = 2000
_FIGURE_S, _MIN_PAIRS = 75.0, 5
_ABOUT = (
    "ratio = seconds of decoding with the drafter over those without, median of pairs; low and "
    "high = its 95 % interval by bootstrap; turn_ratio = the same with the prefill of the prompt; "
    "tau = tokens a round with the drafter"
)


@dataclass(frozen=True, slots=True)
class _Run:
    """One run of some sessions.

    Attributes:
        prefill_s: Seconds of their prompts.
        decode_s: Seconds of their answers.
        rounds: All of them.
    """

    prefill_s: float
    decode_s: float
    rounds: list[Round]

    @property
    def turn_s(self) -> float:
        return self.prefill_s + self.decode_s


def bench_overhead(
    config: EngineConfig,
    *,
    concurrency: Sequence[int] = (1, 4, 16),
    repeats: int = 30,
    is_quick: bool = False,
    report: Progress = unheard,
) -> BenchResult:
    """Measure a drafter against none, on random text and on prose (Python's language reference).

    Args:
        config: Names the model and the drafter.
        concurrency: Sessions that share each forward.
        repeats: Pairs a figure; fewer, but at least five, where they take longer than 75 seconds.
        is_quick: One session and a short text.
        report: Hears which figure is measured, and how much of it is done.
    """
    folder = resolve_checkpoint(config.model, config.revision)
    concurrency = concurrency[:1] if is_quick else concurrency
    num_prompt, num_tokens = (64, 16) if is_quick else (_NUM_PROMPT, _NUM_TOKENS)
    found: list[dict[str, str | int | float | None]] = []
    load = Load()
    with load_engine_target(config, unheard) as target:
        drafts = _Drafts(target, make_drafter(config, target, load, unheard), load)
        prose = load_tokenizer(str(folder)).encode_untrusted("\n".join(topics.values()))
        for kind in ("random", "prose"):
            texts = _texts(
                prose if kind == "prose" else None,
                target.config.vocab_size,
                num_prompt + num_tokens,
            )
            for num_sessions in concurrency:
                pairs = _pairs(drafts, texts, (num_sessions, num_prompt), repeats, report)
                found.append({"text": kind, "sessions": num_sessions, **_figures(pairs)})
        told = conditions(
            model=config.model,
            fingerprint=target.fingerprint,
            drafter=drafts.drafter.name,
            dtype=str(target.dtype).removeprefix("torch."),
            device=str(target.device),
            prompt_tokens=num_prompt,
            answer_tokens=num_tokens,
            sampling="greedy, then the text's token",
            warmup=1,
            pairs=f"{repeats}, or what 75 seconds allow",
        )
    return BenchResult("overhead", _ABOUT, told, found)


@dataclass(frozen=True, slots=True)
class _Drafts:
    """What is measured."""

    target: DenseTransformer
    drafter: Drafter
    load: Load


def _texts(prose: Sequence[int] | None, vocab_size: int, length: int) -> Iterator[list[int]]:
    """Texts without end: random ids, or passages that follow each other, from the start again."""
    rng = random.Random(0)
    start = 0
    while True:
        if prose is None:
            yield [rng.randrange(vocab_size) for _ in range(length)]
            continue
        yield [prose[(start + i) % len(prose)] for i in range(length)]
        start += length


def _pairs(
    drafts: _Drafts,
    texts: Iterator[list[int]],
    shape: tuple[int, int],
    repeats: int,
    report: Progress,
) -> list[tuple[_Run, _Run]]:
    """Pairs over ever other texts, within the time of a figure.

    Args:
        drafts: What is measured.
        texts: As many are taken as there are sessions.
        shape: Sessions at once, and tokens of each prompt.
        repeats: Most pairs.
        report: Hears of each.
    """
    num_sessions, num_prompt = shape
    found: list[tuple[_Run, _Run]] = []
    began_s = time.perf_counter()
    while len(found) < repeats:
        if len(found) >= _MIN_PAIRS and time.perf_counter() - began_s > _FIGURE_S:
            break
        report(f"{num_sessions} sessions", len(found) / repeats)
        found.append(_pair(drafts, list(islice(texts, num_sessions)), num_prompt, len(found)))
    return found


def _pair(
    drafts: _Drafts, texts: list[list[int]], num_prompt: int, number: int
) -> tuple[_Run, _Run]:
    """The same texts without and with the drafter; the first pair is run once before."""
    plain = _Drafts(drafts.target, NullDrafter(), Load())
    if number == 0:
        _run(plain, texts, num_prompt)
    if number % 2:
        drafted = _run(drafts, texts, num_prompt)
        return _run(plain, texts, num_prompt), drafted
    return _run(plain, texts, num_prompt), _run(drafts, texts, num_prompt)


def _run(drafts: _Drafts, texts: list[list[int]], num_prompt: int) -> _Run:
    """Prompts one after the other, then all answers in shared forwards."""
    clock, _ = bench_clock()
    target = drafts.target
    with ExitStack() as stack:
        started_s = clock()
        sessions = []
        for number, text in enumerate(texts):
            session = Session(target, drafts.drafter, session_id=str(number))
            stack.callback(session.close)
            session.sync(text[:num_prompt])
            sessions.append(session)
        prefilled_s = clock()
        rounds = run_together(
            target,
            [
                session.decode_steps(
                    TextSampler(text), StopRules(frozenset(), len(text) - num_prompt)
                )
                for session, text in zip(sessions, texts, strict=True)
            ],
            drafts.load,
        )
        decoded_s = clock()
        for session, text in zip(sessions, texts, strict=True):
            assert session.token_ids == text, "a drafter changed the text"
    return _Run(prefilled_s - started_s, decoded_s - prefilled_s, rounds)


def _figures(pairs: Sequence[tuple[_Run, _Run]]) -> dict[str, int | float | None]:
    ratios = [drafted.decode_s / plain.decode_s for plain, drafted in pairs]
    low, high = _interval(ratios)
    rounds = [round_ for _, run in pairs for round_ in run.rounds if round_.source != "prefill"]
    num_tokens = sum(len(round_.token_ids) for round_ in rounds)
    plain_s = statistics.median(plain.decode_s for plain, _ in pairs)
    num_plain = sum(len(round_.token_ids) for round_ in pairs[0][0].rounds)
    return {
        "pairs": len(pairs),
        "ratio": round(statistics.median(ratios), 4),
        "low": round(low, 4),
        "high": round(high, 4),
        "turn_ratio": round(statistics.median(b.turn_s / a.turn_s for a, b in pairs), 4),
        "tau": round(num_tokens / len(rounds), 3),
        "drafted": sum(round_.num_drafted for round_ in rounds),
        "accepted": sum(round_.num_accepted for round_ in rounds),
        "plain_ms_per_token": round(plain_s / num_plain * 1e3, 3),
    }


def _interval(ratios: Sequence[float]) -> tuple[float, float]:
    """The middle 95 % of medians of resampled pairs."""
    rng = random.Random(0)
    medians = sorted(
        statistics.median(rng.choices(ratios, k=len(ratios))) for _ in range(_RESAMPLES)
    )
    return medians[int(0.025 * _RESAMPLES)], medians[int(0.975 * _RESAMPLES) - 1]
