"""`dlite-agent chat [MODEL]`: talk to a model in the terminal, and let it work in a folder.

Ctrl-C ends an answer or a tool, Ctrl-D the conversation, and `/new` begins another one.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from types import FrameType
from typing import TYPE_CHECKING

from dlite_agent.chat.messages import JSON
from dlite_agent.cli.chat_tools import Answer, Consent
from dlite_agent.cli.console import LoadingNote, note
from dlite_agent.cli.model_options import add_model_options
from dlite_agent.cli.tool_choice import GROUPS, ToolOptions, choose_tools
from dlite_agent.config import EngineConfig, SamplingParams
from dlite_agent.errors import ConfigurationError

if TYPE_CHECKING:
    from dlite_agent.cli.conversation import Conversation
    from dlite_agent.engine.tasks import EngineInfo

__all__ = ["add_arguments", "ask_user", "converse", "run"]

_NEW = "/new"
_KEYS = f"Ctrl-C ends an answer or a tool, Ctrl-D the conversation; {_NEW} begins another one."
_ANSWERS: dict[str, Answer] = {"y": "yes", "n": "no", "": "no", "a": "always"}
_MAX_TURNS = 25
_TOOL_TIMEOUT_S = 120.0


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
        "--dtype",
        default="auto",
        choices=("auto", "float32", "bfloat16", "float64"),
        help="of weights and KV",
    )
    add_model_options(parser)
    parser.add_argument("--temperature", type=float, help="0 is greedy; default: the checkpoint's")
    parser.add_argument("--max-tokens", type=int, help="most tokens of one answer")
    parser.add_argument("--seed", type=int, help="of the sampling; default: a new one a turn")
    parser.add_argument(
        "--json",
        action="store_true",
        help="one JSON object a turn instead of text, with its calls and their results",
    )
    _add_tool_arguments(parser)


def _add_tool_arguments(parser: argparse.ArgumentParser) -> None:
    tools = parser.add_argument_group(
        "tools",
        "What reads runs at once; what writes or runs something asks first, and is\n"
        "refused where nobody can be asked. File tools stay inside of the folder; a\n"
        "command may do whatever you may.",
    )
    tools.add_argument("--root", metavar="FOLDER", help="let the model work there")
    groups = "; ".join(f"{name} ({', '.join(members)})" for name, members in GROUPS.items())
    tools.add_argument(
        "--tools",
        action="append",
        default=[],
        metavar="A,B",
        help=f"groups: {groups}; or single tools, or FILE.py:NAME or MODULE:NAME for a function of "
        "your own. Default: files with --root, else none",
    )
    tools.add_argument("-y", "--yes", action="store_true", help="never ask")
    tools.add_argument(
        "--test-command",
        metavar="COMMAND",
        help="what run_tests runs; default: run_tests.py in the folder, else pytest",
    )
    tools.add_argument(
        "--tool-timeout",
        type=float,
        default=_TOOL_TIMEOUT_S,
        metavar="SECONDS",
        help="of a program that a tool runs; default: %(default)g",
    )
    tools.add_argument(
        "--max-turns",
        type=int,
        default=_MAX_TURNS,
        metavar="N",
        help="most answers to one line, those that only call tools included; default: %(default)s",
    )


def run(arguments: argparse.Namespace) -> int:
    """Load the model, then read lines from standard input until it ends."""
    from dlite_agent.cli.conversation import Conversation
    from dlite_agent.engine.engine import Engine

    if arguments.max_turns < 1:
        raise ConfigurationError(f"--max-turns is {arguments.max_turns}; use at least 1")
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
    options = ToolOptions(
        root=arguments.root,
        names=arguments.tools,
        test_command=arguments.test_command,
        timeout_s=arguments.tool_timeout,
    )
    tools = choose_tools(options)
    can_ask = sys.stdin.isatty() and sys.stdout.isatty() and not arguments.json
    kwargs: dict[str, JSON] = {"enable_thinking": False} if arguments.no_think else {}
    with _orderly_end(), Engine(config) as engine:
        with closing(LoadingNote()) as progress:
            info = engine.load(progress)
        if sys.stdin.isatty() and not arguments.json:
            with suppress(ImportError):
                import readline  # noqa: F401  # gives `input` line editing
            names = ", ".join(tool.spec.name for tool in tools)
            note(_describe(info) + (f"\ntools: {names}" if names else "") + f"\n{_KEYS}")
        conversation = Conversation(
            engine,
            sampling,
            system=arguments.system,
            template_kwargs=kwargs,
            as_json=arguments.json,
            tools=tools,
            consent=Consent(is_given=arguments.yes, ask=ask_user if can_ask else None),
            max_turns=arguments.max_turns,
        )
        return converse(conversation)


def ask_user() -> Answer:
    """Ask whether the call that stands above may run; Enter and Ctrl-D are a no.

    What was typed before the question is no answer to it.
    """
    with suppress(ImportError, OSError, ValueError):
        import termios

        termios.tcflush(sys.stdin.fileno(), termios.TCIFLUSH)
    while True:
        try:
            given = input("  allow it? [y]es, [n]o, [a]lways: ").strip().lower()
        except EOFError:
            return "no"
        if given[:1] in _ANSWERS and given in ("", "y", "yes", "n", "no", "a", "always"):
            return _ANSWERS[given[:1]]


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


@contextmanager
def _orderly_end() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end the program that a tool runs, too, and the engine."""

    def leave(number: int, _: FrameType | None) -> None:
        raise SystemExit(128 + number)  # as shells report it

    before = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _describe(info: EngineInfo) -> str:
    return (
        f"{info.model}, {info.dtype} on {info.device}, {info.max_context} tokens of context, "
        f"drafter {info.drafter}"
    )
