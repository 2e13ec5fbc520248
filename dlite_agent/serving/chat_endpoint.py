"""`/v1/chat/completions`."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from dlite_agent.serving.answers import collected, streamed
from dlite_agent.serving.caller import session_hint
from dlite_agent.serving.chat_request import answer_form, chat_request
from dlite_agent.serving.chat_response import ChatStreamWriter, chat_answer
from dlite_agent.serving.openai_schema import ChatBody
from dlite_agent.serving.service import ServingService

__all__ = ["answer_chat"]


async def answer_chat(service: ServingService, http: Request) -> Response:
    """Answer a request, in one piece or in events."""
    given, tenant = await service.read(http)
    service.check_ready()
    body = ChatBody.model_validate(given)
    form = answer_form(body, service.served_name(body.model))
    request = chat_request(body, tenant, session_hint(http.headers, given))
    turn = service.start(request)
    turn.watch(http.receive)
    if form.is_stream and not request.is_partial:
        return await streamed(turn, ChatStreamWriter(form, request.num_choices), service.settings)
    return await collected(turn, lambda answers: chat_answer(form, answers))
