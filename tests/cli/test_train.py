"""`dlite-agent train` with nano: capture, resume, align, and the served figures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dlite_agent.cli.main import main
from dlite_agent.training.shards import load_records, load_turns

QUESTIONS = ["Hello", "How are you?", "Hello!", "Thank you", "What can you do?", "Hi"]


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    lines = [
        json.dumps(
            {
                "messages": [
                    {"role": "user", "content": question},
                    {"role": "assistant", "content": "?"},
                ]
            }
        )
        for question in QUESTIONS
    ]
    (tmp_path / "chats.jsonl").write_text("\n".join(lines))
    path = tmp_path / "recipe.yaml"
    path.write_text(
        f"model: nano\ntranscripts: [{tmp_path / 'chats.jsonl'}]\nwork: {tmp_path / 'work'}\n"
        f"out: {tmp_path / 'out'}\n"
        "capture: {heldout: 3, max_answer: 24, shard_records: 12, enable_thinking: false}\n"
        "drafter: {num_taps: 3, num_layers: 1, intermediate_size: 64, rank: 8}\n"
        "align: {steps: 4, batch_size: 16, learning_rate: 1.0e-3, device: cpu}\n"
    )
    return path


def test_dry_run_says_what_it_takes(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "capture", str(recipe), "--dry-run"]) == 0
    said = capsys.readouterr()
    assert "6 turns to answer" in said.err
    assert "drafter parameters" in said.out
    assert "taps" in said.out
    assert "0 4 7" in said.out
    assert not (recipe.parent / "work").exists()


def test_capture_align_and_eval(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "capture", str(recipe)]) == 0
    work = tmp_path / "work"
    assert len(list(work.glob("records-*.safetensors"))) >= 2
    turns = load_turns(work)
    assert len(turns) == 2
    heldout = load_records(work, "heldout")
    assert len(heldout) == sum(len(turn.answer_ids) for turn in turns)
    assert main(["train", "capture", str(recipe)]) == 0  # nothing is left to do
    assert load_turns(work) == turns
    assert main(["train", "capture", str(recipe), "capture.seed=2"]) == 2
    assert "'seed': 1" in capsys.readouterr().err
    assert main(["train", "align", str(recipe)]) == 0
    provenance = json.loads((tmp_path / "out" / "provenance.json").read_text())
    assert provenance["step"] == 4
    capsys.readouterr()
    status = main(["train", "eval", str(recipe), "--json"])
    figures = json.loads(capsys.readouterr().out)
    assert status == 0
    assert figures["trained"]["num_tokens"] == figures["served"]["num_tokens"]


def test_capture_that_does_not_fit_the_disk_is_refused(
    recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "capture", str(recipe), "capture.max_records=1000000000000"]) == 3
    assert "lower capture.max_records" in capsys.readouterr().err


def test_steps_without_what_they_need_say_so(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "align", str(recipe)]) != 0
    assert "holds no heldout" in capsys.readouterr().err
    assert main(["train", "capture", str(tmp_path / "none.yaml")]) == 2
    assert "there is no recipe" in capsys.readouterr().err
