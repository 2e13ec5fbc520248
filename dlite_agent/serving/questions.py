"""What the engine answers between two forwards, asked from the event loop."""

from __future__ import annotations

import asyncio
from typing import Protocol, TypeVar, runtime_checkable

from dlite_agent.engine.tasks import Answer, Question
from dlite_agent.serving.http_errors import StatusError, status_error
from dlite_agent.serving.service import ServingService

__all__ = ["AskableBackend", "ask"]

AnswerT = TypeVar("AnswerT", bound=Answer)


@runtime_checkable
class AskableBackend(Protocol):
    """A backend that answers questions, as `Engine` does."""

    def ask(self, task: Question, kind: type[AnswerT]) -> AnswerT:
        """See `Engine.ask`."""
        ...


async def ask(service: ServingService, task: Question, kind: type[AnswerT]) -> AnswerT:
    """Ask; the event loop does not wait.

    Raises:
        StatusError: 501, the backend has no sessions and no vocabulary; else what it raised.
    """
    service.check_ready()
    backend = service.backend
    if not isinstance(backend, AskableBackend):
        message = f"{service.model_names[0]!r} is no engine, so this cannot be asked of it"
        raise StatusError(501, message, "not_supported")
    try:
        return await asyncio.to_thread(backend.ask, task, kind)
    except Exception as error:  # whatever it is, the client must hear of it
        raise status_error(error, is_ours=True) from error
