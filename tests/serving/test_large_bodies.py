"""Large bodies are looked at beside the event loop, which serves others meanwhile."""

from __future__ import annotations

import threading
from typing import Any

import httpx
import pytest

from dlite_agent.serving import chat_endpoint, completions
from dlite_agent.serving.openai_schema import ChatBody, CompletionBody
from dlite_agent.testing import ScriptedEngine
from tests.serving.live_server import live_server

LARGE = "x" * 20_000


@pytest.mark.parametrize("is_large", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_only_a_large_body_leaves_the_loops_thread(
    monkeypatch: pytest.MonkeyPatch, is_large: bool, stream: bool
) -> None:
    threads: list[str] = []

    class WatchedChat(ChatBody):
        def model_post_init(self, _: Any) -> None:
            threads.append(threading.current_thread().name)

    class WatchedCompletion(CompletionBody):
        def model_post_init(self, _: Any) -> None:
            threads.append(threading.current_thread().name)

    monkeypatch.setattr(chat_endpoint, "ChatBody", WatchedChat)
    monkeypatch.setattr(completions, "CompletionBody", WatchedCompletion)
    text = LARGE if is_large else "Hi"
    with live_server(ScriptedEngine(["Hello."] * 2)) as server:
        for path, body in (
            ("chat/completions", {"messages": [{"role": "user", "content": text}]}),
            ("completions", {"prompt": text}),
        ):
            url = f"{server.base_url}/{path}"
            answer = httpx.post(url, json={**body, "stream": stream}, timeout=60, verify=False)
            assert answer.is_success
            assert "Hello." in answer.text or stream
    assert [name == "live server" for name in threads] == [not is_large] * 2


def test_what_is_wrong_in_a_large_body_is_told_as_in_a_small_one() -> None:
    with live_server(ScriptedEngine([])) as server:
        url = f"{server.base_url}/chat/completions"
        for text in ("Hi", LARGE):
            body = {"messages": [{"role": "user", "content": text}], "temperature": -1}
            answer = httpx.post(url, json=body, timeout=60, verify=False)
            assert answer.status_code == 400
            assert answer.json()["error"]["param"] == "temperature"
