"""`dlite-agent bench turns`: what each turn of a transcript costs, client by client, mode by mode.

The model computes every row for real; only what it samples is forced to the transcript's tokens, so
that all runs are the same conversation. Some tokens are split in two, as a model does that samples
another spelling of the same text.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from dlite_agent.backend import ChatRequest
from dlite_agent.bench.bfcl import bfcl_talks
from dlite_agent.bench.clients import CLIENTS, aside, behaviour_of_turn, send
from dlite_agent.bench.report import BenchResult, Value, conditions
from dlite_agent.bench.talk import Talk, built_in_talks, read_talks
from dlite_agent.bench.turn_generator import PRESETS
from dlite_agent.chat.messages import Message
from dlite_agent.config import EngineConfig, SamplingParams
from dlite_agent.engine.forecast import RecordedRequest, answer_ids
from dlite_agent.engine.service import ModelService, load_service
from dlite_agent.engine.tasks import Progress, unheard
from dlite_agent.errors import ConfigurationError
from dlite_agent.models.target import ForwardRows, TargetOutput
from dlite_agent.models.transformer import DenseTransformer
from dlite_agent.outputs import Generation, TurnStats
from dlite_agent.tokenizer import CheckpointTokenizer

__all__ = ["MODES", "TurnsOptions", "bench_turns", "turns_json"]

_ABOUT = (
    "prefilled: rows computed before the answers, from the second turn on; idle: computed between "
    "turns; new: rows that the append-only client needs; amplification: prefilled / new; worst: "
    "the turn with most; ttft_s: seconds to the first token, the median of the later turns. plain "
    "reuses the longest common prefix of what is rendered, none reuses nothing."
)
_JSON_TURN = ("new", "prefilled", "idle_prefilled", "cached", "rewound", "ttft_s", "miss")
MODES: Mapping[str, Mapping[str, str]] = {
    "as_generated": {"history": "as_generated"},
    "auto": {"history": "auto"},
    "template": {"history": "template"},
    "plain": {"reuse": "prefix"},
    "none": {"reuse": "none"},
}
"""Name → options of the engine."""


@dataclass(frozen=True, slots=True)
class TurnsOptions:
    """What is run.

    Attributes:
        transcripts: Files in OpenAI's form, and folders of `*.json`; with no tasks either: a
            built-in one and generated ones.
        bfcl: Tasks of BFCL and categories of them (`bfcl.bfcl_talks`).
        bfcl_limit: How many of each category; None: all.
        presets: Which are generated (`turn_generator.PRESETS`).
        clients: Behaviours (`clients.CLIENTS`).
        modes: See `MODES`.
        split_rate: Share of sampled tokens that are split in two where they can be.
        drift_rate: Share of its turns in which the client `mixed` changes something.
        seed: Of the generator, of the splits and of what `mixed` does.
    """

    transcripts: Sequence[Path] = ()
    bfcl: Sequence[str] = ()
    bfcl_limit: int | None = None
    presets: Sequence[str] = ("ci",)
    clients: Sequence[str] = tuple(CLIENTS)
    modes: Sequence[str] = tuple(MODES)
    split_rate: float = 0.02
    drift_rate: float = 0.5
    seed: int = 0


@dataclass(slots=True)
class _Run:
    talk: Talk
    client: str
    mode: str
    turns: list[TurnStats] = field(default_factory=list)


class _Script:
    """Replaces what a target predicts by the tokens of a script, one for each row that is asked."""

    def __init__(self, target: DenseTransformer) -> None:
        self._compute = target.forward_batch
        self._left: Iterator[int] = iter(())

    def begin(self, token_ids: Iterable[int]) -> None:
        self._left = iter(token_ids)

    def forward_batch(self, batch: Sequence[ForwardRows]) -> list[TargetOutput]:
        outputs = self._compute(batch)
        for output in outputs:
            logits = torch.full_like(output.logits, -1e4)
            for row in logits:
                row[next(self._left)] = 0.0
            output.logits.copy_(logits)
        return outputs


@contextmanager
def _scripted(config: EngineConfig, progress: Progress) -> Iterator[tuple[ModelService, _Script]]:
    service = load_service(config, progress)
    script = _Script(service.model.target)
    # Only of this target: a session's `forward` goes through it too.
    setattr(service.model.target, "forward_batch", script.forward_batch)  # noqa: B010
    try:
        yield service, script
    finally:
        service.close()


def bench_turns(
    config: EngineConfig, options: TurnsOptions | None = None, report: Progress = unheard
) -> BenchResult:
    """Run every transcript with every client in every mode.

    Raises:
        ConfigurationError: A name that does not exist, or a folder without transcripts.
    """
    options = options or TurnsOptions()
    _check("clients", options.clients, CLIENTS)
    _check("modes", options.modes, MODES)
    _check("presets", options.presets, PRESETS)
    talks = _talks(options)
    runs: list[_Run] = []
    needs: dict[str, list[int]] = {}
    for mode in ("as_generated", *(mode for mode in options.modes if mode != "as_generated")):
        changes: dict[str, str] = dict(MODES[mode])
        settings = replace(config, drafter="null", **changes)  # type: ignore[arg-type]  # of MODES
        with _scripted(settings, report) as (service, script):
            for talk in talks:
                if mode == "as_generated":  # always, and before the others: it says what is new
                    first = _run(service, script, talk, "append-only", mode, options)
                    needs[talk.name] = [_needed(stats) for stats in first.turns]
                for client in options.clients if mode in options.modes else ():
                    is_known = (client, mode) == (first.client, first.mode)
                    run = first if is_known else _run(service, script, talk, client, mode, options)
                    runs.append(run)
    told = conditions(
        model=config.model,
        dtype=service.info.dtype,
        device=service.info.device,
        split_rate=options.split_rate,
        drift_rate=options.drift_rate,
        seed=options.seed,
        drafter="null",
    )
    samples = [row for run in runs for row in _turn_rows(run, needs[run.talk.name])]
    rows = [_summary(run, needs[run.talk.name]) for run in runs]
    return BenchResult("turns", _ABOUT, told, rows, samples)


def _needed(stats: TurnStats) -> int:
    """Rows that a turn cannot do without: its new tokens, and the pending one if there is one."""
    return stats.new_tokens + (stats.prefilled_tokens > stats.new_tokens)


def turns_json(result: BenchResult) -> dict[str, object]:
    """`{runs: [{transcript, client, mode, amplification, turns: [...]}]}`, and nothing else."""
    runs = []
    for row in result.rows:
        names = {name: row[name] for name in ("transcript", "client", "mode")}
        turns = [
            {name: sample[name] for name in _JSON_TURN}
            for sample in result.samples
            if all(sample[name] == value for name, value in names.items())
        ]
        runs.append({**names, "amplification": row["amplification"], "turns": turns})
    return {"runs": runs}


def _check(option: str, names: Sequence[str], known: Mapping[str, object]) -> None:
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ConfigurationError(f"{option}: {unknown[0]!r} is none of {', '.join(known)}")


def _talks(options: TurnsOptions) -> list[Talk]:
    talks = read_talks(options.transcripts)
    if options.bfcl:
        talks += bfcl_talks(options.bfcl, options.bfcl_limit)
    return talks or built_in_talks(options.presets, options.seed)


def _run(
    service: ModelService,
    script: _Script,
    talk: Talk,
    client: str,
    mode: str,
    options: TurnsOptions,
) -> _Run:
    """One conversation, as a tenant of its own: nothing of it is known before."""
    run = _Run(talk, client, mode)
    chance = random.Random(options.seed)
    tenant = f"{talk.name}-{client}-{time.perf_counter()}"
    history: list[Message] = []
    for index, message in enumerate(talk.messages):
        if message.role != "assistant" or not history:
            history.append(message)
            continue
        number, tools = len(run.turns), talk.tools_before(index)
        if question := aside(client, tuple(history), number):
            _turn(service, script, ChatRequest(question, tools=tools, tenant=tenant), [0] * 8)
        behaviour = behaviour_of_turn(client, options.drift_rate, chance)
        sent, offered = send(behaviour, tuple(history), tools, number)
        recorded = RecordedRequest(sent, offered, talk.template_kwargs, message)
        said = answer_ids(recorded, service.model.renderer)
        ids = _split(said, service.model.tokenizer, options.split_rate, chance)
        request = ChatRequest(
            sent, tools=offered, tenant=tenant, template_kwargs=talk.template_kwargs
        )
        generation = _turn(service, script, request, ids)
        run.turns.append(generation.stats)
        history.append(generation.message)
    for info in service.model.sessions.sessions():
        if info.tenant == tenant:
            service.model.sessions.discard(service.model.sessions.get(info.session_id))
    return run


def _turn(
    service: ModelService, script: _Script, request: ChatRequest, ids: Sequence[int]
) -> Generation:
    """One request that is answered with these tokens, and the idle time behind it."""
    sampling = SamplingParams(temperature=0.0, max_tokens=len(ids))
    script.begin(ids)
    request = replace(request, sampling=sampling)
    *_, last = service.run(request, time.perf_counter(), lambda: False)
    assert last.generation is not None
    while service.is_idle_work_left:
        script.begin([0] * len(ids))
        service.idle_step()
    return last.generation


def _split(
    ids: Sequence[int], tokenizer: CheckpointTokenizer, rate: float, chance: random.Random
) -> list[int]:
    """Other tokens of the same text: some of them in two, each of which is a token."""
    found: list[int] = []
    for token_id in ids:
        text = tokenizer.token_bytes(token_id)
        is_plain = text.isascii() and token_id not in tokenizer.control_tokens.values()
        if len(text) > 1 and is_plain and chance.random() < rate:
            place = chance.randrange(1, len(text))
            parts = [text[:place].decode(), text[place:].decode()]
            halves = [tokenizer.encode_untrusted(part) for part in parts]
            if all(len(half) == 1 for half in halves):
                found += [half[0] for half in halves]
                continue
        found.append(token_id)
    return found


def _turn_rows(run: _Run, needed: Sequence[int]) -> Iterator[dict[str, Value]]:
    for number, (stats, new) in enumerate(zip(run.turns, needed, strict=True)):
        yield {
            "transcript": run.talk.name,
            "client": run.client,
            "mode": run.mode,
            "turn": number,
            "new": new,
            "prefilled": stats.prefilled_tokens,
            "idle_prefilled": stats.idle_prefilled_tokens,
            "cached": stats.cached_tokens,
            "rewound": stats.rewound_tokens,
            "amplification": round(stats.prefilled_tokens / new, 3),
            "ttft_s": round(stats.ttft_s, 6),
            "total_s": round(stats.total_s, 6),
            "miss": stats.miss.cause if stats.miss is not None else None,
        }


def _summary(run: _Run, needed: Sequence[int]) -> dict[str, Value]:
    later = run.turns[1:]
    prefilled = [stats.prefilled_tokens for stats in later]
    new = sum(needed[1:])
    causes = [stats.miss.cause for stats in later if stats.miss and stats.miss.cause]
    times = sorted(stats.ttft_s for stats in later)
    return {
        "transcript": run.talk.name,
        "client": run.client,
        "mode": run.mode,
        "turns": len(run.turns),
        "new": new,
        "prefilled": sum(prefilled),
        "idle": sum(stats.idle_prefilled_tokens for stats in later),
        "amplification": round(sum(prefilled) / new, 3) if new else 1.0,
        "worst": max(prefilled, default=0),
        "ttft_s": round(times[len(times) // 2], 4) if times else 0.0,
        "miss": max(causes, key=causes.count) if causes else None,
    }
