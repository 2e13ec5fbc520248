"""What happened in a turn, and the figures that are made of it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

import numpy as np

from dlite_agent.chat.logprobs import TokenLogprob
from dlite_agent.chat.miss import Miss, explain_miss
from dlite_agent.chat.stream_parser import ParsedTurn, StopCut
from dlite_agent.config import SamplingParams
from dlite_agent.decoding.loop import Round
from dlite_agent.engine.admission import AdmittedRequest
from dlite_agent.engine.batch_share import BatchShare
from dlite_agent.outputs import TurnStats
from dlite_agent.sampling import TokenLogprobs
from dlite_agent.sessions.session import SyncReport

__all__ = ["KeptIds", "TurnRecord", "TurnTimes", "describe_logprobs"]

logger = logging.getLogger(__name__)

_PROBE_TOKENS = 256


@dataclass(slots=True)
class TurnTimes:
    """Moments of `time.perf_counter`, and seconds.

    Attributes:
        submitted_s: It was asked for.
        started_s: It got its place in the batch.
        rendered_s: Its prompt was rendered.
        acquired_s: It got its session.
        prefilled_s: The session held its prompt.
        first_token_s: Its first token was sampled; 0 before that.
        decode_s: Seconds of all rounds.
    """

    submitted_s: float
    started_s: float = field(default_factory=time.perf_counter)
    rendered_s: float = 0.0
    acquired_s: float = 0.0
    prefilled_s: float = 0.0
    first_token_s: float = 0.0
    decode_s: float = 0.0


@dataclass(slots=True)
class TurnRecord:
    """Notes of one turn, from when it has a session.

    Attributes:
        admitted: What runs.
        session_id: On which session.
        origin: Why that one.
        hinted_session_id: Which one its hint named.
        num_new: Prompt tokens that no earlier turn knew.
        share: Its part in the batch.
        times: When what happened.
        report: Of its sync, once that is over.
        rounds: So far.
        sampled: Ids so far; up to where a stop string was complete.
        cut: Where a stop string ended the turn, or None.
        idle_rows: Rows of its prompt that were computed before it came, while nobody asked for any.
        is_probe: Somebody asked for one token to see whether the model answers: a small prompt in a
            session of its own, which is not worth its place.
        handle: What the client carries for us, to say which turn this was.
    """

    admitted: AdmittedRequest
    session_id: str
    origin: str
    hinted_session_id: str | None
    num_new: int
    share: BatchShare
    times: TurnTimes
    report: SyncReport | None = None
    rounds: list[Round] = field(default_factory=list)
    sampled: list[int] = field(default_factory=list)
    cut: StopCut | None = None
    idle_rows: int = 0
    handle: str = ""
    is_probe: bool = False

    def __post_init__(self) -> None:
        self.handle = self.admitted.memory.handles.sign(self.session_id)
        self.is_probe = (
            self.admitted.sampling.max_tokens == 1
            and len(self.admitted.prompt.token_ids) <= _PROBE_TOKENS
            and not self.admitted.is_raw
            and self.session_id not in self.admitted.memory.past
        )

    def add(self, round_: Round) -> None:
        """Note a round."""
        self.times.first_token_s = self.times.first_token_s or time.perf_counter()
        self.sampled.extend(round_.token_ids)
        self.rounds.append(round_)
        logger.debug(
            "round session=%s source=%s drafted=%d accepted=%d committed=%d",
            self.session_id,
            round_.source,
            round_.num_drafted,
            round_.num_accepted,
            len(round_.token_ids),
        )

    def cut_at(self, cut: StopCut) -> None:
        """End the turn at a stop string; what was sampled behind it never was."""
        self.cut = cut
        del self.sampled[cut.num_tokens :]

    def new_spans(self) -> Iterator[Sequence[int]]:
        """The ids of the tool results that this turn computed, one by one, and of the answer."""
        prompt, messages = self.admitted.prompt, self.admitted.request.messages
        cached = self.report.cached if self.report is not None else 0
        for segment in prompt.segments:
            index = segment.message_index
            is_result = index is not None and messages[index].role == "tool"
            if is_result and segment.stop > cached:
                yield prompt.token_ids[segment.start : segment.stop]
        yield self.sampled

    def kept(self, encode: Callable[[str], list[int]]) -> KeptIds:
        """What the conversation keeps of the answer.

        Args:
            encode: Text to ids, for what a stop string left of a token.
        """
        cut = self.cut
        if cut is None:
            return KeptIds(tuple(self.sampled))
        rest = encode(cut.rest) if cut.rest else []
        return KeptIds((*self.sampled[: cut.num_kept], *rest), is_whole=cut.rest is not None)

    def logprobs(self, token_bytes: Callable[[int], bytes]) -> tuple[TokenLogprob, ...]:
        """Of each sampled id; empty unless they were asked for."""
        entries = [entry for round_ in self.rounds for entry in round_.logprobs]
        return describe_logprobs(entries[: len(self.sampled)], token_bytes)

    def stats(self, parsed: ParsedTurn, drafter: str, notes: Sequence[str]) -> TurnStats:
        """The figures of a turn whose sync is over.

        Args:
            parsed: Its answer.
            drafter: Which drafter ran, and why.
            notes: For a person, beside those of prompt and answer.
        """
        prompt, sampling = self.admitted.prompt, self.admitted.sampling
        times, report = self.times, self.report
        assert report is not None
        assert sampling.seed is not None
        first_token_s = times.first_token_s or time.perf_counter()
        return TurnStats(
            session_id=self.session_id,
            turn=self.handle,
            origin=self.origin,
            prompt_tokens=len(prompt.token_ids),
            new_tokens=self.num_new,
            cached_tokens=report.cached,
            prefilled_tokens=report.prefilled,
            rewound_tokens=report.rewound,
            fed_tokens=self.admitted.memory.take_fed(self.session_id, report.cached),
            idle_prefilled_tokens=min(self.idle_rows, report.cached),
            completion_tokens=len(self.sampled),
            reasoning_tokens=parsed.num_reasoning_tokens,
            rounds=sum(round_.source != "prefill" for round_ in self.rounds),
            drafted_tokens=sum(round_.num_drafted for round_ in self.rounds),
            accepted_tokens=sum(round_.num_accepted for round_ in self.rounds),
            drafted_by=self._by_source(lambda round_: round_.num_drafted),
            accepted_by=self._by_source(lambda round_: round_.num_accepted),
            batch_size=self.share.mean_turns,
            queue_s=times.started_s - times.submitted_s + times.acquired_s - times.rendered_s,
            render_s=times.rendered_s - times.started_s,
            prefill_s=times.prefilled_s - times.acquired_s,
            decode_s=times.decode_s,
            ttft_s=first_token_s - times.submitted_s,
            total_s=time.perf_counter() - times.submitted_s,
            replayed=tuple(
                "generated" if turn.message_index in prompt.spliced else "rendered"
                for turn in self.admitted.plan.turns
            ),
            diverged_message=self._diverged_message(report),
            miss=self._miss(report),
            prompt_hash=_prompt_hash(prompt.token_ids),
            seed=sampling.seed,
            sampling=_in_use(sampling),
            is_thought_cut=any(round_.source == "forced" for round_ in self.rounds),
            drafter=drafter,
            notes=tuple(dict.fromkeys((*prompt.notes, *parsed.notes, *notes))),
        )

    def _miss(self, report: SyncReport) -> Miss | None:
        """What differs from the conversation's last turn; to be asked before this one is kept."""
        admitted = self.admitted
        past = admitted.memory.past.closest(admitted.sent)
        if past is None:
            return None
        cached = report.cached
        return explain_miss(past, admitted.sent, admitted.plan, admitted.prompt, cached)

    def _by_source(self, count: Callable[[Round], int]) -> dict[str, int]:
        """Sums over the rounds that had a draft."""
        found: dict[str, int] = {}
        for round_ in self.rounds:
            if round_.num_drafted:
                found[round_.source] = found.get(round_.source, 0) + count(round_)
        return found

    def _diverged_message(self, report: SyncReport) -> int | None:
        """The message in which the session and the prompt part; a fork parts from its donor."""
        prompt = self.admitted.prompt
        if report.diverged_at is not None:
            return prompt.message_at(report.diverged_at)
        named = {"tool_call": self.admitted.plan.owner_session_id, "hint": self.hinted_session_id}
        is_fork = self.session_id != named.get(self.origin, self.session_id)
        is_missed = report.cached and report.prefilled > self.num_new + 1
        return prompt.message_at(report.cached) if is_fork or is_missed else None


@dataclass(frozen=True, slots=True)
class KeptIds:
    """An answer's ids as the next prompt has them.

    Attributes:
        token_ids: What was sampled; where a stop string cut a token, its rest encoded anew.
        is_whole: They are the whole answer. Otherwise it can only be rendered from its text.
    """

    token_ids: tuple[int, ...]
    is_whole: bool = True


def describe_logprobs(
    entries: Sequence[TokenLogprobs], token_bytes: Callable[[int], bytes]
) -> tuple[TokenLogprob, ...]:
    """Log-probabilities with the tokens' bytes."""
    return tuple(
        TokenLogprob(
            entry.token_id,
            token_bytes(entry.token_id),
            entry.logprob,
            tuple(TokenLogprob(i, token_bytes(i), logprob) for i, logprob in entry.top),
        )
        for entry in entries
    )


def _in_use(sampling: SamplingParams) -> dict[str, float | int]:
    """The parameters that say how this turn was sampled; others only where they do something."""
    always = ("temperature", "top_k", "top_p", "max_tokens")
    off = {
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "thinking_budget": None,
    }
    values = {name: getattr(sampling, name) for name in (*always, *off)}
    return {
        name: value
        for name, value in values.items()
        if name in always or (value is not None and value != off[name])
    }


def _prompt_hash(token_ids: tuple[int, ...]) -> str:
    """blake2b-128 of the ids as little-endian 32-bit numbers, in hex."""
    return blake2b(np.asarray(token_ids, dtype="<i4").tobytes(), digest_size=16).hexdigest()
