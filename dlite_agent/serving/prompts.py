"""`/tokenize` and `/detokenize`."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from dlite_agent.backend import ChatRequest
from dlite_agent.chat.openai_format import (
    messages_from_openai,
    template_kwargs_from_openai,
    tools_from_openai,
)
from dlite_agent.engine.session_tasks import Decoded, Detokenize, TokenIds, Tokenize
from dlite_agent.serving.http_errors import StatusError
from dlite_agent.serving.openai_schema import DetokenizeBody, TokenizeBody
from dlite_agent.serving.questions import ask
from dlite_agent.serving.service import ServingService

__all__ = ["detokenize", "tokenize"]

JSONObject = dict[str, Any]


async def tokenize(service: ServingService, http: Request) -> Response:
    """Answer with the ids of a text, or of messages as they would be prefilled."""

    def build(given: JSONObject, tenant: str) -> Tokenize:
        body = TokenizeBody.model_validate(given)
        service.served_name(body.model)
        if (body.prompt is None) is (body.messages is None):
            message = "the body has both or neither of prompt and messages; send one of them"
            raise StatusError(400, message, "invalid_value", param="prompt")
        request = ChatRequest(
            messages_from_openai(body.messages or []),
            tools_from_openai(body.tools),
            prompt=body.prompt,
            tenant=tenant,
            template_kwargs=template_kwargs_from_openai(body.model_dump()),
        )
        return Tokenize(request, body.add_generation_prompt)

    task = await service.read(http, build)
    ids = (await ask(service, task, TokenIds)).token_ids
    limit = service.check_ready()
    return JSONResponse({"count": len(ids), "max_model_len": limit, "tokens": list(ids)})


async def detokenize(service: ServingService, http: Request) -> Response:
    """Answer with the text of ids, control tokens spelled."""

    def build(given: JSONObject, _: str) -> Detokenize:
        body = DetokenizeBody.model_validate(given)
        service.served_name(body.model)
        return Detokenize(tuple(body.tokens))

    decoded = await ask(service, await service.read(http, build), Decoded)
    return JSONResponse({"prompt": decoded.text})
