"""What the turns of transcripts cost, client by client and mode by mode."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from dlite_agent.bench.clients import CLIENTS, send
from dlite_agent.bench.turn_generator import PRESETS, generate_transcript
from dlite_agent.bench.turns import TurnsOptions, bench_turns, turns_json
from dlite_agent.bench.turns_plot import plot_turns
from dlite_agent.chat.messages import Message, ToolCall, ToolSpec
from dlite_agent.config import EngineConfig
from dlite_agent.errors import ConfigurationError
from tests.tiny_checkpoint import write_checkpoint


def call(number: int) -> dict[str, Any]:
    arguments = json.dumps({"path": f"{number}.py", "line": number})
    function = {"name": "read", "arguments": arguments}
    return {"id": f"call_0000000{number}", "type": "function", "function": function}


TALK = {
    "tools": [{"type": "function", "function": {"name": "read", "parameters": {"type": "object"}}}],
    "messages": [
        {"role": "system", "content": "Fix it."},
        {"role": "user", "content": "Go."},
        {"role": "assistant", "content": "Look.", "tool_calls": [call(1)]},
        {"role": "tool", "tool_call_id": "call_00000001", "content": "x = 1"},
        {"role": "assistant", "content": "Again.", "tool_calls": [call(2)]},
        {"role": "tool", "tool_call_id": "call_00000002", "content": "y = 2"},
        {"role": "assistant", "content": "Done."},
        {"role": "user", "content": "Thanks."},
        {"role": "assistant", "content": "Yes."},
    ],
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Any]:
    folder = tmp_path_factory.mktemp("turns")
    model = write_checkpoint(folder / "model", words=["Look", "Again"])
    (folder / "talk.json").write_text(json.dumps(TALK), encoding="utf-8")
    options = TurnsOptions(
        transcripts=folder,
        clients=("append-only", "json-rewritten", "timestamp"),
        modes=("as_generated", "auto", "plain"),
        split_rate=0.5,
    )
    config = EngineConfig(model=str(model), max_kv_bytes=32 * 2**20)
    found = turns_json(bench_turns(config, options))
    assert isinstance(found["runs"], list)
    return {(run["client"], run["mode"]): run for run in found["runs"]}


def test_what_was_generated_costs_what_is_new_whatever_the_client_rewrites(
    runs: dict[tuple[str, str], Any],
) -> None:
    for client in ("append-only", "json-rewritten"):
        run = runs[client, "as_generated"]
        assert run["amplification"] == 1.0
        assert len(run["turns"]) == 4
        for turn in run["turns"][1:]:
            assert turn["prefilled"] == turn["new"]
            assert turn["miss"] is None


def test_baselines_and_changed_heads_cost_more(runs: dict[tuple[str, str], Any]) -> None:
    assert runs["append-only", "plain"]["amplification"] > 1.0
    head = runs["timestamp", "as_generated"]
    assert head["amplification"] > 3.0
    assert {turn["miss"] for turn in head["turns"][1:]} == {"timestamp"}


def test_the_plot_is_an_image_for_each_transcript(
    runs: dict[tuple[str, str], Any], tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    samples = [
        {"transcript": run["transcript"], "client": client, "mode": mode, **turn}
        for (client, mode), run in runs.items()
        for turn in run["turns"]
    ]
    (path,) = plot_turns(samples, tmp_path)
    assert path.name == "turns-talk.png"
    assert path.read_bytes().startswith(b"\x89PNG")


def test_idle_time_pays_for_a_new_query(runs: dict[tuple[str, str], Any]) -> None:
    run = runs["append-only", "auto"]
    last = run["turns"][-1]
    assert last["idle_prefilled"] > 0
    assert last["prefilled"] <= last["new"]
    assert run["amplification"] <= 1.0


@pytest.mark.parametrize(
    "options", [{"clients": ("nobody",)}, {"modes": ("fast",)}, {"presets": ("huge",)}]
)
def test_a_name_that_does_not_exist_is_refused(options: dict[str, Sequence[str]]) -> None:
    with pytest.raises(ConfigurationError, match="is none of"):
        bench_turns(EngineConfig(), TurnsOptions(**options))  # type: ignore[arg-type]  # by name


def test_a_folder_without_transcripts_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="there is no"):
        bench_turns(EngineConfig(), TurnsOptions(transcripts=tmp_path))


@pytest.mark.parametrize("preset", PRESETS)
def test_a_generated_transcript_follows_from_its_seed(preset: str) -> None:
    messages, tools = generate_transcript(preset, 1, ["a = 1\nb = 2\n", "def f():\n    pass\n"])
    again = generate_transcript(preset, 1, ["a = 1\nb = 2\n", "def f():\n    pass\n"])
    other = generate_transcript(preset, 2, ["a = 1\nb = 2\n", "def f():\n    pass\n"])
    assert (messages, tools) == again
    assert (messages, tools) != other
    assert [message.role for message in messages[:3]] == ["system", "user", "assistant"]
    assert messages[-1].role == "assistant"
    assert sum(bool(message.tool_calls) for message in messages) >= 2


HISTORY = (
    Message("user", "Go."),
    Message("assistant", "", "Hm.", (ToolCall("read", {"a": 1, "b": 2}, id="call_1"),)),
    *(Message("tool", f"line\nline {number}", tool_call_id="call_1") for number in range(3)),
)
TOOLS = (ToolSpec("read", "", {"type": "object", "properties": {}}), ToolSpec("write"))


@pytest.mark.parametrize("client", CLIENTS)
def test_a_client_changes_what_it_is_named_after(client: str) -> None:
    messages, tools = send(client, HISTORY, TOOLS, 3)
    is_same = (messages == HISTORY, tools == TOOLS)
    assert is_same == {
        "append-only": (True, True),
        "tools-shuffled": (True, False),
    }.get(client, (False, True))
    with_system = (Message("system", "Fix."), *HISTORY)
    assert len(send(client, with_system, TOOLS, 2)[0]) == len(with_system)
