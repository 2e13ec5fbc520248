"""Which requests a server without keys answers: those that name it as this machine does.

A page of any web site may send requests to addresses of the machine that shows it, and read the
answers where its own name is made to mean such an address (DNS rebinding). The name stays in the
`Host` header, and where the page came from in `Origin`; no page can change either.
"""

from __future__ import annotations

import ipaddress
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from dlite_agent.serving.http_errors import StatusError
from dlite_agent.serving.settings import ServerSettings

__all__ = ["HostGuard", "is_loopback"]


class HostGuard:
    """Refuses requests for foreign names, and from pages of foreign sites; an ASGI application.

    Programs send no `Origin`, and every browser sends a `Host`; what is not there is not checked.

    Args:
        app: Answers the others.
        settings: Names that are accepted beside this machine's own.
    """

    def __init__(self, app: ASGIApp, settings: ServerSettings) -> None:
        self._app = app
        self._names = {name.lower().rstrip(".") for name in settings.allowed_hosts}
        self._origins = set(settings.allowed_origins)
        self._accepts_addresses = settings.accepts_addresses

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer."""
        error = self._refusal(Headers(scope=scope)) if scope["type"] == "http" else None
        if error is None:
            await self._app(scope, receive, send)
        else:
            await error.response()(scope, receive, send)

    def _refusal(self, headers: Headers) -> StatusError | None:
        host, origin = headers.get("host"), headers.get("origin")
        if host is not None and not self._is_ours(f"//{host}"):
            return StatusError(
                403,
                f"the request is for the host {host!r:.200}, and a server without an API key "
                "answers for names of its own machine only; start it with --allowed-hosts NAME, or "
                "with --api-key",
                "host_not_allowed",
            )
        is_known = origin is None or "*" in self._origins or origin in self._origins
        if not is_known and not self._is_ours(origin or ""):
            return StatusError(
                403,
                f"the request comes from a page of {origin!r:.200}, and a server without an API "
                "key answers no web sites; start it with --allowed-origins, or with --api-key",
                "origin_not_allowed",
            )
        return None

    def _is_ours(self, url: str) -> bool:
        try:
            name = (urlsplit(url).hostname or "").rstrip(".")
        except ValueError:
            return False
        if "*" in self._names or name in self._names or is_loopback(name):
            return True
        return self._accepts_addresses and _address(name) is not None


def is_loopback(name: str) -> bool:
    """Whether a name or an address surely means this machine."""
    address = _address(name)
    if address is not None:
        return address.is_loopback
    return name == "localhost" or name.endswith(".localhost")  # RFC 6761


def _address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(name)
    except ValueError:
        return None
