"""A server without keys answers for its own machine, and no web site."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from contextlib import closing
from typing import Any
from urllib.parse import urlsplit

import pytest

from dlite_agent.serving.settings import ServerSettings
from dlite_agent.testing import ScriptedEngine
from tests.serving.live_server import LiveServer, live_server

BODY = json.dumps({"messages": [{"role": "user", "content": "Hi"}]})


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live_server(ScriptedEngine(["Hello."] * 100)) as running:
        yield running


def asked(
    server: LiveServer, method: str = "POST", path: str = "/v1/chat/completions", **headers: str
) -> tuple[http.client.HTTPResponse, Any]:
    """An answer and its JSON; headers are sent as they are, `Host` too."""
    connection = http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=60)
    with closing(connection):
        connection.request(method, path, BODY, {"Content-Type": "application/json", **headers})
        answer = connection.getresponse()
        text = answer.read()
    return answer, json.loads(text) if text.startswith(b"{") else None


OURS = ["localhost", "LocalHost:80", "app.localhost", "127.0.0.1:8000", "127.9.9.9", "[::1]:8000"]
FOREIGN = ["evil.example", "localhost.evil.example", "127.0.0.1.evil.example", "192.168.1.9:8000"]


@pytest.mark.parametrize("host", OURS)
def test_names_of_this_machine_are_answered(server: LiveServer, host: str) -> None:
    assert asked(server, Host=host)[0].status == 200


@pytest.mark.parametrize("host", [*FOREIGN, "0.0.0.0", "[::1", ""])
@pytest.mark.parametrize(
    ("method", "path"),
    [("POST", "/v1/chat/completions"), ("GET", "/v1/dlite/sessions"), ("GET", "/metrics")],
)
def test_other_names_are_refused(server: LiveServer, host: str, method: str, path: str) -> None:
    answer, told = asked(server, method, path, Host=host)
    assert answer.status == 403
    error = told["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["type"], error["code"]) == ("permission_error", "host_not_allowed")
    assert repr(host) in error["message"]
    assert "--allowed-hosts" in error["message"]


@pytest.mark.parametrize(
    ("origin", "status"),
    [
        ("http://localhost:3000", 200),
        ("http://127.0.0.1", 200),
        ("https://evil.example", 403),
        ("null", 403),
        ("http://[", 403),
    ],
)
def test_pages_of_other_sites_are_refused(server: LiveServer, origin: str, status: int) -> None:
    answer, told = asked(server, Origin=origin)
    assert answer.status == status
    assert status == 200 or told["error"]["code"] == "origin_not_allowed"
    assert answer.headers["access-control-allow-origin"] is None


def test_names_and_sites_that_were_given_are_answered() -> None:
    settings = ServerSettings(
        allowed_hosts=("Box.Example",),
        accepts_addresses=True,
        allowed_origins=("https://chat.example",),
    )
    with live_server(ScriptedEngine(["Hello."] * 9), settings) as server:
        for host in ("box.example:80", "192.168.1.9:8000", "[fe80::1]:8000"):
            assert asked(server, Host=host)[0].status == 200
        assert asked(server, Host="evil.example")[0].status == 403
        answer, _ = asked(server, Origin="https://chat.example")
        assert answer.status == 200
        assert answer.headers["access-control-allow-origin"] == "https://chat.example"
        preflight = {
            "Access-Control-Request-Method": "POST",
            "Access-Control-Request-Headers": "content-type,authorization",
            "Origin": "https://chat.example",
        }
        assert asked(server, "OPTIONS", **preflight)[0].status == 200
        assert asked(server, Origin="https://evil.example")[0].status == 403


def test_who_asks_for_a_key_may_have_any_name() -> None:
    with live_server(ScriptedEngine(["Hello."]), ServerSettings(api_keys=("k",))) as server:
        for headers, status in (({}, 401), ({"Authorization": "Bearer k"}, 200)):
            answer, _ = asked(server, Host="box.example", Origin="https://a.example", **headers)
            assert answer.status == status
            assert answer.headers["access-control-allow-origin"] is None
