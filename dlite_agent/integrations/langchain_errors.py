"""Our errors as LangChain's: each is both, so that either `except` clause works.

Retry and fallback middleware reads LangChain's class and its `is_retryable`; our own classes keep
their code and status.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from langchain_core import exceptions as core

from dlite_agent import errors

__all__ = ["langchain_errors"]


class _ContextLengthExceeded(errors.ContextLengthExceededError, core.ContextOverflowError):
    pass


class _ModelNotFound(errors.ModelNotFoundError, core.ModelNotFoundError):
    pass


class _UnsupportedParameter(errors.UnsupportedParameterError, core.ModelInvalidRequestError):
    pass


class _Request(errors.RequestError, core.ModelInvalidRequestError):
    pass


class _SessionNotFound(errors.SessionNotFoundError, core.ModelInvalidRequestError):
    pass


class _SessionBusy(errors.SessionBusyError, core.ModelAPIError):
    pass


class _Capacity(errors.CapacityError, core.ModelAPIError):
    pass


_BOTH: dict[type[errors.DLiteError], type[errors.DLiteError]] = {
    both.__mro__[1]: both
    for both in (
        _ContextLengthExceeded,
        _ModelNotFound,
        _UnsupportedParameter,
        _Request,
        _SessionNotFound,
        _SessionBusy,
        _Capacity,
    )
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
        raise _converted(error, both) from error


def _converted(error: errors.DLiteError, both: type[errors.DLiteError]) -> errors.DLiteError:
    converted = both.__new__(both, *error.args)
    converted.args = error.args
    converted.__dict__.update(error.__dict__)
    return converted
