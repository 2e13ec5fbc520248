"""The files of integrations/openai-compatible, each used as its client uses it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import litellm
import pytest
import yaml
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, ToolMessage
from openai import OpenAI

from dlite_agent.backend import ChatRequest
from dlite_agent.serving.settings import ServerSettings
from dlite_agent.testing import ScriptedEngine
from tests.serving.live_server import live_server

pytestmark = pytest.mark.usefixtures("litellm_as_it_was")

FOLDER = Path(__file__).parents[2] / "integrations" / "openai-compatible"
QWEN_CODE = os.environ.get("DLITE_QWEN_CODE") or shutil.which("qwen")
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


def test_openhands_calls_tools_at_a_temperature_above_zero() -> None:
    config = tomllib.loads(text("openhands.toml"))["llm"]
    assert (config["base_url"], config["native_tool_calling"]) == (IN_FILES, True)
    engine = ScriptedEngine([CALL])
    with nano(engine) as url:
        answer = litellm.completion(
            config["model"],
            ASK,
            base_url=url,
            api_key=config["api_key"],
            temperature=config["temperature"],
            top_p=config["top_p"],
            tools=TOOLS,
        )
    assert answer.choices[0].message.tool_calls[0].function.name == "read"
    assert engine.requests[0].sampling.temperature == 0.6
    assert litellm.completion_cost(answer, custom_cost_per_token=_prices(config)) == 0


def _prices(config: dict[str, Any]) -> Any:
    return {name: config[name] for name in ("input_cost_per_token", "output_cost_per_token")}


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


def test_cline_gets_its_calls_as_text_and_the_cached_tokens() -> None:
    provider = json.loads(text("cline.json"))["providerSettings"]["OpenAiCompatible"]
    assert provider["openAiBaseUrl"] == IN_FILES
    assert provider["openAiModelId"] in [model["id"] for model in provider["models"]]
    said = "<read_file>\n<path>a.py</path>\n</read_file>"
    engine = ScriptedEngine([said, said])
    with nano(engine) as url:
        client = OpenAI(base_url=url, api_key=provider["openAiApiKey"])
        for _ in range(2):
            chunks = list(
                client.chat.completions.create(
                    model=provider["openAiModelId"],
                    messages=ASK,
                    stream=True,
                    stream_options={"include_usage": True},
                )
            )
        client.close()
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == said
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


@pytest.mark.host
@pytest.mark.skipif(QWEN_CODE is None, reason="qwen, of npm's @qwen-code/qwen-code, is not there")
def test_qwen_code_itself_calls_a_tool_and_answers(tmp_path: Path) -> None:
    assert QWEN_CODE is not None
    home, work = tmp_path / "home", tmp_path / "work"
    for folder in (home / ".qwen", work):
        folder.mkdir(parents=True)
    (work / "a.txt").write_text("It is forty-two.\n")

    def read_it(request: ChatRequest) -> str:
        assert "read_file" in [tool.name for tool in request.tools]
        arguments = {"file_path": str(work / "a.txt")}
        call = json.dumps({"name": "read_file", "arguments": arguments})
        return f"<think>\nHm.\n</think>\n\n<tool_call>\n{call}\n</tool_call>"

    engine = ScriptedEngine([read_it, "Forty-two."])
    with nano(engine) as url:
        settings = text("qwen-code.settings.json").replace(IN_FILES, url)
        (home / ".qwen" / "settings.json").write_text(settings, encoding="utf-8")
        done = subprocess.run(
            [QWEN_CODE, "-y", "What does a.txt say?"],
            env={"PATH": os.environ["PATH"], "HOME": str(home), "OPENAI_API_KEY": "local"},
            cwd=work,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=100,
        )
    assert done.stdout.strip() == "Forty-two.", done.stdout + done.stderr
    *_, thought, result = engine.requests[1].messages
    assert (thought.reasoning, thought.tool_calls[0].name) == ("Hm.", "read_file")
    assert "It is forty-two." in result.content
