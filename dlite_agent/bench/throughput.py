"""Many turns at once: tokens a second, and how long each of them waits.

N turns with prompts of their own, which are prefilled before, sample greedily a fixed number of
tokens, which no stop id ends. What is measured is the time from the first one's first token to the
last one's last; drafted turns end at different times, and a window in which all decode may be
empty:
- *throughput*: tokens of all turns over that time.
- *wait*: the longest gap between two rounds of a turn, over the median gap of all turns, while all
  of them decode: what sharing forwards does to the unluckiest turn, 1.0 being its fair time. Turns
  that begin or end beside it are not part of it, since a forward of fewer turns is shorter.
- *wait beside a prefill*: the same while one more prompt arrives and is prefilled beside them.

The turns are stepped in this thread, by the scheduler that the engine uses, so that no reader and
no other thread is part of the figure.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path

from dlite_agent.backend import ChatRequest
from dlite_agent.bench.machine import bench_clock
from dlite_agent.bench.report import BenchResult, Value, conditions
from dlite_agent.chat.messages import Message
from dlite_agent.config import EngineConfig, SamplingParams
from dlite_agent.engine.service import ModelService, load_service
from dlite_agent.engine.tasks import Event, Failure, Finished, Progress, unheard
from dlite_agent.errors import ConfigurationError
from dlite_agent.outputs import GenerationChunk

__all__ = ["CONCURRENCY", "bench_throughput"]

CONCURRENCY = (1, 4, 16)
_PROMPT_CHARACTERS = 1200
_ARRIVAL_CHARACTERS = 4000
_TOKENS = 128
_QUICK_TOKENS = 24
_ABOUT = (
    "tokens_per_s: of all turns together while they decode; to_one = over the first row of the "
    "same drafter; to_null = over the same row without drafts; wait = longest gap between two "
    "rounds of a turn over the median gap, while all decode; wait_prefill = the same while another "
    "prompt is prefilled beside them; all are medians over the repeats"
)


Row = dict[str, str | int | float | None]


@dataclass(eq=False)
class _Reader:
    """Notes when rounds of a turn came."""

    clock: Callable[[], float]
    submitted_s: float = 0.0
    is_cancelled: bool = False
    is_parked: bool = False
    is_over: bool = False
    rounds: list[tuple[float, int]] = field(default_factory=list)  # when, and how many tokens

    def put(self, event: Event) -> None:
        if isinstance(event, Failure):
            raise event.error
        if isinstance(event, Finished):
            self.is_over = True
        if isinstance(event, GenerationChunk):
            self.rounds.append((self.clock(), len(event.token_ids)))


@dataclass(frozen=True, slots=True)
class _Run:
    """One measurement: tokens a second, gaps between rounds without and beside a prefill, and τ."""

    tokens_per_s: float
    gaps_s: Sequence[float]
    mixed_gaps_s: Sequence[float]
    tau: float

    @property
    def wait(self) -> float:
        return max(self.gaps_s) / statistics.median(self.gaps_s)

    @property
    def mixed_wait(self) -> float:
        return max(self.mixed_gaps_s) / statistics.median(self.gaps_s)


def bench_throughput(
    config: EngineConfig,
    *,
    concurrency: Sequence[int] = CONCURRENCY,
    drafters: Sequence[str] = ("null", "auto"),
    repeats: int = 3,
    is_quick: bool = False,
    report: Progress = unheard,
) -> BenchResult:
    """Measure some turns at once, without drafts and with them.

    Args:
        config: Names the model; `drafters` are used, and as many turns as are asked for.
        concurrency: Turns at once, a row each.
        drafters: As for `EngineConfig.drafter`; `"null"` is the baseline.
        repeats: Runs a figure; the first of each drafter is preceded by one that does not count.
        is_quick: Few tokens.
        report: Hears which figure is measured, and how much of it is done.

    Raises:
        ConfigurationError: A number of turns is below 1.
    """
    if not concurrency or min(concurrency) < 1:
        raise ConfigurationError(
            f"concurrency is {list(concurrency)!r}; use numbers of turns, at least 1"
        )
    num_tokens = _QUICK_TOKENS if is_quick else _TOKENS
    found: list[Row] = []
    baseline: dict[int, float] = {}
    told = {}
    for drafter in drafters:
        many = replace(config, drafter=drafter, max_batch=256)
        with closing(load_service(many, unheard)) as service:
            service.model.stop_token_ids = frozenset()
            told = _conditions(service, num_tokens, repeats)
            _measure(service, min(concurrency), num_tokens)
            first = None
            for count in concurrency:
                runs: list[_Run] = []
                while len(runs) < repeats:
                    report(f"{drafter}, {count} turns", len(runs) / repeats)
                    runs.append(_measure(service, count, num_tokens))
                rate = statistics.median(run.tokens_per_s for run in runs)
                first = first or rate
                baseline.setdefault(count, rate)
                ratios = rate / first, rate / baseline[count]
                found.append(_row(count, drafter, runs, ratios))
    return BenchResult("throughput", _ABOUT, told, found)


def _conditions(service: ModelService, num_tokens: int, repeats: int) -> dict[str, Value]:
    config = service.model.config
    return conditions(
        model=config.model,
        fingerprint=service.model.target.fingerprint,
        dtype=service.info.dtype,
        device=service.info.device,
        prompt_characters=_PROMPT_CHARACTERS,
        tokens=num_tokens,
        sampling="greedy",
        prefill_chunk=config.prefill_chunk,
        warmup=1,
        repeats=repeats,
    )


def _row(concurrency: int, drafter: str, runs: Sequence[_Run], ratios: tuple[float, float]) -> Row:
    """Medians of some runs, with their rate over one turn's and over plain decoding's."""
    return {
        "concurrency": concurrency,
        "drafter": drafter,
        "tokens_per_s": round(statistics.median(run.tokens_per_s for run in runs), 1),
        "to_one": round(ratios[0], 2),
        "to_null": round(ratios[1], 2),
        "tau": round(statistics.median(run.tau for run in runs), 2),
        "wait": round(statistics.median(run.wait for run in runs), 2),
        "wait_prefill": round(statistics.median(run.mixed_wait for run in runs), 2),
    }


def _measure(service: ModelService, count: int, num_tokens: int) -> _Run:
    """Run the turns, and once more with another prompt that arrives."""
    clock, _ = bench_clock()
    plain, start_s, end_s = _decode(service, count, num_tokens, clock, arrives=False)
    mixed, mixed_start_s, mixed_end_s = _decode(service, count, num_tokens, clock, arrives=True)
    within = [n for one in plain for time_s, n in one.rounds if start_s < time_s <= end_s]
    return _Run(
        tokens_per_s=sum(within) / (end_s - start_s),
        gaps_s=_gaps(plain, *_all_decode(plain)) or _gaps(plain, start_s, end_s),
        mixed_gaps_s=_gaps(mixed, mixed_start_s, mixed_end_s),
        tau=sum(within) / len(within),
    )


def _decode(
    service: ModelService, count: int, num_tokens: int, clock: Callable[[], float], *, arrives: bool
) -> tuple[list[_Reader], float, float]:
    """Readers of the turns, when the first of them had begun to decode, and when all had ended."""
    for max_tokens in (1, num_tokens):
        readers = [_Reader(clock) for _ in range(count)]
        for number, reader in enumerate(readers):
            service.add(_request(number, max_tokens, _PROMPT_CHARACTERS), reader)
        while not all(reader.rounds for reader in readers):
            service.step()
        if arrives and max_tokens > 1:
            service.add(_request(count, 1, _ARRIVAL_CHARACTERS), _Reader(clock))
        while service.num_turns:
            service.step()
    for info in service.model.sessions.sessions():
        service.model.sessions.discard(service.model.sessions.get(info.session_id))
    start_s = min(reader.rounds[0][0] for reader in readers)
    return readers, start_s, max(reader.rounds[-1][0] for reader in readers)


def _all_decode(readers: Sequence[_Reader]) -> tuple[float, float]:
    """From the last one's first token to the first one's last."""
    start_s = max(reader.rounds[0][0] for reader in readers)
    return start_s, min(reader.rounds[-1][0] for reader in readers)


def _gaps(readers: Sequence[_Reader], start_s: float, end_s: float) -> list[float]:
    """Times between two rounds of a turn, from a start to an end."""
    times = [[time_s for time_s, _ in reader.rounds] for reader in readers]
    return [
        after - before
        for one in times
        for before, after in itertools.pairwise(one)
        if start_s <= before and after <= end_s
    ]


def _request(number: int, num_tokens: int, num_characters: int) -> ChatRequest:
    """A prompt of its own: a piece of this package's source, and what to do with it."""
    sources = sorted(Path(__file__).parents[1].glob("*/*.py"))
    text = "".join(path.read_text(encoding="utf-8") for path in sources)
    start = number * 7919 % (len(text) - num_characters)
    task = f"{number}: continue this file.\n{text[start : start + num_characters]}"
    sampling = SamplingParams(temperature=0.0, max_tokens=num_tokens)
    return ChatRequest((Message("user", task),), sampling=replace(sampling, seed=number))
