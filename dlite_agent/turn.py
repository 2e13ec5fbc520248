"""One turn from start to end: replay, render, sync, decode, parse, remember."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from hashlib import blake2b

import numpy as np
import torch

from dlite_agent.admission import AdmittedRequest, admit
from dlite_agent.backend import ChatRequest
from dlite_agent.chat.message_keys import turn_forms
from dlite_agent.chat.stream_parser import EndReason, ParsedTurn, StreamParser
from dlite_agent.decoding.loop import Round
from dlite_agent.decoding.stopping import StopRules
from dlite_agent.errors import (
    CapacityError,
    ConfigurationError,
)
from dlite_agent.loading import LoadedModel
from dlite_agent.outputs import Generation, GenerationChunk, TurnStats
from dlite_agent.sampling import KeyedNoise, Sampler
from dlite_agent.sessions.journal import JournalRecord
from dlite_agent.sessions.session import Session, SyncReport

__all__ = ["run_turn"]

logger = logging.getLogger(__name__)

_ROUND_ROWS = 16
_PROCESS_ADVICE = (
    "other Python threads of this process slow the model down: {share:.0%} of the decode time went "
    'to waiting for the interpreter lock; use isolation="process" to give it a process of its own'
)


def run_turn(
    model: LoadedModel,
    request: ChatRequest,
    submitted_s: float,
    should_stop: Callable[[], bool],
) -> Iterator[GenerationChunk]:
    """Run one turn; the last chunk has the finish reason. A turn that is stopped has none.

    Whatever happens, the session is released and valid, and holds a prefix of what it was asked to
    hold, so that the same request again goes on from there.

    Args:
        model: The parts; used by this turn alone while it runs.
        request: What was asked.
        submitted_s: `time.perf_counter` when it was.
        should_stop: Asked before every prefill chunk and every round.

    Raises:
        RequestError: The request cannot be run as it is.
        CapacityError: No room for it now.
    """
    times = _Times(submitted_s)
    admitted = admit(model, request)
    times.rendered_s = time.perf_counter()
    hinted_session_id = model.session_of_hint(request.session_hint)
    session, origin = model.sessions.acquire(
        admitted.prompt.token_ids,
        hint_session_id=hinted_session_id,
        in_place_ids=frozenset(filter(None, [admitted.plan.owner_session_id])),
        turn_start=admitted.turn_start,
    )
    turn = _Turn(model, admitted, hinted_session_id, session, origin, times)
    try:
        with closing(turn.run(should_stop)) as chunks:
            yield from chunks
    except (RuntimeError, MemoryError, FloatingPointError) as error:
        ours = _translated(error)
        if ours is None:
            raise
        raise ours from error
    finally:
        if model.config.reuse == "none":
            model.sessions.discard(session)
        else:
            model.sessions.release(session, waits_for_tool=turn.ended_in_call)


@dataclass(slots=True)
class _Times:
    submitted_s: float
    started_s: float = field(default_factory=time.perf_counter)
    rendered_s: float = 0.0
    prefilled_s: float = 0.0
    first_token_s: float = 0.0
    decode_s: float = 0.0


@dataclass(slots=True)
class _Turn:
    """The part of a turn that has a session."""

    model: LoadedModel
    admitted: AdmittedRequest
    hinted_session_id: str | None
    session: Session
    origin: str
    times: _Times
    report: SyncReport | None = None
    num_prefilled: int = 0
    sampled: list[int] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    ended_in_call: bool = False

    def run(self, should_stop: Callable[[], bool]) -> Generator[GenerationChunk, None, None]:
        model, prompt, keys = self.model, self.admitted.prompt, self.admitted.plan.keys
        num_new = model.known.count_new(prompt, keys, model.control_ids)
        is_complete = self._sync(should_stop)
        parser = StreamParser(
            model.tokenizer, starts_in="reasoning" if prompt.starts_in_reasoning else "text"
        )
        finish: EndReason = "cancelled"
        last = GenerationChunk()
        if is_complete:
            with closing(self._decode(should_stop)) as rounds:
                for round_ in rounds:
                    chunk = GenerationChunk(tuple(parser.feed(round_.token_ids)), round_.token_ids)
                    if round_.finish is not None:
                        finish, last = round_.finish, chunk
                        break
                    yield chunk
        parsed = parser.finish(finish)
        model.known.add(prompt.token_ids, keys, self.sampled)
        self._remember(parsed)
        stats = self._stats(parsed, num_new)
        self._log(stats, parsed)
        if finish == "cancelled":
            return
        generation = Generation(
            parsed.message,
            parsed.finish_reason,
            stats,
            tuple(self.sampled),
            prompt.token_ids,
            parsed.unparsed,
        )
        yield replace(
            last,
            deltas=last.deltas + parsed.deltas,
            finish_reason=parsed.finish_reason,
            stats=stats,
            generation=generation,
        )

    def _sync(self, should_stop: Callable[[], bool]) -> bool:
        """Whether the session holds the prompt now; False when the turn was stopped before."""
        target = self.model.target
        rows_before = target.rows_computed
        try:
            self.report = self.session.sync(self.admitted.prompt.token_ids, should_stop=should_stop)
        finally:
            self.num_prefilled = target.rows_computed - rows_before
            self.times.prefilled_s = time.perf_counter()
        return self.report.is_complete

    def _decode(self, should_stop: Callable[[], bool]) -> Generator[Round, None, None]:
        """The session's rounds, noted and timed; a reader's pauses do not count."""
        sampling, prompt_ids = self.admitted.sampling, self.admitted.prompt.token_ids
        times, meter = self.times, self.model.contention
        assert sampling.seed is not None
        assert sampling.max_tokens is not None
        sampler = Sampler(
            sampling, KeyedNoise.derive(sampling.seed, sampling.choice_index, prompt_ids)
        )
        stop_token_ids = self.model.stop_token_ids.union(sampling.stop_token_ids)
        limits = StopRules(stop_token_ids, sampling.max_tokens)
        with closing(self.session.decode(sampler, limits, should_stop)) as rounds:
            while True:
                began_s = time.perf_counter()
                meter.start()
                self._make_room(sampling.max_tokens - len(self.sampled))
                round_ = next(rounds, None)
                meter.stop()
                times.decode_s += time.perf_counter() - began_s
                if round_ is None:
                    return
                times.first_token_s = times.first_token_s or time.perf_counter()
                self.sampled.extend(round_.token_ids)
                self.rounds.append(round_)
                logger.debug(
                    "round session=%s source=%s drafted=%d accepted=%d committed=%d",
                    self.session.session_id,
                    round_.source,
                    round_.num_drafted,
                    round_.num_accepted,
                    len(round_.token_ids),
                )
                yield round_

    def _make_room(self, max_rows: int) -> None:
        """Evict idle sessions before the pool is full; without success the loop drafts less."""
        with suppress(CapacityError):
            self.model.sessions.make_room(self.session, min(max_rows, _ROUND_ROWS))

    def _remember(self, parsed: ParsedTurn) -> None:
        """Note the turn for exact replay; what was sampled before a stop counts as well."""
        model, session_id = self.model, self.session.session_id
        model.remember_hint(self.admitted.request.session_hint, session_id)
        if not self.sampled:
            return
        plan, message = self.admitted.plan, parsed.message
        forms = turn_forms(plan.key, message, parsed.unparsed)
        is_closed = self.sampled[-1] == model.closing_id
        model.known.add_answer([form.key for form in forms], is_closed=is_closed)
        calls = [call.id for call in message.tool_calls if call.id]
        calls += [region.id for region in parsed.unparsed]
        self.ended_in_call = bool(calls)
        if model.config.reuse == "prefix":
            return
        model.handles.remember(calls, plan.handle(message, session_id, parsed.unparsed))
        ids = self.admitted.prompt.turn_record(self.sampled)
        if ids is not None:
            for form in forms:
                record = JournalRecord(ids, form.reasoning_digest, session_id)
                model.journal.record(form.key, record)

    def _stats(self, parsed: ParsedTurn, num_new: int) -> TurnStats:
        prompt, sampling = self.admitted.prompt, self.admitted.sampling
        times, report = self.times, self.report
        assert report is not None
        assert sampling.seed is not None
        params = {
            name: getattr(sampling, name)
            for name in ("temperature", "top_k", "top_p", "max_tokens")
        }
        first_token_s = times.first_token_s or time.perf_counter()
        return TurnStats(
            session_id=self.session.session_id,
            origin=self.origin,
            prompt_tokens=len(prompt.token_ids),
            new_tokens=num_new,
            cached_tokens=report.cached,
            prefilled_tokens=self.num_prefilled,
            rewound_tokens=report.rewound,
            completion_tokens=len(self.sampled),
            reasoning_tokens=parsed.num_reasoning_tokens,
            rounds=sum(round_.source != "prefill" for round_ in self.rounds),
            drafted_tokens=sum(round_.num_drafted for round_ in self.rounds),
            accepted_tokens=sum(round_.num_accepted for round_ in self.rounds),
            queue_s=times.started_s - times.submitted_s,
            render_s=times.rendered_s - times.started_s,
            prefill_s=times.prefilled_s - times.rendered_s,
            decode_s=times.decode_s,
            ttft_s=first_token_s - times.submitted_s,
            total_s=time.perf_counter() - times.submitted_s,
            replayed=tuple(
                "generated" if turn.message_index in prompt.spliced else "rendered"
                for turn in self.admitted.plan.turns
            ),
            diverged_message=self._diverged_message(report, num_new),
            prompt_hash=_prompt_hash(prompt.token_ids),
            seed=sampling.seed,
            sampling=params,
            drafter=self.model.drafter.name,
            notes=tuple(dict.fromkeys((*prompt.notes, *parsed.notes, *self._contention_notes()))),
        )

    def _diverged_message(self, report: SyncReport, num_new: int) -> int | None:
        """The message in which the session and the prompt part; a fork parts from its donor."""
        prompt = self.admitted.prompt
        if report.diverged_at is not None:
            return prompt.message_at(report.diverged_at)
        named = {"tool_call": self.admitted.plan.owner_session_id, "hint": self.hinted_session_id}
        is_fork = self.session.session_id != named.get(self.origin, self.session.session_id)
        is_missed = report.cached and self.num_prefilled > num_new + 1
        return prompt.message_at(report.cached) if is_fork or is_missed else None

    def _contention_notes(self) -> list[str]:
        """Advice for a host whose own threads slow us down; once for each engine."""
        model = self.model
        share = model.contention.verdict()
        if share is None or model.config.isolation == "process" or model.has_advised_process:
            return []
        model.has_advised_process = True
        note = _PROCESS_ADVICE.format(share=share)
        logger.warning("%s", note)
        return [note]

    def _log(self, stats: TurnStats, parsed: ParsedTurn) -> None:
        rate = stats.completion_tokens / stats.decode_s if stats.decode_s else 0.0
        logger.info(
            "turn session=%s origin=%s prompt=%d cached=%d prefill=%d rewound=%d new=%d sampled=%d "
            "rounds=%d tau=%.2f queue_s=%.3f ttft_s=%.3f total_s=%.3f decode_tok_s=%.1f finish=%s",
            stats.session_id,
            stats.origin,
            stats.prompt_tokens,
            stats.cached_tokens,
            stats.prefilled_tokens,
            stats.rewound_tokens,
            stats.new_tokens,
            stats.completion_tokens,
            stats.rounds,
            stats.acceptance_length,
            stats.queue_s,
            stats.ttft_s,
            stats.total_s,
            rate,
            parsed.finish_reason,
        )


def _prompt_hash(token_ids: tuple[int, ...]) -> str:
    """blake2b-128 of the ids as little-endian 32-bit numbers, in hex."""
    return blake2b(np.asarray(token_ids, dtype="<i4").tobytes(), digest_size=16).hexdigest()


def _translated(error: Exception) -> Exception | None:
    """Our error for what torch and Python raise, or None."""
    if isinstance(error, FloatingPointError):
        return ConfigurationError(f"{error}; load the model with dtype='float32'")
    is_memory = isinstance(error, MemoryError | torch.OutOfMemoryError)
    if is_memory or "DefaultCPUAllocator" in str(error):
        return CapacityError(
            f"no memory for this turn: {error}; shorten the prompt, or lower max_kv_bytes or "
            "prefill_chunk"
        )
    return None
