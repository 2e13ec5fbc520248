"""The server's application: endpoints, errors, and loading beside them."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from pydantic import ValidationError
from starlette.exceptions import HTTPException

from dlite_agent import __version__
from dlite_agent.backend import ChatBackend
from dlite_agent.errors import DLiteError
from dlite_agent.serving.caller import check_key
from dlite_agent.serving.chat_endpoint import answer_chat
from dlite_agent.serving.http_errors import StatusError, status_error
from dlite_agent.serving.openai_schema import ChatBody
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
    _add_error_answers(app)
    _add_probes(app, service)
    _add_models(app, service)

    @app.post("/v1/chat/completions", openapi_extra=_body(ChatBody), summary="Answer a chat")
    async def chat_completions(http: Request) -> Response:
        return await answer_chat(service, http)

    return app


def _add_probes(app: FastAPI, service: ServingService) -> None:
    @app.get("/health", summary="Whether the server lives")
    async def health() -> Response:
        return Response()

    @app.get("/ready", summary="Whether it takes requests")
    async def ready() -> Response:
        service.check_ready()
        return Response()


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
    async def invalid(_: Request, error: ValidationError) -> Response:
        first = error.errors(include_url=False, include_context=False)[0]
        param = ".".join(map(str, first["loc"]))
        message = f"{param} is {first['input']!r:.200}; {first['msg']}"
        return StatusError(400, message, "invalid_value", param=param).response()

    @app.exception_handler(HTTPException)
    async def refused(_: Request, error: HTTPException) -> Response:
        return StatusError(error.status_code, error.detail).response()


def _body(model: type[ChatBody]) -> JSONObject:
    """OpenAPI's words for a body that the endpoint reads itself."""
    schema = model.model_json_schema()
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}
