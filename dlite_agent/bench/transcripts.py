"""Transcripts of agents as one line of tokens, and which of them the assistant wrote."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dlite_agent.chat.messages import Message, ToolSpec
from dlite_agent.chat.openai_format import messages_from_openai, tools_from_openai
from dlite_agent.chat.renderer import Renderer
from dlite_agent.errors import ConfigurationError
from dlite_agent.tokenizer import CheckpointTokenizer

__all__ = [
    "Transcript",
    "built_in_transcripts",
    "load_transcripts",
    "read_transcript",
    "transcript_files",
]

_ASSETS = Path(__file__).parent / "assets"


@dataclass(frozen=True, slots=True)
class Transcript:
    """A session as it stood after its last answer, each turn as it was sampled.

    Attributes:
        name: Of the file.
        token_ids: All ids.
        answers: [start, stop) of each answer; the first id is what the prefill's logits give, the
            last one ends the turn.
        tool_results: [start, stop) of what tools returned.
    """

    name: str
    token_ids: tuple[int, ...]
    answers: tuple[tuple[int, int], ...]
    tool_results: tuple[tuple[int, int], ...]


def load_transcripts(
    given: Path | Iterable[Path], tokenizer: CheckpointTokenizer
) -> list[Transcript]:
    """Read files, and every `*.json` of folders: OpenAI's `messages`, and `tools` if there are any.

    Thinking is switched off: transcripts have no thoughts, and an empty one is the template's text,
    not the assistant's.

    Raises:
        ConfigurationError: There is no such file, or one is no transcript with an answer.
    """
    renderer = Renderer(tokenizer)
    return [_transcript(path, tokenizer, renderer) for path in transcript_files(given)]


def transcript_files(given: Path | Iterable[Path]) -> list[Path]:
    """Files, and the `*.json` of folders by name.

    Raises:
        ConfigurationError: A path that does not exist, or a folder without any.
    """
    found: list[Path] = []
    for path in (given,) if isinstance(given, Path) else given:
        if not path.exists():
            raise ConfigurationError(
                f"there is no {str(path)!r}; name a file, or a folder with *.json in it"
            )
        inside = sorted(path.glob("*.json")) if path.is_dir() else [path]
        if not inside:
            raise ConfigurationError(f"there is no *.json in {str(path)!r}; name a folder that has")
        found += inside
    return found


def built_in_transcripts(tokenizer: CheckpointTokenizer) -> list[Transcript]:
    """A short repair of a small repository, written for this bench."""
    return load_transcripts(_ASSETS, tokenizer)


def _transcript(path: Path, tokenizer: CheckpointTokenizer, renderer: Renderer) -> Transcript:
    messages, tools = read_transcript(path)
    ids: tuple[int, ...] = ()
    answers: list[tuple[int, int]] = []
    results: list[tuple[int, int]] = []
    splices: dict[int, tuple[int, ...]] = {}
    closing_id = tokenizer.control_tokens.get(renderer.traits.closer)
    for number, message in enumerate(messages):
        if message.role != "assistant":
            continue
        variables = {"enable_thinking": False}
        prompt, whole = (
            renderer.render(
                messages[:stop],
                tools,
                template_kwargs=variables,
                splices=splices,
                add_generation_prompt=stop == number,
            )
            for stop in (number, number + 1)
        )
        start = len(prompt.token_ids)
        rest = whole.token_ids[start:]
        if whole.token_ids[:start] != prompt.token_ids or closing_id not in rest:
            raise ConfigurationError(
                f"the chat template renders messages[{number}] of {path.name!r} in another form "
                "than it asks for it; use another tokenizer"
            )
        results += [
            (segment.start, segment.stop)
            for segment in prompt.segments
            if segment.start >= len(ids)
            and segment.message_index is not None
            and messages[segment.message_index].role == "tool"
        ]
        stop = start + rest.index(closing_id) + 1
        ids = whole.token_ids[:stop]
        answers.append((start, stop))
        record = prompt.turn_record(ids[start:])
        if record is not None:
            splices[number] = record
    if not answers:
        raise ConfigurationError(f"{path.name!r} has no message of an assistant; use another file")
    return Transcript(path.stem, ids, tuple(answers), tuple(results))


def read_transcript(path: Path) -> tuple[tuple[Message, ...], tuple[ToolSpec, ...]]:
    """The messages and tools of a file in OpenAI's form.

    Raises:
        ConfigurationError: It is none.
    """
    try:
        found: Any = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigurationError(f"{path.name!r} is no JSON: {error}; use another file") from error
    if not isinstance(found, Mapping) or not isinstance(found.get("messages"), list):
        raise ConfigurationError(
            f"{path.name!r} has no list of messages; use OpenAI's form, "
            '{"messages": [...], "tools": [...]}'
        )
    return messages_from_openai(found["messages"]), tools_from_openai(found.get("tools"))
