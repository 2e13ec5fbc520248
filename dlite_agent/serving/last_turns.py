"""What the last turn of each session cost, and why."""

from __future__ import annotations

from collections import OrderedDict

from dlite_agent.backend import ChatRequest
from dlite_agent.chat.messages import JSON
from dlite_agent.outputs import Generation, turn_figures

__all__ = ["LastTurns"]

_MAX_SESSIONS = 1024


class LastTurns:
    """The figures of the latest turns, by tenant and session; older sessions are forgotten."""

    def __init__(self) -> None:
        self._turns: OrderedDict[tuple[str, str], dict[str, JSON]] = OrderedDict()

    def note(self, request: ChatRequest, generation: Generation) -> None:
        """Keep a turn's figures under its session's id and what the client calls it."""
        figures = turn_figures(generation)
        for name in {generation.stats.session_id, request.session_hint or ""} - {""}:
            self._turns[request.tenant, name] = figures
            self._turns.move_to_end((request.tenant, name))
        while len(self._turns) > _MAX_SESSIONS:
            self._turns.popitem(last=False)

    def forget(self, tenant: str, session_id: str) -> None:
        """Drop what is known of a session."""
        for key, figures in list(self._turns.items()):
            if key[0] == tenant and figures["session_id"] == session_id:
                del self._turns[key]

    def find(self, tenant: str, name: str) -> dict[str, JSON] | None:
        """The figures of the last turn of a session; None where none is known."""
        return self._turns.get((tenant, name))
