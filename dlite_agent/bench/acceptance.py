"""How far drafts are accepted and what that is worth: one row per request, and nothing else.

Every drafter answers the same requests of a suite, in the real loop. A request is answered three
times: by the session that computed its history, by a fork of it, and by one that was saved to disk
and loaded again; drafters with a history of their own lose it there, and are measured once more
with it saved too. `bench.acceptance_figures` turns the rows into tables.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path

from dlite_agent.bench.acceptance_figures import ABOUT, figures_of
from dlite_agent.bench.machine import bench_clock
from dlite_agent.bench.persisted_state import HistoryKeeper, keeping_history
from dlite_agent.bench.report import BenchResult, Value, conditions
from dlite_agent.bench.suite import SuiteRequest, built_in_suite, load_suite
from dlite_agent.bench.timed_decode import TimedSampler, TimedTurn, decode_timed
from dlite_agent.chat.renderer import Renderer
from dlite_agent.config import DType, EngineConfig, SamplingParams
from dlite_agent.decoding.load import Load
from dlite_agent.decoding.loop import Round
from dlite_agent.decoding.stopping import StopRules
from dlite_agent.drafters.drafter import Drafter
from dlite_agent.drafters.load import drafter_beside
from dlite_agent.engine.drafting import make_drafter
from dlite_agent.engine.tasks import unheard
from dlite_agent.kernels.row_kernels import load_row_kernels
from dlite_agent.models.transformer import DenseTransformer
from dlite_agent.models.weights import (
    fingerprint,
    load_target,
    resolve_checkpoint,
    sampling_defaults,
)
from dlite_agent.sampling import KeyedNoise
from dlite_agent.sessions.session import Session
from dlite_agent.tokenizer import CheckpointTokenizer, load_tokenizer

__all__ = ["AcceptanceOptions", "bench_acceptance"]

_HELD_BACK = 16
"""Tokens of a conversation's first prompt that come after the save or the fork."""
_NUM_SLOTS = 16


@dataclass(frozen=True, slots=True)
class AcceptanceOptions:
    """What is asked, and how it is answered.

    Attributes:
        suite: As for `load_suite`; None: a built-in one.
        drafters: As for `EngineConfig.drafter`; empty: `suffix`, `dlite` where the checkpoint has
            one, and `auto`. Plain decoding is always measured too.
        temperature: 0 is greedy; other parameters are the checkpoint's.
        seed: Of the noise.
        max_tokens: Most tokens of an answer.
        is_quick: One conversation and two turns.
    """

    suite: Path | None = None
    drafters: Sequence[str] = ()
    temperature: float = 0.0
    seed: int = 0
    max_tokens: int = 256
    is_quick: bool = False


def bench_acceptance(
    model: str = "nano", *, dtype: DType = "auto", options: AcceptanceOptions | None = None
) -> BenchResult:
    """Measure every drafter on every request.

    Args:
        model: As for `EngineConfig.model`.
        dtype: As for `EngineConfig.dtype`.
        options: None: the defaults.

    Raises:
        ConfigurationError: The suite or a drafter cannot be used.
    """
    options = options or AcceptanceOptions()
    folder = resolve_checkpoint(model)
    tokenizer = load_tokenizer(str(folder))
    suite = load_suite(options.suite or built_in_suite(model), tokenizer)
    if options.is_quick:
        suite = [suite[0][:2]]
    with load_target(model, dtype=dtype) as target:
        target.use_kernels(load_row_kernels(EngineConfig().cache_folder()))
        drafters = _drafters(model, folder, target, options.drafters)
        subject = _Subject(target, drafters, _stop_ids(target, tokenizer), folder, options)
        rows = subject.rows(suite)
        told = conditions(
            model=model,
            fingerprint=fingerprint(folder),
            dtype=str(target.dtype).removeprefix("torch."),
            device=str(target.device),
            concurrency=1,
            temperature=options.temperature,
            seed=options.seed,
            max_tokens=options.max_tokens,
            suite="built-in" if options.suite is None else options.suite.name,
            conversations=len(suite),
            requests=sum(len(requests) for requests in suite),
            warmup=1,
        )
    return BenchResult("acceptance", ABOUT, told, figures_of(rows), rows)


def _drafters(
    model: str, folder: Path, target: DenseTransformer, names: Sequence[str]
) -> dict[str, Drafter]:
    """Plain decoding first; the others under the names that they were asked for."""
    if not names:
        names = ["suffix", *(["dlite"] if drafter_beside(folder) is not None else []), "auto"]
    return {
        Path(name).name: keeping_history(
            make_drafter(EngineConfig(model=model, drafter=name), target, Load(), unheard)
        )
        for name in dict.fromkeys(["null", *names])
    }


def _stop_ids(target: DenseTransformer, tokenizer: CheckpointTokenizer) -> frozenset[int]:
    closing_id = tokenizer.control_tokens.get(Renderer(tokenizer).traits.closer)
    ids = {*target.config.eos_token_ids, tokenizer.eos_token_id, closing_id}
    return frozenset(token_id for token_id in ids if token_id is not None)


@dataclass(slots=True)
class _Subject:
    """A model and its drafters, asked one request after the other."""

    target: DenseTransformer
    drafters: Mapping[str, Drafter]
    stop_ids: frozenset[int]
    checkpoint: Path
    options: AcceptanceOptions
    params: SamplingParams = field(init=False)

    def __post_init__(self) -> None:
        defaults = sampling_defaults(self.checkpoint)
        self.params = SamplingParams(temperature=self.options.temperature).with_defaults(defaults)

    def rows(self, suite: Sequence[Sequence[SuiteRequest]]) -> list[dict[str, Value]]:
        """One row a request, drafter and kind of session; the first conversation's start warms up.

        Drafters take turns in who is first.
        """
        for _ in self._conversation(suite[0][:1]):
            pass
        found = [answer for requests in suite for answer in self._conversation(requests)]
        plain = {answer.request: answer.turn.token_ids for answer in found if answer.name == "null"}
        return [answer.row(self.options, plain[answer.request]) for answer in found]

    def _conversation(self, requests: Sequence[SuiteRequest]) -> Iterator[_Answer]:
        names = list(self.drafters)
        with ExitStack() as stack:
            sessions = {}
            for name, drafter in self.drafters.items():
                sessions[name] = Session(self.target, drafter, session_id=name)
                stack.callback(sessions[name].close)
                sessions[name].sync(requests[0].prompt_ids[:-_HELD_BACK] or requests[0].prompt_ids)
            for request in requests:
                turned = request.turn % len(names)
                for name in (*names[turned:], *names[:turned]):
                    yield from self._request(name, sessions[name], request)

    def _request(self, name: str, session: Session, request: SuiteRequest) -> Iterator[_Answer]:
        """Restore and fork while the session is where the request found it; then itself."""
        if name != "null":
            with tempfile.TemporaryDirectory() as folder:
                session.save(folder)
                for kind, drafter in _restored(self.drafters[name], Path(folder)).items():
                    with closing(Session.load(folder, self.target, drafter)) as restored:
                        yield self._answer(name, kind, restored, request)
            with closing(session.fork()) as fork:
                yield self._answer(name, "fork", fork, request)
        yield self._answer(name, "fresh", session, request)

    def _answer(self, name: str, kind: str, session: Session, request: SuiteRequest) -> _Answer:
        clock, _ = bench_clock()
        began_s = clock()
        report = session.sync(request.prompt_ids)
        prefill_s = clock() - began_s
        noise = KeyedNoise.derive(self.options.seed, 0, request.prompt_ids)
        sampler = TimedSampler(self.params, noise, clock)
        limits = StopRules(self.stop_ids, self.options.max_tokens)
        turn = decode_timed(self.target, session, sampler, limits, clock)
        taps = session.hidden.states.nbytes if session.hidden is not None else 0
        state_bytes = session.nbytes - session.kv.nbytes - taps - 8 * len(session.token_ids)
        return _Answer(request, name, kind, turn, report.prefilled, prefill_s, state_bytes)


def _restored(drafter: Drafter, folder: Path) -> dict[str, Drafter]:
    """Who drafts after a restore: with a history that was lost, and with one that was saved."""
    if not isinstance(drafter, HistoryKeeper):
        return {"restored": drafter}
    drafter.save(folder)
    return {"restored": drafter.anew(), "restored+state": drafter.anew(folder)}


@dataclass(frozen=True, slots=True)
class _Answer:
    """A request, answered."""

    request: SuiteRequest
    name: str
    kind: str
    turn: TimedTurn
    num_prefilled: int
    prefill_s: float
    state_bytes: int

    def row(self, options: AcceptanceOptions, plain_ids: Sequence[int]) -> dict[str, Value]:
        """What the CSV has of it."""
        request, turn = self.request, self.turn
        return {
            "conversation": request.conversation,
            "turn": request.turn,
            "drafter": self.name,
            "session": self.kind,
            "temperature": options.temperature,
            "thinking": request.thinking,
            "context_tokens": len(request.prompt_ids),
            "prefilled_tokens": self.num_prefilled,
            "answer_tokens": len(turn.token_ids),
            **_counts(turn.rounds),
            "prefill_ms": round(self.prefill_s * 1e3, 4),
            "draft_ms": round(turn.draft_s * 1e3, 4),
            "verify_ms": round(turn.verify_s * 1e3, 4),
            "sample_ms": round(turn.sample_s * 1e3, 4),
            "host_ms": round(turn.host_s * 1e3, 4),
            "state_bytes": self.state_bytes,
            "is_plain_answer": int(turn.token_ids == list(plain_ids)),
        }


def _counts(rounds: Sequence[Round]) -> dict[str, Value]:
    """Counts over the rounds behind the prefill's token.

    A stop token that no draft named is no token of a round. `slots_accepted` has the rounds that
    accepted at least 1, 2, ... tokens, and `slots_left` those whose answer went on so long.
    """
    rounds = [round_ for round_ in rounds if round_.source != "prefill"]
    num_left = sum(len(round_.token_ids) for round_ in rounds)
    accepted, left, tokens = [], [], 0
    for round_ in rounds:
        accepted.append(round_.num_accepted)
        left.append(num_left)
        num_left -= len(round_.token_ids)
        ends_by_bonus = round_.finish == "stop" and round_.num_accepted < len(round_.token_ids)
        tokens += len(round_.token_ids) - ends_by_bonus
    slots = range(1, 1 + _NUM_SLOTS)
    return {
        "rounds": len(rounds),
        "tokens": tokens,
        "drafted": sum(round_.num_drafted for round_ in rounds),
        "accepted": sum(accepted),
        "slots_accepted": " ".join(str(sum(n >= slot for n in accepted)) for slot in slots),
        "slots_left": " ".join(str(sum(n >= slot for n in left)) for slot in slots),
    }
