"""Transcripts of agents, in the formats that they are kept in, as messages and tools.

A file is JSON, or JSON lines with a conversation a line. Its format is told by what it holds:

- OpenAI: `{"messages": [...], "tools": [...]}`, tools optional;
- ShareGPT: `{"conversations": [{"from": "human", "value": "..."}]}`;
- SWE-agent's `.traj`: `{"history": [...], "trajectory": [...]}`;
- mini-swe-agent: `{"trajectory_format": "mini-swe-agent-...", "messages": [...]}`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from dlite_agent.chat.messages import Message, ToolSpec
from dlite_agent.chat.openai_format import messages_from_openai, tools_from_openai
from dlite_agent.errors import ConfigurationError, RequestError

__all__ = ["BASH_TOOL", "Conversation", "read_conversations"]

_SUFFIXES = (".json", ".jsonl", ".traj")
_SHAREGPT_ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "tool": "tool",
    "function_response": "tool",
    "observation": "tool",
}
BASH_TOOL: dict[str, object] = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Execute a bash command",
        "parameters": {
            "type": "object",
            "properties": {
                "command": {"type": "string", "description": "The bash command to execute"}
            },
            "required": ["command"],
        },
    },
}
"""As in `minisweagent/models/utils/actions_toolcall.py` (a test compares them)."""
"""What mini-swe-agent offers its model; its trajectories do not hold it."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """One transcript.

    Attributes:
        messages: Normalised.
        tools: What the model was offered.
        where: File and number, for messages.
    """

    messages: tuple[Message, ...]
    tools: tuple[ToolSpec, ...]
    where: str

    @property
    def turns(self) -> tuple[int, ...]:
        """Indices of the assistant's messages that answer something."""
        return tuple(
            index
            for index, message in enumerate(self.messages)
            if index and message.role == "assistant"
        )


def read_conversations(paths: Sequence[Path]) -> Iterator[Conversation]:
    """Yield all conversations of files and folders, in the order of their names.

    Args:
        paths: Files, or folders that are searched for `.json`, `.jsonl` and `.traj`.

    Raises:
        ConfigurationError: A path does not exist, or a file holds something else; the message names
            file and number.
    """
    for path in paths:
        if not path.exists():
            raise ConfigurationError(f"there is no {str(path)!r}; name a file or a folder")
        if path.is_dir():
            files = sorted(file for file in path.rglob("*") if file.suffix in _SUFFIXES)
            if not files:
                raise ConfigurationError(
                    f"{str(path)!r} holds no transcripts ({', '.join(_SUFFIXES)})"
                )
        else:
            files = [path]
        for file in files:
            yield from _read_file(file)


def _read_file(path: Path) -> Iterator[Conversation]:
    text = path.read_text("utf-8")
    try:
        content = json.loads(text)
        items = content if isinstance(content, list) else [content]
    except json.JSONDecodeError as error:
        if path.suffix != ".jsonl":
            raise ConfigurationError(f"{str(path)!r} is no JSON: {error}") from error
        items = _lines(path, text)
    for number, item in enumerate(items):
        where = f"{path}#{number}"
        if not isinstance(item, dict):
            raise ConfigurationError(f"{where} is a {type(item).__name__}, not a conversation")
        messages, tools = _as_openai(item, where)
        try:
            yield Conversation(messages_from_openai(messages), tools_from_openai(tools), where)
        except RequestError as error:
            raise ConfigurationError(f"{where}: {error}") from error


def _lines(path: Path, text: str) -> list[object]:
    items: list[object] = []
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            try:
                items.append(json.loads(line))
            except json.JSONDecodeError as error:
                raise ConfigurationError(f"{path}, line {number}, is no JSON: {error}") from error
    return items


_Messages = list[Mapping[str, object]]


def _as_openai(item: Mapping[str, object], where: str) -> tuple[_Messages, _Messages | None]:
    tools = cast(_Messages | None, item.get("tools"))
    if isinstance(item.get("history"), list):
        return _of_swe_agent(cast(_Messages, item["history"])), tools
    if isinstance(item.get("conversations"), list):
        return _of_sharegpt(cast(_Messages, item["conversations"]), where), tools
    if not isinstance(item.get("messages"), list):
        raise ConfigurationError(
            f"{where} has none of the fields messages, conversations and history; see "
            "docs/guides/train-a-drafter.md for the formats that are read"
        )
    messages = cast(_Messages, item["messages"])
    if str(item.get("trajectory_format", "")).startswith("mini-swe-agent"):
        calls = any(message.get("tool_calls") for message in messages)
        kept = [message for message in messages if message.get("role") != "exit"]
        return kept, tools or ([BASH_TOOL] if calls else None)
    return messages, tools


def _of_sharegpt(turns: _Messages, where: str) -> _Messages:
    messages: _Messages = []
    for turn in turns:
        role = _SHAREGPT_ROLES.get(str(turn.get("from")))
        if role is None:
            raise ConfigurationError(
                f"{where}: a turn is from {turn.get('from')!r}; known are "
                f"{', '.join(_SHAREGPT_ROLES)}"
            )
        messages.append({"role": role, "content": turn.get("value")})
    return messages


def _of_swe_agent(history: _Messages) -> _Messages:
    """The agent's own messages; demonstrations and other agents' are left out."""
    messages: _Messages = []
    for entry in history:
        if entry.get("is_demo") or entry.get("agent", "main") not in ("main", "primary"):
            continue
        message = {key: entry[key] for key in ("role", "content", "tool_calls") if entry.get(key)}
        ids = entry.get("tool_call_ids")
        if isinstance(ids, list) and ids:
            message["tool_call_id"] = ids[0]
        messages.append(message)
    return messages
