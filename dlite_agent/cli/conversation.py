"""One conversation of the chat: lines, answers, and the calls between them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Generator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field

from dlite_agent.backend import ChatBackend
from dlite_agent.chat.messages import (
    JSON,
    Message,
    ReasoningDelta,
    TextDelta,
    ToolCall,
    ToolCallDelta,
    UnparsedToolCall,
)
from dlite_agent.cli.chat_screen import ChatScreen, JSONScreen, TextScreen
from dlite_agent.cli.chat_tools import ChatTool, Consent, ToolStopped, misfit
from dlite_agent.cli.console import error_status
from dlite_agent.config import SamplingParams
from dlite_agent.engine.agent_session import AgentSession
from dlite_agent.errors import ConfigurationError, DLiteError
from dlite_agent.outputs import Generation

__all__ = ["Conversation"]

_NOT_RUN = "Error: not run; the work was stopped here."
_MAX_SAME = 3  # errors of one call, after which a small model never finds out


@dataclass(slots=True)
class Conversation:
    """What is said, and how.

    Attributes:
        backend: Answers.
        sampling: Of every turn.
        system: System message, or None.
        template_kwargs: Extra variables of the chat template.
        as_json: Write one object a turn instead of text.
        tools: What the model may call.
        consent: To calls that write or run something.
        max_turns: Most answers to one line, those that only call tools included.
        num_answered: Lines that were answered, in part at least.
        last_error: What the last line that was refused raised.
    """

    backend: ChatBackend
    sampling: SamplingParams = field(default_factory=SamplingParams)
    system: str | None = None
    template_kwargs: dict[str, JSON] = field(default_factory=dict)
    as_json: bool = False
    tools: Sequence[ChatTool] = ()
    consent: Consent = field(default_factory=Consent)
    max_turns: int = 25
    num_answered: int = 0
    last_error: DLiteError | None = None
    _errors: Counter[str] = field(default_factory=Counter)
    _session: AgentSession = field(init=False)
    _screen: ChatScreen = field(init=False)

    def __post_init__(self) -> None:
        self._screen = JSONScreen() if self.as_json else TextScreen()
        self.restart()

    def restart(self) -> None:
        """Forget everything but the system message."""
        self._session = AgentSession(
            self.backend,
            tools=[tool.spec for tool in self.tools],
            template_kwargs=self.template_kwargs,
        )
        if self.system:
            self._session.messages.append(Message("system", self.system))

    @property
    def history(self) -> list[Message]:
        """Messages so far."""
        return self._session.messages

    @property
    def status(self) -> int:
        """The command's exit status: of the last error when no line was answered."""
        return 0 if self.last_error is None or self.num_answered else error_status(self.last_error)

    def ask(self, line: str) -> None:
        """Send a line, write the answer, and run what it calls, until it calls nothing.

        An error of ours is written and the line forgotten with all that followed it; so is a line
        that Ctrl-C stopped before there was any text. What was written until Ctrl-C stays, and so
        do calls: one that was stopped has what it printed as its result.

        Raises:
            ConfigurationError: The model cannot run at all.
        """
        self._answer_open_calls()  # of a line that was stopped where nobody could see to it
        num_before = len(self.history)
        self._errors.clear()
        self.history.append(Message("user", line))
        try:
            self._work(num_before)
        except ConfigurationError:
            raise
        except DLiteError as error:
            is_acted = any(message.role == "tool" for message in self.history[num_before:])
            self._session.rewind(num_before)
            self.last_error = error
            self._screen.error(error, is_acted=is_acted)

    def _work(self, num_before: int) -> None:
        for number in range(1, self.max_turns + 1):
            answer, text = self._answer()
            if answer is None:
                self._screen.end_turn(None, text)
                if text.strip():
                    self.history.append(Message("assistant", text))
                elif number == 1:
                    self._session.rewind(num_before)
                self.num_answered += number == 1
                return
            self.num_answered += number == 1
            self._screen.answered(answer)
            has_calls = bool(answer.message.tool_calls or answer.unparsed)
            is_last = number == self.max_turns
            goes_on = has_calls and not is_last and self._run_calls(answer)
            self._answer_open_calls(answer.unparsed)
            self._screen.end_turn(answer, text)
            if not goes_on:
                if has_calls and is_last:
                    self._screen.limit(self.max_turns)
                return

    def _answer(self) -> tuple[Generation | None, str]:
        """Take a turn; the answer is None where Ctrl-C ended it, and the text what was written."""
        texts: list[str] = []
        generation: Generation | None = None
        chunks = self._session.stream(sampling=self.sampling)
        assert isinstance(chunks, Generator), "closing it ends the turn"
        try:
            with closing(chunks):
                for chunk in chunks:
                    for delta in chunk.deltas:
                        self._show(delta, texts)
                    generation = chunk.generation or generation
        except KeyboardInterrupt:
            self._screen.stopped()
        return generation, "".join(texts)

    def _show(self, delta: object, texts: list[str]) -> None:
        if isinstance(delta, TextDelta):
            texts.append(delta.text)
            self._screen.text(delta.text)
        elif isinstance(delta, ReasoningDelta):
            self._screen.thought(delta.text)
        elif isinstance(delta, ToolCallDelta) and delta.name is not None:
            self._screen.calling(delta.name)

    def _run_calls(self, answer: Generation) -> bool:
        """Run an answer's calls, one after the other; whether the line goes on."""
        for call in answer.message.tool_calls:
            try:
                result = self._run(call)
                is_stopped = False
            except ToolStopped as stopped:
                result = f"{stopped.output}\nError: the user stopped this call.".lstrip("\n")
                is_stopped = True
            except KeyboardInterrupt:
                result, is_stopped = "Error: the user stopped this call.", True
            self._add_result(call, result)
            if is_stopped:
                self._screen.stopped()
                return False
            if self._is_stuck(call, result):
                self._screen.stuck(call.name)
                return False
        return True

    def _is_stuck(self, call: ToolCall, result: str) -> bool:
        """Whether a call failed in the same way before, too often for one line."""
        failed = f"{call.name} {json.dumps(call.arguments, sort_keys=True)} {result}"
        self._errors[failed] += result.startswith("Error: ")
        return self._errors[failed] >= _MAX_SAME

    def _run(self, call: ToolCall) -> str:
        tool = next((tool for tool in self.tools if tool.spec.name == call.name), None)
        self._screen.call(call, tool)
        if tool is None:
            known = ", ".join(tool.spec.name for tool in self.tools) or "none"
            return f"Error: no tool {call.name}; there are: {known}"
        wrong = misfit(tool.spec, call.arguments)
        if wrong is not None:
            return wrong
        assert isinstance(call.arguments, dict), "it fits an object's schema"
        return self.consent.refusal(tool, call.arguments) or tool.run(call.arguments, self._feed)

    def _feed(self, text: str) -> None:
        """Let the model read what a tool has printed so far."""
        with suppress(DLiteError):  # the turn will say what is wrong
            self._session.feed(text)

    def _add_result(self, call: ToolCall, result: str) -> None:
        self.history.append(Message("tool", result, tool_call_id=call.id, name=call.name))
        self._screen.result(call, result)

    def _answer_open_calls(self, unparsed: Sequence[UnparsedToolCall] = ()) -> None:
        """Give every call of the last answer a result, as templates and models expect it."""
        answers = [message for message in self.history if message.role == "assistant"]
        answered = {message.tool_call_id for message in self.history if message.role == "tool"}
        for call in answers[-1].tool_calls if answers else ():
            if call.id not in answered:
                self._add_result(call, _NOT_RUN)
        for region in unparsed:
            result = f"Error: this is no call: {region.error}"
            self._screen.unparsed(region, result)
            self.history.append(Message("tool", result, tool_call_id=region.id))
