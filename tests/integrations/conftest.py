from __future__ import annotations

import inspect
from collections.abc import AsyncIterator

import litellm
import pytest
from litellm.caching.llm_caching_handler import LLMClientCache


@pytest.fixture
async def litellm_as_it_was(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[None]:
    """Take back what a test told LiteLLM, and close the connections that it keeps open."""
    costs = dict(litellm.model_cost)
    clients = LLMClientCache()
    monkeypatch.setattr(litellm, "suppress_debug_info", True)
    monkeypatch.setattr(litellm, "in_memory_llm_clients_cache", clients)
    yield
    litellm.model_cost.clear()
    litellm.model_cost.update(costs)
    for client in clients.cache_dict.values():
        closing = client.close()
        if inspect.isawaitable(closing):
            await closing
