"""What a turn returns: chunks while it runs, a message and the turn's statistics at the end."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from dlite_agent.chat.logprobs import TokenLogprob
from dlite_agent.chat.messages import JSON, Delta, Message, UnparsedToolCall
from dlite_agent.chat.miss import Miss

__all__ = [
    "FinishReason",
    "Generation",
    "GenerationChunk",
    "Replay",
    "TurnStats",
    "prefill_amplification",
    "turn_figures",
    "usage_to_openai",
]

FinishReason = Literal["stop", "length", "tool_calls", "cancelled"]
Replay = Literal["generated", "rendered"]


@dataclass(frozen=True, slots=True)
class TurnStats:
    """The figures of one turn. Times are seconds of `time.perf_counter`; counts are tokens.

    Attributes:
        session_id: The session that holds this turn's KV.
        turn: A signed handle of this turn. A client that sends it back with the message
            (`Message.turn`) is found sooner; nothing depends on it.
        origin: Why that session was chosen: `tool_call`, `hint`, `prefix`, `restored` or `cold`.
        prompt_tokens: Tokens of the prompt, cached ones included.
        new_tokens: Prompt tokens that no earlier turn of this engine rendered or sampled.
        cached_tokens: Prompt tokens whose KV was reused.
        prefilled_tokens: Rows computed outside decode rounds in this turn, counted in the forward.
        idle_prefilled_tokens: Cached prompt tokens that were computed between the last turn and
            this one; no part of `prefilled_tokens`.
        fed_tokens: Cached prompt tokens that were computed while their message was still growing
            (`AgentSession.feed`); no part of `prefilled_tokens`.
        rewound_tokens: Tokens that the session dropped before the prefill.
        completion_tokens: Sampled tokens, the stop token included.
        reasoning_tokens: Those of them inside a thought.
        rounds: Decode rounds (target forwards after the prefill).
        drafted_tokens: Tokens that drafters proposed.
        accepted_tokens: Proposed tokens that the target confirmed.
        drafted_by: Proposed tokens of each source; two that share a block are one, `a+b`.
        accepted_by: Confirmed tokens of each.
        batch_size: Turns that shared a forward with this one, itself included, on average.
        queue_s: Waiting for a place in the batch, for memory, or for a prefix that another turn was
            computing.
        render_s: Messages to token ids.
        prefill_s: Sync, until the first token's logits.
        decode_s: All rounds, with what other turns had in their forwards.
        ttft_s: From the request to the first sampled token.
        total_s: From the request to the end.
        replayed: For each assistant message of the prompt: spliced as generated, or rendered.
        diverged_message: Index of the first message that differs from what the session holds,
            or None.
        miss: What differed from the conversation's last turn and what it cost; None where nothing
            did.
        prompt_hash: blake2b-128 of the prompt's ids, hex: what "lossless" is relative to.
        seed: The seed in use.
        sampling: The resolved sampling parameters: temperature, top_k, top_p, max_tokens, and those
            others that do something.
        is_thought_cut: The thinking budget was spent, and a thought was closed for the model.
        drafter: Which drafter ran, and why.
        notes: Oddities that the caller may want to know, once each, for a person.
    """

    session_id: str = ""
    turn: str = ""
    origin: str = "cold"
    prompt_tokens: int = 0
    new_tokens: int = 0
    cached_tokens: int = 0
    prefilled_tokens: int = 0
    idle_prefilled_tokens: int = 0
    fed_tokens: int = 0
    rewound_tokens: int = 0
    completion_tokens: int = 0
    reasoning_tokens: int = 0
    rounds: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    drafted_by: dict[str, int] = field(default_factory=dict)
    accepted_by: dict[str, int] = field(default_factory=dict)
    batch_size: float = 1.0
    queue_s: float = 0.0
    render_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    ttft_s: float = 0.0
    total_s: float = 0.0
    replayed: tuple[Replay, ...] = ()
    diverged_message: int | None = None
    miss: Miss | None = None
    prompt_hash: str = ""
    seed: int = 0
    sampling: dict[str, float | int] = field(default_factory=dict)
    is_thought_cut: bool = False
    drafter: str = "null"
    notes: tuple[str, ...] = ()

    @property
    def acceptance_length(self) -> float:
        """τ: committed tokens per round; the bonus counts, the prefill's token does not.

        0 without a round.
        """
        if not self.rounds:
            return 0.0
        return (self.completion_tokens - 1) / self.rounds

    @property
    def model_s(self) -> float:
        """Seconds in which the model computed: prefill and decode."""
        return self.prefill_s + self.decode_s


def prefill_amplification(turns: Sequence[TurnStats]) -> float:
    """A of one conversation: rows prefilled over rows that had to be, from the second turn on.

    A turn has to compute its new tokens and one more row: the last token that the turn before
    sampled, which is pending and has no KV yet. 1.0 means that nothing was computed twice.

    Args:
        turns: All turns of the conversation, in order.

    Returns:
        The sum of `prefilled_tokens` over the sum of `new_tokens + 1`; 1.0 without a second turn.
    """
    later = turns[1:]
    needed = sum(stats.new_tokens + 1 for stats in later)
    return sum(stats.prefilled_tokens for stats in later) / needed if needed else 1.0


@dataclass(frozen=True, slots=True)
class GenerationChunk:
    """What one round added.

    Attributes:
        deltas: Typed text; may be empty while a marker or a half character is held back.
        token_ids: The ids that were committed.
        finish_reason: Set on the last chunk only.
        stats: Set on the last chunk only.
        generation: The whole answer, set on the last chunk only.
        choice_index: Which of the request's choices, from 0.
        logprobs: Of each id, where they were asked for.
    """

    deltas: tuple[Delta, ...] = ()
    token_ids: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    stats: TurnStats | None = None
    generation: Generation | None = None
    choice_index: int = 0
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Generation:
    """A finished turn.

    Attributes:
        message: The assistant's message, calls parsed.
        finish_reason: `length` wins over `tool_calls`.
        stats: Figures of the turn.
        token_ids: All sampled ids, the stop token included; with a stop string, up to the token
            that completed it.
        prompt_token_ids: The prompt's ids, as the target saw them: what "lossless" is relative to.
        unparsed: Call regions that are no call, in order.
        matched_stop: The stop string that ended the content, or None.
        logprobs: Of each id in `token_ids`, where they were asked for.
    """

    message: Message
    finish_reason: FinishReason
    stats: TurnStats
    token_ids: tuple[int, ...] = ()
    prompt_token_ids: tuple[int, ...] = ()
    unparsed: tuple[UnparsedToolCall, ...] = ()
    matched_stop: str | None = None
    logprobs: tuple[TokenLogprob, ...] = ()


def usage_to_openai(generations: Sequence[Generation]) -> dict[str, JSON]:
    """OpenAI's `usage` of one prompt and all answers; cached is what no answer had to compute.

    `completion_tokens_details` says nothing of drafts: OpenAI's fields for them mean predictions
    that a client sends.
    """
    stats = [generation.stats for generation in generations]
    prompt_tokens = stats[0].prompt_tokens
    completion_tokens = sum(turn.completion_tokens for turn in stats)
    reasoning_tokens = sum(turn.reasoning_tokens for turn in stats)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": min(turn.cached_tokens for turn in stats)},
        "completion_tokens_details": {"reasoning_tokens": reasoning_tokens},
    }


def turn_figures(generation: Generation) -> dict[str, JSON]:
    """A turn's stats as JSON, with what in it is no call and the stop string that ended it."""
    turn: dict[str, Any] = asdict(generation.stats)
    if generation.unparsed:
        turn["unparsed"] = [asdict(item) for item in generation.unparsed]
    if generation.matched_stop is not None:
        turn["matched_stop"] = generation.matched_stop
    plain: dict[str, JSON] = json.loads(json.dumps(turn))  # lists for tuples, as a client stores it
    return plain
