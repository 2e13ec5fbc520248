"""What the doctor says of recorded requests, with a tokenizer and no weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dlite_agent.cli.main import main

TOOLS = [{"type": "function", "function": {"name": "read", "parameters": {"type": "object"}}}]
CALL = {"id": "call_1", "type": "function", "function": {"name": "read", "arguments": '{"a":1}'}}
TALK: list[dict[str, Any]] = [
    {"role": "system", "content": "Fix bugs. It is 12:30."},
    {"role": "user", "content": "Fix it."},
    {"role": "assistant", "content": "", "reasoning_content": "Look first.", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call_1", "content": "x = 1\n" * 5},
    {"role": "assistant", "content": "Done."},
    {"role": "user", "content": "Thanks."},
    {"role": "assistant", "content": "You are welcome."},
]


def request(stop: int, **changes: Any) -> dict[str, Any]:
    return {"messages": [dict(message) for message in TALK[:stop]], "tools": TOOLS} | changes


def doctor(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> Any:
    assert main(["doctor", *map(str, arguments), "--json"]) == 0
    (report,) = json.loads(capsys.readouterr().out)["transcripts"]
    return report


def write_file(path: Path, content: object) -> Path:
    path.write_text(json.dumps(content), encoding="utf-8")
    return path


def test_a_transcript_costs_what_is_new(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = write_file(tmp_path / "talk.json", {"messages": TALK, "tools": TOOLS})
    report = doctor(capsys, path, "--history", "as_generated")
    assert report["name"] == "talk"
    assert len(report["requests"]) == 3
    assert report["amplification"] == 1.0
    assert all(turn["miss"] is None for turn in report["requests"])
    assert not report["advice"]


def test_recorded_requests_say_what_the_client_changed(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    second = request(4, tools=TOOLS)
    second["messages"][2] |= {"reasoning_content": None}
    answered = {"request": request(2), "response": {"choices": [{"message": TALK[2]}]}}
    path = tmp_path / "log.jsonl"
    path.write_text(f"{json.dumps(answered)}\n\n{json.dumps(second)}\n", encoding="utf-8")
    report = doctor(capsys, "nano", path)
    assert report["amplification"] == 1.0
    assert report["plain_amplification"] > 1.0
    assert report["requests"][1]["miss"]["cause"] is None
    assert report["advice"] == [
        "free: request 1, messages[2]: reasoning dropped; the original is used"
    ]


def test_a_timestamp_is_named_with_both_texts_and_what_to_do(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    second = request(4)
    second["messages"][0]["content"] = "Fix bugs. It is 12:31."
    path = write_file(tmp_path / "log.json", [request(2), second])
    report = doctor(capsys, path)
    assert report["amplification"] > 1.5
    miss = report["requests"][1]["miss"]
    assert (miss["cause"], miss["message_index"]) == ("timestamp", 0)
    assert "12:30" in miss["was"]
    assert "12:31" in miss["now"]
    assert report["advice"][0].startswith(f"timestamp: {miss['tokens']} tokens")
    assert "12:31" in report["advice"][0]
    assert "last message" in report["advice"][0]


def test_the_report_is_a_table_for_a_person(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = write_file(tmp_path / "log.json", {"requests": [request(2), request(4, tools=[])]})
    assert main(["doctor", str(path)]) == 0
    printed = capsys.readouterr().out
    assert "log: 2 requests" in printed
    assert "tools_changed" in printed
    assert "amplification" in printed


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("{", "no JSON"),
        ("[]", "holds no request"),
        ('{"prompt": "x"}', "without messages"),
        ("[1]", "without messages"),
        ('{"messages": []}', "holds no request"),
        ('[{"messages": []}]', "has no messages"),
    ],
)
def test_a_file_that_is_none_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, content: str, says: str
) -> None:
    path = tmp_path / "log.json"
    path.write_text(content, encoding="utf-8")
    assert main(["doctor", str(path)]) == 2
    assert says in capsys.readouterr().err


def test_a_file_that_is_missing_and_a_second_model_are_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["doctor", str(tmp_path / "none.json")]) == 2
    assert "cannot be read" in capsys.readouterr().err
    assert main(["doctor", "nano", "smollm2"]) == 2
    assert "several models" in capsys.readouterr().err
