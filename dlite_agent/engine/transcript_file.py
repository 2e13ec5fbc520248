"""A conversation's messages, tools and settings in a file of a saved session's folder."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dlite_agent.backend import ChatRequest
from dlite_agent.chat.messages import Message, ToolCall, ToolSpec
from dlite_agent.errors import CheckpointError, DLiteError
from dlite_agent.sessions.atomic_file import explained, make_folder, write_file

__all__ = ["read_transcript", "write_transcript"]

_NAME = "transcript.json"
_FORMAT = 1


def write_transcript(folder: Path, request: ChatRequest) -> None:
    """Write a request's messages, tools, history mode and template variables.

    Raises:
        CheckpointError: The folder cannot be written, or something in it is no JSON.
    """
    content = {
        "format": _FORMAT,
        "messages": [asdict(message) for message in request.messages],
        "tools": [asdict(tool) for tool in request.tools],
        "history": request.history,
        "template_kwargs": dict(request.template_kwargs),
    }
    try:
        text = json.dumps(content, indent=1)
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"the transcript cannot be written as JSON: {error}; use texts, numbers, lists and "
            "mappings in messages, tools and template_kwargs"
        ) from error
    with explained("save the session to", folder):
        make_folder(folder)
        write_file(folder / _NAME, [text.encode()])


def read_transcript(folder: Path) -> ChatRequest:
    """What `write_transcript` wrote.

    Raises:
        CheckpointError: There is none, or it is damaged.
    """
    path = folder / _NAME
    with explained("read the session in", folder):
        if not path.is_file():
            raise CheckpointError(
                f"{str(folder)!r} holds no conversation ({_NAME} is missing); name the folder that "
                "was given to AgentSession.save"
            )
        text = path.read_bytes()
    try:
        content = json.loads(text)
        if content["format"] != _FORMAT:
            raise CheckpointError(
                f"{str(path)!r} has format {content['format']!r}, but this version reads "
                f"{_FORMAT}; read it with the version that wrote it"
            )
        return ChatRequest(
            tuple(_message(**fields) for fields in content["messages"]),
            tools=tuple(ToolSpec(**fields) for fields in content["tools"]),
            history=content["history"],
            template_kwargs=content["template_kwargs"],
        )
    except CheckpointError:
        raise
    except (ValueError, TypeError, KeyError, RecursionError, DLiteError) as error:
        raise CheckpointError(
            f"{str(path)!r} is damaged ({error}); start the conversation anew"
        ) from error


def _message(tool_calls: list[dict[str, Any]], **fields: Any) -> Message:
    return Message(tool_calls=tuple(ToolCall(**call) for call in tool_calls), **fields)
