"""Conversations whose answers a model writes again, turn by turn."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dlite_agent.chat.openai_format import messages_from_openai, tools_from_openai
from dlite_agent.chat.renderer import Renderer
from dlite_agent.errors import ConfigurationError, RequestError
from dlite_agent.tokenizer import CheckpointTokenizer

__all__ = ["SuiteRequest", "built_in_suite", "load_suite"]

_ASSETS = Path(__file__).parent / "assets"


@dataclass(frozen=True, slots=True)
class SuiteRequest:
    """One turn.

    Attributes:
        conversation: Its name.
        turn: Which of its answers, from 0.
        prompt_ids: Everything before the answer.
        thinking: `on`, `off`, or `template` where the conversation leaves it to the template.
    """

    conversation: str
    turn: int
    prompt_ids: tuple[int, ...]
    thinking: str


def built_in_suite(model: str) -> Path:
    """Agents on held-out tasks for nano, which recorded them; a short repair for any other model.

    `docs/benchmarks/record_suite.py` made the former.
    """
    return _ASSETS / ("nano.jsonl" if model == "nano" else "repair.json")


def load_suite(path: Path, tokenizer: CheckpointTokenizer) -> list[list[SuiteRequest]]:
    """Read conversations, one a line: OpenAI's `messages`, or a `prompt` that is one message.

    Each message of an assistant is a turn, behind everything before it as it stands in the file;
    where the last message is somebody else's, its answer is one more. A line may have `tools`, a
    `name`, and `enable_thinking` for the chat template.

    Args:
        path: `.jsonl`; a file of another name is one conversation.
        tokenizer: Of the model that answers.

    Raises:
        ConfigurationError: It cannot be read, or a line is no such conversation.
    """
    renderer = Renderer(tokenizer)
    suite = [
        list(_requests(f"{path.name}:{number}", line, renderer))
        for number, line in enumerate(_lines(path), 1)
    ]
    names = [requests[0].conversation for requests in suite if requests]
    for name in names:
        if names.count(name) > 1:
            raise ConfigurationError(
                f"two conversations of {str(path)!r} are called {name!r}; name each differently"
            )
    if not any(suite):
        raise ConfigurationError(f"{str(path)!r} asks for no answer; use a file with conversations")
    return [requests for requests in suite if requests]


def _lines(path: Path) -> list[Any]:
    try:
        text = path.read_text(encoding="utf-8")
        texts = text.splitlines() if path.suffix == ".jsonl" else [text]
        return [json.loads(line) for line in texts if line.strip()]
    except OSError as error:
        raise ConfigurationError(
            f"the suite {str(path)!r} cannot be read: {error.strerror}; name a file that can"
        ) from error
    except ValueError as error:
        raise ConfigurationError(
            f"the suite {str(path)!r} is no JSON: {error}; use one conversation a line"
        ) from error


def _requests(where: str, line: Any, renderer: Renderer) -> Iterator[SuiteRequest]:
    if isinstance(line, Mapping) and isinstance(line.get("prompt"), str):
        line = {**line, "messages": [{"role": "user", "content": line["prompt"]}]}
    if not isinstance(line, Mapping) or not isinstance(line.get("messages"), list):
        raise ConfigurationError(
            f'{where} has neither messages nor a prompt; use {{"messages": [...]}} in OpenAI\'s '
            'form, or {"prompt": "..."}'
        )
    try:
        messages = messages_from_openai(line["messages"])
        tools = tools_from_openai(line.get("tools"))
    except RequestError as error:
        raise ConfigurationError(f"{where}: {error}") from error
    thinking = line.get("enable_thinking")
    variables = {} if thinking is None else {"enable_thinking": bool(thinking)}
    stops = [number for number, message in enumerate(messages) if message.role == "assistant"]
    if messages and messages[-1].role != "assistant":
        stops.append(len(messages))
    for turn, stop in enumerate(stops):
        prompt = renderer.render(
            messages[:stop], tools, template_kwargs=variables, add_generation_prompt=True
        )
        yield SuiteRequest(
            conversation=str(line.get("name", where)),
            turn=turn,
            prompt_ids=tuple(prompt.token_ids),
            thinking="template" if thinking is None else ("on" if thinking else "off"),
        )
