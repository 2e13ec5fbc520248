"""Middleware for `create_agent`: feed a tool's output while it runs, and elide where that pays.

Needs the package langchain (`pip install "dlite-agent[demo]"`).
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import threading
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, fields
from itertools import accumulate
from typing import Any

from langchain.agents.middleware import AgentMiddleware, ModelRequest, ModelResponse
from langchain.agents.structured_output import ToolStrategy
from langchain.tools import ToolRuntime
from langchain.tools.tool_node import ToolCallRequest
from langchain_core.messages import AIMessage, AnyMessage, BaseMessage, ToolMessage
from langgraph.types import Command

from dlite_agent.errors import DLiteError
from dlite_agent.integrations.langchain import ChatDLite

__all__ = ["ElideToolResults", "FeedToolOutput"]

logger = logging.getLogger(__name__)

ToolResult = ToolMessage | Command[Any]
_MAX_OPEN_CALLS = 256


class FeedToolOutput(AgentMiddleware[Any, Any, Any]):
    """Prefills what a tool prints while the tool still runs, so that the next turn starts sooner.

    A tool prints with LangGraph's own `ToolRuntime.emit_output_delta`. What it emits as text, put
    together, is taken for the beginning of its result; the next turn decides by its tokens, and
    what the result does not begin with is dropped. Whole lines are fed, by a thread of their own:
    neither the tool nor an event loop waits for the model. `fed_tokens` of the next turn's figures
    says what it brought.

    Of parallel calls, one is fed once those before it have ended, since results stand in the
    prompt in the order of their calls. Models other than `ChatDLite`, and agents whose answer
    travels as a tool (`ToolStrategy`), run as without this middleware. Put it last in the list, so
    that it sees the messages that the model sees.

    ```python
    @tool(description="Run the tests.")
    def run_tests(runtime: ToolRuntime) -> str:
        lines = []
        for line in start_tests():
            lines.append(line)
            runtime.emit_output_delta(line)
        return "".join(lines)


    agent = create_agent(ChatDLite("nano"), [run_tests], middleware=[FeedToolOutput()])
    ```
    """

    def __init__(self) -> None:
        super().__init__()
        self._open: dict[str, _Asked] = {}
        self._lock = threading.RLock()

    def wrap_model_call(
        self,
        request: ModelRequest[Any],
        handler: Callable[[ModelRequest[Any]], ModelResponse[Any]],
    ) -> ModelResponse[Any]:
        """Note what the model was asked, for the tools that it calls."""
        response = handler(request)
        self._note(request, response)
        return response

    async def awrap_model_call(
        self,
        request: ModelRequest[Any],
        handler: Callable[[ModelRequest[Any]], Awaitable[ModelResponse[Any]]],
    ) -> ModelResponse[Any]:
        """`wrap_model_call` for asyncio."""
        response = await handler(request)
        self._note(request, response)
        return response

    def wrap_tool_call(
        self, request: ToolCallRequest, handler: Callable[[ToolCallRequest], ToolResult]
    ) -> ToolResult:
        """Run the tool with a runtime whose output is fed."""
        feeder = self._feeder(request)
        if feeder is None:
            return handler(request)
        try:
            result = handler(feeder.request(request))
        finally:
            feeder.close()
        self._finish(feeder, result)
        return result

    async def awrap_tool_call(
        self, request: ToolCallRequest, handler: Callable[[ToolCallRequest], Awaitable[ToolResult]]
    ) -> ToolResult:
        """`wrap_tool_call` for asyncio."""
        feeder = self._feeder(request)
        if feeder is None:
            return await handler(request)
        try:
            result = await handler(feeder.request(request))
        finally:
            if feeder.is_started:
                await asyncio.to_thread(feeder.close)
        self._finish(feeder, result)
        return result

    def _note(self, request: ModelRequest[Any], response: ModelResponse[Any]) -> None:
        answer = next((m for m in response.result if isinstance(m, AIMessage)), None)
        if (
            answer is None
            or not isinstance(request.model, ChatDLite)
            or isinstance(request.response_format, ToolStrategy)
        ):
            return
        system = [request.system_message] if request.system_message else []
        messages: list[BaseMessage] = [*system, *request.messages, answer]
        asked = _Asked(request.model, messages, list(request.tools), dict(request.model_settings))
        with self._lock:
            self._open.update(dict.fromkeys(asked.call_ids, asked))
            for call_id in list(self._open)[:-_MAX_OPEN_CALLS]:  # tools that never ran
                del self._open[call_id]

    def _feeder(self, request: ToolCallRequest) -> _Feeder | None:
        call_id = request.tool_call["id"] or ""
        with self._lock:
            asked = self._open.pop(call_id, None)
        if asked is None or not isinstance(request.runtime, ToolRuntime):
            return None
        return _Feeder(asked, call_id)

    def _finish(self, feeder: _Feeder, result: ToolResult) -> None:
        if isinstance(result, ToolMessage):
            feeder.asked.results[feeder.call_id] = result


@dataclass(slots=True, eq=False)
class _Asked:
    """A turn that made calls, with what the model was asked, and the results so far."""

    model: ChatDLite
    messages: list[BaseMessage]
    tools: list[Any]
    options: dict[str, Any]
    results: dict[str, ToolMessage] = field(default_factory=dict)

    @property
    def call_ids(self) -> list[str]:
        answer = self.messages[-1]
        assert isinstance(answer, AIMessage)
        return [call["id"] or "" for call in answer.tool_calls]

    def feed(self, call_id: str, text: str) -> None:
        """Prefill what a call has printed; not while one before it has no result."""
        before = self.call_ids[: self.call_ids.index(call_id)]
        results = dict(self.results)
        if all(earlier in results for earlier in before):
            part = ToolMessage(text, tool_call_id=call_id)
            messages = [*self.messages, *(results[earlier] for earlier in before), part]
            self.model.feed(messages, tools=self.tools, **self.options)


class _Feeder:
    """Feeds what one running tool prints, the newest text each time, until it is closed."""

    def __init__(self, asked: _Asked, call_id: str) -> None:
        self.asked = asked
        self.call_id = call_id
        self._text = ""
        self._is_over = False
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    @property
    def is_started(self) -> bool:
        """Whether anything was printed, so that `close` may have to wait."""
        return self._thread is not None

    def request(self, request: ToolCallRequest) -> ToolCallRequest:
        """The same call, with a runtime that hands on what the tool emits."""
        runtime = request.runtime
        given = {item.name: getattr(runtime, item.name) for item in fields(runtime)}
        return ToolCallRequest(
            tool_call=request.tool_call,
            tool=request.tool,
            state=request.state,
            runtime=_FedRuntime(**given, feed=self.add),
        )

    def add(self, delta: object) -> None:
        """Take the next piece; never waits for the model."""
        if not isinstance(delta, str):
            return
        with self._changed:
            self._text += delta
            if self._thread is None:
                run = contextvars.copy_context().run  # the thread id of the graph is in there
                self._thread = threading.Thread(
                    target=run, args=(self._run,), name="dlite feeder", daemon=True
                )
                self._thread.start()
            self._changed.notify_all()

    def close(self) -> None:
        """Feed no more; wait for what is being fed, which the turn needs anyway."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        fed = ""
        while (text := self._whole_lines(fed)) != fed:
            try:
                self.asked.feed(self.call_id, text)
            except DLiteError:  # the turn itself says what is wrong, if it still is
                logger.debug("feeding a tool's output failed", exc_info=True)
                return
            fed = text

    def _whole_lines(self, fed: str) -> str:
        """The lines so far, once there are more than were fed; as many, once the tool is over."""

        def lines() -> str:
            return self._text[: self._text.rfind("\n") + 1]

        with self._changed:
            self._changed.wait_for(lambda: self._is_over or len(lines()) > len(fed))
            return fed if self._is_over else lines()


@dataclass
class _FedRuntime(ToolRuntime[Any, Any]):
    feed: Callable[[object], None] = field(kw_only=True)

    def emit_output_delta(self, delta: Any) -> None:
        """As LangGraph's; the model hears it too."""
        self.feed(delta)
        super().emit_output_delta(delta)


@dataclass(frozen=True, slots=True)
class ElideToolResults:
    """Takes old tool results out of the history, in batches, where the re-prefill pays.

    An edit for LangChain's `ContextEditingMiddleware`. What stands behind the first elided result
    has to be computed again, once. All results that may go are elided together, and only when no
    more tokens are computed again than `max_cost` for each one that goes. So what all edits of a
    conversation cost is at most `max_cost` times what they free, however long it gets, whereas an
    edit at every turn computes the newest messages again at every turn. Which batches there were
    follows from the messages alone, so the history stays the same between two batches, in another
    process too.

    ```python
    edit = ElideToolResults(trigger=16_000)
    agent = create_agent(model, tools, middleware=[ContextEditingMiddleware(edits=[edit])])
    ```

    Args:
        trigger: Elide only what is longer than this, in the middleware's count of tokens.
        keep: Newest results that stay.
        max_cost: Tokens that may be computed again for each one that is elided. Where this is never
            reached, as when answers are longer than results, nothing is elided.
        placeholder: What the model reads in place of a result.
    """

    trigger: int = 16_000
    keep: int = 3
    max_cost: float = 1.0
    placeholder: str = "[cleared]"

    def apply(
        self, messages: list[AnyMessage], *, count_tokens: Callable[[Sequence[BaseMessage]], int]
    ) -> None:
        """Edit a history in place, as it was edited at every turn before.

        Args:
            messages: The whole history, without earlier edits.
            count_tokens: Of a list of messages.
        """
        results = [i for i, message in enumerate(messages) if isinstance(message, ToolMessage)]
        if len(results) <= self.keep or count_tokens(messages) <= self.trigger:
            return

        def size(message: AnyMessage) -> int:  # a count may hold what every prompt begins with
            return count_tokens([messages[0], message]) - first

        first = count_tokens(messages[:1])
        totals = list(accumulate([first, *map(size, messages[1:])], initial=0))
        cleared = {i: self._cleared(messages[i]) for i in results}
        gains = {i: totals[i + 1] - totals[i] - size(cleared[i]) for i in results}
        elided: set[int] = set()
        turns = [i for i, message in enumerate(messages) if isinstance(message, AIMessage)]
        for stop in (*turns, len(messages)):
            if totals[stop] - sum(gains[i] for i in elided) > self.trigger:
                old = [i for i in results if i < stop][: -self.keep or None]
                batch = {i for i in old if i not in elided and gains[i] > 0}
                if self._pays(batch, gains, totals[: stop + 1]):
                    elided |= batch
        for i in elided:
            messages[i] = cleared[i]

    def _pays(self, batch: set[int], gains: dict[int, int], totals: list[int]) -> bool:
        gain = sum(gains[i] for i in batch)
        return bool(batch) and totals[-1] - totals[min(batch)] - gain <= self.max_cost * gain

    def _cleared(self, message: AnyMessage) -> AnyMessage:
        return message.model_copy(update={"content": self.placeholder, "artifact": None})
