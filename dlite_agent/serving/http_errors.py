"""Our errors as answers: the right status, OpenAI's error object, and words that clients look for.

LiteLLM tells a prompt that is too long by "This model's maximum context length is", SWE-agent by
"is longer than the model's context length"; both then stop in place of trying again.
"""

from __future__ import annotations

import logging
import re
from typing import Any

from starlette.responses import JSONResponse

from dlite_agent.errors import (
    ConfigurationError,
    ContextLengthExceededError,
    DLiteError,
    RequestError,
)

__all__ = ["StatusError", "status_error"]

logger = logging.getLogger(__name__)

_RETRY_AFTER_S = 1
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}
# Our messages name what is wrong first: "temperature is -1; use ...".
_PARAM = re.compile(r"([a-z_][\w.\[\]]*)(?: is |=| has | names |: )")


class StatusError(Exception):
    """An answer that is an error.

    Args:
        status: HTTP status.
        message: What happened, the value, what to do.
        code: OpenAI's code of it.
        param: The field of the request that is wrong.
        retry_after_s: When the same request may succeed; None: not said.
    """

    def __init__(
        self,
        status: int,
        message: str,
        code: str | None = None,
        *,
        param: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param
        self.retry_after_s = retry_after_s

    @property
    def body(self) -> dict[str, Any]:
        """OpenAI's error object."""
        default = "invalid_request_error" if self.status < 500 else "server_error"
        kind = _TYPES.get(self.status, default)
        error = {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        return {"error": error}

    def response(self) -> JSONResponse:
        """The whole answer."""
        headers = {}
        if self.retry_after_s is not None:
            headers["retry-after"] = str(self.retry_after_s)
        elif self.status >= 500:
            headers["x-should-retry"] = "false"  # openai-python would try again
        if self.status == 401:
            headers["www-authenticate"] = "Bearer"
        return JSONResponse(self.body, self.status, headers)


def status_error(error: BaseException, *, is_ours: bool = False) -> StatusError:
    """The answer for what was raised.

    Args:
        error: Anything.
        is_ours: It was raised by the engine and not by reading the request: a configuration that is
            wrong is then no fault of the client's.
    """
    if isinstance(error, StatusError):
        return error
    if isinstance(error, ContextLengthExceededError):
        return StatusError(400, _too_long(error), error.code, param="messages")
    if isinstance(error, DLiteError) and not (is_ours and isinstance(error, ConfigurationError)):
        param = _param(str(error)) if isinstance(error, RequestError | ConfigurationError) else None
        retry_after_s = _RETRY_AFTER_S if error.retryable else None
        code = "invalid_value" if isinstance(error, ConfigurationError) else error.code
        return StatusError(
            error.http_status, str(error), code, param=param, retry_after_s=retry_after_s
        )
    logger.error("request failed: %s", error, exc_info=error)
    message = (
        str(error) if isinstance(error, DLiteError) else f"{type(error).__name__} in the server"
    )
    return StatusError(500, message, "internal_error")


def _too_long(error: ContextLengthExceededError) -> str:
    asked = error.prompt_tokens + error.max_tokens
    return (
        f"This model's maximum context length is {error.limit} tokens. However, you requested "
        f"{asked} tokens ({error.prompt_tokens} in the messages, {error.max_tokens} in the "
        "completion), which is longer than the model's context length. Shorten the history, lower "
        f"max_tokens or {error.how_to_raise}."
    )


def _param(message: str) -> str | None:
    found = _PARAM.match(message)
    return found[1] if found is not None else None
