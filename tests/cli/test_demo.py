"""The demo over scripted agents: what it prints, what it reports, and that it can fail."""

from __future__ import annotations

import errno
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import pytest

from dlite_agent.backend import ChatBackend
from dlite_agent.cli.comparison import compare
from dlite_agent.cli.demo import run_demo
from dlite_agent.cli.demo_report import POLICIES, demo_report, demo_summary
from dlite_agent.cli.main import main
from dlite_agent.config import ReusePolicy
from tests.cli.scripted import agent_run, call, demo_arguments, solver

pytestmark = pytest.mark.host

Opener = Callable[[ReusePolicy], AbstractContextManager[ChatBackend]]


def never(*_: object) -> float:
    raise AssertionError("there is nothing to measure")


def far(*_: object) -> float:
    return 1.0


def opener(**engines: ChatBackend) -> Opener:
    return lambda policy: nullcontext(engines.get(policy) or solver())


def test_a_solved_task_is_reported_with_every_field(capsys: pytest.CaptureFixture[str]) -> None:
    report = run_demo(demo_arguments(json=True), opener(), never)
    assert capsys.readouterr().out == ""
    assert report["solved"] is True
    assert report["identical"] is True
    assert isinstance(report["amplification"], float)
    assert {"speedup", "speedup_prefix"} <= set(report)
    assert len(report["turns"]) == 6  # type: ignore[arg-type]
    assert json.loads(json.dumps(report)) == report


def test_each_turn_has_a_line_with_its_figures(capsys: pytest.CaptureFixture[str]) -> None:
    run_demo(demo_arguments(), opener(), never)
    shown = capsys.readouterr().out
    assert shown.startswith("A repository of 3 files with one bug. The user: ")
    lines = [line for line in shown.splitlines() if line.startswith("  turn ")]
    assert len(lines) == 3 * 6
    for word in ("new", "cached", "prefilled", "written", "drafted", "accepted", "ms"):
        assert all(word in line for line in lines)
    assert shown.count("> run_tests()") == 2, "tools are shown for our run only"
    assert "FAIL" in shown
    assert "all" in shown.splitlines()[-1]
    assert "\x1b" not in shown


def test_a_long_answer_is_cut_on_the_screen(capsys: pytest.CaptureFixture[str]) -> None:
    rambles = solver(steps=1, then=["s" * 5000])
    run_demo(demo_arguments(), opener(session=rambles), far)
    shown = capsys.readouterr().out
    assert "(512 characters)" in shown  # max_tokens; one token a byte
    assert max(map(len, shown.splitlines())) < 500


def test_blank_lines_of_a_tool_result_are_not_shown(capsys: pytest.CaptureFixture[str]) -> None:
    run_demo(demo_arguments(), opener(), never)
    assert "    \n" not in capsys.readouterr().out


def test_a_run_that_says_something_else_is_not_identical(
    capsys: pytest.CaptureFixture[str],
) -> None:
    other = solver(steps=-1, then=["Well done."])
    report = run_demo(demo_arguments(), opener(none=other), far)
    assert report["solved"] is True
    assert report["identical"] is False
    assert "'no reuse' and ours: DIFFERENT in turn 6" in capsys.readouterr().out


def test_a_run_that_does_not_solve_it_is_no_success() -> None:
    gives_up = solver(steps=3, then=["I give up."])
    report = run_demo(demo_arguments(json=True), opener(session=gives_up), far)
    assert report["solved"] is False
    assert report["identical"] is False


def test_an_agent_that_never_ends_is_stopped_and_said(
    capsys: pytest.CaptureFixture[str],
) -> None:
    endless = solver(steps=0, then=[call("list_files")] * 100)
    report = run_demo(demo_arguments(), opener(none=endless), far)
    assert report["solved"] is False
    assert "no reuse: no end after" in capsys.readouterr().out


def test_speedups_are_ratios_of_model_time() -> None:
    ours = agent_run(([1], [2]), ([1, 2, 3], [4]))
    runs = dict.fromkeys(POLICIES, ours)
    runs["none"] = agent_run(*[([1], [2])] * 6)
    report = demo_report(runs, {})
    assert report["speedup"] == 3.0
    assert report["speedup_prefix"] == 1.0
    assert "3.00 x" in demo_summary(runs, {})


def test_a_speedup_counts_the_turns_before_the_runs_part() -> None:
    ours = agent_run(([1], [2]), ([1, 2, 3], [4]), ([1, 2, 3, 4, 5], [6]))
    longer = agent_run(([1], [2]), ([1, 2, 3], [4]), *[([1, 2, 3, 4, 5], [7])] * 9)
    runs = dict.fromkeys(POLICIES, ours)
    runs["none"] = longer
    found = compare(ours, longer, "float64", far)
    assert demo_report(runs, {"none": found})["speedup"] == 1.0
    nothing = compare(ours, agent_run(([1], [3])), "float64", far)
    assert demo_report(runs, {"none": nothing})["speedup"] is None


def test_a_missing_langchain_is_named_with_the_pip_line_before_anything_is_loaded() -> None:
    code = (
        "import sys\n"
        "sys.modules['langchain'] = None\n"
        "from dlite_agent.cli.main import main\n"
        "status = main(['demo'])\n"
        "assert 'torch' not in sys.modules\n"
        "sys.exit(status)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    assert 'pip install "dlite-agent[demo]"' in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_full_disk_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(**_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(tempfile, "TemporaryDirectory", full)
    assert main(["demo", "--size", "tiny", "--bugs", "1", "--json"]) == 3
    shown = capsys.readouterr().err
    assert "TMPDIR" in shown
    assert shown.count("\n") == 1


def test_a_repository_without_a_bug_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--bugs", "0"]) == 2
    assert "--bugs is 0" in capsys.readouterr().err
