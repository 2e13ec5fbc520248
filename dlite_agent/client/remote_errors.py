"""What a server refuses, and a server that is not there, as our own errors."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import httpx

from dlite_agent import errors

__all__ = ["error_of", "pause_s", "transport_errors"]

_NUMBERS = re.compile(
    r"maximum context length is (\d+) tokens.*\((\d+) in the messages, (\d+) in the completion\)"
)
_KEYS = (401, 403)
_BY_STATUS: dict[int, type[errors.DLiteError]] = {
    **dict.fromkeys(_KEYS, errors.ConfigurationError),
    429: errors.CapacityError,
    503: errors.CapacityError,
}


def error_of(sent: Mapping[str, Any], status: int = 500) -> errors.DLiteError:
    """The error of an OpenAI error object: by its code, else by the answer's status."""
    message, code = str(sent.get("message")), sent.get("code")
    if code == errors.ContextLengthExceededError.code:
        numbers = _NUMBERS.search(message)
        if numbers is not None:
            limit, prompt_tokens, max_tokens = map(int, numbers.groups())
            advice = "start the server with a larger --max-model-len"
            return errors.ContextLengthExceededError(prompt_tokens, max_tokens, limit, advice)
    by_code = {
        kind.code: kind for kind in _kinds() if kind is not errors.ContextLengthExceededError
    }
    default = errors.RequestError if 400 <= status < 500 else errors.DLiteError
    error = by_code.get(str(code), _BY_STATUS.get(status, default))(message)
    if status in _KEYS:  # no class of ours, as an engine in this process asks for no key
        error.http_status = status
    return error


def pause_s(response: httpx.Response, *, waits: bool) -> float:
    """Seconds after which to ask again; the body must have been read.

    A model that is loading is waited for, as `Engine` does.

    Args:
        response: A refusal.
        waits: Whether to wait for a place as well.

    Raises:
        DLiteError: Asking again does not help.
    """
    try:
        sent = response.json()["error"]
    except (ValueError, KeyError, TypeError):
        sent = {"message": f"the server answered {response.status_code}: {response.text[:500]!r}"}
    code = sent.get("code")
    if code == "loading" or (waits and code == "queue_full"):
        return float(response.headers.get("retry-after", 1))
    raise error_of(sent, response.status_code)


@contextmanager
def transport_errors(base_url: str) -> Iterator[None]:
    """Raise what becomes of a connection as `CapacityError`, which a retry may repair."""
    try:
        yield
    except (httpx.TransportError, httpx.StreamError) as error:
        raise errors.CapacityError(
            f"no answer from {base_url!r} ({type(error).__name__}: {error}); see whether "
            "`dlite-agent serve` runs there, and try again"
        ) from error


def _kinds() -> list[type[errors.DLiteError]]:
    classes = [getattr(errors, name) for name in errors.__all__]
    return [kind for kind in classes if kind is not errors.MissingDependencyError]
