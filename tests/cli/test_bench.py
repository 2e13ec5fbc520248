from __future__ import annotations

import json
from pathlib import Path

import pytest

from dlite_agent.cli import bench
from dlite_agent.cli.main import main
from tests.tiny_checkpoint import write_checkpoint


def test_a_bench_prints_its_conditions_and_figures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = str(write_checkpoint(tmp_path / "model"))
    options = [
        "--model",
        folder,
        "--repeats",
        "2",
        "--dtype",
        "float32",
        "--quick",
        "--concurrency",
        "2",
    ]
    assert main(["bench", "step", *options]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("=== step\nprocessor")
    assert "ours_ms" in shown
    assert main(["bench", *options, "--json", "--csv", str(tmp_path / "csv")]) == 0
    shown, told = capsys.readouterr()
    results = json.loads(shown)
    assert set(results) == set(bench.BENCHES)
    step = results["step"]
    assert step["conditions"]["model"] == folder
    assert len(step["rows"]) > 1
    assert (tmp_path / "csv" / "step.csv").is_file()
    assert "step.csv" in told


@pytest.mark.parametrize(
    ("options", "advice"),
    [
        (["stop"], "'step'"),
        (["--repeats", "0"], "at least 1"),
        (["--threads", "0"], "at least 1"),
        (["step", "--csv", __file__], "name a folder"),
        (["step", "--csv", "/proc/no/where"], "name a folder"),
        (["step", "--csv", "/proc"], "name a folder"),
        (["throughput", "--concurrency", "1,many"], "1,4,16"),
        (["throughput", "--concurrency", "0"], "at least 1"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    options: list[str], advice: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *options]) == 2
    assert advice in capsys.readouterr().err


def test_every_bench_is_in_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["bench", "--help"])
    shown = capsys.readouterr().out
    assert all(name in shown for name in bench.BENCHES)
