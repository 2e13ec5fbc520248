"""`/v1/dlite/sessions`: what a tenant has, and what it may do with it."""

from __future__ import annotations

import json
from typing import Any, Literal

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from dlite_agent.backend import ChatRequest
from dlite_agent.engine.session_tasks import SessionAction, SessionCommand, SessionReply
from dlite_agent.engine.tasks import ListSessions, SessionList, StoredSession
from dlite_agent.serving.answers import collected
from dlite_agent.serving.caller import tenant_of
from dlite_agent.serving.http_errors import StatusError
from dlite_agent.serving.openai_schema import ForkBody
from dlite_agent.serving.questions import ask
from dlite_agent.serving.service import ServingService

__all__ = [
    "SimpleAction",
    "act",
    "delete_session",
    "explain_session",
    "fork_session",
    "list_sessions",
    "load_session",
]

JSONObject = dict[str, Any]
SimpleAction = Literal["pin", "unpin", "save"]


async def list_sessions(service: ServingService, http: Request) -> Response:
    """Answer with the tenant's sessions, one entry a tier."""
    listed = await ask(service, ListSessions(_tenant(service, http)), SessionList)
    data = [_described(session) for session in listed.sessions]
    return JSONResponse({"object": "list", "data": data})


async def act(service: ServingService, http: Request, name: str, action: SimpleAction) -> Response:
    """Do something quick with a session."""
    return JSONResponse({"id": await _command(service, _tenant(service, http), name, action)})


async def delete_session(service: ServingService, http: Request, name: str) -> Response:
    """Forget a session in all tiers."""
    tenant = _tenant(service, http)
    session_id = await _command(service, tenant, name, "delete")
    service.last_turns.forget(tenant, session_id)
    return JSONResponse({"id": session_id, "deleted": True})


async def fork_session(service: ServingService, http: Request, name: str) -> Response:
    """Make a session that holds the same and goes its own way."""
    body, tenant = await service.read(
        http, lambda given, tenant: (ForkBody.model_validate(given), tenant)
    )
    session_id = await _command(service, tenant, name, "fork", body.name or "")
    return JSONResponse({"id": session_id, "name": body.name})


async def load_session(service: ServingService, http: Request, name: str) -> Response:
    """Bring a session into the KV pool, before its next turn asks for it."""
    tenant = _tenant(service, http)
    found = await ask(service, SessionCommand("find", name, tenant), SessionReply)
    request = ChatRequest(
        (), prompt=found.token_ids, tenant=tenant, is_partial=True, when_full="wait"
    )
    turn = service.start([request])
    turn.watch(http.receive)
    return await collected(turn, lambda _: {"id": found.session_id})


async def explain_session(service: ServingService, http: Request, name: str) -> Response:
    """Answer with the figures of the session's last turn: what was computed again, and why."""
    tenant = _tenant(service, http)
    figures = service.last_turns.find(tenant, name) or await _figures_on_disk(service, tenant, name)
    if figures is None:
        message = f"no turn of a session {name!r} is known; list the sessions, or take a turn first"
        raise StatusError(404, message, "session_not_found")
    return JSONResponse(figures)


async def _figures_on_disk(service: ServingService, tenant: str, name: str) -> JSONObject | None:
    """What an earlier server noted of a session's last turn."""
    try:
        found = await ask(service, SessionCommand("find", name, tenant), SessionReply)
    except StatusError as error:
        if error.code in ("session_not_found", "not_supported"):
            return None
        raise
    return json.loads(found.last_turn) if found.last_turn else None


async def _command(
    service: ServingService, tenant: str, name: str, action: SessionAction, new_name: str = ""
) -> str:
    command = SessionCommand(action, name, tenant, new_name)
    return (await ask(service, command, SessionReply)).session_id


def _tenant(service: ServingService, http: Request) -> str:
    salt = {"cache_salt": http.query_params.get("cache_salt")}
    return tenant_of(http.headers, salt, service.settings)


def _described(session: StoredSession) -> JSONObject:
    return {
        "id": session.session_id,
        "object": "dlite.session",
        "tier": session.tier,
        "num_tokens": session.num_tokens,
        "num_bytes": session.nbytes,
        "idle_s": round(session.idle_s, 3),
        "is_pinned": session.is_pinned,
    }
