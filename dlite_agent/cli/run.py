"""`dlite-agent run -- COMMAND`: a command with a server of its own, which it finds by itself."""

from __future__ import annotations

import argparse
import signal
import subprocess
from collections.abc import Sequence
from types import FrameType

from dlite_agent.cli.console import LoadingNote, note
from dlite_agent.cli.serve import (
    add_engine_arguments,
    engine_config,
    require_server,
)
from dlite_agent.cli.vllm_flags import sampling_defaults

__all__ = ["add_arguments", "run", "variables"]

_KEY = "local"  # clients want one; a server on the loopback interface asks for none
_BY_SIGNAL = 128  # as shells report it


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    parser.add_argument(
        "--model",
        default="nano",
        help="nano, a folder in the Hugging Face layout, a GGUF file, or a hub name",
    )
    add_engine_arguments(parser)
    parser.add_argument(
        "command", nargs="+", metavar="COMMAND", help="behind --: the command and its arguments"
    )


def run(arguments: argparse.Namespace) -> int:
    """Serve, run the command, stop, and return its exit status."""
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
        listener = open_listener("127.0.0.1", 0)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
        note(f"serving {config.model} on {url} for {arguments.command[0]}")
        with serving(engine, settings, listener):
            return _run(arguments.command, variables(url, config.model))


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


def _run(command: Sequence[str], added: dict[str, str]) -> int:
    """Run a command to its end; what asks us to end asks the command."""
    # `env` adds to the environment, and becomes the command.
    pairs = [f"{name}={value}" for name, value in added.items()]
    asked: list[int] = []
    started: list[subprocess.Popen[bytes]] = []

    def pass_on(number: int, _: FrameType | None) -> None:
        asked.append(number)
        for process in started:
            process.send_signal(number)

    before = signal.signal(signal.SIGTERM, pass_on)
    try:
        started.append(subprocess.Popen(["env", *pairs, *command]))
        if asked:  # before there was anybody to tell
            started[0].terminate()
        status = _wait(started[0])
    finally:
        signal.signal(signal.SIGTERM, before)
    return status if status >= 0 else _BY_SIGNAL - status


def _wait(process: subprocess.Popen[bytes]) -> int:
    while True:
        try:
            return process.wait()
        except KeyboardInterrupt:
            continue  # the terminal sent it to the command as well, which decides what it means
