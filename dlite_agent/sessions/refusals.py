"""What a session refuses, with what to do instead."""

from __future__ import annotations

from dlite_agent.errors import SessionBusyError, SessionError

__all__ = ["check_idle", "check_last_turn", "check_length", "check_open"]


def check_open(session_id: str, *, is_closed: bool) -> None:
    """Refuse to use a closed session."""
    if is_closed:
        raise SessionError(f"session {session_id!r} is closed; sync the prompt in a new one")


def check_idle(session_id: str, running: str | None, operation: str) -> None:
    """Refuse a second operation."""
    if running is not None:
        raise SessionBusyError(
            f"session {session_id!r} runs {running}, so {operation} has to wait; finish or close "
            "that first, or fork"
        )


def check_last_turn(session_id: str, common: int, last_turn_start: int) -> None:
    """Refuse a prompt that leaves the session before its last turn."""
    if common < last_turn_start:
        raise SessionError(
            f"session {session_id!r} shares {common} tokens with the prompt, but its last turn "
            f"starts at {last_turn_start}; fork it at {common}, or use in_place=True"
        )


def check_length(session_id: str, length: int, num_tokens: int) -> None:
    """Refuse a length that the session does not have."""
    if not 0 <= length <= num_tokens:
        raise ValueError(
            f"length is {length!r}, but session {session_id!r} has {num_tokens} tokens"
        )
