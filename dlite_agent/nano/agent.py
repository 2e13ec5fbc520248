"""A LangChain agent on a task of the world: what `demo` and `evaluate` run."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from dlite_agent.backend import ChatBackend, ChatRequest
from dlite_agent.chat.messages import Message, ToolSpec
from dlite_agent.errors import ContextLengthExceededError, MissingDependencyError
from dlite_agent.nano.tools import REPAIR_TOOLS, RepairTools
from dlite_agent.nano.world import Task
from dlite_agent.outputs import Generation, GenerationChunk

if TYPE_CHECKING:
    from langchain_core.tools import BaseTool

__all__ = ["AgentRun", "RecordingBackend", "repair_tools", "require_langchain", "run_repair"]

MAX_STEPS = 40
"""LangGraph steps; an agent turn takes two (model, tools)."""
MAX_ANSWER_TOKENS = 512


class RecordingBackend:
    """A `ChatBackend` that keeps every finished turn of another one.

    Args:
        backend: Does the work; not closed with this one.
        on_turn: Called with each finished generation, in the thread that reads it.
    """

    def __init__(
        self, backend: ChatBackend, on_turn: Callable[[Generation], None] | None = None
    ) -> None:
        self._backend = backend
        self._on_turn = on_turn
        self.generations: list[Generation] = []

    @property
    def model_name(self) -> str:
        """Name of the wrapped backend's model."""
        return self._backend.model_name

    @property
    def max_context(self) -> int:
        """Context of the wrapped backend, in tokens."""
        return self._backend.max_context

    def stream(self, request: ChatRequest) -> Iterator[GenerationChunk]:
        """Pass chunks on and keep the last one's generation."""
        for chunk in self._backend.stream(request):
            if chunk.generation is not None:
                self._keep(chunk.generation)
            yield chunk

    def generate(self, request: ChatRequest) -> Generation:
        """Pass the answer on and keep it."""
        return self.generate_choices(request)[0]

    def generate_choices(self, request: ChatRequest) -> list[Generation]:
        """Pass the answers on and keep them."""
        return [self._keep(answer) for answer in self._backend.generate_choices(request)]

    async def astream(self, request: ChatRequest) -> AsyncIterator[GenerationChunk]:
        """Pass chunks on and keep the last one's generation."""
        async for chunk in self._backend.astream(request):
            if chunk.generation is not None:
                self._keep(chunk.generation)
            yield chunk

    async def agenerate(self, request: ChatRequest) -> Generation:
        """Pass the answer on and keep it."""
        return (await self.agenerate_choices(request))[0]

    async def agenerate_choices(self, request: ChatRequest) -> list[Generation]:
        """Pass the answers on and keep them."""
        return [self._keep(answer) for answer in await self._backend.agenerate_choices(request)]

    def count_tokens(self, messages: tuple[Message, ...], tools: tuple[ToolSpec, ...] = ()) -> int:
        """Count with the wrapped backend."""
        return self._backend.count_tokens(messages, tools)

    def close(self) -> None:
        """Leave the wrapped backend open; its owner closes it."""

    def _keep(self, generation: Generation) -> Generation:
        self.generations.append(generation)
        if self._on_turn is not None:
            self._on_turn(generation)
        return generation


@dataclass(frozen=True, slots=True)
class AgentRun:
    """One agent on one task.

    Attributes:
        solved: Whether the task's own tests pass afterwards.
        turns: Every model turn, in order.
        wall_s: Seconds in all, tools included.
        error: What ended the run early, for a person; None when the agent stopped by itself.
    """

    solved: bool
    turns: tuple[Generation, ...]
    wall_s: float
    error: str | None = None

    @property
    def model_s(self) -> float:
        """Seconds of prefill and decoding."""
        return sum(turn.stats.model_s for turn in self.turns)


def require_langchain() -> None:
    """See that `create_agent` can be imported.

    Raises:
        MissingDependencyError: It cannot.
    """
    try:
        import langchain.agents  # noqa: F401  # only whether it is there
    except ImportError as error:
        raise MissingDependencyError(
            f"the agent needs the package {error.name or 'langchain'!r}, which is not installed; "
            'run: pip install "dlite-agent[demo]"'
        ) from error


def repair_tools(
    folder: Path, log: Callable[[str, Mapping[str, object], str], None] | None = None
) -> list[BaseTool]:
    """The four repair tools on a folder, as LangChain tools.

    Args:
        folder: The repository; nothing outside of it is read or written.
        log: Called after each call with the name, the arguments and the result.
    """
    from langchain_core.tools import StructuredTool

    tools = RepairTools(folder)

    def bound(name: str) -> Callable[..., str]:
        def call(**arguments: object) -> str:
            result = tools.call(name, arguments)
            if log is not None:
                log(name, arguments, result)
            return result

        return call

    made: list[BaseTool] = []
    for spec in REPAIR_TOOLS:
        function = cast(dict[str, Any], spec["function"])
        made.append(
            StructuredTool.from_function(
                func=bound(function["name"]),
                name=function["name"],
                description=function["description"],
                args_schema=function["parameters"],
            )
        )
    return made


def run_repair(
    backend: ChatBackend,
    task: Task,
    folder: Path,
    *,
    on_turn: Callable[[Generation], None] | None = None,
    log: Callable[[str, Mapping[str, object], str], None] | None = None,
    enable_thinking: bool | None = None,
) -> AgentRun:
    """Let a `create_agent` agent work on a task, greedily, until it stops calling tools.

    Args:
        backend: The model.
        task: What to repair.
        folder: Where the repository is written to; made if missing.
        on_turn: Called after each model turn.
        log: Called after each tool call.
        enable_thinking: Passed to the chat template; None leaves its default.

    Raises:
        MissingDependencyError: langchain is not installed.
    """
    require_langchain()
    from langchain.agents import create_agent
    from langgraph.errors import GraphRecursionError

    from dlite_agent.integrations.langchain import ChatDLite

    recorder = RecordingBackend(backend, on_turn)
    llm = ChatDLite(
        model=backend.model_name,
        engine=recorder,
        temperature=0.0,
        max_tokens=MAX_ANSWER_TOKENS,
        enable_thinking=enable_thinking,
    )
    agent = create_agent(llm, repair_tools(task.materialise(folder), log))
    error = None
    start = time.perf_counter()
    try:
        agent.invoke(
            {"messages": [{"role": "user", "content": task.prompt}]}, {"recursion_limit": MAX_STEPS}
        )
    except GraphRecursionError:
        error = f"no end after {MAX_STEPS} steps"
    except ContextLengthExceededError as exceeded:
        error = str(exceeded)
    wall_s = time.perf_counter() - start
    return AgentRun(task.solved(folder), tuple(recorder.generations), wall_s, error)
