"""What is refused, with which status, and in the words that clients look for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from dlite_agent import errors
from dlite_agent.serving.settings import ServerSettings
from dlite_agent.testing import ScriptedEngine
from tests.serving.live_server import LiveServer, live_server

HI: list[Any] = [{"role": "user", "content": "Hi"}]
TOOLS = [{"type": "function", "function": {"name": "look"}}]
KEYS = ("first", "second")
SETTINGS = ServerSettings(
    model_names=("served", "also"), api_keys=KEYS, tenant_header="x-tenant", max_body_bytes=4096
)
AUTHORIZED = {"authorization": "Bearer first"}


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live_server(ScriptedEngine(["Hello."] * 100), SETTINGS) as running:
        yield running


@pytest.fixture(scope="module")
def http(server: LiveServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, headers=AUTHORIZED, verify=False) as client:
        yield client


def refused(answer: httpx.Response) -> tuple[int, str, str | None, str | None, str]:
    """Status, type, code, param and message of an answer that is OpenAI's error object."""
    (name,) = answer.json()
    error = answer.json()[name]
    assert name == "error"
    assert set(error) == {"message", "type", "param", "code"}
    return answer.status_code, error["type"], error["code"], error["param"], error["message"]


@pytest.mark.parametrize(
    ("body", "status", "code", "param", "words"),
    [
        ({"model": "other"}, 404, "model_not_found", "model", "does not exist"),
        ({"messages": []}, 400, "invalid_value", "messages", "at least 1"),
        ({"messages": "Hi"}, 400, "invalid_value", "messages", "valid list"),
        ({"messages": [{"role": "x"}]}, 400, "unsupported_parameter", "messages[0].role", "use"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            400,
            "unsupported_parameter",
            "messages[0].content[0].type",
            "reads text only",
        ),
        ({"temperature": -1}, 400, "invalid_value", "temperature", "-1.0"),
        ({"temperature": "hot"}, 400, "invalid_value", "temperature", "'hot'"),
        ({"cache_salt": True}, 400, "invalid_value", "cache_salt", "use a text"),
        ({"n": 0}, 400, "unsupported_parameter", "n", "from 1 to 128"),
        ({"top_logprobs": 3}, 400, "invalid_value", "top_logprobs", "logprobs=True"),
        ({"tool_choice": "required"}, 400, "invalid_request_error", None, "no tools"),
        ({"response_format": {"type": "x"}}, 400, "unsupported_parameter", "response_format", ""),
        ({"modalities": ["text", "audio"]}, 400, "unsupported_parameter", "modalities", "text"),
        ({"function_call": {"name": "f"}}, 400, "unsupported_parameter", "function_call", "tool"),
        ({"tool_choice": 5}, 400, "invalid_value", "tool_choice", "5"),
        ({"stop": {}}, 400, "invalid_value", "stop", "{}"),
        (
            {"tools": TOOLS, "tool_choice": "other"},
            400,
            "invalid_request_error",
            "tool_choice",
            "['look']",
        ),
        ({"functions": [{"name": "f"}]}, 400, "unsupported_parameter", "functions", "tools"),
        ({"dlite": {"history": "odd"}}, 400, "invalid_value", "dlite.history", "odd"),
    ],
)
def test_a_field_that_is_wrong_is_named(
    http: httpx.Client, body: Any, status: int, code: str, param: str | None, words: str
) -> None:
    told = refused(http.post("/v1/chat/completions", json={"messages": HI, **body}))
    assert (told[0], *told[2:4]) == (status, code, param)
    assert words in told[4]


@pytest.mark.parametrize(
    ("content", "kind", "status", "words"),
    [
        (b'{"messages": [', "application/json", 400, "not valid JSON"),
        (b"[]", "application/json", 400, "JSON list"),
        (b"\xff", "application/json", 400, "not valid JSON"),
        (b"[" * 4000, "application/json", 400, "nested too deep"),
        (b'{"x": ' + b"9" * 4050 + b"}", "application/json", 400, "messages"),
        (b"{}", "text/plain", 415, "application/json"),
        (b" " * 4097, "application/json", 413, "larger than 4096 bytes"),
        ([b" " * 4096, b" "], "application/json", 413, "--max-body-bytes"),
    ],
    ids=["cut", "list", "bytes", "deep", "number", "text", "large", "chunked"],
)
def test_a_body_that_is_no_request_is_refused(
    http: httpx.Client, content: Any, kind: str, status: int, words: str
) -> None:
    headers = {"content-type": kind}
    content = iter(content) if isinstance(content, list) else content
    told = refused(http.post("/v1/chat/completions", content=content, headers=headers))
    assert told[0] == status
    assert words in told[4]


def test_half_a_character_is_text(http: httpx.Client, server: LiveServer) -> None:
    body = b'{"messages": [{"role": "user", "content": "a\\ud83d b \\ud83d\\ude00"}]}'
    headers = {"content-type": "application/json; charset=utf-8"}
    assert http.post("/v1/chat/completions", content=body, headers=headers).is_success
    assert isinstance(server.backend, ScriptedEngine)
    assert server.backend.requests[-1].messages[0].content == "a\ufffd b 😀"


@pytest.mark.parametrize(
    "path", ["/v1/chat/completions", "/v1/completions", "/tokenize", "/v1/models"]
)
@pytest.mark.parametrize("sent", [None, "Bearer wrong", "Basic first", "first"])
def test_a_wrong_key_is_told_before_anything_else(
    server: LiveServer, http: httpx.Client, path: str, sent: str | None
) -> None:
    headers = {"authorization": sent or ""}
    method = "GET" if path.endswith("models") else "POST"
    answer = http.request(method, path, headers=headers, content=b"{")
    assert refused(answer)[:3] == (401, "authentication_error", "invalid_api_key")
    assert answer.headers["www-authenticate"] == "Bearer"
    for open_path in ("/health", "/ready", "/metrics"):
        assert http.get(open_path, headers=headers).is_success


def test_a_packed_body_is_refused(http: httpx.Client) -> None:
    headers = {"content-type": "application/json", "content-encoding": "gzip"}
    told = refused(http.post("/v1/chat/completions", content=b"\x1f\x8b", headers=headers))
    assert told[0] == 415
    assert "'gzip'" in told[4]


def test_unknown_paths_and_methods_are_errors_of_the_same_form(http: httpx.Client) -> None:
    told = refused(http.post("/v1/responses"))
    assert told[0] == 404
    assert "POST '/v1/responses'" in told[4]
    answer = http.get("/v1/chat/completions")
    assert refused(answer)[0] == 405
    assert answer.headers["allow"] == "POST"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("raised", "status", "kind", "words"),
    [
        (
            errors.ContextLengthExceededError(41_203, 1_024, 40_960),
            400,
            openai.BadRequestError,
            # LiteLLM's words, and SWE-agent's.
            ["This model's maximum context length is", "is longer than the model's context length"],
        ),
        (errors.RequestError("messages is odd"), 400, openai.BadRequestError, ["messages is odd"]),
        (errors.SessionBusyError("runs"), 409, openai.ConflictError, ["runs"]),
        (errors.CapacityError("no room"), 503, openai.InternalServerError, ["no room"]),
        (errors.ConfigurationError("NaN"), 500, openai.InternalServerError, ["NaN"]),
        (KeyError("secret"), 500, openai.InternalServerError, ["KeyError in the server"]),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else None,
)
def test_what_the_engine_raises_has_a_status(
    raised: Exception, status: int, kind: type[openai.APIStatusError], words: list[str], stream: Any
) -> None:
    with live_server(ScriptedEngine([raised])) as server:
        ai = openai.OpenAI(base_url=server.base_url, api_key="none", max_retries=0)
        with pytest.raises(kind) as caught:
            ai.chat.completions.create(model="scripted", messages=HI, stream=stream)
        ai.close()
    assert caught.value.status_code == status
    assert all(word in caught.value.message for word in words)
    assert "secret" not in caught.value.message
    headers = caught.value.response.headers
    assert (headers.get("retry-after") == "1") is (status in (409, 503))
    assert (headers.get("x-should-retry") == "false") is (status == 500)


def test_a_tenant_is_a_key_a_header_and_a_salt(server: LiveServer, http: httpx.Client) -> None:
    assert isinstance(server.backend, ScriptedEngine)
    seen = []
    for key in KEYS:
        for named in ({}, {"x-tenant": "a"}, {"x-tenant": "b"}):
            for salt in ({}, {"cache_salt": "a"}, {"cache_salt": "b"}):
                headers = {"authorization": f"Bearer {key}", **named}
                http.post("/v1/chat/completions", json={"messages": HI, **salt}, headers=headers)
                seen.append(server.backend.requests[-1].tenant)
    assert len(set(seen)) == len(seen) == 18
    assert "" not in seen
    assert not any(key in tenant for key in KEYS for tenant in seen)


def test_a_key_that_is_none_and_a_header_of_anybody_are_refused() -> None:
    with pytest.raises(errors.ConfigurationError, match="API key is ''"):
        ServerSettings(api_keys=("a", ""))
    with pytest.raises(errors.ConfigurationError, match="without a key"):
        ServerSettings(tenant_header="x-tenant")


def test_without_keys_everybody_is_the_tenant_of_this_process() -> None:
    engine = ScriptedEngine(["Hello."])
    with live_server(engine) as server:
        httpx.post(f"{server.base_url}/chat/completions", json={"messages": HI}, verify=False)
    assert engine.requests[-1].tenant == ""
