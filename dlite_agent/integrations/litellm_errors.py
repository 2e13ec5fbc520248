"""Our errors as LiteLLM's own.

Agents decide by class whether to stop or to wait and try again, and most try again after a plain
`BadRequestError`. What no repetition repairs is therefore a class that they stop at.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from litellm.exceptions import (
    AuthenticationError,
    ContextWindowExceededError,
    NotFoundError,
    ServiceUnavailableError,
    Timeout,
    UnsupportedParamsError,
)

from dlite_agent import errors

__all__ = ["PROVIDER", "litellm_errors"]

PROVIDER = "dlite"


@contextmanager
def litellm_errors(model: str, timeout_s: float | None) -> Iterator[None]:
    """Raise what the body raises as LiteLLM's class of it.

    | raised | becomes |
    |---|---|
    | `ModelNotFoundError`, `SessionNotFoundError` | `NotFoundError` |
    | `ContextLengthExceededError` | `ContextWindowExceededError` |
    | a key that a server refuses | `AuthenticationError` |
    | `CapacityError`, `SessionBusyError` | `ServiceUnavailableError` |
    | any other `DLiteError` | `UnsupportedParamsError`, which is a `BadRequestError` |
    | `TimeoutError` | `Timeout` |

    Args:
        model: As it was asked for, without the provider.
        timeout_s: What the call was bounded by, for the message.
    """
    try:
        yield
    except errors.DLiteError as error:
        raise _converted(error, model) from error
    except TimeoutError as error:
        message = f"no answer within timeout={timeout_s} seconds; pass a longer timeout"
        raise Timeout(message=message, model=model, llm_provider=PROVIDER) from error


def _converted(error: errors.DLiteError, model: str) -> Exception:
    message = str(error)
    if isinstance(error, errors.ContextLengthExceededError):
        return ContextWindowExceededError(message=message, model=model, llm_provider=PROVIDER)
    if error.http_status in (401, 403):
        return AuthenticationError(message=message, model=model, llm_provider=PROVIDER)
    if error.http_status == 404:
        return NotFoundError(message=message, model=model, llm_provider=PROVIDER)
    if error.retryable:
        return ServiceUnavailableError(message=message, model=model, llm_provider=PROVIDER)
    return UnsupportedParamsError(message=message, model=model, llm_provider=PROVIDER)
