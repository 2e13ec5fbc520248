"""`ChatDLite(base_url=…)`: the same class against a server."""

from __future__ import annotations

import pytest
from langchain_core.messages import HumanMessage, ToolMessage

from dlite_agent import ChatDLite, Message
from dlite_agent.errors import ConfigurationError
from dlite_agent.serving.settings import ServerSettings
from dlite_agent.testing import ScriptedEngine
from tests.serving.live_server import live_server

CALL = (
    "<think>\nHm.\n</think>\n\n"
    '<tool_call>\n{"name": "read", "arguments": {"path": "a"}}\n</tool_call>'
)


def read(path: str) -> str:
    """Read a file."""
    return path


async def test_a_tool_conversation_goes_over_the_server() -> None:
    backend = ScriptedEngine([CALL, "It says A.", "It says A.", "Bye."])
    settings = ServerSettings(model_names=("served",), api_keys=("secret",))
    with live_server(backend, settings) as server:
        model = ChatDLite(base_url=server.base_url, api_key="secret", temperature=0)
        agent = model.bind_tools([read])
        history = [HumanMessage("What does a say?")]
        history.append(agent.invoke(history))
        (call,) = history[-1].tool_calls
        assert (call["name"], call["args"]) == ("read", {"path": "a"})
        assert history[-1].additional_kwargs["reasoning_content"] == "Hm."
        assert history[-1].response_metadata["model_name"] == "served"
        history.append(ToolMessage("A", tool_call_id=call["id"]))
        chunks = list(agent.stream(history))
        assert "".join(chunk.text for chunk in chunks) == "It says A."
        answer = await agent.ainvoke(history)
        usage = answer.usage_metadata
        assert usage is not None
        assert usage["input_token_details"]["cache_read"] == usage["input_tokens"] - 1
        session = model.session()
        assert session.turn(Message("user", "Bye.")).message.content == "Bye."
    request = backend.requests[1]
    assert request.messages[1].reasoning == "Hm."
    assert request.sampling.temperature == 0


def test_what_only_a_server_can_be_told_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="drafter is 'null', but the model runs on the"):
        ChatDLite(base_url="http://127.0.0.1:8000/v1", drafter="null")
    assert ChatDLite("other", base_url="http://127.0.0.1:8000/v1")._backend().model_name == "other"
