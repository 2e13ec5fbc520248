"""What only an engine answers: ids of prompts, completions without a template, sessions by name."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from dlite_agent.config import EngineConfig
from dlite_agent.engine.engine import Engine
from dlite_agent.serving.settings import ServerSettings
from dlite_agent.testing import ScriptedEngine
from tests.serving.live_server import LIMIT_S, LiveServer, live_server
from tests.tiny_checkpoint import write_checkpoint

HI = [{"role": "user", "content": "Hi there."}]
SETTINGS = ServerSettings(model_names=("tiny",), metrics_prefix="vllm:", api_keys=("a", "b"))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder = write_checkpoint(tmp_path_factory.mktemp("checkpoint"), max_positions=1024)
    kept = str(tmp_path_factory.mktemp("sessions"))
    config = EngineConfig(str(folder), dtype="float64", kv_disk=kept)
    with Engine(config) as engine:
        engine.load()
        with live_server(engine, SETTINGS) as running:
            yield running


@pytest.fixture
def http(server: LiveServer) -> Iterator[httpx.Client]:
    """A client whose tenant nobody had before."""
    with connected(server, "a") as client:
        yield client
        for session in client.get("/v1/dlite/sessions").json()["data"]:
            client.delete(f"/v1/dlite/sessions/{session['id']}")


def connected(server: LiveServer, key: str) -> httpx.Client:
    headers = {"authorization": f"Bearer {key}"}
    return httpx.Client(base_url=server.url, headers=headers, timeout=LIMIT_S, verify=False)


def chat(http: httpx.Client, **fields: Any) -> Any:
    body = {"messages": HI, "seed": 1, "max_tokens": 8, "return_token_ids": True, **fields}
    answer = http.post("/v1/chat/completions", json=body)
    assert answer.is_success, answer.text
    return answer.json()


def sessions(http: httpx.Client) -> list[dict[str, Any]]:
    return list(http.get("/v1/dlite/sessions").json()["data"])


def test_ids_of_a_prompt_are_those_that_are_prefilled(http: httpx.Client) -> None:
    ids = http.post("/tokenize", json={"messages": HI}).json()
    assert ids["tokens"] == chat(http)["prompt_token_ids"]
    assert (ids["count"], ids["max_model_len"]) == (len(ids["tokens"]), 1024)
    text = http.post("/detokenize", json={"tokens": ids["tokens"]}).json()["prompt"]
    assert text.startswith("<|im_start|>user\nHi there.<|im_end|>")
    assert http.post("/tokenize", json={"prompt": text}).json()["tokens"] == ids["tokens"]
    closed = http.post("/tokenize", json={"messages": HI, "add_generation_prompt": False}).json()
    assert ids["tokens"][: closed["count"]] == closed["tokens"]
    assert http.post("/tokenize", json={}).status_code == 400


def test_a_probe_leaves_no_session(http: httpx.Client) -> None:
    for fields in ({}, {"stream": True}, {"chat_template_kwargs": {"enable_thinking": True}}):
        body = {"messages": HI, "max_tokens": 1, **fields}
        answer = http.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200
        assert '"finish_reason":"length"' in answer.text
        assert sessions(http) == []


def test_a_session_is_pinned_forked_saved_loaded_and_forgotten(http: httpx.Client) -> None:
    path = "/v1/dlite/sessions"
    first = chat(http, session_id="mine")["choices"][0]["message"]["dlite"]["session_id"]
    assert {(s["id"], s["tier"]) for s in sessions(http)} >= {(first, "device")}
    for action, is_pinned in (("pin", True), ("unpin", False), ("save", False)):
        assert http.post(f"{path}/mine/{action}").json() == {"id": first}
        device = {s["id"]: s for s in sessions(http) if s["tier"] == "device"}
        resident = device[first]  # beside it, what idle time builds
        assert resident["is_pinned"] is is_pinned
        assert all(session["idle_s"] < LIMIT_S for session in device.values())
    assert (first, "disk") in {(s["id"], s["tier"]) for s in sessions(http)}
    fork = http.post(f"{path}/mine/fork", json={"name": "other"}).json()
    held = {s["id"]: s["num_tokens"] for s in sessions(http) if s["tier"] == "device"}
    assert held[fork["id"]] == held[first]
    assert http.post(f"{path}/{fork['id']}/load").json() == {"id": fork["id"]}
    assert http.delete(f"{path}/other").json() == {"id": fork["id"], "deleted": True}
    assert http.delete(f"{path}/other").status_code == 404
    assert http.post(f"{path}/mine/nonsense").status_code == 400


def test_a_name_of_a_session_may_hold_slashes(http: httpx.Client) -> None:
    chat(http, session_id="team/mine")
    path = "/v1/dlite/sessions/team%2Fmine"
    assert http.get(f"{path}/explain").status_code == 200
    assert http.post(f"{path}/pin").status_code == 200
    assert http.delete(path).status_code == 200
    assert http.delete(path).status_code == 404


def test_the_last_turn_of_a_session_is_explained(http: httpx.Client) -> None:
    said = chat(http, session_id="mine")["choices"][0]["message"]
    edited = [{"role": "user", "content": "Hi yonder."}]
    chat(http, session_id="mine", messages=[*edited, said, *HI])
    figures = http.get("/v1/dlite/sessions/mine/explain").json()
    assert figures["miss"]["cause"] == "message_edited"
    assert figures["miss"]["message_index"] == 0
    assert figures["prefilled_tokens"] > 0
    http.delete("/v1/dlite/sessions/mine")
    assert http.get("/v1/dlite/sessions/mine/explain").status_code == 404


def test_the_last_turn_is_explained_after_a_restart(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "model", max_positions=1024)
    config = EngineConfig(str(folder), dtype="float64", kv_disk=str(tmp_path / "kept"))
    told = []
    for number in range(2):
        with Engine(config) as engine:
            engine.load()
            with live_server(engine, SETTINGS) as running, connected(running, "a") as http:
                if number == 0:
                    chat(http, session_id="mine")
                told.append(http.get("/v1/dlite/sessions/mine/explain").json())
                assert http.get("/v1/dlite/sessions/other/explain").status_code == 404
    assert told[0] == told[1]
    assert told[0]["origin"] == "cold"


def test_a_session_of_another_tenant_does_not_exist(server: LiveServer, http: httpx.Client) -> None:
    mine = chat(http, session_id="mine")["choices"][0]["message"]["dlite"]["session_id"]
    with connected(server, "b") as stranger:
        assert sessions(stranger) == []
        assert sessions(http) != []
        assert http.get("/v1/dlite/sessions?cache_salt=x").json()["data"] == []
        for name in (mine, "mine"):
            path = f"/v1/dlite/sessions/{name}"
            answers = [stranger.post(f"{path}/{action}") for action in ("pin", "load", "save")]
            answers += [stranger.post(f"{path}/fork", json={}), stranger.delete(path)]
            answers.append(stranger.get(f"{path}/explain"))
            assert [answer.status_code for answer in answers] == [404] * 6
            assert answers[0].json()["error"]["code"] == "session_not_found"
        usage = chat(stranger, session_id="mine")["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == 0


def test_metrics_have_vllms_names(server: LiveServer, http: httpx.Client) -> None:
    def metrics() -> dict[str, float]:
        lines = http.get("/metrics").text.splitlines()
        pairs = [line.rsplit(" ", 1) for line in lines if not line.startswith("#")]
        return {name: float(value) for name, value in pairs}

    before = metrics()
    usage = chat(http)["usage"]
    label = '{model_name="tiny"}'
    after = metrics()
    assert after[f"vllm:num_requests_running{label}"] == 0
    assert after[f"vllm:num_requests_waiting{label}"] == 0
    assert 0 < after[f"vllm:kv_cache_usage_perc{label}"] < 1
    for name, count in (
        ("prompt_tokens_total", usage["prompt_tokens"]),
        ("generation_tokens_total", usage["completion_tokens"]),
        ("prefix_cache_queries_total", usage["prompt_tokens"]),
        ("time_to_first_token_seconds_count", 1),
        ("e2e_request_latency_seconds_count", 1),
    ):
        assert after[f"vllm:{name}{label}"] - before.get(f"vllm:{name}{label}", 0) == count
    assert any(name.startswith("vllm:request_success_total{") for name in after)


def test_a_backend_that_is_no_engine_says_so() -> None:
    with live_server(ScriptedEngine([])) as server:
        url = f"{server.url}/v1/dlite/sessions"
        answer = httpx.get(url, verify=False)
    assert answer.status_code == 501
    assert answer.json()["error"]["code"] == "not_supported"
