"""Who asks: key, tenant and session of a request."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any

from starlette.datastructures import Headers

from dlite_agent.serving.http_errors import StatusError
from dlite_agent.serving.settings import ServerSettings, tenant_name

__all__ = ["check_key", "session_hint", "tenant_of"]

# The first that is there names the session.
_HINT_HEADERS = (
    "x-dlite-session",
    "x-session-id",
    "x-litellm-session-id",
    "x-session-affinity",
    "x-opencode-session",
    "session_id",
)
_HINT_FIELDS = ("session_id", "prompt_cache_key")


def check_key(headers: Headers, settings: ServerSettings) -> str:
    """The key of a request; empty where the server asks for none.

    Raises:
        StatusError: 401; it has none, or one that is not known.
    """
    if not settings.api_keys:
        return ""
    scheme, _, sent = headers.get("authorization", "").partition(" ")
    sent = sent.strip() if scheme.lower() == "bearer" else ""
    known = [secrets.compare_digest(sent.encode(), key.encode()) for key in settings.api_keys]
    if not any(known):
        advice = "send 'Authorization: Bearer KEY' with a key that the server was started with"
        what = "Incorrect API key provided" if sent else "no API key was sent"
        raise StatusError(401, f"{what}; {advice}", "invalid_api_key")
    return sent


def tenant_of(headers: Headers, body: Mapping[str, Any], settings: ServerSettings) -> str:
    """Whose request it is: of a key, in it of a header that the server trusts, in it of a salt.

    Raises:
        StatusError: See `check_key`; or 400, the salt is no text.
    """
    key = check_key(headers, settings)
    salt = body.get("cache_salt") or ""
    if not isinstance(salt, str):
        message = f"cache_salt is {salt!r:.200}; use a text"
        raise StatusError(400, message, "invalid_value", param="cache_salt")
    named = headers.get(settings.tenant_header, "") if settings.tenant_header else ""
    return tenant_name((key, named, salt))


def session_hint(headers: Headers, body: Mapping[str, Any]) -> str | None:
    """Where to look for the session first: a header, a field, or `metadata.session_id`."""
    metadata = body.get("metadata")
    candidates = [headers.get(name) for name in _HINT_HEADERS]
    candidates += [body.get(name) for name in _HINT_FIELDS]
    candidates.append(metadata.get("session_id") if isinstance(metadata, Mapping) else None)
    return next((str(candidate) for candidate in candidates if candidate), None)
