"""What the turns of transcripts cost, client by client and mode by mode."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from dlite_agent.bench.clients import (
    CLIENTS,
    HARMLESS,
    MIXED,
    SUBAGENT,
    aside,
    behaviour_of_turn,
    send,
)
from dlite_agent.bench.turn_generator import PRESETS, generate_transcript
from dlite_agent.bench.turns import TurnsOptions, bench_turns, turns_json
from dlite_agent.bench.turns_plot import plot_turns
from dlite_agent.chat.messages import Message, ToolCall, ToolSpec
from dlite_agent.chat.openai_format import message_to_openai
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
        {
            "role": "assistant",
            "reasoning_content": "Hm.",
            "content": "Look.",
            "tool_calls": [call(1)],
        },
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
        transcripts=[folder],
        clients=("append-only", "mixed", "subagent", "edited", "timestamp"),
        modes=("as_generated", "auto", "plain"),
        split_rate=0.5,
    )
    config = EngineConfig(model=str(model), max_kv_bytes=32 * 2**20)
    found = turns_json(bench_turns(config, options))
    assert list(found) == ["runs"]
    assert isinstance(found["runs"], list)
    return {(run["client"], run["mode"]): run for run in found["runs"]}


def test_what_was_generated_costs_what_is_new_whatever_the_client_rewrites(
    runs: dict[tuple[str, str], Any],
) -> None:
    for client in ("append-only", "mixed", "subagent"):
        run = runs[client, "as_generated"]
        assert run["amplification"] == 1.0
        assert len(run["turns"]) == 4
        for turn in run["turns"]:
            assert turn["prefilled"] == turn["new"]
            assert turn["miss"] is None


def test_baselines_and_changed_heads_cost_more(runs: dict[tuple[str, str], Any]) -> None:
    assert runs["append-only", "plain"]["amplification"] > 1.0
    head = runs["timestamp", "as_generated"]
    assert head["amplification"] > 3.0
    assert {turn["miss"] for turn in head["turns"][1:]} == {"timestamp"}


def test_an_edit_costs_what_stands_behind_it_and_is_named(runs: dict[tuple[str, str], Any]) -> None:
    turns = runs["edited", "as_generated"]["turns"]
    # The last turn is a new query: the template takes the thought out of what it renders.
    assert [turn["miss"] for turn in turns] == [None, None, "message_edited", "rendered_again"]
    assert turns[1]["prefilled"] == turns[1]["new"]
    assert turns[2]["prefilled"] > turns[2]["new"]


def test_json_has_the_stated_form_and_nothing_else(runs: dict[tuple[str, str], Any]) -> None:
    for run in runs.values():
        assert list(run) == ["transcript", "client", "mode", "amplification", "turns"]
        for turn in run["turns"]:
            assert list(turn) == [
                *("new", "prefilled", "idle_prefilled", "cached", "rewound", "ttft_s", "miss")
            ]


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
        bench_turns(EngineConfig(), TurnsOptions(transcripts=[tmp_path]))


@pytest.mark.parametrize("preset", PRESETS)
def test_a_generated_transcript_follows_from_its_seed(preset: str) -> None:
    messages, tools = generate_transcript(preset, 1, ["a = 1\nb = 2\n", "def f():\n    pass\n"])
    again = generate_transcript(preset, 1, ["a = 1\nb = 2\n", "def f():\n    pass\n"])
    other = generate_transcript(preset, 2, ["a = 1\nb = 2\n", "def f():\n    pass\n"])
    assert (messages, tools) == again
    assert (messages, tools) != other
    assert [message.role for message in messages[:3]] == ["system", "user", "assistant"]
    assert messages[-1].role == "assistant"
    called = [message for message in messages if message.tool_calls]
    assert len(called) >= 2
    assert all(message.reasoning for message in called)


UNCHANGED = ("append-only", MIXED, SUBAGENT)
HISTORY = (
    Message("user", "Go."),
    *(
        message
        for number in range(4)
        for message in (
            Message(
                "assistant", "", "Hm.", (ToolCall("read", {"a": 1, "b": 2}, id=f"call_{number}"),)
            ),
            Message("tool", f"line\nline {number}", tool_call_id=f"call_{number}"),
        )
    ),
)
TOOLS = (ToolSpec("read", "", {"type": "object", "properties": {}}), ToolSpec("write"))


def sent_text(client: str, turn: int) -> str:
    """What goes over the wire."""
    messages: list[Any] = [message_to_openai(message) for message in HISTORY]
    tools: list[Any] = [{"function": {"name": tool.name, "parameters": {}}} for tool in TOOLS]
    return json.dumps(CLIENTS[client](messages, tools, turn))


@pytest.mark.parametrize("client", [name for name in CLIENTS if name not in UNCHANGED])
def test_a_client_changes_what_it_sends_at_some_turn(client: str) -> None:
    assert any(sent_text(client, turn) != sent_text("append-only", turn) for turn in (3, 4))


@pytest.mark.parametrize("client", CLIENTS)
def test_what_is_harmless_leaves_what_was_said(client: str) -> None:
    read = [send(client, HISTORY, TOOLS, turn)[0] for turn in (3, 4)]
    said = [
        [(m.role, m.content, [(c.name, c.arguments) for c in m.tool_calls]) for m in messages]
        for messages in (HISTORY, *read)
    ]
    is_same = said[1] == said[0] and said[2] == said[0]
    assert is_same == (client in (*HARMLESS, *UNCHANGED))


def test_a_mixed_client_draws_a_behaviour_at_the_stated_rate() -> None:
    chance = random.Random(0)
    drawn = [behaviour_of_turn("mixed", 0.25, chance) for _ in range(1000)]
    assert set(drawn) == {"append-only", *HARMLESS}
    assert 700 <= drawn.count("append-only") <= 800
    assert {behaviour_of_turn("edited", 0.25, chance) for _ in range(20)} == {"edited"}


def test_only_a_sub_agent_asks_something_else_behind_the_same_head() -> None:
    history = (Message("system", "Fix."), *HISTORY)
    assert aside("subagent", history, 0) == aside("append-only", history, 3) == ()
    head, question = aside("subagent", history, 3)
    assert head == history[0]
    assert question not in history
