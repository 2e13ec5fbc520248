"""What a client may do with its sessions by name: look, pin, fork, save, delete."""

from __future__ import annotations

import secrets

from dlite_agent.engine.loading import LoadedModel
from dlite_agent.engine.session_tasks import SessionCommand, SessionReply
from dlite_agent.engine.tasks import Later
from dlite_agent.errors import SessionBusyError, SessionError, SessionNotFoundError
from dlite_agent.sessions.kept import KeptSession
from dlite_agent.sessions.session import Session

__all__ = ["run_command"]


def run_command(model: LoadedModel, command: SessionCommand) -> SessionReply | Later:
    """Do it; called between two forwards. A save is answered when it is on the disk.

    Raises:
        SessionNotFoundError: The tenant has no such session, or not in the tier that it takes.
        SessionBusyError: A turn runs on it.
        SessionError: It is to be saved, and there is no folder for sessions.
        CapacityError: There is no room for a fork.
    """
    memory = model.tenants.of(command.tenant)
    session_id = memory.session_of_hint(command.name) or command.name
    resident, kept = _resident(model, session_id, command), _kept(model, session_id, command)
    if resident is None and kept is None:
        raise SessionNotFoundError(
            f"no session has the id or name {command.name!r}; list them, or send the whole history "
            "without an id, which continues from the longest prefix that is left"
        )
    match command.action:
        case "find":
            told = kept.last_turn if kept is not None else ""
            return SessionReply(session_id, _token_ids(resident, kept), told)
        case "delete":
            _delete(model, session_id, resident, command)
        case "fork":
            return SessionReply(_fork(model, _in_pool(resident, command), command))
        case "save":
            return _save(model, resident, SessionReply(session_id))
        case "pin" | "unpin":
            _in_pool(resident, command).is_pinned = command.action == "pin"
    return SessionReply(session_id)


def _resident(model: LoadedModel, session_id: str, command: SessionCommand) -> Session | None:
    for info in model.sessions.sessions():
        if info.session_id == session_id and info.tenant == command.tenant:
            return model.sessions.get(session_id)
    return None


def _kept(model: LoadedModel, session_id: str, command: SessionCommand) -> KeptSession | None:
    for _, kept in model.tiers.kept():
        if kept.session_id == session_id and kept.tenant == command.tenant:
            return kept
    return None


def _token_ids(resident: Session | None, kept: KeptSession | None) -> tuple[int, ...]:
    if resident is not None:
        return tuple(resident.token_ids)
    return tuple(kept.trail.token_ids) if kept is not None else ()


def _in_pool(session: Session | None, command: SessionCommand) -> Session:
    if session is None:
        raise SessionNotFoundError(
            f"session {command.name!r} is kept, but not in the KV pool; load it first"
        )
    return session


def _idle(session: Session, command: SessionCommand) -> Session:
    if session.busy:
        raise SessionBusyError(
            f"session {command.name!r} runs a turn; wait until it ends, or cancel it"
        )
    return session


def _delete(
    model: LoadedModel, session_id: str, resident: Session | None, command: SessionCommand
) -> None:
    if resident is not None:
        model.sessions.discard(_idle(resident, command))
    for info in model.sessions.sessions():
        if info.sibling_of == session_id and info.tenant == command.tenant and not info.is_busy:
            model.sessions.discard(model.sessions.get(info.session_id))
    model.tiers.remove([session_id])
    journal = model.tenants.of(command.tenant).journal
    model.tiers.forget_turns(command.tenant, journal, {session_id})


def _fork(model: LoadedModel, donor: Session, command: SessionCommand) -> str:
    num_tokens = len(_idle(donor, command).token_ids)
    fork = donor.fork(num_tokens, session_id=secrets.token_hex(8))
    entry = model.sessions.adopt(fork, command.tenant)
    entry.turn_start = num_tokens
    fork.try_claim()
    model.sessions.release(fork)  # it was used just now
    model.tenants.of(command.tenant).remember_hint(command.new_name or None, fork.session_id)
    return fork.session_id


def _save(model: LoadedModel, resident: Session | None, reply: SessionReply) -> Later:
    if model.tiers.disk is None:
        raise SessionError(
            "kv_disk is 'off', so no session is kept on disk; name a folder (serve: --kv-disk)"
        )
    if resident is not None and not resident.busy:
        model.tiers.save(resident, {})
    disk = model.tiers.disk

    def wait() -> SessionReply:
        disk.flush()
        return reply

    return model.saves.put(wait, None)
