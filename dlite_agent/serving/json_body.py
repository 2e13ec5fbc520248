"""The body of a request: JSON of a limited size, whose strings are text."""

from __future__ import annotations

import json
import re
from typing import Any, cast

from starlette.requests import Request

from dlite_agent.serving.http_errors import StatusError

__all__ = ["parse_json", "read_body"]

_LONE_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


async def read_body(http: Request, max_bytes: int) -> bytes:
    """Read a body that says that it is JSON.

    What a web page may send to another site without being asked for permission has other types.

    Raises:
        StatusError: 413; it is too large. 415; it is of another type.
    """
    kind = http.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        message = f"content-type is {kind!r}; send JSON with content-type 'application/json'"
        raise StatusError(415, message, "unsupported_media_type")
    coding = http.headers.get("content-encoding", "identity")
    if coding.lower() != "identity":
        message = f"content-encoding is {coding!r:.200}; send the body as it is"
        raise StatusError(415, message, "unsupported_media_type")
    return await _read(http, max_bytes)


def parse_json(data: bytes) -> dict[str, Any]:
    """A body that is a JSON object; halves of surrogate pairs, which are no text, become U+FFFD.

    Raises:
        StatusError: 400; it is none.
    """
    try:
        parsed: Any = json.loads(data)
    except RecursionError:
        raise StatusError(400, "the body is nested too deep; send a flatter one") from None
    except ValueError as error:
        message = f"the body is not valid JSON: {error}; send one JSON object"
        raise StatusError(400, message, "invalid_json") from None
    if not isinstance(parsed, dict):
        message = f"the body is a JSON {type(parsed).__name__}; send an object"
        raise StatusError(400, message, "invalid_json")
    if _LONE_SURROGATE.search(data):
        parsed = _clean(parsed)
    return cast(dict[str, Any], parsed)


async def _read(http: Request, max_bytes: int) -> bytes:
    declared = http.headers.get("content-length", "0")
    chunks, size = [], 0
    if declared.isdigit() and int(declared) > max_bytes:
        raise _too_large(max_bytes)
    async for chunk in http.stream():
        size += len(chunk)
        if size > max_bytes:
            raise _too_large(max_bytes)
        chunks.append(chunk)
    return b"".join(chunks)


def _too_large(max_bytes: int) -> StatusError:
    message = (
        f"the body is larger than {max_bytes} bytes; send less, or start the server with a larger "
        "--max-body-bytes"
    )
    return StatusError(413, message, "request_too_large")


def _clean(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    if isinstance(value, list):
        return [_clean(item) for item in value]
    if isinstance(value, dict):
        return {_clean(key): _clean(item) for key, item in value.items()}
    return value
