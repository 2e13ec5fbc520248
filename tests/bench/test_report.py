from __future__ import annotations

import csv
import time
from pathlib import Path

import pytest
import torch

from dlite_agent.bench import machine
from dlite_agent.bench.machine import (
    bench_clock,
    git_revision,
    package_version,
    processor_name,
    read_bandwidth,
)
from dlite_agent.bench.report import BenchResult, Samples, conditions, measure


def test_samples_have_a_median_and_a_spread() -> None:
    samples = Samples([1.0, 2.0, 3.0, 4.0, 100.0])
    assert samples.median_s == 3.0
    assert samples.spread > 0.5
    assert Samples([2.0]).spread == 0.0


def test_warm_up_calls_are_not_timed() -> None:
    calls: list[int] = []
    samples = measure(lambda: calls.append(1), repeats=3, warmup=2)
    assert len(calls) == 5
    assert len(samples.times_s) == 3


def test_conditions_name_hardware_versions_and_threads() -> None:
    found = conditions(dtype="float32")
    assert found["torch"] == torch.__version__
    assert found["threads"] == torch.get_num_threads()
    assert found["dtype"] == "float32"
    assert {"processor", "clock", "python", "platform", "dlite-agent", "revision"} <= set(found)


@pytest.mark.parametrize(("threads", "clock"), [(1, time.thread_time), (2, time.perf_counter)])
def test_one_thread_is_timed_by_its_own_work(
    threads: int, clock: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert bench_clock()[0] is clock


def test_a_csv_has_its_conditions_and_its_rows(tmp_path: Path) -> None:
    rows = [{"rows": 1, "median_ms": 2.5}, {"rows": 8, "median_ms": 3.5}]
    result = BenchResult("step", "about", {"threads": 2}, rows)
    path = result.write_csv(tmp_path / "new")
    lines = path.read_text().splitlines()
    assert lines[0] == "# threads: 2"
    assert list(csv.DictReader(lines[1:])) == [
        {"rows": "1", "median_ms": "2.5"},
        {"rows": "8", "median_ms": "3.5"},
    ]


def test_a_package_that_is_not_installed_has_no_version() -> None:
    assert package_version("no-such-package-anywhere") is None
    assert package_version("torch") == torch.__version__


def test_the_processor_has_a_name() -> None:
    assert processor_name()


def test_a_revision_is_one_word_and_absent_outside_a_checkout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert " " not in (git_revision() or "")
    monkeypatch.setattr(machine, "__file__", str(tmp_path / "machine.py"))
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert git_revision() is None
    monkeypatch.setenv("PATH", str(tmp_path))
    assert git_revision() is None


def test_the_bandwidth_is_bytes_over_seconds() -> None:
    bandwidth = read_bandwidth(torch.device("cpu"), buffer_bytes=32 * 2**20)
    assert 1e8 < bandwidth < 1e13
