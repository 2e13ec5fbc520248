"""Turns that last: silence, clients that leave, too many of them, and a server that stops."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import AsyncGenerator, Callable, Iterator

import httpx
import pytest

from dlite_agent.backend import ChatRequest
from dlite_agent.errors import CapacityError
from dlite_agent.outputs import GenerationChunk
from dlite_agent.serving.app import create_app
from dlite_agent.serving.settings import ServerSettings
from dlite_agent.testing import ScriptedEngine
from tests.serving.chunk_rules import checked, events
from tests.serving.live_server import LiveServer, live_server

BODY = {"messages": [{"role": "user", "content": "Hi"}], "stream": True}
HEAD = "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json"
ENDLESS = "x" * 1_000_000
FOREVER_S = 3600.0  # a round that no test waits for
LIMIT_S = 60.0


def wait_until(is_so: Callable[[], bool]) -> None:
    """Wait for what another thread is about to do; the test's own time limit ends it."""
    pause = threading.Event()
    while not is_so():
        pause.wait(0.005)


def post(server: LiveServer, **fields: object) -> httpx.Response:
    url = f"{server.base_url}/chat/completions"
    return httpx.post(url, json={**BODY, **fields}, timeout=LIMIT_S, verify=False)


@pytest.fixture
def http() -> Iterator[httpx.Client]:
    with httpx.Client(timeout=LIMIT_S, verify=False) as client:
        yield client


def test_headers_and_signs_of_life_come_before_the_first_token(http: httpx.Client) -> None:
    settings = ServerSettings(keep_alive_s=0.01, headers_within_s=0.01)
    engine = ScriptedEngine([ENDLESS], round_s=FOREVER_S)
    with (
        live_server(engine, settings) as server,
        http.stream("POST", f"{server.base_url}/chat/completions", json=BODY) as answer,
    ):
        assert answer.status_code == 200
        lines = answer.iter_lines()
        assert json.loads(next(lines).removeprefix("data: "))["choices"][0]["delta"]["role"]
        comments = [line for line in (next(lines) for _ in range(8)) if line]
        assert set(comments) == {": keep-alive"}


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_ends_its_turn(stream: bool) -> None:
    engine = ScriptedEngine([ENDLESS], round_s=0.01)
    with live_server(engine) as server:
        address = httpx.URL(server.url)
        with socket.create_connection((address.host, address.port or 0)) as leaving:
            body = json.dumps({**BODY, "stream": stream})
            leaving.sendall(f"{HEAD}\r\ncontent-length: {len(body)}\r\n\r\n{body}".encode())
            wait_until(lambda: len(engine.requests) == 1)
        wait_until(lambda: engine.num_cancelled == 1)
        wait_until(lambda: server.service.num_running == 0)
        text = httpx.get(f"{server.url}/metrics", verify=False).text
    assert 'dlite:request_errors_total{model_name="scripted"} 1.0' in text


async def test_a_connection_that_breaks_before_the_headers_ends_its_turn() -> None:
    engine = ScriptedEngine([ENDLESS], round_s=0.01)
    app = create_app(engine)
    service = app.state.service

    async def receive() -> dict[str, object]:
        if not engine.requests and not service.num_running:
            return {"type": "http.request", "body": json.dumps(BODY).encode()}
        await asyncio.Event().wait()
        raise AssertionError("nobody sets it")

    async def send(message: dict[str, object]) -> None:
        raise ConnectionResetError(message["type"])

    headers = [(b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "headers": headers}
    async with app.router.lifespan_context(app), asyncio.timeout(LIMIT_S):
        while service.max_context is None:
            await asyncio.sleep(0)
        with pytest.raises(ConnectionResetError):
            await app({**scope, "query_string": b""}, receive, send)
    assert service.num_running == 0
    assert engine.num_cancelled == 1


def test_a_client_that_leaves_before_it_asked_is_no_error(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with live_server(ScriptedEngine(["Hello."])) as server:
        address = httpx.URL(server.url)
        with socket.create_connection((address.host, address.port or 0)) as leaving:
            leaving.sendall(f"{HEAD}\r\ncontent-length: 100\r\n\r\n{{".encode())
        assert post(server, stream=False).is_success
    assert caplog.records == []


def test_an_error_after_the_headers_is_the_last_event_but_one() -> None:
    class Failing(ScriptedEngine):
        async def astream(self, request: ChatRequest) -> AsyncGenerator[GenerationChunk, None]:
            async for chunk in super().astream(request):
                yield chunk
                raise CapacityError("no room any more")

    with live_server(Failing([ENDLESS])) as server:
        answer = post(server)
    *_, said, error, done = events(answer.text)
    assert json.loads(said)["choices"][0]["delta"]["content"]
    assert json.loads(error)["error"]["message"] == "no room any more"
    assert done == "[DONE]"


def test_who_is_one_too_many_may_try_again_later(http: httpx.Client) -> None:
    engine = ScriptedEngine([ENDLESS, ENDLESS, "Hello."], round_s=0.01)
    settings = ServerSettings(max_running=1, max_queue=1, headers_within_s=0.0)
    with live_server(engine, settings) as server:
        url = f"{server.base_url}/chat/completions"
        with http.stream("POST", url, json=BODY), http.stream("POST", url, json=BODY):
            assert (server.service.num_running, server.service.num_waiting) == (1, 1)
            answer = post(server)
            assert answer.status_code == 429
            assert answer.headers["retry-after"] == "1"
            assert answer.json()["error"]["type"] == "rate_limit_error"
            assert answer.json()["error"]["code"] == "queue_full"
            assert httpx.get(f"{server.url}/health", verify=False).is_success
        wait_until(lambda: server.service.num_running == 0)
        assert post(server, stream=False).json()["choices"][0]["message"]["content"] == "Hello."


def test_more_choices_than_places_are_let_in_where_nobody_is() -> None:
    settings = ServerSettings(max_running=1, max_queue=1)
    with live_server(ScriptedEngine(["Hello."] * 3), settings) as server:
        assert len(post(server, stream=False, n=3).json()["choices"]) == 3
        assert server.service.num_running == 0


def test_a_stop_lets_turns_that_run_end(http: httpx.Client) -> None:
    may_go_on = asyncio.Event()

    class Gated(ScriptedEngine):
        async def astream(self, request: ChatRequest) -> AsyncGenerator[GenerationChunk, None]:
            async for chunk in super().astream(request):
                yield chunk
                await may_go_on.wait()

    settings = ServerSettings(shutdown_timeout_s=LIMIT_S)
    with live_server(Gated(["Hello there."]), settings) as server:
        url = f"{server.base_url}/chat/completions"
        with http.stream("POST", url, json=BODY) as answer:
            server.stop()
            assert post(server).status_code == 503
            assert server.service.loop is not None
            server.service.loop.call_soon_threadsafe(may_go_on.set)
            (told,), _ = checked(answer.read().decode(), includes_usage=False)
    assert (told.content, told.finish_reason) == ("Hello there.", "stop")


@pytest.mark.parametrize("is_second_signal", [False, True])
def test_a_stop_ends_streams_cleanly(http: httpx.Client, is_second_signal: bool) -> None:
    engine = ScriptedEngine([ENDLESS, ENDLESS], round_s=0.01)
    patience_s = FOREVER_S if is_second_signal else 0.0
    settings = ServerSettings(shutdown_timeout_s=patience_s, headers_within_s=0.0)
    with live_server(engine, settings) as server:
        url = f"{server.base_url}/chat/completions"
        with http.stream("POST", url, json=BODY) as answer:
            lines = answer.iter_lines()
            next(lines)
            server.stop()
            if is_second_signal:
                server.service.cancel_turns_soon()
            *_, error, done = [line for line in lines if line]
        assert json.loads(error.removeprefix("data: "))["error"]["code"] == "shutting_down"
        assert done == "data: [DONE]"
        assert engine.num_cancelled == 1
        refused = post(server)
    assert refused.status_code == 503
    assert refused.json()["error"]["code"] == "shutting_down"


def test_a_model_that_loads_is_waited_for_and_one_that_cannot_is_told() -> None:
    class Loading(ScriptedEngine):
        def __init__(self) -> None:
            super().__init__(["Hello."])
            self.may_load = threading.Event()
            self.error: Exception | None = None

        @property
        def max_context(self) -> int:  # type: ignore[override]
            assert self.may_load.wait(LIMIT_S)
            if self.error is not None:
                raise self.error
            return 100

        @max_context.setter
        def max_context(self, value: int) -> None:
            pass

    for error, status in ((None, 200), (CapacityError("no memory"), 500)):
        engine = Loading()
        engine.error = error
        with live_server(engine) as server:
            refused = post(server, stream=False)
            assert refused.status_code == 503
            assert refused.json()["error"]["code"] == "loading"
            assert httpx.get(f"{server.url}/ready", verify=False).status_code == 503
            assert httpx.get(f"{server.url}/health", verify=False).status_code == 200
            engine.may_load.set()
            wait_until(lambda s=server.service: bool(s.max_context or s.load_error))
            answer = post(server, stream=False)
            assert answer.status_code == status
            assert "no memory" in answer.text or error is None
