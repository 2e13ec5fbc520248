"""One turn over HTTP: what is sent, and what each answer means; who sends it is its caller's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx

from dlite_agent.backend import ChatRequest
from dlite_agent.client.answer_reader import AnswerReader
from dlite_agent.client.remote_errors import pause_s
from dlite_agent.client.wire import chat_body, completion_body
from dlite_agent.errors import CapacityError
from dlite_agent.outputs import GenerationChunk

__all__ = ["CONNECT_S", "RemoteTurn"]

CONNECT_S = 10.0


class RemoteTurn:
    """Asks until there is an answer.

    Args:
        request: The turn.
        model: As the server calls it; None for its first.
        base_url: Names the server in errors.

    Attributes:
        call: The arguments of `httpx.Client.stream`.
    """

    def __init__(self, request: ChatRequest, model: str | None, base_url: str) -> None:
        self._request = request
        self._base_url = base_url
        self._reader = AnswerReader()
        is_chat = request.prompt is None
        body = chat_body(request, model) if is_chat else completion_body(request, model)
        self.call: dict[str, Any] = {
            "method": "POST",
            "url": "/v1/chat/completions" if is_chat else "/v1/completions",
            "json": body,
        }
        if request.is_partial:  # it has one answer, at its end
            self.call["timeout"] = httpx.Timeout(None, connect=CONNECT_S)

    def has_lines(self, response: httpx.Response) -> bool:
        """Whether an answer is a stream; else its body is to be read at once."""
        return response.is_success and not self._request.is_partial

    def read(self, line: str) -> Iterator[GenerationChunk]:
        """The chunks of a line.

        Raises:
            DLiteError: What ended the turn.
        """
        return self._reader.read(line)

    def pause_s(self, response: httpx.Response) -> float | None:
        """Behind an answer: seconds after which to ask again, or None where it was the answer.

        Raises:
            CapacityError: The server ended in the middle of an answer, or is full.
            DLiteError: What the engine would raise.
        """
        if response.is_error:
            return pause_s(response, waits=self._request.when_full == "wait")
        if self.has_lines(response) and not self._reader.is_over:
            raise CapacityError(
                f"the server at {self._base_url!r} ended in the middle of an answer; try again"
            )
        return None
