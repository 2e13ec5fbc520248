"""`dlite-agent train` with nano: capture, also when it is killed, both stages, served figures."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dlite_agent.cli.main import main
from dlite_agent.training.shards import captured_with, load_records, load_turns, load_windows

QUESTIONS = ["Hello", "How are you?", "Hello!", "Thank you", "What can you do?", "Hi"]
KILLED = """
import os, signal, sys
from dlite_agent.cli.main import main
from dlite_agent.training import shards

def write_json(path, content, write=shards.write_json, done=[]):
    if done.append(path) or path.name == "capture.json" and len(done) > 2:
        os.kill(os.getpid(), signal.SIGKILL)  # the second shard is there, the place behind it not
    write(path, content)

shards.write_json = write_json
main(sys.argv[1:])
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Transcripts, a recipe, and what was captured with it."""
    folder = tmp_path_factory.mktemp("train")
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
    (folder / "chats.jsonl").write_text("\n".join(lines))
    (folder / "recipe.yaml").write_text(
        f"model: nano\ntranscripts: [{folder / 'chats.jsonl'}]\nwork: {folder / 'work'}\n"
        f"out: {folder / 'out'}\n"
        "capture: {heldout: 3, max_answer: 16, shard_records: 12, enable_thinking: false,\n"
        "          max_windows: 2, window: 20, max_records: 60}\n"
        "drafter: {num_taps: 3, num_layers: 1, intermediate_size: 64, rank: 8}\n"
        "teacher: {steps: 2, batch_size: 16, device: cpu}\n"
        "align: {steps: 4, batch_size: 16, learning_rate: 1.0e-3, device: cpu}\n"
    )
    assert main(["train", "capture", str(folder / "recipe.yaml")]) == 0
    return folder


def test_dry_run_says_what_it_takes(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = str(folder / "recipe.yaml")
    assert main(["train", "capture", recipe, f"work={folder / 'other'}", "--dry-run"]) == 0
    said = capsys.readouterr()
    assert "6 turns to answer" in said.err
    for wanted in ("drafter parameters", "0 4 7", "free disk, memory", "align: on this CPU about"):
        assert wanted in said.out
    assert not (folder / "other").exists()


def test_killed_capture_goes_on_to_the_same_records(folder: Path) -> None:
    recipe, work = str(folder / "recipe.yaml"), folder / "killed"
    arguments = ["train", "capture", recipe, f"work={work}"]
    killed = subprocess.run(
        [sys.executable, "-c", KILLED, *arguments], capture_output=True, check=False
    )
    assert killed.returncode == -9
    shards = len(list(work.glob("*.safetensors")))
    assert shards >= 2
    assert main(arguments) == 0
    for kind in ("records", "heldout"):
        whole, again = load_records(folder / "work", kind), load_records(work, kind)
        assert torch.equal(whole.taps, again.taps)
        assert torch.equal(whole.left, again.left)
    assert load_turns(work) == load_turns(folder / "work")


def test_capture_keeps_records_windows_and_heldout_turns(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe, work = str(folder / "recipe.yaml"), folder / "work"
    turns, heldout = load_turns(work), load_records(work, "heldout")
    assert len(turns) == 2
    assert len(heldout) == sum(len(turn.answer_ids) for turn in turns)
    windows = load_windows(work)
    assert len(windows) == 2
    assert windows.rows.span_starts().tolist()[0] == 14  # the prompt's, but for its last row
    assert len(load_windows(work, "heldout_windows")) == 2
    assert captured_with(work)["taps"] == [0, 4, 7]
    assert main(["train", "capture", recipe]) == 0  # nothing is left to do
    assert load_turns(work) == turns
    assert main(["train", "capture", recipe, "capture.seed=2"]) == 2
    assert "'seed': 1" in capsys.readouterr().err


def test_capture_that_was_given_no_time_goes_on(folder: Path) -> None:
    recipe, work = str(folder / "recipe.yaml"), folder / "short"
    arguments = ["train", "capture", recipe, f"work={work}"]
    assert main([*arguments, "--minutes", "0"]) == 0
    assert len(list(work.glob("records-*"))) == 1  # one turn, in a shard of its own
    assert main(arguments) == 0
    whole, again = load_records(folder / "work"), load_records(work)
    assert torch.equal(whole.next_ids, again.next_ids)
    assert torch.equal(whole.left, again.left)


def test_both_stages_and_the_served_figures(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = str(folder / "recipe.yaml")
    assert main(["train", "teacher", recipe]) == 0
    assert main(["train", "align", recipe]) == 0
    assert "step=4 of 4" in capsys.readouterr().err
    assert json.loads((folder / "out" / "provenance.json").read_text())["step"] == 4
    assert main(["train", "eval", recipe, "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["trained"]["num_tokens"] == figures["served"]["num_tokens"]
    assert figures["cause"] == ""
    assert 0.0 <= figures["bigram"] <= 1.0
    assert len(figures["by_position"]) == 7
    assert main(["train", "eval", recipe, "capture.enable_thinking=true"]) == 2
    assert "mode: the records were captured with enable_thinking=False" in capsys.readouterr().err


def test_target_may_work_beside_the_student(folder: Path, tmp_path: Path) -> None:
    recipe = str(folder / "recipe.yaml")
    changed = [f"work={tmp_path / 'work'}", f"out={tmp_path / 'out'}", "teacher=null"]
    changed += ["capture.store=none", "capture.dtype=int8", "align.save_every_s=0"]
    assert main(["train", "capture", recipe, *changed]) == 0
    assert not list((tmp_path / "work").glob("records-*"))
    assert main(["train", "align", recipe, *changed]) == 0
    pools = json.loads((tmp_path / "work" / "align" / "pools.json").read_text())
    assert len(pools) == 5  # four steps of 16, pools of 12 records
    assert pools[1] != pools[0]


@pytest.mark.soak  # three processes that load nano, two of them together
def test_two_processes_train_as_one_does(folder: Path, tmp_path: Path) -> None:
    launcher = ["torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m"]
    environment = os.environ | {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    curves: dict[str, list[dict[str, object]]] = {}
    for name, start in (("one", []), ("two", launcher)):
        work = tmp_path / name
        shutil.copytree(folder / "work", work, ignore=shutil.ignore_patterns("align", "teacher"))
        changed = [f"work={work}", f"out={tmp_path / name / 'out'}", "teacher=null"]
        changed += ["align.device=auto", "align.autocast=false"]
        changed += ["align.log_every_s=0", "align.save_every_s=0"]
        command = ["dlite_agent.cli.main", "train", "align", str(folder / "recipe.yaml"), *changed]
        for end in (["--minutes", "0"], []):
            subprocess.run(
                [sys.executable, "-m", *start, *command, *end], check=True, env=environment
            )
        lines = (work / "align" / "curve.jsonl").read_text().splitlines()
        curves[name] = [json.loads(line) for line in lines]
    for one, two in zip(curves["one"], curves["two"], strict=True):
        assert one["step"] == two["step"]
        (kind,) = {"loss", "heldout_tau"} & set(one)
        assert two[kind] == pytest.approx(one[kind], rel=1e-4)


def test_capture_that_does_not_fit_the_disk_is_refused(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = str(folder / "recipe.yaml")
    changed = [f"work={tmp_path}", "capture.max_records=1000000000000"]
    assert main(["train", "capture", recipe, *changed]) == 3
    assert "lower capture.max_records" in capsys.readouterr().err


def test_steps_without_what_they_need_say_so(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe, changed = str(folder / "recipe.yaml"), f"work={tmp_path / 'nothing'}"
    assert main(["train", "align", recipe, changed]) == 2
    assert "holds no heldout" in capsys.readouterr().err
    assert main(["train", "capture", "nanoo"]) == 2
    assert "did you mean 'nano'?" in capsys.readouterr().err
