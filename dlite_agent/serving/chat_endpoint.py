"""`/v1/chat/completions`."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from dlite_agent.serving.answers import Asked, answered
from dlite_agent.serving.caller import session_hint
from dlite_agent.serving.chat_request import answer_form, chat_request
from dlite_agent.serving.chat_response import ChatStreamWriter, chat_answer
from dlite_agent.serving.openai_schema import ChatBody
from dlite_agent.serving.service import ServingService

__all__ = ["answer_chat"]


async def answer_chat(service: ServingService, http: Request) -> Response:
    """Answer a request, in one piece or in events."""

    def build(given: dict[str, Any], tenant: str) -> Asked:
        body = ChatBody.model_validate(given)
        form = answer_form(body, service.served_name(body.model))
        request = chat_request(body, tenant, session_hint(http.headers, given))
        return Asked(
            [request],
            form.is_stream and not request.is_partial,
            lambda: ChatStreamWriter(form, request.num_choices),
            lambda generations: chat_answer(form, generations),
        )

    return await answered(service, http, await service.read(http, build))
