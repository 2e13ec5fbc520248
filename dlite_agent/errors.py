"""Every exception that dlite-agent raises on purpose.

```
DLiteError
├─ ConfigurationError            wrong before any work was done                     400
│  ├─ ModelNotFoundError         no such folder, hub name or weight file            404
│  ├─ UnsupportedCheckpointError we read the config and cannot run it               400
│  ├─ DrafterMismatchError       drafter trained for another target                 400
│  └─ MissingDependencyError     an extra is not installed                          500
├─ RequestError                  the caller can repair the request                  400
│  ├─ ContextLengthExceededError prompt + max_tokens do not fit                     400
│  └─ UnsupportedParameterError  a parameter, value or content we refuse to ignore  400
├─ SessionError
│  ├─ SessionNotFoundError       an explicit session id that does not exist         404
│  ├─ SessionBusyError           a second turn on a running session                 409
│  └─ CheckpointError            unreadable or foreign session file                 400
└─ CapacityError                 no room or queue full; try again                   503
```

Each message says what happened, the value, and what to do. All are picklable, since they cross
process borders. What a client replays from its history is never an error, and model output that
does not parse is data.
"""

from __future__ import annotations

from typing import Self

__all__ = [
    "CapacityError",
    "CheckpointError",
    "ConfigurationError",
    "ContextLengthExceededError",
    "DLiteError",
    "DrafterMismatchError",
    "MissingDependencyError",
    "ModelNotFoundError",
    "RequestError",
    "SessionBusyError",
    "SessionError",
    "SessionNotFoundError",
    "UnsupportedCheckpointError",
    "UnsupportedParameterError",
]


class DLiteError(Exception):
    """Root of all errors raised on purpose.

    Attributes:
        code: Error code as in OpenAI's API, for a host that answers over HTTP.
        http_status: Status of the HTTP answer.
        retryable: Whether the same request may succeed later without a change.
    """

    code: str = "internal_error"
    http_status: int = 500
    retryable: bool = False


class ConfigurationError(DLiteError, ValueError):
    """An option is wrong; found before any work was done."""

    code = "invalid_configuration"
    http_status = 400


class ModelNotFoundError(ConfigurationError):
    """The model folder, hub name, revision or a weight file does not exist."""

    code = "model_not_found"
    http_status = 404


class UnsupportedCheckpointError(ConfigurationError):
    """The checkpoint's config was read and names something that this version cannot run."""

    code = "unsupported_checkpoint"


class DrafterMismatchError(ConfigurationError):
    """A drafter does not exist or was trained for another target."""

    code = "drafter_mismatch"


class MissingDependencyError(ConfigurationError, ImportError):
    """A package of an optional extra is not installed."""

    code = "missing_dependency"
    http_status = 500


class RequestError(DLiteError, ValueError):
    """The caller can repair the request."""

    code = "invalid_request_error"
    http_status = 400


class ContextLengthExceededError(RequestError):
    """The prompt, or the prompt with `max_tokens`, does not fit the context.

    Args:
        prompt_tokens: Tokens in the rendered prompt.
        max_tokens: Tokens that the request wants to generate.
        limit: Tokens that fit.
        how_to_raise: What to do for a higher limit; depends on whose limit it is.
    """

    code = "context_length_exceeded"

    def __init__(
        self,
        prompt_tokens: int,
        max_tokens: int,
        limit: int,
        how_to_raise: str = "raise max_context",
    ) -> None:
        self.prompt_tokens = prompt_tokens
        self.max_tokens = max_tokens
        self.limit = limit
        self.how_to_raise = how_to_raise
        super().__init__(
            f"prompt has {prompt_tokens} tokens and max_tokens={max_tokens}, but the limit is "
            f"{limit}; shorten the history, lower max_tokens or {how_to_raise}"
        )

    def __reduce__(self) -> tuple[type[Self], tuple[int, int, int, str], dict[str, object]]:
        arguments = (self.prompt_tokens, self.max_tokens, self.limit, self.how_to_raise)
        return type(self), arguments, vars(self)


class UnsupportedParameterError(RequestError):
    """A parameter, its value or a content type that we refuse rather than ignore."""

    code = "unsupported_parameter"


class SessionError(DLiteError):
    """Something about an explicitly named session."""

    code = "session_error"
    http_status = 400


class SessionNotFoundError(SessionError):
    """No session has this id. A cache miss is not an error; only an explicit id is."""

    code = "session_not_found"
    http_status = 404


class SessionBusyError(SessionError):
    """Another turn runs on this session and `on_conflict="error"` was asked for."""

    code = "session_busy"
    http_status = 409
    retryable = True


class CheckpointError(SessionError):
    """A saved session is unreadable, damaged, or of another model, or cannot be written."""

    code = "session_checkpoint"


class CapacityError(DLiteError, RuntimeError):
    """No room left for this request now; the queue or the KV budget is full."""

    code = "capacity"
    http_status = 503
    retryable = True
