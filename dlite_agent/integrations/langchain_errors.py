"""Our errors as LangChain's: each is both, so that either `except` clause works.

Retry and fallback middleware reads LangChain's class and its `is_retryable`; our own classes keep
their code and status.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from langchain_core import exceptions as core

from dlite_agent import errors

__all__ = [
    "CapacityError",
    "ContextLengthExceededError",
    "ModelNotFoundError",
    "ModelTimeoutError",
    "RequestError",
    "SessionBusyError",
    "SessionNotFoundError",
    "UnsupportedParameterError",
    "langchain_errors",
]


class CapacityError(errors.CapacityError, core.ModelAPIError):
    """`dlite_agent.CapacityError` that is also LangChain's `ModelAPIError`."""


class ContextLengthExceededError(errors.ContextLengthExceededError, core.ContextOverflowError):
    """`dlite_agent.ContextLengthExceededError` that is also LangChain's `ContextOverflowError`."""


class ModelNotFoundError(errors.ModelNotFoundError, core.ModelNotFoundError):
    """`dlite_agent.ModelNotFoundError` that is also LangChain's `ModelNotFoundError`."""


class ModelTimeoutError(core.ModelTimeoutError, TimeoutError):
    """LangChain's `ModelTimeoutError` and Python's `TimeoutError`: the call's `timeout` is over."""


class RequestError(errors.RequestError, core.ModelInvalidRequestError):
    """`dlite_agent.RequestError` that is also LangChain's `ModelInvalidRequestError`."""


class SessionBusyError(errors.SessionBusyError, core.ModelAPIError):
    """`dlite_agent.SessionBusyError` that is also LangChain's `ModelAPIError`."""


class SessionNotFoundError(errors.SessionNotFoundError, core.ModelInvalidRequestError):
    """`dlite_agent.SessionNotFoundError` that is also LangChain's `ModelInvalidRequestError`."""


class UnsupportedParameterError(errors.UnsupportedParameterError, core.ModelInvalidRequestError):
    """`dlite_agent.UnsupportedParameterError`, and LangChain's `ModelInvalidRequestError`."""


_BOTH: dict[type[errors.DLiteError], type[errors.DLiteError]] = {
    errors.CapacityError: CapacityError,
    errors.ContextLengthExceededError: ContextLengthExceededError,
    errors.ModelNotFoundError: ModelNotFoundError,
    errors.RequestError: RequestError,
    errors.SessionBusyError: SessionBusyError,
    errors.SessionNotFoundError: SessionNotFoundError,
    errors.UnsupportedParameterError: UnsupportedParameterError,
}


@contextmanager
def langchain_errors() -> Iterator[None]:
    """Raise a `DLiteError` of the body as an error that is LangChain's too, where there is one."""
    try:
        yield
    except errors.DLiteError as error:
        both = _BOTH.get(type(error))
        if both is None:
            raise
        # One traceback, not two: the converted error is the same event.
        raise _converted(error, both).with_traceback(error.__traceback__) from error.__cause__


def _converted(error: errors.DLiteError, both: type[errors.DLiteError]) -> errors.DLiteError:
    converted = both.__new__(both, *error.args)
    converted.args = error.args
    converted.__dict__.update(error.__dict__)
    return converted
