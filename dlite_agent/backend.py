"""The one call behind every integration: a chat request in, chunks out."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol, get_args

from dlite_agent.chat.field_types import check_fields, make_tuple
from dlite_agent.chat.messages import JSON, Message, ToolSpec
from dlite_agent.chat.output_rules import OutputRules
from dlite_agent.config import HistoryMode, SamplingParams
from dlite_agent.outputs import Generation, GenerationChunk

__all__ = ["ChatBackend", "ChatRequest"]


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """One turn, as every host asks for it.

    Attributes:
        messages: The whole history, normalised (`chat.openai_format.messages_from_openai`).
        tools: What the model may call.
        sampling: Unset fields come from the checkpoint.
        session_hint: Where to look first (a thread id, a prompt cache key). Never proof.
        tenant: Whose request it is. Nothing that one tenant sent or got is reused for another.
        template_kwargs: Extra variables of the chat template, e.g. `{"enable_thinking": False}`.
        history: Overrides the engine's mode for this call; None keeps it.
        stop: Strings that end the content; no part of it. Thoughts and calls are not searched.
        output: Which tools may or must be called, and the form of the answer.
        is_partial: The last message is still growing: compute what is sure to stay of it, and
            answer nothing. The stream has no chunks.
        is_public: What it computes is kept, and found by the requests of every tenant
            (`Engine.publish`). Only with `is_partial`; its messages are whole, and `tenant` is
            nobody's.
        num_choices: How many independent answers, from `sampling.choice_index` on.
        prompt: Text or ids that the target reads in place of messages, no template around them;
            control tokens that the text spells count as such. The answer is text, markers too.
        when_full: What happens where `max_queue` requests wait already: `"error"` raises
            `CapacityError` (a server's choice), `"wait"` waits for a place (a program's own).

    Raises:
        RequestError: A field is of another type; a single text is no tuple of stop strings.
    """

    messages: tuple[Message, ...]
    tools: tuple[ToolSpec, ...] = ()
    sampling: SamplingParams = field(default_factory=SamplingParams)
    session_hint: str | None = None
    tenant: str = ""
    template_kwargs: Mapping[str, JSON] = field(default_factory=dict)
    history: HistoryMode | None = None
    stop: tuple[str, ...] = ()
    output: OutputRules = field(default_factory=OutputRules)
    is_partial: bool = False
    is_public: bool = False
    num_choices: int = 1
    when_full: Literal["error", "wait"] = "error"
    prompt: str | tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        modes = (None, *get_args(HistoryMode))
        checks = {
            "session_hint": (isinstance(self.session_hint, str | None), "a text or None"),
            "tenant": (isinstance(self.tenant, str), "a text"),
            "template_kwargs": (isinstance(self.template_kwargs, Mapping), "a mapping"),
            "history": (self.history in modes, f"one of {modes!r}"),
            "output": (isinstance(self.output, OutputRules), "OutputRules"),
            "sampling": (isinstance(self.sampling, SamplingParams), "SamplingParams"),
            "is_partial": (isinstance(self.is_partial, bool), "True or False"),
            "is_public": (
                self.is_public is False or (self.is_public is True and self.is_partial is True),
                "False, or True with is_partial=True",
            ),
            "num_choices": (type(self.num_choices) is int, "a whole number"),
            "prompt": (isinstance(self.prompt, str | tuple | None), "a text or a tuple of ids"),
            "when_full": (self.when_full in ("error", "wait"), "'error' or 'wait'"),
        }
        check_fields(self, checks)
        make_tuple(self, "messages", Message, "a tuple of Message")
        make_tuple(self, "tools", ToolSpec, "a tuple of ToolSpec")
        make_tuple(self, "stop", str, "a tuple of texts")


class ChatBackend(Protocol):
    """What `Engine`, a remote engine and the scripted double have in common.

    Closing or cancelling an iterator cancels the turn within one prefill chunk or one round.
    """

    @property
    def model_name(self) -> str:
        """What was asked for: `nano`, a folder or a hub name."""
        ...

    @property
    def max_context(self) -> int:
        """Most tokens of prompt and answer together. Loads the model when that was not done yet."""
        ...

    def stream(self, request: ChatRequest) -> Iterator[GenerationChunk]:
        """Run a turn, a chunk a round; the last chunk carries the whole answer and its stats.

        With several choices, their chunks come as they are ready, each with its `choice_index`, and
        each choice has a last chunk.
        """
        ...

    def generate(self, request: ChatRequest) -> Generation:
        """Run a turn to its end; of several choices, return the first."""
        ...

    def generate_choices(self, request: ChatRequest) -> list[Generation]:
        """Run a turn to its end; all choices, in order."""
        ...

    def astream(self, request: ChatRequest) -> AsyncIterator[GenerationChunk]:
        """`stream` for asyncio; never blocks the loop."""
        ...

    async def agenerate(self, request: ChatRequest) -> Generation:
        """`generate` for asyncio; never blocks the loop."""
        ...

    async def agenerate_choices(self, request: ChatRequest) -> list[Generation]:
        """`generate_choices` for asyncio; never blocks the loop."""
        ...

    def count_tokens(self, messages: tuple[Message, ...], tools: tuple[ToolSpec, ...] = ()) -> int:
        """Exact prompt length of these messages when rendered, without a generation prompt."""
        ...

    def close(self) -> None:
        """Cancel what runs and give the memory back; may be called twice."""
        ...
