"""`dlite-agent chat [MODEL]`: talk to a model in the terminal.

Ctrl-C ends an answer, Ctrl-D the conversation, and `/new` begins another one.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Generator
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

from dlite_agent.backend import ChatBackend, ChatRequest
from dlite_agent.chat.messages import JSON, Message, ReasoningDelta, TextDelta
from dlite_agent.cli.console import LoadingNote, dim, error_status, note, write
from dlite_agent.cli.model_options import add_model_options
from dlite_agent.config import EngineConfig, SamplingParams
from dlite_agent.errors import ConfigurationError, DLiteError
from dlite_agent.outputs import Generation, TurnStats

if TYPE_CHECKING:
    from dlite_agent.engine.tasks import EngineInfo

__all__ = ["Conversation", "add_arguments", "converse", "run", "status_line"]

_NEW = "/new"
_KEYS = f"Ctrl-C ends an answer, Ctrl-D the conversation; {_NEW} begins another one."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    parser.add_argument(
        "model",
        nargs="?",
        default="nano",
        help="nano, a folder in the Hugging Face layout, a GGUF file, or a hub name",
    )
    parser.add_argument("--system", help="system message")
    parser.add_argument(
        "--no-think", action="store_true", help="ask the template to switch thinking off"
    )
    parser.add_argument(
        "--drafter",
        default="auto",
        help="auto, suffix, lookup, null, or the folder or hub name of a trained one",
    )
    parser.add_argument(
        "--dtype", default="auto", choices=("auto", "float32", "bfloat16", "float64")
    )
    add_model_options(parser)
    parser.add_argument("--temperature", type=float, help="0 is greedy; default: the checkpoint's")
    parser.add_argument("--max-tokens", type=int, help="most tokens of one answer")
    parser.add_argument("--seed", type=int)
    parser.add_argument(
        "--json", action="store_true", help="one JSON object a turn instead of text"
    )


@dataclass(slots=True)
class Conversation:
    """What is said, and how.

    Attributes:
        backend: Answers.
        sampling: Of every turn.
        system: System message, or None.
        template_kwargs: Extra variables of the chat template.
        as_json: Write one object a turn instead of text.
        history: Messages so far.
        num_answered: Lines that were answered, in part at least.
        last_error: What the last line that was refused raised.
    """

    backend: ChatBackend
    sampling: SamplingParams = field(default_factory=SamplingParams)
    system: str | None = None
    template_kwargs: dict[str, JSON] = field(default_factory=dict)
    as_json: bool = False
    history: list[Message] = field(default_factory=list)
    num_answered: int = 0
    last_error: DLiteError | None = None

    def __post_init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Forget everything but the system message."""
        self.history = [Message("system", self.system)] if self.system else []

    @property
    def status(self) -> int:
        """The command's exit status: of the last error when no line was answered."""
        return 0 if self.last_error is None or self.num_answered else error_status(self.last_error)

    def ask(self, line: str) -> None:
        """Send a line and write the answer.

        An error of ours is written and the line forgotten; so is a line that Ctrl-C stopped before
        there was any text. What was written until Ctrl-C stays.

        Raises:
            ConfigurationError: The model cannot run at all.
        """
        said = Message("user", line)
        request = ChatRequest(
            (*self.history, said), sampling=self.sampling, template_kwargs=self.template_kwargs
        )
        try:
            answer = self._answer(request)
        except ConfigurationError:
            raise
        except DLiteError as error:
            self.last_error = error
            self._write_error(error)
            return
        self.num_answered += 1
        if answer is not None:
            self.history += [said, answer]

    def _answer(self, request: ChatRequest) -> Message | None:
        texts: list[str] = []
        generation: Generation | None = None
        try:
            chunks = self.backend.stream(request)
            assert isinstance(chunks, Generator), "closing it ends the turn"
            with closing(chunks):
                for chunk in chunks:
                    for delta in chunk.deltas:
                        self._show(delta, texts)
                    generation = chunk.generation or generation
        except KeyboardInterrupt:
            self._show(TextDelta(" [stopped]"), [])
        text = "".join(texts)
        self._write_end(generation, text)
        if generation is not None:
            return generation.message
        return Message("assistant", text) if text.strip() else None

    def _show(self, delta: object, texts: list[str]) -> None:
        if isinstance(delta, TextDelta):
            texts.append(delta.text)
            if not self.as_json:
                write(delta.text, end="")
        elif isinstance(delta, ReasoningDelta) and not self.as_json:
            write(dim(delta.text), end="")

    def _write_end(self, generation: Generation | None, text: str) -> None:
        if self.as_json:
            row = {
                "content": text,
                "finish_reason": generation.finish_reason if generation else "cancelled",
                "stats": asdict(generation.stats) if generation else None,
            }
            write(json.dumps(row))
            return
        write()
        if generation is not None and sys.stdout.isatty():
            write(dim(status_line(generation.stats)))

    def _write_error(self, error: DLiteError) -> None:
        if self.as_json:
            write(json.dumps({"error": {"code": error.code, "message": str(error)}}))
        else:
            note(str(error))


def run(arguments: argparse.Namespace) -> int:
    """Load the model, then read lines from standard input until it ends."""
    from dlite_agent.engine.engine import Engine

    sampling = SamplingParams(
        temperature=arguments.temperature, max_tokens=arguments.max_tokens, seed=arguments.seed
    )
    config = EngineConfig(
        model=arguments.model,
        drafter=arguments.drafter,
        dtype=arguments.dtype,
        quantize=arguments.quantize,
        rope_scaling=arguments.rope_scaling,
    )
    kwargs: dict[str, JSON] = {"enable_thinking": False} if arguments.no_think else {}
    with Engine(config) as engine:
        with closing(LoadingNote()) as progress:
            info = engine.load(progress)
        if sys.stdin.isatty() and not arguments.json:
            with suppress(ImportError):
                import readline  # noqa: F401  # gives `input` line editing
            note(f"{_describe(info)}\n{_KEYS}")
        return converse(
            Conversation(
                engine,
                sampling,
                system=arguments.system,
                template_kwargs=kwargs,
                as_json=arguments.json,
            )
        )


def converse(conversation: Conversation) -> int:
    """Read lines from standard input, and answer each, until it ends; return the exit status.

    Ctrl-C while a terminal waits for a line is answered with the keys; elsewhere it ends the
    command.
    """
    is_terminal = sys.stdin.isatty()
    prompt = "> " if is_terminal and sys.stdout.isatty() and not conversation.as_json else ""
    while True:
        try:
            line = input(prompt)
            if line.strip() == _NEW:
                conversation.restart()
            elif line.strip():
                conversation.ask(line)
        except EOFError:
            return conversation.status
        except KeyboardInterrupt:
            if not is_terminal:
                raise
            note("\n" + _KEYS)


def _describe(info: EngineInfo) -> str:
    return (
        f"{info.model}, {info.dtype} on {info.device}, {info.max_context} tokens of context, "
        f"drafter {info.drafter}"
    )


def status_line(stats: TurnStats) -> str:
    """Cached share, acceptance length and speed of a turn, in one line."""
    rate = stats.completion_tokens / stats.decode_s if stats.decode_s else 0.0
    return (
        f"{stats.prompt_tokens} prompt tokens, {stats.cached_tokens} cached, "
        f"{stats.prefilled_tokens} prefilled · "
        f"{stats.completion_tokens} written, τ {stats.acceptance_length:.2f}, {rate:.0f} tok/s"
    )
