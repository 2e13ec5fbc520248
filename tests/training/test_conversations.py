"""Transcripts of four formats become the same messages."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dlite_agent.errors import ConfigurationError
from dlite_agent.training.conversations import read_conversations

CALL = {
    "id": "1",
    "type": "function",
    "function": {"name": "bash", "arguments": '{"command": "ls"}'},
}
OPENAI = {
    "messages": [
        {"role": "system", "content": "You fix bugs."},
        {"role": "user", "content": "Fix it."},
        {"role": "assistant", "content": "I look.", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "1", "content": "a.py"},
        {"role": "assistant", "content": "Done."},
    ]
}
MINI = {
    "trajectory_format": "mini-swe-agent-1.1",
    "info": {},
    "messages": [
        *({**message, "extra": {"cost": 1}} for message in OPENAI["messages"]),
        {"role": "exit", "content": "Submitted", "extra": {}},
    ],
}
TRAJ = {
    "trajectory": [],
    "history": [
        {"role": "system", "content": "You fix bugs.", "agent": "main"},
        {"role": "user", "content": "An example.", "agent": "main", "is_demo": True},
        {"role": "user", "content": [{"type": "text", "text": "Fix it."}], "agent": "main"},
        {"role": "assistant", "content": "I look.", "tool_calls": [CALL], "agent": "main"},
        {"role": "tool", "content": "a.py", "tool_call_ids": ["1"], "agent": "main"},
        {"role": "assistant", "content": "Done.", "agent": "main", "thought": "Done."},
    ],
}
SHAREGPT = {
    "conversations": [
        {"from": "human", "value": "Fix it."},
        {"from": "gpt", "value": "Done."},
    ]
}


def test_formats_are_told_apart_and_read(tmp_path: Path) -> None:
    contents = {"a.json": OPENAI, "b.json": MINI, "c.traj": TRAJ}
    for name, content in contents.items():
        (tmp_path / name).write_text(json.dumps(content))
    (tmp_path / "d.jsonl").write_text(f"{json.dumps(SHAREGPT)}\n\n{json.dumps(SHAREGPT)}\n")
    (tmp_path / "notes.txt").write_text("no transcript")
    openai, mini, traj, *chats = read_conversations([tmp_path])
    assert openai.messages == mini.messages == traj.messages
    assert openai.turns == (2, 4)
    assert openai.messages[2].tool_calls[0].arguments == {"command": "ls"}
    assert [tool.name for tool in mini.tools] == ["bash"]
    assert openai.tools == traj.tools == ()
    assert [chat.turns for chat in chats] == [(1,), (1,)]
    assert chats[1].where.endswith("d.jsonl#1")


@pytest.mark.parametrize(
    ("name", "text", "named"),
    [
        ("a.json", "{", "is no JSON"),
        ("a.jsonl", '{"messages": []}\n{', "line 2, is no JSON"),
        ("a.json", "[3]", "#0 is a int"),
        ("a.json", '{"prompt": "x"}', "none of the fields"),
        ("a.json", '{"conversations": [{"from": "narrator", "value": "x"}]}', "from 'narrator'"),
        ("a.json", '{"messages": [{"role": "oracle", "content": "x"}]}', "#0: .*oracle"),
    ],
)
def test_file_of_something_else_is_named(tmp_path: Path, name: str, text: str, named: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigurationError, match=named):
        list(read_conversations([tmp_path / name]))


def test_paths_without_transcripts_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="there is no"):
        list(read_conversations([tmp_path / "missing"]))
    with pytest.raises(ConfigurationError, match="holds no transcripts"):
        list(read_conversations([tmp_path]))
