"""The sessions that a server keeps: which there are, and what may be done with one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from dlite_agent.client.answer_reader import turn_stats
from dlite_agent.outputs import TurnStats

__all__ = ["RemoteSession", "RemoteSessions"]

Ask = Callable[..., dict[str, Any]]
_PATH = "/v1/dlite/sessions"


@dataclass(frozen=True, slots=True)
class RemoteSession:
    """A session in one tier of a server.

    Attributes:
        session_id: Its id.
        tier: `device` (the KV pool), `host` or `disk`; it may be in several.
        num_tokens: Tokens that it holds there.
        nbytes: What it takes there.
        idle_s: Seconds since it was used.
        is_pinned: It is kept whatever needs the place.
    """

    session_id: str
    tier: str
    num_tokens: int
    nbytes: int
    idle_s: float
    is_pinned: bool


class RemoteSessions:
    """One tenant's sessions on a server; made by `RemoteEngine.sessions`.

    A session is named by its id (`TurnStats.session_id`) or by the hint of its requests
    (`ChatRequest.session_hint`, `AgentSession.name`). Every method raises `SessionNotFoundError`
    for one that is not there.

    Args:
        ask: Sends a method, a path and options, and returns the JSON of the answer.
        tenant: Whose.
    """

    def __init__(self, ask: Ask, tenant: str) -> None:
        self._ask = ask
        self._params = {"cache_salt": tenant} if tenant else {}
        self._tenant = tenant

    def list(self) -> tuple[RemoteSession, ...]:
        """All of them, one entry a tier."""
        listed = self._ask("GET", _PATH, params=self._params)["data"]
        return tuple(_session(described) for described in listed)

    def pin(self, name: str) -> str:
        """Keep a session whatever needs its place; returns its id, as do the next three."""
        return self._act(name, "pin")

    def unpin(self, name: str) -> str:
        """Let it go again when its place is needed."""
        return self._act(name, "unpin")

    def save(self, name: str) -> str:
        """Write it to the server's disk now; needs `--kv-disk`."""
        return self._act(name, "save")

    def load(self, name: str) -> str:
        """Bring it into the KV pool before its next turn asks for it."""
        return self._act(name, "load")

    def fork(self, name: str, new_name: str | None = None) -> str:
        """Make a session that holds the same and goes its own way.

        Args:
            name: The one to copy.
            new_name: The hint of the requests that will use it; None: it is found by its tokens.

        Returns:
            Its id.
        """
        body = {"name": new_name, "cache_salt": self._tenant or None}
        return str(self._ask("POST", _path(name, "fork"), json=body)["id"])

    def delete(self, name: str) -> str:
        """Forget it in all tiers."""
        return str(self._ask("DELETE", _path(name), params=self._params)["id"])

    def explain(self, name: str) -> TurnStats:
        """The figures of its last turn; `miss` says what was computed again, and why."""
        return turn_stats(self._ask("GET", _path(name, "explain"), params=self._params))

    def _act(self, name: str, action: str) -> str:
        return str(self._ask("POST", _path(name, action), params=self._params)["id"])


def _path(*parts: str) -> str:
    return "/".join([_PATH, *(quote(part, safe="") for part in parts)])


def _session(described: Mapping[str, Any]) -> RemoteSession:
    return RemoteSession(
        session_id=described["id"],
        tier=described["tier"],
        num_tokens=described["num_tokens"],
        nbytes=described["num_bytes"],
        idle_s=described["idle_s"],
        is_pinned=described["is_pinned"],
    )
