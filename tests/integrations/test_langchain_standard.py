"""LangChain's own unit suite for chat models."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.language_models import BaseChatModel
from langchain_tests.unit_tests import ChatModelUnitTests

from dlite_agent import ChatDLite


class TestChatDLite(ChatModelUnitTests):
    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatDLite

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"model": "nano"}

    @property
    def has_tool_choice(self) -> bool:
        return False

    @property
    def has_structured_output(self) -> bool:
        return False

    @pytest.mark.xfail(
        reason='asks for tool_choice="any": no constrained decoding yet', strict=True
    )
    def test_bind_tool_pydantic(self, model: BaseChatModel, my_adder_tool: Any) -> None:
        super().test_bind_tool_pydantic(model, my_adder_tool)

    @pytest.mark.xfail(reason="core loads only classes of its own list; see test_langchain.py")
    def test_serdes(self, model: BaseChatModel, snapshot: Any) -> None:
        super().test_serdes(model, snapshot)
