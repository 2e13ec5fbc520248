"""What every stream of chat chunks keeps to, whoever reads it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from openai.types.chat import ChatCompletionChunk


@dataclass
class Told:
    """One choice, put together as a client does it."""

    content: str = ""
    reasoning: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)
    finish_reason: str | None = None
    num_chunks: int = 0


def events(body: str) -> list[str]:
    """The data of all events; comments are skipped."""
    parts = body.split("\n\n")
    assert parts[-1] == "", "the last event is whole"
    assert all(part.startswith(("data: ", ": ")) for part in parts[:-1]), parts
    return [part.removeprefix("data: ") for part in parts[:-1] if part.startswith("data: ")]


def checked(body: str, *, includes_usage: bool) -> tuple[list[Told], dict[str, Any] | None]:
    """Check the events of a stream that ended well; returns its choices and its usage."""
    *data, done = events(body)
    assert done == "[DONE]"
    chunks = [json.loads(item) for item in data]
    for chunk in chunks:
        ChatCompletionChunk.model_validate(chunk, strict=True)
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks}) == 1
    usage = None
    if includes_usage:
        assert chunks[-1]["choices"] == []
        usage = chunks.pop()["usage"]
        assert all(chunk["usage"] is None for chunk in chunks)
    else:
        assert all("usage" not in chunk for chunk in chunks)
    return _choices(chunks), usage


def _choices(chunks: Sequence[dict[str, Any]]) -> list[Told]:
    told: dict[int, Told] = {}
    for chunk in chunks:
        (sent,) = chunk["choices"]
        assert {"index", "delta", "finish_reason"} <= set(sent)
        choice = told.setdefault(sent["index"], Told())
        assert choice.finish_reason is None, "nothing follows the reason"
        delta = sent["delta"]
        assert (delta.get("role") == "assistant") is (choice.num_chunks == 0)
        choice.num_chunks += 1
        choice.finish_reason = sent["finish_reason"]
        assert not (choice.finish_reason and delta), "the last delta is empty"
        assert not (choice.calls and delta.get("content")), "no content behind calls"
        choice.content += delta.get("content") or ""
        choice.reasoning += delta.get("reasoning_content") or ""
        for call in delta.get("tool_calls", ()):
            _add_call(choice.calls, call)
    assert all(choice.finish_reason for choice in told.values())
    return [told[index] for index in sorted(told)]


def _add_call(calls: list[dict[str, Any]], sent: dict[str, Any]) -> None:
    if sent["index"] == len(calls):  # its first delta: who it is, and nothing else
        assert sent["type"] == "function"
        assert sent["function"]["arguments"] == ""
        assert sent["id"] not in [call["id"] for call in calls]
        calls.append({"id": sent["id"], "name": sent["function"]["name"], "arguments": ""})
    else:
        assert set(sent) == {"index", "function"}
        assert set(sent["function"]) == {"arguments"}
        calls[sent["index"]]["arguments"] += sent["function"]["arguments"]
