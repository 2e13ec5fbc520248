"""One turn from start to end: replay, render, sync, decode, parse, remember."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Never

from dlite_agent.backend import ChatRequest
from dlite_agent.chat.message_keys import turn_forms
from dlite_agent.chat.raw_parser import RawParser
from dlite_agent.chat.stream_parser import EndReason, ParsedTurn, StopCut, StreamParser
from dlite_agent.decoding.loop import Round
from dlite_agent.decoding.steps import Pause, Steps, next_item
from dlite_agent.decoding.stopping import StopRules
from dlite_agent.engine.admission import admit
from dlite_agent.engine.batch_share import BatchShare
from dlite_agent.engine.feed import feed_steps
from dlite_agent.engine.loading import LoadedModel
from dlite_agent.engine.turn_end import translated, turn_labels
from dlite_agent.engine.turn_parser import turn_parser
from dlite_agent.engine.turn_record import KeptIds, TurnRecord, TurnTimes, describe_logprobs
from dlite_agent.engine.turn_session import find_session
from dlite_agent.errors import (
    CapacityError,
)
from dlite_agent.models.cost_table import MAX_ROWS
from dlite_agent.outputs import Generation, GenerationChunk, TurnStats
from dlite_agent.sampling import KeyedNoise, Sampler
from dlite_agent.sessions.journal import JournalRecord
from dlite_agent.sessions.session import Session

__all__ = ["turn_steps"]

logger = logging.getLogger(__name__)

# Rows of every decode forward in an audit: the pending token and up to seven drafted ones.
_AUDIT_ROWS = 8
_PARKED_NOTE = (
    "this stream was parked, since nobody read it for long while its turn ran: requests that named "
    "its session got a fork meanwhile"
)
_PROCESS_ADVICE = (
    "other Python threads of this process slow the model down: {share:.0%} of the decode time went "
    'to waiting for the interpreter lock; use isolation="process" to give it a process of its own'
)


def turn_steps(
    model: LoadedModel,
    request: ChatRequest,
    submitted_s: float,
    should_stop: Callable[[], bool],
    share: BatchShare,
) -> Steps[GenerationChunk, None]:
    """The steps of one turn; the last chunk has the finish reason. A turn that is stopped has none.

    Whatever happens, the session is released and valid, and holds a prefix of what it was asked to
    hold, so that the same request again goes on from there.

    Args:
        model: The parts; used by this turn alone between two of its steps.
        request: What was asked.
        submitted_s: `time.perf_counter` when it was.
        should_stop: Asked before every prefill chunk and every round.
        share: What it may take of the batch.

    Raises:
        RequestError: The request cannot be run as it is.
        CapacityError: No room for it now, and nobody to wait for.
    """
    times = TurnTimes(submitted_s)
    admitted = admit(model, request)
    if request.is_partial:
        yield from feed_steps(model, admitted, should_stop, share)
        return
    times.rendered_s = time.perf_counter()
    found = yield from find_session(model, admitted, should_stop, share)
    times.acquired_s = time.perf_counter()
    if found is None:
        return
    session, origin, hinted_id = found
    prompt, keys = admitted.prompt, admitted.plan.keys
    num_new = model.tenants.count_new(admitted.request.tenant, prompt, keys, model.control_ids)
    record = TurnRecord(
        admitted, session.session_id, origin, hinted_id, num_new, share=share, times=times
    )
    if model.idle is not None:
        record.idle_rows = model.idle.settle(session.session_id)
    turn = _Turn(model, session, record)
    try:
        with admitted.memory.known.running(prompt.token_ids):
            yield from turn.steps(should_stop)
    except (RuntimeError, MemoryError, FloatingPointError) as error:
        ours = translated(error, model.target.dtype)
        if ours is None:
            raise
        raise ours from error
    finally:
        if model.config.reuse == "none" or record.is_probe:
            model.sessions.discard(session)
        else:
            model.sessions.release(session, waits_for_tool=turn.ended_in_call)
            model.tiers.save(session, turn_labels(admitted, turn.generation))


@dataclass(slots=True)
class _Turn:
    """The part of a turn that has a session."""

    model: LoadedModel
    session: Session
    record: TurnRecord
    ended_in_call: bool = False
    generation: Generation | None = None

    def steps(self, should_stop: Callable[[], bool]) -> Steps[GenerationChunk, None]:
        model, record = self.model, self.record
        prompt, keys = record.admitted.prompt, record.admitted.plan.keys
        record.report = yield from self.session.sync_steps(
            prompt.token_ids, should_stop=should_stop, chunk_rows=self._chunk_rows
        )
        if record.origin == "restored":  # its last row was computed again, to be compared
            report = record.report
            record.report = replace(
                report, cached=report.cached - 1, prefilled=report.prefilled + 1
            )
        record.times.prefilled_s = time.perf_counter()
        prefill_s = record.times.prefilled_s - record.times.acquired_s
        model.tiers.note_prefill(record.report.prefilled, prefill_s)
        parser = turn_parser(model, record.admitted)
        finish: EndReason = "cancelled"
        last = GenerationChunk()
        if record.report.is_complete:
            finish, last = yield from self._decode(parser, should_stop)
        parsed = parser.finish(finish)
        if record.cut is not None:
            self.session.rewind(len(prompt.token_ids) + record.cut.num_kept)
        kept = record.kept(model.tokenizer.encode_untrusted)
        record.admitted.memory.known.add(prompt.token_ids, keys, kept.token_ids)
        hint, session_id = record.admitted.request.session_hint, self.session.session_id
        record.admitted.memory.remember_hint(hint, session_id)
        if not record.admitted.is_raw:
            self._remember(parsed, kept)
        stats = record.stats(parsed, model.drafter_reason, self._notes())
        if not record.admitted.is_raw:
            sent = record.admitted.sent.with_answer(parsed.message)
            record.admitted.memory.past.remember(self.session.session_id, sent)
        _log(stats, parsed.finish_reason)
        if finish == "cancelled":
            return
        if model.idle is not None and not record.admitted.is_raw:
            model.idle.note(self.session.session_id, record.admitted, parsed.message)
        self.generation = Generation(
            parsed.message,
            parsed.finish_reason,
            stats,
            tuple(record.sampled),
            prompt.token_ids,
            parsed.unparsed,
            record.cut.stop if record.cut is not None else None,
            record.logprobs(model.tokenizer.token_bytes),
        )
        yield replace(
            last,
            deltas=last.deltas + parsed.deltas,
            finish_reason=parsed.finish_reason,
            stats=stats,
            generation=self.generation,
        )

    def _decode(
        self, parser: StreamParser | RawParser, should_stop: Callable[[], bool]
    ) -> Steps[GenerationChunk, tuple[EndReason, GenerationChunk]]:
        """All rounds as chunks, but the last one, which is returned with why it is the last."""
        record = self.record
        with closing(self._rounds(should_stop)) as rounds:
            while True:
                began_s = time.perf_counter()
                self._note_parking()
                yield from self._wait_for_room(should_stop)
                round_ = yield from next_item(rounds)
                record.times.decode_s += time.perf_counter() - began_s
                if round_ is None:
                    return "cancelled", GenerationChunk()
                record.add(round_)
                chunk = self._read(parser, round_)
                if record.cut is not None or round_.finish is not None:
                    return ("stop" if record.cut is not None else round_.finish or "stop"), chunk
                yield chunk

    def _note_parking(self) -> None:
        """Lend the session to others, once, where nobody reads what this turn says."""
        if self.record.share.is_parked and not self.session.is_parked:
            self.session.is_parked = True
            logger.info(
                "parked session=%s sampled=%d: nobody reads its stream; the turn runs to its end, "
                "and who names the session forks it",
                self.session.session_id,
                len(self.record.sampled),
            )

    def _read(self, parser: StreamParser | RawParser, round_: Round) -> GenerationChunk:
        """Parse a round, up to where a stop string ends the turn."""
        record, ids = self.record, round_.token_ids
        stop = record.admitted.stop_controls.get(ids[-1])
        deltas = parser.feed(ids if stop is None else ids[:-1])
        num_before = len(record.sampled) - len(ids)
        if parser.stop_cut is not None:
            record.cut_at(parser.stop_cut)
        elif stop is not None:
            num_tokens = len(record.sampled)
            record.cut_at(StopCut(stop, num_tokens, num_tokens - 1, ""))
        num_read = len(record.sampled) - num_before
        logprobs = describe_logprobs(round_.logprobs[:num_read], self.model.tokenizer.token_bytes)
        return GenerationChunk(tuple(deltas), ids[:num_read], logprobs=logprobs)

    def _rounds(self, should_stop: Callable[[], bool]) -> Steps[Round, None]:
        admitted = self.record.admitted
        sampling, prompt_ids = admitted.sampling, admitted.prompt.token_ids
        assert sampling.seed is not None
        assert sampling.max_tokens is not None
        sampler = Sampler(
            sampling, KeyedNoise.derive(sampling.seed, sampling.choice_index, prompt_ids)
        )
        limits = StopRules(
            self.model.stop_token_ids.union(sampling.stop_token_ids, admitted.stop_controls),
            sampling.max_tokens,
            admitted.thoughts,
            _AUDIT_ROWS if self.model.config.audit else None,
            admitted.constraint,
            self.model.config.max_draft_tokens,
        )
        return self.session.decode_steps(sampler, limits, should_stop)

    def _chunk_rows(self) -> int:
        """Rows of the next chunk; 0 where it has to wait for memory."""
        share = self.record.share
        num_left = len(self.record.admitted.prompt.token_ids) - len(self.session.token_ids)
        rows = min(share.chunk_rows, num_left)
        return rows if self._has_room(rows) or not share.may_wait else 0

    def _wait_for_room(self, should_stop: Callable[[], bool]) -> Steps[Never, None]:
        """Evict idle sessions before the pool is full; else draft less, and then wait for others.

        Without anybody to wait for, the loop meets the full pool.
        """
        record = self.record
        num_left = (record.admitted.sampling.max_tokens or 1) - len(record.sampled)
        is_room_short = not self._has_room(min(num_left, MAX_ROWS))
        self.session.set_room_short(is_room_short)
        if not is_room_short:
            return
        while not self._has_room(1) and record.share.may_wait and not should_stop():
            yield Pause("room")

    def _has_room(self, num_rows: int) -> bool:
        try:
            self.model.sessions.make_room(self.session, num_rows)
        except CapacityError:
            return False
        return True

    def _remember(self, parsed: ParsedTurn, kept: KeptIds) -> None:
        """Note the turn for exact replay; what was sampled before a stop counts as well."""
        model, session_id, turn = self.model, self.session.session_id, self.record
        memory = turn.admitted.memory
        if not turn.sampled:
            return
        plan, message = turn.admitted.plan, parsed.message
        forms = turn_forms(plan.key, message, parsed.unparsed)
        is_closed = kept.token_ids[-1:] == (model.closing_id,)
        memory.known.add_answer([form.key for form in forms], is_closed=is_closed)
        calls = [call.id for call in message.tool_calls if call.id]
        calls += [region.id for region in parsed.unparsed]
        self.ended_in_call = bool(calls)
        if model.config.reuse == "prefix":
            return
        for span in turn.new_spans():
            model.workspaces.add(span, tenant=turn.admitted.request.tenant)
        memory.handles.remember(
            [turn.handle, *calls], plan.handle(message, session_id, parsed.unparsed)
        )
        ids = turn.admitted.prompt.turn_record(kept.token_ids)
        if ids is not None and kept.is_whole:
            for form in forms:
                record = JournalRecord(ids, form.reasoning_digest, session_id)
                memory.journal.record(form.key, record)

    def _notes(self) -> list[str]:
        notes = self._contention_notes()
        return [*notes, _PARKED_NOTE] if self.session.is_parked else notes

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


def _log(stats: TurnStats, finish_reason: str) -> None:
    miss = stats.miss
    rate = stats.completion_tokens / stats.decode_s if stats.decode_s else 0.0
    logger.info(
        "turn session=%s origin=%s prompt=%d cached=%d prefill=%d rewound=%d idle=%d new=%d "
        "sampled=%d rounds=%d tau=%.2f batch=%.1f queue_s=%.3f ttft_s=%.3f total_s=%.3f "
        "decode_tok_s=%.1f miss=%s miss_tokens=%d miss_message=%s finish=%s",
        stats.session_id,
        stats.origin,
        stats.prompt_tokens,
        stats.cached_tokens,
        stats.prefilled_tokens,
        stats.rewound_tokens,
        stats.idle_prefilled_tokens,
        stats.new_tokens,
        stats.completion_tokens,
        stats.rounds,
        stats.acceptance_length,
        stats.batch_size,
        stats.queue_s,
        stats.ttft_s,
        stats.total_s,
        rate,
        miss.cause if miss is not None else None,
        miss.tokens if miss is not None else 0,
        miss.message_index if miss is not None else None,
        finish_reason,
    )
