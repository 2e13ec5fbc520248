"""`dlite-agent chat [MODEL]`: talk to a model in the terminal.

Ctrl-C ends an answer, Ctrl-D the conversation.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict

from dlite_agent.backend import ChatBackend, ChatRequest
from dlite_agent.chat.messages import JSON, Message, ReasoningDelta, TextDelta
from dlite_agent.cli.console import write
from dlite_agent.config import EngineConfig, SamplingParams
from dlite_agent.errors import RequestError
from dlite_agent.outputs import Generation, TurnStats

__all__ = ["add_arguments", "converse", "run", "status_line"]

DIM, PLAIN = "\x1b[2m", "\x1b[0m"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    parser.add_argument(
        "model",
        nargs="?",
        default="nano",
        help="nano, a folder in the Hugging Face layout, or a hub name",
    )
    parser.add_argument("--system", help="system message")
    parser.add_argument(
        "--no-think", action="store_true", help="ask the template to switch thinking off"
    )
    parser.add_argument("--drafter", default="auto", help="auto, lookup or null")
    parser.add_argument(
        "--dtype", default="auto", choices=("auto", "float32", "bfloat16", "float64")
    )
    parser.add_argument("--temperature", type=float, help="0 is greedy; default: the checkpoint's")
    parser.add_argument("--max-tokens", type=int, help="most tokens of one answer")
    parser.add_argument("--seed", type=int)
    parser.add_argument(
        "--json", action="store_true", help="one JSON object a turn instead of text"
    )


def run(arguments: argparse.Namespace) -> int:
    """Load the model, then read lines from standard input until it ends."""
    from dlite_agent.engine import Engine

    sampling = SamplingParams(
        temperature=arguments.temperature, max_tokens=arguments.max_tokens, seed=arguments.seed
    )
    config = EngineConfig(model=arguments.model, drafter=arguments.drafter, dtype=arguments.dtype)
    kwargs: dict[str, JSON] = {"enable_thinking": False} if arguments.no_think else {}
    with Engine(config) as engine:
        engine.load()
        converse(
            engine,
            sampling,
            system=arguments.system,
            template_kwargs=kwargs,
            as_json=arguments.json,
        )
    return 0


def converse(
    backend: ChatBackend,
    sampling: SamplingParams,
    *,
    system: str | None = None,
    template_kwargs: dict[str, JSON] | None = None,
    as_json: bool = False,
) -> None:
    """Hold one conversation over standard input and output.

    A turn that Ctrl-C ends keeps what was written; the session stays valid and the next turn goes
    on from it.
    """
    history: list[Message] = [Message("system", system)] if system else []
    while (line := _read_line(quiet=as_json)) is not None:
        if not line.strip():
            continue
        history.append(Message("user", line))
        request = ChatRequest(
            tuple(history), sampling=sampling, template_kwargs=template_kwargs or {}
        )
        try:
            answer = _answer(backend, request, as_json=as_json)
        except RequestError as error:
            write(f"{error}")
            history.pop()
            continue
        history.append(answer)


def _read_line(*, quiet: bool) -> str | None:
    prompt = "" if quiet or not sys.stdin.isatty() else "> "
    try:
        return input(prompt)
    except EOFError:
        return None
    except KeyboardInterrupt:
        write()
        return ""


def _answer(backend: ChatBackend, request: ChatRequest, *, as_json: bool) -> Message:
    """Stream one answer; on Ctrl-C return what there is."""
    text: list[str] = []
    generation: Generation | None = None
    chunks = backend.stream(request)
    try:
        for chunk in chunks:
            for delta in chunk.deltas:
                if isinstance(delta, TextDelta):
                    text.append(delta.text)
                    _show(delta.text, as_json=as_json)
                elif isinstance(delta, ReasoningDelta):
                    _show(delta.text, dim=True, as_json=as_json)
            generation = chunk.generation or generation
    except KeyboardInterrupt:
        close = getattr(chunks, "close", None)
        if close is not None:
            close()
        _show(" [stopped]", as_json=as_json)
    _finish(generation, "".join(text), as_json=as_json)
    return generation.message if generation is not None else Message("assistant", "".join(text))


def _show(text: str, *, as_json: bool, dim: bool = False) -> None:
    if as_json:
        return
    write(f"{DIM}{text}{PLAIN}" if dim and sys.stdout.isatty() else text, end="")


def _finish(generation: Generation | None, text: str, *, as_json: bool) -> None:
    if as_json:
        stats = asdict(generation.stats) if generation else None
        finish = generation.finish_reason if generation else "cancelled"
        write(json.dumps({"content": text, "finish_reason": finish, "stats": stats}))
    else:
        write()
        if generation is not None and sys.stdout.isatty():
            write(f"{DIM}{status_line(generation.stats)}{PLAIN}")


def status_line(stats: TurnStats) -> str:
    """Cached share, acceptance length and speed of a turn, in one line."""
    rate = stats.completion_tokens / stats.decode_s if stats.decode_s else 0.0
    return (
        f"{stats.prompt_tokens} prompt tokens, {stats.cached_tokens} cached, "
        f"{stats.prefilled_tokens} prefilled · "
        f"{stats.completion_tokens} written, τ {stats.acceptance_length:.2f}, {rate:.0f} tok/s"
    )
