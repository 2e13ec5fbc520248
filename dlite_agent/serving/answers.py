"""From a turn that runs to an answer: in one piece, or in events."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from dlite_agent.backend import ChatRequest
from dlite_agent.outputs import Generation, GenerationChunk
from dlite_agent.serving.http_errors import status_error
from dlite_agent.serving.service import ServingService
from dlite_agent.serving.settings import ServerSettings
from dlite_agent.serving.sse import DONE, KEEP_ALIVE, EventStream, event
from dlite_agent.serving.turn import ClientGoneError, ServedTurn

__all__ = ["CLIENT_GONE", "Asked", "StreamWriter", "answered", "collected"]

JSONObject = dict[str, Any]
CLIENT_GONE = 499
"""nginx's status; nobody reads it."""


class StreamWriter(Protocol):
    """Turns one answer's chunks into a client's; keep one for each answer."""

    def begin(self) -> Iterator[JSONObject]:
        """What is sent before the first chunk."""
        ...

    def write(self, chunk: GenerationChunk) -> Iterator[JSONObject]:
        """What is sent for a chunk."""
        ...

    def finish(self) -> Iterator[JSONObject]:
        """What is sent behind the last chunk."""
        ...


@dataclass(frozen=True, slots=True)
class Asked:
    """What a body asks for, and how the answer is put.

    Attributes:
        requests: See `ServedTurn`.
        is_stream: In events.
        writer: Makes what writes the events.
        answer: Makes the whole answer of all choices.
    """

    requests: Sequence[ChatRequest]
    is_stream: bool
    writer: Callable[[], StreamWriter]
    answer: Callable[[Sequence[Generation]], JSONObject]


async def answered(service: ServingService, http: Request, asked: Asked) -> Response:
    """Run what was asked for, and answer.

    Raises:
        StatusError: See `ServingService.start`.
    """
    turn = service.start(asked.requests)
    turn.watch(http.receive)
    if asked.is_stream:
        return await _streamed(turn, asked.writer(), service.settings)
    return await collected(turn, asked.answer)


async def collected(
    turn: ServedTurn, answer: Callable[[Sequence[Generation]], JSONObject]
) -> Response:
    """Wait for all choices, and answer with them. Closes the turn."""
    generations: dict[int, Generation] = {}
    try:
        while (chunk := await turn.next()) is not None:
            if chunk.generation is not None:
                generations[chunk.choice_index] = chunk.generation
    except ClientGoneError:
        return Response(status_code=CLIENT_GONE)
    except Exception as error:  # noqa: BLE001  # whatever it is, the client must hear of it
        return status_error(error, is_ours=True).response()
    finally:
        await turn.aclose()
    return JSONResponse(answer([generations[index] for index in sorted(generations)]))


async def _streamed(turn: ServedTurn, writer: StreamWriter, settings: ServerSettings) -> Response:
    """Answer in events. What is refused soon is an answer with a status; else it is an event.

    Closes the turn, at the end of the stream.
    """
    try:
        await turn.wait_for_first(settings.headers_within_s)
    except ClientGoneError:
        await turn.aclose()
        return Response(status_code=CLIENT_GONE)
    except Exception as error:  # noqa: BLE001  # whatever it is, the client must hear of it
        await turn.aclose()
        return status_error(error, is_ours=True).response()
    return EventStream(_events(turn, writer, settings.keep_alive_s), turn.aclose)


async def _events(
    turn: ServedTurn, writer: StreamWriter, keep_alive_s: float
) -> AsyncGenerator[bytes, None]:
    try:
        for data in writer.begin():
            yield event(data)
        while True:
            try:
                chunk = await turn.next(keep_alive_s)
            except TimeoutError:
                yield KEEP_ALIVE
                continue
            if chunk is None:
                break
            for data in writer.write(chunk):
                yield event(data)
        for data in writer.finish():
            yield event(data)
    except ClientGoneError:
        return
    except Exception as error:  # noqa: BLE001  # the status is sent already
        yield event(status_error(error, is_ours=True).body)
    await turn.aclose()
    yield DONE
