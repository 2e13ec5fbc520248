"""The server's application: its endpoints, and what their errors look like."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from dlite_agent import __version__
from dlite_agent.backend import ChatBackend
from dlite_agent.engine.tasks import Inspect, Usage
from dlite_agent.errors import DLiteError
from dlite_agent.serving import prompts, sessions
from dlite_agent.serving.answers import CLIENT_GONE
from dlite_agent.serving.caller import check_key
from dlite_agent.serving.chat_endpoint import answer_chat
from dlite_agent.serving.completions import answer_completion
from dlite_agent.serving.host_guard import HostGuard
from dlite_agent.serving.http_errors import StatusError, status_error
from dlite_agent.serving.openai_schema import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    ForkBody,
    TokenizeBody,
)
from dlite_agent.serving.questions import ask
from dlite_agent.serving.service import ServingService
from dlite_agent.serving.settings import ServerSettings

__all__ = ["create_app"]

JSONObject = dict[str, Any]


def create_app(backend: ChatBackend, settings: ServerSettings | None = None) -> FastAPI:
    """Make the application; its `state.service` is what its endpoints share.

    The backend is loaded when the server starts, and stays the caller's: closing it is not done
    here.

    Args:
        backend: Answers the requests.
        settings: None: the defaults.
    """
    service = ServingService(backend, settings or ServerSettings())

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        service.start_loading()
        yield

    app = FastAPI(
        title="dlite-agent",
        version=__version__,
        lifespan=lifespan,
        docs_url=None,  # its page is fetched from elsewhere
        redoc_url=None,
    )
    app.state.service = service
    _add_guards(app, service.settings)
    _add_error_answers(app)
    _add_probes(app, service)
    _add_models(app, service)
    _add_answers(app, service)
    _add_sessions(app, service)
    return app


def _add_guards(app: FastAPI, settings: ServerSettings) -> None:
    if not settings.api_keys:
        app.add_middleware(HostGuard, settings=settings)
    if settings.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.allowed_origins,
            allow_methods=["*"],
            allow_headers=["*"],
        )


def _add_answers(app: FastAPI, service: ServingService) -> None:
    @app.post("/v1/chat/completions", openapi_extra=_body(ChatBody), summary="Answer a chat")
    async def chat_completions(http: Request) -> Response:
        return await answer_chat(service, http)

    @app.post("/v1/completions", openapi_extra=_body(CompletionBody), summary="Continue a text")
    async def completions(http: Request) -> Response:
        return await answer_completion(service, http)

    @app.post("/tokenize", openapi_extra=_body(TokenizeBody), summary="Ids of a prompt")
    async def tokenize(http: Request) -> Response:
        return await prompts.tokenize(service, http)

    @app.post("/detokenize", openapi_extra=_body(DetokenizeBody), summary="Text of ids")
    async def detokenize(http: Request) -> Response:
        return await prompts.detokenize(service, http)


def _add_sessions(app: FastAPI, service: ServingService) -> None:
    path = "/v1/dlite/sessions"

    @app.get(path, summary="The caller's sessions, in all tiers")
    async def list_sessions(http: Request) -> Response:
        return await sessions.list_sessions(service, http)

    @app.delete(path + "/{name:path}", summary="Forget a session")
    async def delete_session(http: Request, name: str) -> Response:
        return await sessions.delete_session(service, http, name)

    @app.get(path + "/{name:path}/explain", summary="What its last turn computed, and why")
    async def explain_session(http: Request, name: str) -> Response:
        return await sessions.explain_session(service, http, name)

    @app.post(path + "/{name:path}/fork", openapi_extra=_body(ForkBody), summary="Copy a session")
    async def fork_session(http: Request, name: str) -> Response:
        return await sessions.fork_session(service, http, name)

    @app.post(path + "/{name:path}/load", summary="Bring a session into the KV pool")
    async def load_session(http: Request, name: str) -> Response:
        return await sessions.load_session(service, http, name)

    @app.post(path + "/{name:path}/{action}", summary="Pin, unpin or save a session")
    async def act(http: Request, name: str, action: sessions.SimpleAction) -> Response:
        return await sessions.act(service, http, name, action)


def _add_probes(app: FastAPI, service: ServingService) -> None:
    @app.get("/health", summary="Whether the server lives")
    async def health() -> Response:
        return Response()

    @app.get("/ready", summary="Whether it takes requests")
    async def ready() -> Response:
        service.check_ready()
        return Response()

    @app.get("/metrics", summary="Figures for Prometheus")
    async def metrics() -> Response:
        with contextlib.suppress(StatusError):  # a backend that is loading, or keeps no sessions
            usage = await ask(service, Inspect(), Usage)
            service.metrics.note_memory(
                usage.kv_used_bytes, usage.kv_free_bytes, usage.num_sessions
            )
        return Response(service.metrics.text(), media_type=CONTENT_TYPE_LATEST)


def _add_models(app: FastAPI, service: ServingService) -> None:
    def described(name: str, max_context: int) -> JSONObject:
        return {
            "id": name,
            "object": "model",
            "created": service.created_at,
            "owned_by": "dlite-agent",
            "root": service.backend.model_name,
            # The same in the words of vLLM, of OpenRouter and of llama.cpp, which agents look for.
            "max_model_len": max_context,
            "context_length": max_context,
            "meta": {"n_ctx": max_context},
        }

    @app.get("/v1/models", summary="The models of this server")
    async def models(http: Request) -> JSONResponse:
        check_key(http.headers, service.settings)
        size = service.check_ready()
        data = [described(name, size) for name in service.model_names]
        return JSONResponse({"object": "list", "data": data})

    @app.get("/v1/models/{name:path}", summary="One of them")
    async def model(http: Request, name: str) -> JSONResponse:
        check_key(http.headers, service.settings)
        size = service.check_ready()
        return JSONResponse(described(service.served_name(name), size))


def _add_error_answers(app: FastAPI) -> None:
    @app.exception_handler(StatusError)
    @app.exception_handler(DLiteError)
    @app.exception_handler(Exception)
    async def raised(_: Request, error: Exception) -> Response:
        return status_error(error).response()

    @app.exception_handler(ValidationError)
    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: ValidationError | RequestValidationError) -> Response:
        first = error.errors()[0]
        param = ".".join(str(part) for part in first["loc"] if not _is_union_branch(part))
        message = f"{param} is {first['input']!r:.200}; {first['msg']}"
        return StatusError(400, message, "invalid_value", param=param).response()

    @app.exception_handler(ClientDisconnect)
    async def left(_: Request, __: Exception) -> Response:
        return Response(status_code=CLIENT_GONE)

    @app.exception_handler(HTTPException)
    async def refused(http: Request, error: HTTPException) -> Response:
        what = f"{http.method} {http.url.path!r:.200}: {error.detail}"
        message = f"{what}; GET /openapi.json lists what is answered"
        answer = StatusError(error.status_code, message).response()
        answer.headers.update(error.headers or {})
        return answer


def _is_union_branch(part: str | int) -> bool:
    """Whether a part of pydantic's place of an error is a type that a field might have had."""
    return part in ("str", "int", "float") or str(part).startswith(("list[", "dict["))


def _body(model: type[BaseModel]) -> JSONObject:
    """OpenAPI's words for a body that the endpoint reads itself."""
    schema = model.model_json_schema()
    schema = _inlined(schema, schema.pop("$defs", {}))
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def _inlined(schema: Any, definitions: JSONObject) -> Any:
    """A schema with what it refers to in place: its references mean nothing inside another file."""
    if isinstance(schema, list):
        return [_inlined(item, definitions) for item in schema]
    if not isinstance(schema, dict):
        return schema
    named = schema.get("$ref", "")
    if named:
        return _inlined(definitions[named.removeprefix("#/$defs/")], definitions)
    return {name: _inlined(item, definitions) for name, item in schema.items()}
