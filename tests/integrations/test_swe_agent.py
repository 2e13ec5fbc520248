"""SWE-agent: what it sends through LiteLLM, what its history processors cost, and its own classes.

Its own classes are imported where `DLITE_SWE_AGENT_SRC` names a checkout; what it needs beside our
packages must be importable there.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import litellm
import pytest
import yaml
from litellm.caching.llm_caching_handler import LLMClientCache

from dlite_agent import Engine, EngineConfig
from dlite_agent.errors import MissingDependencyError
from dlite_agent.integrations import swe_agent
from dlite_agent.integrations.litellm import handler, register
from dlite_agent.serving.settings import ServerSettings
from dlite_agent.testing import ScriptedEngine
from tests.serving.live_server import live_server

FOLDER = Path(__file__).parents[2] / "integrations" / "swe-agent"
SOURCE = os.environ.get("DLITE_SWE_AGENT_SRC")  # the clean environment of a test has it no more
BASH = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "runs the given command directly in bash",
        "parameters": {
            "type": "object",
            "properties": {"command": {"type": "string"}},
            "required": ["command"],
        },
    },
}
WARNING = "does not support function calling"
CALL = '<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call>'


@pytest.fixture(autouse=True)
def _litellm_as_it_was(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    costs = dict(litellm.model_cost)
    monkeypatch.setattr(litellm, "suppress_debug_info", True)
    monkeypatch.setattr(handler, "_configs", {})
    yield
    litellm.model_cost.clear()
    litellm.model_cost.update(costs)


def model_section(name: str) -> dict[str, Any]:
    section: dict[str, Any] = yaml.safe_load((FOLDER / name).read_text(encoding="utf-8"))
    model: dict[str, Any] = section["agent"]["model"]
    return model


def query(messages: list[dict[str, Any]], config: str = "dlite.yaml", **options: Any) -> Any:
    """Call LiteLLM with the arguments that SWE-agent 1.1's model class calls it with."""
    model = model_section(config)
    return litellm.completion(
        model=model["name"],
        messages=messages,
        temperature=model.get("temperature", 0.0),  # its default
        top_p=model["top_p"],
        api_version=None,
        api_key=options.pop("api_key", None),
        fallbacks=[],
        extra_headers={"User-Agent": "swe-agent/1.1.0"},
        tools=[BASH],
        n=None,
        **model["completion_kwargs"],
        **options,
    )


def test_its_call_uses_the_checkpoints_sampling_and_allows_one_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = ScriptedEngine([f"<think>\nHm.\n</think>\n\nI look.{CALL}"], model_name="nano")
    monkeypatch.setattr(Engine, "shared", lambda *_: engine)
    marked = {"type": "ephemeral"}
    answer = query(
        [
            {"role": "system", "content": "You are helpful."},
            {
                "role": "user",
                "content": [{"type": "text", "text": "Fix.", "cache_control": marked}],
            },
        ]
    )
    (request,) = engine.requests
    assert request.sampling.temperature is None
    assert request.sampling.top_p is None
    assert not request.output.parallel_tool_calls
    assert [message.content for message in request.messages] == ["You are helpful.", "Fix."]
    assert litellm.completion_cost(answer, model="dlite/nano") == 0
    (call,) = answer.choices[0].message.tool_calls
    assert call.to_dict()["function"]["name"] == "bash"


def test_a_server_is_asked_for_the_checkpoints_sampling_too() -> None:
    model = model_section("dlite-server.yaml")
    optional = litellm.utils.get_optional_params(
        model=model["name"].removeprefix("hosted_vllm/"),
        custom_llm_provider="hosted_vllm",
        temperature=0.0,
        top_p=model["top_p"],
        tools=[BASH],
        parallel_tool_calls=model["completion_kwargs"]["parallel_tool_calls"],
        additional_drop_params=model["completion_kwargs"]["additional_drop_params"],
    )
    assert "temperature" not in optional
    assert "top_p" not in optional
    assert optional["parallel_tool_calls"] is False


def test_a_server_answers_its_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(litellm, "in_memory_llm_clients_cache", LLMClientCache())
    engine = ScriptedEngine([f"I look.{CALL}"])
    with live_server(engine, ServerSettings(model_names=("nano",))) as server:
        where = {"api_base": server.base_url, "api_key": "local"}
        answer = query([{"role": "user", "content": "Fix."}], "dlite-server.yaml", **where)
    (call,) = answer.choices[0].message.tool_calls
    assert call.to_dict()["function"]["name"] == "bash"
    (request,) = engine.requests
    assert request.sampling.temperature is request.sampling.top_p is None
    assert not request.output.parallel_tool_calls


def test_both_ways_differ_in_where_the_model_is_and_in_nothing_else() -> None:
    here, there = model_section("dlite.yaml"), model_section("dlite-server.yaml")
    assert here.pop("name") == "dlite/nano"
    assert there.pop("name") == "hosted_vllm/nano"
    assert (there.pop("api_base"), there.pop("api_key")) == ("http://127.0.0.1:8000/v1", "local")
    assert here == there


def test_the_registry_says_what_the_provider_says() -> None:
    registry = json.loads((FOLDER / "models.json").read_text(encoding="utf-8"))
    register(["nano"])
    own = litellm.model_cost["dlite/nano"]
    for provider in ("dlite", "hosted_vllm"):
        entry = registry[f"{provider}/nano"]
        assert {**own, "litellm_provider": provider} == {**own, **entry}


class _Host:
    """Stands where SWE-agent's command line is imported from."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[list[str]] = []
        self.main: Callable[[list[str]], None] = self.calls.append
        names = ("sweagent", "sweagent.run", "sweagent.run.run")
        modules = {name: types.ModuleType(name) for name in names}
        vars(modules["sweagent.run.run"])["main"] = lambda arguments: self.main(arguments)
        for name, module in modules.items():
            monkeypatch.setitem(sys.modules, name, module)


def test_the_command_line_is_handed_over_with_its_models_registered(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    host = _Host(monkeypatch)
    monkeypatch.setenv("DLITE_MAX_CONTEXT", "777")
    config = tmp_path / "two.yaml"
    config.write_text("agent: {agent_configs: [{model: {name: dlite/from/file}}]}")
    arguments = ["run", f"--config={config}", "--agent.model.name", "dlite/from/word", "--n", "3"]
    swe_agent.main(arguments)
    assert host.calls == [arguments]
    for name in ("dlite/from/file", "dlite/from/word"):
        assert litellm.supports_function_calling(name)
        assert litellm.get_model_info(name)["max_input_tokens"] == 777


@pytest.mark.parametrize("place", ["file", "word"])
def test_a_registry_is_read_before_swe_agent_asks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, place: str
) -> None:
    known: list[bool] = []
    host = _Host(monkeypatch)
    host.main = lambda _: known.append(litellm.supports_function_calling("hosted_vllm/mine"))
    registry = tmp_path / "models.json"
    entry = json.loads((FOLDER / "models.json").read_text(encoding="utf-8"))["hosted_vllm/nano"]
    registry.write_text(json.dumps({"hosted_vllm/mine": entry}), encoding="utf-8")
    config = tmp_path / "agent.yaml"
    named = f"litellm_model_registry: {registry}" if place == "file" else "name: hosted_vllm/mine"
    config.write_text(f"agent: {{model: {{{named}}}}}", encoding="utf-8")
    word = ["--agent.model.litellm_model_registry", str(registry)] if place == "word" else []
    assert not litellm.supports_function_calling("hosted_vllm/mine")
    swe_agent.main(["run", "--config", str(config), *word])
    assert known == [True]


def test_a_missing_swe_agent_says_where_it_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sweagent", None)
    with pytest.raises(MissingDependencyError, match="which is not installed; it is on no"):
        swe_agent.main(["run"])


def as_cached(message: dict[str, Any]) -> dict[str, Any]:
    """What the `cache_control` processor makes of a message; a tool's mark stands beside it."""
    part = {"type": "text", "text": message["content"]}
    mark = {"cache_control": {"type": "ephemeral"}}
    if message["role"] == "tool":
        return {**message, **mark, "content": [part]}
    return {**message, "content": [{**part, **mark}]}


def elided(message: dict[str, Any]) -> dict[str, Any]:
    """What the `last_n_observations` processor makes of an old observation."""
    num_lines = len(message["content"].splitlines())
    return {**message, "content": f"Old environment output: ({num_lines} lines omitted)"}


Processor = Callable[[list[dict[str, Any]]], list[dict[str, Any]]]


def last_marked(history: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [*history[:-1], as_cached(history[-1])]


def run_agent(process: Processor, num_turns: int) -> list[dict[str, Any]]:
    """Take turns as SWE-agent does, thoughts and figures dropped; each turn's figures."""
    history: list[dict[str, Any]] = [
        {"role": "system", "content": "You are a helpful assistant."},
        {"role": "user", "content": "Fix the bug in add.py."},
    ]
    figures = []
    for turn in range(num_turns):
        answer = query(process(history), tool_choice="required", max_tokens=500, seed=turn)
        message = answer.choices[0].message
        calls = [call.to_dict() for call in message.tool_calls]
        figures.append(message.provider_specific_fields["dlite"])
        history.append({"role": "assistant", "content": message.content or "", "tool_calls": calls})
        seen = f"OBSERVATION:\nline of {turn}\n" * 6
        history.append({"role": "tool", "content": seen, "tool_call_id": calls[0]["id"]})
    return figures


@pytest.fixture
def _nano() -> Iterator[None]:
    register([EngineConfig("nano", kv_disk="off")])
    yield
    Engine.close_all()


@pytest.mark.usefixtures("_nano")
def test_cache_control_costs_nothing_and_elided_observations_say_what_they_cost() -> None:
    for turn in run_agent(last_marked, 3)[1:]:
        assert turn["prefilled_tokens"] == turn["new_tokens"] + 1
        assert turn["miss"] is None or turn["miss"]["cause"] is None  # only what was taken back

    def elide_first(history: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [*history[:3], elided(history[3]), *history[4:]] if len(history) > 6 else history

    *before, after = run_agent(elide_first, 4)
    assert all(turn["miss"] is None or turn["miss"]["cause"] is None for turn in before)
    miss = after["miss"]
    assert (miss["cause"], miss["message_index"]) == ("history_trimmed", 3)
    assert "Old environment output" in miss["now"]
    assert 0 < miss["tokens"] <= after["prefilled_tokens"]


SCRIPTED = """
import json
import sys
from dlite_agent import Engine
from dlite_agent.integrations.swe_agent import main
from dlite_agent.testing import ScriptedEngine

call = json.dumps({"name": "bash", "arguments": {"command": "ls"}})
turn = f"I look.<tool_call>\\n{call}\\n</tool_call>"
engine = ScriptedEngine([turn] * 3, model_name="nano")
Engine.shared = staticmethod(lambda *_: engine)
main(sys.argv[1:])
request = engine.requests[-1]
assert request.sampling.temperature is None, request.sampling
assert not request.output.parallel_tool_calls
print("TURNS", len(engine.requests), "MESSAGES", len(request.messages))
"""


def run_host(program: list[str], config: str, folder: Path, *options: str) -> str:
    """Run SWE-agent's command line for two calls, in a container that does nothing."""
    assert SOURCE is not None
    command = [sys.executable, *program, "run", f"--output_dir={folder}", *options]
    for path in (Path(SOURCE) / "config" / "default.yaml", FOLDER / config):
        command += ["--config", str(path)]
    command += ["--agent.model.per_instance_call_limit=2", "--env.deployment.type=dummy"]
    command += ["--agent.model.litellm_model_registry", str(FOLDER / "models.json")]
    command += ["--problem_statement.text=Fix add.py."]
    path = os.pathsep.join([SOURCE, *filter(None, sys.path)])
    run = subprocess.run(
        command,
        env={**os.environ, "PYTHONPATH": path, "SWE_AGENT_TRAJECTORY_DIR": str(folder)},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    (trajectory,) = folder.glob("*/*.traj")
    stats = json.loads(trajectory.read_text(encoding="utf-8"))["info"]["model_stats"]
    assert (stats["api_calls"], stats["instance_cost"]) == (3, 0)
    return " ".join((run.stdout + run.stderr).split())  # it breaks lines anywhere


@pytest.mark.host
@pytest.mark.timeout(600)  # it imports for half a minute, and longer on a busy machine
@pytest.mark.skipif(not SOURCE, reason="DLITE_SWE_AGENT_SRC names no checkout of SWE-agent")
def test_its_own_command_line_runs_turns_in_this_process(tmp_path: Path) -> None:
    said = run_host(["-c", SCRIPTED], "dlite.yaml", tmp_path)
    assert "TURNS 3" in said
    assert WARNING not in said


@pytest.mark.host
@pytest.mark.timeout(600)  # it imports for half a minute, and longer on a busy machine
@pytest.mark.skipif(not SOURCE, reason="DLITE_SWE_AGENT_SRC names no checkout of SWE-agent")
@pytest.mark.parametrize("module", ["sweagent.run.run", "dlite_agent.integrations.swe_agent"])
def test_its_own_command_line_asks_a_server(module: str, tmp_path: Path) -> None:
    engine = ScriptedEngine([f"I look.{CALL}"] * 3)
    with live_server(engine, ServerSettings(model_names=("nano",))) as server:
        where = f"--agent.model.api_base={server.base_url}"
        said = run_host(["-m", module], "dlite-server.yaml", tmp_path, where)
    assert [len(request.messages) for request in engine.requests] == [2, 4, 6]
    assert all(request.sampling.temperature is None for request in engine.requests)
    # By itself it looks before it reads the registry; ours has read it by then.
    assert (WARNING in said) == (module == "sweagent.run.run")
