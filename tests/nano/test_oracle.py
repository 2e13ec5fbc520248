from __future__ import annotations

import json
import random
import subprocess
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from dlite_agent.nano import mini
from dlite_agent.nano.chatml import Conversation, encode_conversation, train_tokenizer
from dlite_agent.nano.corpus import WIDTHS, draw_conversation
from dlite_agent.nano.drills import drill_conversation, module_drill
from dlite_agent.nano.oracle import repair_conversation
from dlite_agent.nano.skills import skill_conversation
from dlite_agent.nano.world import make_task

pytest.importorskip("minisweagent")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    texts = [
        json.dumps(draw_conversation(random.Random(i), split="train", progress=0.0).messages)
        for i in range(60)
    ]
    return train_tokenizer(texts, 1000)


def calls_of(conversation: Conversation) -> list[tuple[str, dict[str, object]]]:
    found = []
    for message in conversation.messages:
        for call in message.get("tool_calls", []):  # type: ignore[attr-defined]
            found.append((call["function"]["name"], call["function"]["arguments"]))
    return found


def test_repair_takes_one_step_a_turn_and_ends_with_an_answer() -> None:
    conversation = repair_conversation(
        random.Random(1), split="train", size="small", thinking=True, mistakes=0.0
    )
    names = [name for name, _ in calls_of(conversation)]
    cycle = ["read_file", "edit_file", "run_tests"]
    assert names == ["list_files", "run_tests", *cycle * (len(names) // len(cycle))]
    assert "tests pass. I fixed" in str(conversation.messages[-1]["content"])


def test_mistakes_are_marked_and_followed_by_a_recovery() -> None:
    for seed in range(30):
        conversation = repair_conversation(
            random.Random(seed), split="train", size="tiny", thinking=False, mistakes=1.0
        )
        (wrong,) = conversation.unlearned
        assert conversation.messages[wrong]["role"] == "assistant"
        assert "0 failed" in str(conversation.messages[-2]["content"])


def test_thinking_decides_where_the_text_before_a_call_stands() -> None:
    for thinking in (True, False):
        conversation = repair_conversation(
            random.Random(2), split="train", size="tiny", thinking=thinking
        )
        turn = next(m for m in conversation.messages if m["role"] == "assistant")
        assert bool(turn["content"]) is not thinking
        assert ("reasoning_content" in turn) is thinking


def test_the_bash_tool_is_mini_swe_agents_own() -> None:
    from minisweagent.models.utils.actions_toolcall import BASH_TOOL

    assert mini.BASH_TOOL == BASH_TOOL


def test_the_shell_prints_what_the_simulation_says(tmp_path: Path) -> None:
    for seed in range(5):
        task = make_task(seed, split="train", size="small")
        root = task.materialise(tmp_path / str(seed))
        shell = mini.SimulatedShell(task)
        path, broken = task.broken_path, task.broken
        for command in (
            "ls -R",
            "python3 run_tests.py",
            f"grep -n -A2 'def {broken.name}(' {path}",
        ):
            assert shell.execute(command) == run(command, root)
        found = shell.execute(f"grep -n -A2 'def {broken.name}(' {path}")[1]
        line = found.strip().split("\n")[-1].split("-")[0]
        command = f"sed -i '{line}c\\    {broken.line(broken.right)}' {path}"
        assert shell.execute(command) == run(command, root)
        assert shell.execute("python3 run_tests.py") == run("python3 run_tests.py", root)
        assert task.solved(root)


def run(command: str, root: Path) -> tuple[int, str]:
    environment = {"LC_ALL": "C", "PATH": "/usr/local/bin:/usr/bin:/bin"}
    result = subprocess.run(
        command, shell=True, cwd=root, env=environment, capture_output=True, text=True, check=False
    )
    return result.returncode, result.stdout + result.stderr


def test_mini_calls_bash_once_a_turn_and_submits_alone() -> None:
    for seed in range(10):
        conversation = mini.mini_conversation(
            random.Random(seed), split="train", size="small", thinking=seed % 2 == 0
        )
        commands = [str(arguments["command"]) for _, arguments in calls_of(conversation)]
        assert commands[-1] == mini.SUBMIT
        assert mini.SUBMIT not in commands[:-1]
        assert "## Recommended Workflow" in str(conversation.messages[1]["content"])


def test_skills_cover_calls_and_plain_answers() -> None:
    kinds = {
        (bool(c.tools), bool(calls_of(c)))
        for seed in range(200)
        for c in [skill_conversation(random.Random(seed), split="train", thinking=True)]
    }
    assert {(True, True), (False, False)} <= kinds


def test_every_dialect_fits_a_training_row(tokenizer: Tokenizer) -> None:
    for seed in range(40):
        conversation = draw_conversation(random.Random(seed), split="train", progress=1.0)
        row = encode_conversation(tokenizer, conversation)
        assert len(row.ids) == len(row.weights)
        assert max(row.weights) == 1.0
        assert len(row.ids) <= WIDTHS[-1] * 1.4  # this small tokenizer makes longer rows


def test_module_drills_fix_functions_that_were_read_and_are_wrong() -> None:
    for seed in range(30):
        conversation = module_drill(random.Random(seed), split="train")
        (read, read_arguments), *edits = calls_of(conversation)
        listing = next(m["content"] for m in conversation.messages if m["role"] == "tool")
        assert read == "read_file"
        assert 1 <= len(edits) <= 10
        for name, arguments in edits:
            assert name == "edit_file"
            assert arguments["path"] == read_arguments["path"]
            assert str(listing).count(f"    {arguments['old']}\n") == 1
            assert arguments["new"] != arguments["old"]


def test_drills_ask_for_the_right_line() -> None:
    for seed in range(20):
        conversation = drill_conversation(random.Random(seed), split="train")
        assert calls_of(conversation) or not conversation.tools
        roles = [message["role"] for message in conversation.messages]
        assert roles[0] == "user"
        assert roles[-1] == "assistant"
