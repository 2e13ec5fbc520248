"""LangChain's own integration suite, answered by nano: real weights, real decoding, no network."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import pytest
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage
from langchain_tests.integration_tests import ChatModelIntegrationTests

from dlite_agent import ChatDLite, Engine

Detail = Literal[
    "audio_input",
    "audio_output",
    "reasoning_output",
    "cache_read_input",
    "cache_creation_input",
]


@pytest.fixture(scope="module", autouse=True)
def _no_engine_is_left() -> Iterator[None]:
    yield
    Engine.close_all()


class TestNano(ChatModelIntegrationTests):
    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatDLite

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"model": "nano", "temperature": 0, "max_tokens": 64, "enable_thinking": False}

    @property
    def standard_chat_model_params(self) -> dict[str, Any]:
        return {}

    @property
    def supports_json_mode(self) -> bool:
        return True

    @property
    def supported_usage_metadata_details(
        self,
    ) -> dict[Literal["invoke", "stream"], list[Detail]]:
        return {
            "invoke": ["cache_read_input", "reasoning_output"],
            "stream": ["cache_read_input", "reasoning_output"],
        }

    def invoke_with_cache_read_input(self, *, stream: bool = False) -> AIMessage:
        model = self.chat_model_class(**self.chat_model_params)
        messages: list[Any] = [HumanMessage("Name the four seasons of the year, please.")]
        messages += [model.invoke(messages), HumanMessage("And the months?")]
        return _ask(model, messages, stream=stream)

    def invoke_with_reasoning_output(self, *, stream: bool = False) -> AIMessage:
        params = {**self.chat_model_params, "enable_thinking": True, "max_tokens": 256}
        return _ask(self.chat_model_class(**params), [HumanMessage("Hello")], stream=stream)


def _ask(model: BaseChatModel, messages: list[Any], *, stream: bool) -> AIMessage:
    if not stream:
        return model.invoke(messages)
    chunks = list(model.stream(messages))
    message = chunks[0]
    for chunk in chunks[1:]:
        message += chunk
    assert isinstance(message, AIMessageChunk)
    return message


def test_the_bytes_that_a_forced_call_must_have_are_drafted() -> None:
    """Without any drafter: what is drafted is what the grammar leaves no choice in."""
    model = ChatDLite("nano", drafter="null", temperature=0, max_tokens=64, enable_thinking=False)
    tool = {"type": "function", "function": {"name": "count_open_files", "parameters": {}}}
    message = model.bind_tools([tool], tool_choice="count_open_files").invoke("Go on.")
    assert message.tool_calls[0]["args"] == {}
    turn = message.response_metadata["dlite"]
    assert turn["completion_tokens"] <= 40
    assert turn["completion_tokens"] > 4 * turn["rounds"]  # τ
