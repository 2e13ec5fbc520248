"""A chat backend without a model: it says what a script says, through the real parser."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import AsyncGenerator, Callable, Generator, Iterable, Iterator
from contextlib import aclosing, closing
from dataclasses import replace

from dlite_agent.backend import ChatRequest
from dlite_agent.chat.logprobs import TokenLogprob
from dlite_agent.chat.messages import JSON, Message, ToolSpec
from dlite_agent.chat.openai_format import message_to_openai
from dlite_agent.chat.stop_strings import StopStrings
from dlite_agent.chat.stream_parser import EndReason, StreamParser
from dlite_agent.errors import RequestError
from dlite_agent.outputs import Generation, GenerationChunk, TurnStats
from dlite_agent.testing.tokenizers import ByteTokenizer

__all__ = ["ScriptedEngine"]

Turn = str | Exception | Callable[[ChatRequest], str]


class ScriptedEngine:
    """Plays one scripted turn a request; a `ChatBackend`.

    A turn is written as a model of the Qwen3 family samples it, markers included: `<think>` and
    `</think>` around a thought, `<tool_call>` and `</tool_call>` around a call in JSON. Tokens are
    bytes, so the figures of a turn are bytes; what an earlier prompt shares with this one counts as
    cached. May be used from any thread, and from asyncio.

    Args:
        turns: What to say, in order; a function of the request may say it, and an exception is
            raised.
        model_name: Reported as such.
        max_context: Reported as such.
        tokens_per_round: Tokens of one chunk.
        round_s: Seconds that each round takes.

    Attributes:
        requests: Every request that takes a turn, in order.
        partial_requests: Those whose last message still grew; they take no turn of the script.
        num_cancelled: Turns that were closed or cancelled before their end.
    """

    def __init__(
        self,
        turns: Iterable[Turn],
        *,
        model_name: str = "scripted",
        max_context: int = 32_768,
        tokens_per_round: int = 4,
        round_s: float = 0.0,
    ) -> None:
        self.model_name = model_name
        self.max_context = max_context
        self.requests: list[ChatRequest] = []
        self.partial_requests: list[ChatRequest] = []
        self.num_cancelled = 0
        self._turns = list(turns)
        self._tokens_per_round = tokens_per_round
        self._round_s = round_s
        self._tokenizer = ByteTokenizer()
        self._call_numbers = itertools.count()
        self._lock = threading.Lock()
        self._prompts: list[str] = []

    def stream(self, request: ChatRequest) -> Generator[GenerationChunk, None, None]:
        """Play the next turn; of several choices, one turn each, one after the other."""
        for index in range(self._num_turns(request)):
            is_finished = False
            try:
                for chunk in self._play(request):
                    time.sleep(self._round_s)
                    is_finished = chunk.generation is not None
                    yield replace(chunk, choice_index=index)
            finally:
                self._count_end(is_finished)

    async def astream(self, request: ChatRequest) -> AsyncGenerator[GenerationChunk, None]:
        """`stream` for asyncio; the event loop runs between rounds."""
        for index in range(self._num_turns(request)):
            is_finished = False
            try:
                for chunk in self._play(request):
                    await asyncio.sleep(self._round_s)
                    is_finished = chunk.generation is not None
                    yield replace(chunk, choice_index=index)
            finally:
                self._count_end(is_finished)

    def generate(self, request: ChatRequest) -> Generation:
        """Play the next turn to its end."""
        return self.generate_choices(request)[0]

    def generate_choices(self, request: ChatRequest) -> list[Generation]:
        """Play as many turns as there are choices."""
        with closing(self.stream(request)) as chunks:
            return [chunk.generation for chunk in chunks if chunk.generation is not None]

    async def agenerate(self, request: ChatRequest) -> Generation:
        """Play the next turn to its end."""
        return (await self.agenerate_choices(request))[0]

    async def agenerate_choices(self, request: ChatRequest) -> list[Generation]:
        """Play as many turns as there are choices."""
        async with aclosing(self.astream(request)) as chunks:
            return [chunk.generation async for chunk in chunks if chunk.generation is not None]

    def count_tokens(self, messages: tuple[Message, ...], tools: tuple[ToolSpec, ...] = ()) -> int:
        """Length of the prompt in bytes."""
        return len(self._prompt(messages, tools).encode())

    def close(self) -> None:
        """Do nothing; there is nothing to give back."""

    def _prompt_of(self, request: ChatRequest) -> str:
        prompt = request.prompt
        if prompt is None:
            return self._prompt(request.messages, request.tools)
        if isinstance(prompt, str):
            return prompt
        return b"".join(map(self._tokenizer.token_bytes, prompt)).decode("utf-8", "replace")

    def _prompt(self, messages: tuple[Message, ...], tools: tuple[ToolSpec, ...]) -> str:
        listed: list[dict[str, JSON]] = [
            {"type": "function", "function": {"name": tool.name, "parameters": tool.parameters}}
            for tool in tools
        ]
        rendered = [message_to_openai(message) for message in messages]
        return self._tokenizer.apply_template(rendered, listed or None, False)

    def _num_turns(self, request: ChatRequest) -> int:
        if request.is_partial:
            self.partial_requests.append(request)
            return 0
        return request.num_choices

    def _play(self, request: ChatRequest) -> Iterator[GenerationChunk]:
        text, stats = self._begin(request)
        ids = self._tokenizer.encode_template(text + "<|im_end|>")
        reason: EndReason = "stop"
        limit = request.sampling.max_tokens
        if limit is not None and limit < len(ids):
            ids, reason = ids[:limit], "length"
        parser = StreamParser(
            self._tokenizer,
            new_call_id=lambda: f"call_{next(self._call_numbers)}",
            stops=StopStrings(request.stop) if request.stop else None,
        )
        wants_logprobs = request.sampling.logprobs
        cut = None
        num_rounds = 0
        for start in range(0, len(ids), self._tokens_per_round):
            round_ids = ids[start : start + self._tokens_per_round]
            num_rounds += 1
            deltas = tuple(parser.feed(round_ids))
            cut = parser.stop_cut
            if cut is not None:
                ids, reason = ids[: cut.num_tokens], "stop"
                round_ids = ids[start:]
            logprobs = self._logprobs(round_ids) if wants_logprobs else ()
            yield GenerationChunk(deltas, tuple(round_ids), logprobs=logprobs)
            if cut is not None:
                break
        parsed = parser.finish(reason)
        stats = TurnStats(
            session_id=request.session_hint or "scripted",
            prompt_tokens=stats.prompt_tokens,
            new_tokens=stats.prompt_tokens - stats.cached_tokens,
            cached_tokens=stats.cached_tokens,
            prefilled_tokens=stats.prompt_tokens - stats.cached_tokens,
            completion_tokens=len(ids),
            reasoning_tokens=parsed.num_reasoning_tokens,
            rounds=num_rounds,
        )
        generation = Generation(
            message=parsed.message,
            finish_reason=parsed.finish_reason,
            stats=stats,
            token_ids=tuple(ids),
            unparsed=parsed.unparsed,
            matched_stop=cut.stop if cut is not None else None,
            logprobs=self._logprobs(ids) if wants_logprobs else (),
        )
        yield GenerationChunk(
            deltas=parsed.deltas,
            finish_reason=parsed.finish_reason,
            stats=stats,
            generation=generation,
        )

    def _logprobs(self, token_ids: list[int]) -> tuple[TokenLogprob, ...]:
        """A script is certain of what it says."""
        raw = self._tokenizer.token_bytes
        return tuple(TokenLogprob(token_id, raw(token_id), 0.0) for token_id in token_ids)

    def _begin(self, request: ChatRequest) -> tuple[str, TurnStats]:
        """Take the next turn of the script, and count what the prompt shares with earlier ones."""
        prompt = self._prompt_of(request)
        with self._lock:
            number = len(self.requests)
            self.requests.append(request)
            turn = self._turns[number] if number < len(self._turns) else None
            shared = max((_num_shared(earlier, prompt) for earlier in self._prompts), default=0)
            self._prompts.append(prompt)
        if turn is None:
            raise RequestError(
                f"this is request {number + 1} and the script has {number} turns; write more turns"
            )
        if isinstance(turn, Exception):
            raise turn
        num_tokens = len(prompt.encode())
        cached = max(0, min(len(prompt[:shared].encode()), num_tokens - 1))
        text = turn if isinstance(turn, str) else turn(request)
        return text, TurnStats(prompt_tokens=num_tokens, cached_tokens=cached)

    def _count_end(self, is_finished: bool) -> None:
        if not is_finished:
            with self._lock:
                self.num_cancelled += 1


def _num_shared(first: str, second: str) -> int:
    """Length of the common prefix, in characters."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(first), len(second)))
