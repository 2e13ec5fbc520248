"""LangChain's own unit suite for chat models."""

from __future__ import annotations

from importlib import import_module
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

    @pytest.fixture(autouse=True)
    def _core_may_load_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Core's list of classes for `allowed_objects="all"` has no place for those of others."""
        load = import_module("langchain_core.load.load")  # the package has a function of that name
        paths = load._get_default_allowed_class_paths("all")
        own = {tuple(ChatDLite.lc_id())}
        monkeypatch.setitem(load._default_class_paths_cache, "all", paths | own)
