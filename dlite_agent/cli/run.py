"""`dlite-agent run -- COMMAND`: a command with a server of its own, which it finds by itself."""

from __future__ import annotations

import argparse
import shutil
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from dlite_agent.cli.console import LoadingNote, note
from dlite_agent.cli.serve import (
    add_engine_arguments,
    engine_config,
    require_server,
)
from dlite_agent.cli.vllm_flags import sampling_defaults
from dlite_agent.config import child_environment

__all__ = ["add_arguments", "run", "variables"]

_KEY = "local"  # clients want one; a server on the loopback interface asks for none
_HOST = "127.0.0.1"
# As shells report it: a command that a signal ended, that cannot be run, that is not there.
_BY_SIGNAL, _NOT_RUN, _NOT_FOUND = 128, 126, 127


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    parser.add_argument(
        "--model",
        default="nano",
        help="nano, a folder in the Hugging Face layout, a GGUF file, or a hub name",
    )
    add_engine_arguments(parser)
    parser.add_argument(
        "command",
        nargs=argparse.PARSER,  # all that follows is the command's, options too
        metavar="COMMAND",
        help="the command and its arguments, which may begin with --",
    )


def run(arguments: argparse.Namespace) -> int:
    """Serve, run the command, stop, and return its exit status."""
    command = _without_dashes(arguments.command)
    status = _check(command[0])  # before a model is loaded for nothing
    if status:
        return status
    require_server("run")
    from dlite_agent.engine.engine import Engine
    from dlite_agent.serving.server import open_listener, serving
    from dlite_agent.serving.settings import ServerSettings

    config = engine_config(arguments)
    settings = ServerSettings(
        max_running=config.max_batch,
        max_queue=config.max_queue,
        sampling_defaults=sampling_defaults(arguments.generation_config),
        shutdown_timeout_s=0.0,  # who asked has ended
    )
    with Engine(config) as engine:
        progress = LoadingNote()
        try:
            engine.load(progress)
        finally:
            progress.close()
        listener = open_listener(_HOST, 0)
        url = f"http://{_HOST}:{listener.getsockname()[1]}/v1"
        note(f"serving {config.model} on {url} for {command[0]}")
        with serving(engine, settings, listener):
            return _run(command, child_environment(variables(url, config.model), _HOST))


def variables(url: str, model: str) -> dict[str, str]:
    """What clients read to find a server.

    | Read by | Variables |
    |---|---|
    | openai-python, openai-node, LangChain | `OPENAI_BASE_URL`, `OPENAI_API_KEY` |
    | LiteLLM's `openai/`, Aider | `OPENAI_API_BASE`, `OPENAI_API_KEY`, `AIDER_MODEL` |
    | LiteLLM's `hosted_vllm/` | `HOSTED_VLLM_API_BASE`, `HOSTED_VLLM_API_KEY` |
    | Qwen Code | `OPENAI_BASE_URL`, `OPENAI_API_KEY`, `OPENAI_MODEL` |
    | OpenHands | `LLM_BASE_URL`, `LLM_API_KEY`, `LLM_MODEL` |

    Args:
        url: The server's, with `/v1`.
        model: As the server calls it.
    """
    bases = ("OPENAI_BASE_URL", "OPENAI_API_BASE", "HOSTED_VLLM_API_BASE", "LLM_BASE_URL")
    keys = ("OPENAI_API_KEY", "HOSTED_VLLM_API_KEY", "LLM_API_KEY")
    return {
        **dict.fromkeys(bases, url),
        **dict.fromkeys(keys, _KEY),
        "OPENAI_MODEL": model,
        "AIDER_MODEL": f"openai/{model}",
        "LLM_MODEL": f"hosted_vllm/{model}",
    }


def _without_dashes(words: list[str]) -> list[str]:
    """The command behind a `--`, which is ours; another one is the command's."""
    return words[1:] if words[0] == "--" and len(words) > 1 else words


def _check(program: str) -> int:
    """0 where a command can be run; else say so, and return a shell's status."""
    if shutil.which(program) is not None:
        return 0
    if "/" in program and Path(program).exists():
        note(f"dlite-agent run: {program!r} is no program that may be run; try: chmod +x")
        return _NOT_RUN
    note(f"dlite-agent run: there is no command {program!r}; check its name, and PATH")
    return _NOT_FOUND


def _run(command: Sequence[str], environment: dict[str, str]) -> int:
    """Run a command to its end; what asks us to end asks the command."""
    asked: list[int] = []
    started: list[subprocess.Popen[bytes]] = []

    def pass_on(number: int, _: FrameType | None) -> None:
        asked.append(number)
        for process in started:
            process.send_signal(number)

    before = {number: signal.signal(number, pass_on) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        started.append(subprocess.Popen(command, env=environment))
        if asked:  # before there was anybody to tell
            started[0].send_signal(asked[0])
        status = _wait(started[0])
    except OSError as error:  # e.g. a script without a first line that names its interpreter
        note(f"dlite-agent run: {command[0]!r} cannot be run: {error.strerror}")
        return _NOT_RUN
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return status if status >= 0 else _BY_SIGNAL - status


def _wait(process: subprocess.Popen[bytes]) -> int:
    while True:
        try:
            return process.wait()
        except KeyboardInterrupt:
            continue  # the terminal sent it to the command as well, which decides what it means
