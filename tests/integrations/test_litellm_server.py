"""LiteLLM in front of the server: our provider with `api_base`, `hosted_vllm/` and `openai/`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import litellm
import pytest

import dlite_agent.integrations.litellm  # noqa: F401  # registers the provider
from dlite_agent.errors import ContextLengthExceededError, RequestError
from dlite_agent.serving.settings import ServerSettings
from dlite_agent.testing import ScriptedEngine
from tests.serving.live_server import live_server

pytestmark = pytest.mark.usefixtures("litellm_as_it_was")

ROOT = Path(__file__).parents[2]
CALL = (
    "<think>\nHm.\n</think>\n\nI look."
    '<tool_call>\n{"name": "read", "arguments": {"path": "é.py"}}\n</tool_call>'
)
TOOLS = [
    {
        "type": "function",
        "function": {"name": "read", "parameters": {"type": "object", "properties": {}}},
    }
]
PROVIDERS = ("dlite", "hosted_vllm", "openai")


@pytest.mark.parametrize("provider", PROVIDERS)
async def test_a_tool_conversation_goes_over_the_server(provider: str) -> None:
    backend = ScriptedEngine([CALL, "It says A.", "Bye."])
    settings = ServerSettings(model_names=("served",), api_keys=("secret",))
    history: list[Any] = [{"role": "user", "content": "What does it say?"}]
    with live_server(backend, settings) as server:
        options: dict[str, Any] = {
            "model": f"{provider}/served",
            "api_base": server.base_url,
            "api_key": "secret",
            "tools": TOOLS,
            "extra_body": {"session_id": "mine"},
        }
        answer = litellm.completion(messages=history, parallel_tool_calls=False, **options)
        message = answer.choices[0].message
        (call,) = message.tool_calls
        assert (message.content, message.reasoning_content) == ("I look.", "Hm.")
        assert json.loads(call.function.arguments) == {"path": "é.py"}
        assert answer.choices[0].finish_reason == "tool_calls"
        result = {"role": "tool", "tool_call_id": call.id, "content": "A"}
        history += [message.model_dump(), result]
        stream = litellm.completion(
            messages=history, stream=True, stream_options={"include_usage": True}, **options
        )
        chunks = list(stream)
        rebuilt = litellm.stream_chunk_builder(chunks).choices[0]
        assert (rebuilt.message.content, rebuilt.finish_reason) == ("It says A.", "stop")
        usage = chunks[-1].usage
        assert 0 < usage.prompt_tokens_details.cached_tokens < usage.prompt_tokens
        assert usage.completion_tokens == len("It says A.") + 1
        history += [rebuilt.message.model_dump(), {"role": "user", "content": "Thanks."}]
        last = await litellm.acompletion(messages=history, **options)
        assert last.choices[0].message.content == "Bye."
    assert not backend.requests[0].output.parallel_tool_calls
    assert all(request.session_hint == "mine" for request in backend.requests)
    assert [message.role for message in backend.requests[2].messages] == [
        *("user", "assistant", "tool", "assistant", "user")
    ]
    assert backend.requests[2].messages[1].tool_calls[0].arguments == {"path": "é.py"}
    assert backend.requests[2].messages[1].reasoning == "Hm."


@pytest.mark.parametrize("provider", PROVIDERS)
def test_refusals_are_litellms_own(provider: str) -> None:
    too_long, wrong = ContextLengthExceededError(41_203, 9, 40_960), RequestError("no")
    backend = ScriptedEngine([too_long, wrong])
    ask = [{"role": "user", "content": "Hi."}]
    with live_server(backend, ServerSettings(model_names=("served",))) as server:
        where = {"api_base": server.base_url, "api_key": "local", "max_retries": 0}
        with pytest.raises(litellm.ContextWindowExceededError, match="41203"):
            litellm.completion(f"{provider}/served", ask, **where)
        with pytest.raises(litellm.BadRequestError, match="no"):
            litellm.completion(f"{provider}/served", ask, **where)
        with pytest.raises(litellm.NotFoundError, match="'other'"):
            litellm.completion(f"{provider}/other", ask, **where)


@pytest.mark.parametrize("provider", PROVIDERS)
def test_a_wrong_key_is_an_authentication_error(provider: str) -> None:
    settings = ServerSettings(model_names=("served",), api_keys=("secret",))
    ask = [{"role": "user", "content": "Hi."}]
    with live_server(ScriptedEngine([]), settings) as server:
        where = {"api_base": server.base_url, "api_key": "wrong", "max_retries": 0}
        with pytest.raises(litellm.AuthenticationError, match="Incorrect API key"):
            litellm.completion(f"{provider}/served", ask, **where)


def test_our_figures_and_prices_come_over_the_server() -> None:
    backend = ScriptedEngine(["Yes.", "Yes."])
    ask = [{"role": "user", "content": "Hi."}]
    with live_server(backend, ServerSettings(model_names=("served",))) as server:
        litellm.completion("dlite/served", ask, api_base=server.url)
        answer = litellm.completion("dlite/served", ask, api_base=server.url)
    figures = answer.choices[0].message.provider_specific_fields["dlite"]
    cached = answer.usage.prompt_tokens_details.cached_tokens
    assert figures["cached_tokens"] == cached == answer.usage.prompt_tokens - 1
    assert litellm.completion_cost(answer) == 0
    assert litellm.supports_function_calling("dlite/served")


def test_a_call_to_a_server_imports_no_tensor_library(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("torch", "transformers"):
        monkeypatch.setitem(sys.modules, name, None)  # an import would fail now
    settings = ServerSettings(model_names=("served",))
    with live_server(ScriptedEngine(["Yes."]), settings) as server:
        ask = [{"role": "user", "content": "Hi."}]
        answer = litellm.completion("dlite/served", ask, api_base=server.url)
    assert answer.choices[0].message.content == "Yes."


@pytest.mark.soak  # LiteLLM alone takes seconds to import
def test_a_client_of_a_server_loads_no_tensor_library() -> None:
    code = (
        "import sys, litellm\n"
        "import dlite_agent.integrations.litellm\n"
        "answer = litellm.completion('dlite/served', [{'role': 'user', 'content': 'Hi.'}],"
        " api_base=sys.argv[1])\n"
        "print(answer.choices[0].message.content,"
        " [m for m in ('torch', 'transformers') if m in sys.modules])"
    )
    settings = ServerSettings(model_names=("served",))
    with live_server(ScriptedEngine(["Yes."]), settings) as server:
        done = subprocess.run(
            [sys.executable, "-c", code, server.url],
            capture_output=True,
            text=True,
            cwd=ROOT,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "Yes. []"
