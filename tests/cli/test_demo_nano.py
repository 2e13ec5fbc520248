"""The whole demo on nano: the real model, agent and tools, and what it promises."""

from __future__ import annotations

import io
import json
import signal
import subprocess
import sys
from typing import Any

import pytest
import torch

from dlite_agent.cli.main import main

pytestmark = pytest.mark.host


@pytest.fixture(scope="module")
def outcome() -> tuple[int, str, str]:
    """Status, output and errors of one small demo in float64."""
    with pytest.MonkeyPatch.context() as patch:
        streams = io.StringIO(), io.StringIO()
        patch.setattr(sys, "stdout", streams[0])
        patch.setattr(sys, "stderr", streams[1])
        options = ["--seed", "1", "--size", "tiny", "--bugs", "1", "--dtype", "float64"]
        status = main(["demo", "--no-think", "--json", *options])
    return status, streams[0].getvalue(), streams[1].getvalue()


@pytest.fixture
def report(outcome: tuple[int, str, str]) -> dict[str, Any]:
    report: dict[str, Any] = json.loads(outcome[1])
    return report


def test_json_is_one_object_and_nothing_else(outcome: tuple[int, str, str]) -> None:
    _, written, errors = outcome
    assert written.count("\n") == 1
    assert json.loads(written)["conditions"]["torch"] == torch.__version__
    assert errors == ""


def test_nothing_is_prefilled_twice(report: dict[str, Any]) -> None:
    assert report["amplification"] == 1.0
    for turn in report["turns"][1:]:
        assert turn["prefilled"] == turn["new"] + 1
        assert turn["cached"] + turn["prefilled"] == turn["prompt"]


def test_every_token_is_that_of_a_run_without_reuse(report: dict[str, Any]) -> None:
    found = report["comparisons"]["none"]
    assert found["identical"] is True
    assert found["turns_with_same_prompt"] == len(report["turns"])
    assert found["num_equal"] == report["runs"]["session"]["sampled"]


def test_it_is_solved_and_all_three_runs_are_the_same(
    outcome: tuple[int, str, str], report: dict[str, Any]
) -> None:
    assert report["solved"] is True
    assert report["identical"] is True
    assert report["near_ties"] == 0
    assert len(report["turns"]) >= 5
    assert outcome[0] == 0


def test_ctrl_c_ends_it_cleanly() -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "dlite_agent.cli.main", "demo"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("  turn 1:"):
            break
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert errors == "\ncancelled\n"
