"""The files of integrations/openai-compatible, each used as its client uses it.

The clients themselves run in test_openai_programs.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import litellm
import pytest
import yaml
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, ToolMessage
from openai import OpenAI

from dlite_agent.serving.settings import ServerSettings
from dlite_agent.testing import ScriptedEngine
from tests.serving.live_server import live_server

pytestmark = pytest.mark.usefixtures("litellm_as_it_was")

FOLDER = Path(__file__).parents[2] / "integrations" / "openai-compatible"
IN_FILES = "http://127.0.0.1:8000/v1"
CALL = (
    "<think>\nHm.\n</think>\n\nI look."
    '<tool_call>\n{"name": "read", "arguments": {"path": "a"}}\n</tool_call>'
)
READ = {"name": "read", "parameters": {"type": "object", "properties": {}}}
TOOLS: list[Any] = [{"type": "function", "function": READ}]
ASK: list[Any] = [{"role": "user", "content": "Hi."}]


def text(name: str) -> str:
    return (FOLDER / name).read_text(encoding="utf-8")


@contextmanager
def nano(engine: ScriptedEngine) -> Iterator[str]:
    """Serve under the name that the files have; the URL in place of theirs."""
    with live_server(engine, ServerSettings(model_names=("nano",))) as server:
        yield server.base_url


def test_aider_sends_no_temperature_and_knows_the_context() -> None:
    config = yaml.safe_load(text("aider.conf.yml"))
    (settings,) = yaml.safe_load(text(config["model-settings-file"]))
    metadata = json.loads(text(config["model-metadata-file"]))
    assert (config["openai-api-base"], settings["name"]) == (IN_FILES, config["model"])
    assert settings["use_temperature"] is False  # Aider's own switch
    litellm.register_model(metadata)
    assert litellm.get_model_info(config["model"])["max_input_tokens"] == 65_536
    edit = "a.py\n<<<<<<< SEARCH\none\n=======\ntwo\n>>>>>>> REPLACE\n"
    engine = ScriptedEngine([edit])
    with nano(engine) as url:
        options = {"api_base": url, "api_key": config["openai-api-key"]}
        chunks = litellm.completion(config["model"], ASK, stream=True, **options)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == edit
    assert engine.requests[0].sampling.temperature is None


def test_openhands_names_its_session_and_sends_parts() -> None:
    lines = [line for line in text("openhands.env").splitlines() if not line.startswith("#")]
    config = dict(line.split("=", 1) for line in lines)
    assert config["LLM_BASE_URL"] == IN_FILES
    engine = ScriptedEngine([CALL])
    with nano(engine) as url:
        answer = litellm.completion(
            config["LLM_MODEL"],
            [{"role": "user", "content": [{"type": "text", "text": "Hi."}]}],
            base_url=url,
            api_key=config["LLM_API_KEY"],
            reasoning_effort="high",
            prompt_cache_key="conversation",
            tools=TOOLS,
        )
    assert answer.choices[0].message.tool_calls[0].function.name == "read"
    (request,) = engine.requests
    assert request.messages[0].content == "Hi."
    assert request.session_hint == "conversation"
    assert request.sampling.temperature is None


def test_opencode_reads_thoughts_calls_and_usage_and_names_its_session() -> None:
    config = json.loads(text("opencode.json"))
    provider_name, _, model = config["model"].partition("/")
    provider = config["provider"][provider_name]
    assert provider["npm"] == "@ai-sdk/openai-compatible"
    assert provider["options"]["baseURL"] == IN_FILES
    assert provider["models"][model]["limit"]["output"] >= 1  # else it asks for 0 tokens
    engine = ScriptedEngine([CALL])
    with nano(engine) as url, OpenAI(base_url=url, api_key="local") as client:
        chunks = list(
            client.chat.completions.create(
                model=model,
                messages=ASK,
                tools=TOOLS,
                stream=True,
                stream_options={"include_usage": True},
                extra_headers={"x-session-affinity": "ses_1"},
            )
        )
    assert engine.requests[0].session_hint == "ses_1"
    deltas = [choice.delta for chunk in chunks for choice in chunk.choices]
    thoughts = [getattr(delta, "reasoning_content", None) or "" for delta in deltas]
    assert "".join(thoughts) == "Hm."
    calls = [call for delta in deltas for call in delta.tool_calls or ()]
    assert [(call.index, call.function and call.function.name) for call in calls[:1]] == [
        (0, "read")
    ]
    assert json.loads("".join((c.function and c.function.arguments) or "" for c in calls)) == {
        "path": "a"
    }
    assert chunks[-1].usage is not None


def test_cline_gets_its_calls_and_the_cached_tokens() -> None:
    settings = json.loads(text("cline.json"))
    provider = settings["providers"][settings["lastUsedProvider"]]["settings"]
    assert provider["baseUrl"] == IN_FILES
    engine = ScriptedEngine([CALL, CALL])
    with nano(engine) as url, OpenAI(base_url=url, api_key=provider["apiKey"]) as client:
        for _ in range(2):
            chunks = list(
                client.chat.completions.create(
                    model=provider["model"],
                    messages=ASK,
                    tools=TOOLS,
                    tool_choice="auto",
                    stream=True,
                    stream_options={"include_usage": True},
                )
            )
    assert chunks[-2].choices[0].finish_reason == "tool_calls"
    usage = chunks[-1].usage
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens == usage.prompt_tokens - 1


def test_a_litellm_proxy_hands_the_session_on() -> None:
    config = yaml.safe_load(text("litellm-proxy.yaml"))
    assert config["general_settings"]["forward_client_headers_to_llm_api"] is True
    engine = ScriptedEngine(["Yes.", "Yes."])
    with nano(engine) as url:
        for entry in config["model_list"]:
            assert entry["litellm_params"]["api_base"] == IN_FILES
            entry["litellm_params"]["api_base"] = url
        router = litellm.Router(model_list=config["model_list"], **config["router_settings"])
        headers = {"x-litellm-session-id": "mine"}
        answer = router.completion("nano", ASK, extra_headers=headers)
        router.retire()
    assert answer.choices[0].message.content == "Yes."
    assert engine.requests[0].session_hint == "mine"


@pytest.mark.host
def test_chat_openai_holds_a_tool_conversation() -> None:
    langchain_openai = pytest.importorskip(
        "langchain_openai", reason="langchain-openai is not installed"
    )
    engine = ScriptedEngine([CALL, "It says A."])
    with nano(engine) as url, OpenAI(base_url=url, api_key="local") as client:
        model = langchain_openai.ChatOpenAI(
            model="nano",
            base_url=url,
            api_key="local",
            root_client=client,
            client=client.chat.completions,
            stream_usage=True,  # off for another base URL than OpenAI's
        ).bind_tools(TOOLS)
        history: list[BaseMessage] = [HumanMessage("What does a say?")]
        answer = model.invoke(history)
        assert isinstance(answer, AIMessage)
        (call,) = answer.tool_calls
        assert (call["name"], call["args"]) == ("read", {"path": "a"})
        history += [answer, ToolMessage("A", tool_call_id=call["id"])]
        chunks = list(model.stream(history))
    assert "".join(chunk.text for chunk in chunks) == "It says A."
    cached = sum(
        chunk.usage_metadata["input_token_details"]["cache_read"]
        for chunk in chunks
        if chunk.usage_metadata
    )
    assert cached > 0
    assert [message.role for message in engine.requests[1].messages] == [
        *("user", "assistant", "tool")
    ]
