from __future__ import annotations

from openai import OpenAI

from dlite_agent.testing import ScriptedEngine
from tests.serving.live_server import live_server

MESSAGES = [{"role": "user", "content": "Hi"}]


def test_a_conversation_with_openai_python() -> None:
    engine = ScriptedEngine(["<think>hm</think>Hello.", "Bye."])
    with live_server(engine) as server:
        client = OpenAI(base_url=server.base_url, api_key="none", _strict_response_validation=True)
        answer = client.chat.completions.create(model="scripted", messages=MESSAGES)
        assert answer.choices[0].message.content == "Hello."
        chunks = list(
            client.chat.completions.create(model="scripted", messages=MESSAGES, stream=True)
        )
    assert chunks[1].choices[0].delta.content == "Bye."
    assert chunks[-1].choices[0].finish_reason == "stop"
