from __future__ import annotations

import json
from pathlib import Path

import pytest

from dlite_agent.bench.report import BenchResult
from dlite_agent.cli import bench
from dlite_agent.cli.main import main
from tests.tiny_checkpoint import write_checkpoint


def test_a_bench_prints_its_conditions_and_figures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = str(write_checkpoint(tmp_path / "model"))
    options = ["--model", folder, "--repeats", "2", "--dtype", "float32", "--quick"]
    assert main(["bench", "attention", *options]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("=== attention\nprocessor")
    assert "cached" in shown
    named = ["step", "attention"]
    assert main(["bench", *named, *options, "--json", "--csv", str(tmp_path / "csv")]) == 0
    shown, told = capsys.readouterr()
    results = json.loads(shown)
    assert list(results) == named
    step = results["step"]
    assert step["conditions"]["model"] == folder
    assert len(step["rows"]) > 1
    assert (tmp_path / "csv" / "step.csv").is_file()
    assert "step.csv" in told


def test_turns_are_printed_one_by_one_and_as_sums(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answer = {"role": "assistant", "content": "Yes."}
    messages = [{"role": "user", "content": "Go."}, answer, {"role": "user", "content": "On."}]
    for name in ("a", "b"):
        path = tmp_path / f"{name}.json"
        path.write_text(json.dumps({"messages": [*messages, answer]}), encoding="utf-8")
    folder = str(write_checkpoint(tmp_path / "model", max_positions=1024))
    files = [str(tmp_path / "a.json"), str(tmp_path / "b.json")]
    options = ["--clients", "append-only", "--modes", "as_generated,none", "--transcripts", *files]
    assert main(["bench", "turns", "--model", folder, *options]) == 0
    lines = capsys.readouterr().out.splitlines()
    (heads, sums) = (i for i, line in enumerate(lines) if line.startswith("transcript "))
    assert lines[heads].split() == [
        *("transcript", "client", "mode", "turn", "new", "prefilled", "idle_prefilled", "cached"),
        *("rewound", "amplification", "ttft_s", "total_s", "miss"),
    ]
    rows = [line.split()[:4] for line in lines[heads + 1 : sums] if " append-only " in line]
    assert sorted(rows) == [
        [name, "append-only", mode, turn]
        for name in "ab"
        for mode in ("as_generated", "none")
        for turn in "01"
    ]
    assert "amplification" in lines[sums]


def test_all_are_run_where_none_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    quick = {
        name: ("", lambda arguments, name=name: BenchResult(name, "", {}, [])) for name in "ab"
    }
    monkeypatch.setattr(bench, "BENCHES", quick)
    assert main(["bench", "--json"]) == 0
    assert list(json.loads(capsys.readouterr().out)) == ["a", "b"]


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
        (["attention", "--quantize", "int8"], "use it with decode"),
        (["overhead", "--rope-scaling", "yarn"], "no JSON"),
        (["--transcripts", "/proc/no/where", "turns"], "name another"),
        (["--transcripts", __file__, "turns"], "name benches before --transcripts"),
        (["turns", "--bfcl", "base", "--bfcl-limit", "0"], "--bfcl-limit is 0"),
        (["turns", "--split-rate", "2"], "between 0 and 1"),
        (["turns", "--drift-rate", "-1"], "between 0 and 1"),
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


def test_acceptance_is_printed_from_its_rows_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parts = "draft_ms verify_ms sample_ms host_ms".split()
    rows = [
        {"conversation": "a", "turn": 0, "drafter": name, "session": "fresh"}
        | {"context_tokens": 10, "rounds": rounds, "tokens": 8, "state_bytes": 0}
        | {"slots_accepted": "1 1", "slots_left": "2 2", "is_plain_answer": 1}
        | dict.fromkeys(parts, float(rounds))
        for name, rounds in (("null", 8), ("dlite", 2))
    ]
    path = BenchResult("acceptance", "", {"model": "some"}, [], rows).write_csv(tmp_path)
    assert main(["bench", "acceptance", "--from-csv", str(path), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["model"] == "some"
    plain, drafted = printed["drafters"]
    assert (plain["name"], plain["speedup"], plain["c"]) == ("null", 1.0, 1.0)
    assert (drafted["name"], drafted["history"], drafted["restored"]) == ("dlite", "short", False)
    assert (drafted["tau_micro"], drafted["tau_macro"], drafted["speedup"]) == (4.0, 4.0, 4.0)
    assert drafted["per_slot"] == [0.5, 0.5]
    assert main(["bench", "acceptance", "--from-csv", str(path)]) == 0
    assert "dlite" in capsys.readouterr().out
