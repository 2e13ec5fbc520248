"""Rows of requests: the real loop, with sessions that computed their history and that did not."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from dlite_agent.bench.acceptance import AcceptanceOptions, bench_acceptance
from dlite_agent.bench.acceptance_figures import (
    acceptance_json,
    figures_of,
    read_result,
)
from dlite_agent.bench.acceptance_plots import plot_acceptance
from dlite_agent.bench.report import BenchResult, Value
from dlite_agent.drafters.load import BESIDE_NAME
from dlite_agent.errors import ConfigurationError
from dlite_agent.models.dlite_config import DLiteConfig
from dlite_agent.models.dlite_files import write_dlite
from dlite_agent.models.weights import load_target
from tests.dlite_models import random_weights
from tests.tiny_checkpoint import write_checkpoint


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> BenchResult:
    folder = tmp_path_factory.mktemp("acceptance")
    checkpoint = write_checkpoint(folder / "model")
    with load_target(str(checkpoint), max_kv_bytes=2**24) as target:
        config = DLiteConfig.for_target(target.config, "", num_taps=2, rank=4)
    write_dlite(checkpoint / BESIDE_NAME, config, random_weights(config), {})
    suite = folder / "suite.jsonl"
    said = {"role": "assistant", "content": "I read the file."}
    turns = [{"role": "user", "content": "Read a file again, please."}, said] * 2
    lines = [{"messages": turns[:-1]}, {"prompt": "aaaa aaaa aaaa aaaa"}]
    suite.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    options = AcceptanceOptions(suite=suite, drafters=("suffix", "dlite"), max_tokens=12)
    return bench_acceptance(str(checkpoint), dtype="float64", options=options)


def rows_of(result: BenchResult, drafter: str, session: str) -> list[dict[str, Value]]:
    found = [dict(row) for row in result.samples]
    return [row for row in found if (row["drafter"], row["session"]) == (drafter, session)]


def test_all_answer_alike_and_a_fork_and_a_restore_are_accepted_like_a_fresh_session(
    result: BenchResult,
) -> None:
    names = list(dict.fromkeys(row["drafter"] for row in result.samples))
    assert names == ["null", "suffix", "dlite"]
    assert all(row["is_plain_answer"] for row in result.samples)
    fresh = rows_of(result, "dlite", "fresh")
    assert [row["turn"] for row in fresh] == [0, 1, 0]
    counted = ("rounds", "tokens", "drafted", "accepted", "slots_accepted", "state_bytes")
    for session in ("fork", "restored"):
        for row, other in zip(fresh, rows_of(result, "dlite", session), strict=True):
            assert [row[name] for name in counted] == [other[name] for name in counted]
    assert {row["state_bytes"] for row in fresh} == {0}
    assert all(row["state_bytes"] for row in rows_of(result, "suffix", "fresh"))


def test_a_restored_session_prefills_only_what_is_new(result: BenchResult) -> None:
    for session in ("fresh", "fork", "restored"):
        first, second, _ = rows_of(result, "dlite", session)
        assert first["prefilled_tokens"] == 16
        assert 0 < int(second["prefilled_tokens"] or 0) < int(second["context_tokens"] or 0)


def test_tables_follow_from_the_csv_alone(result: BenchResult, tmp_path: Path) -> None:
    read = read_result(result.write_csv(tmp_path))
    assert read.rows == result.rows
    assert list(read.samples) == list(result.samples)
    assert read.conditions["max_tokens"] == "12"


def test_json_has_a_row_a_drafter_history_and_session(result: BenchResult) -> None:
    printed = json.loads(json.dumps(acceptance_json(result)))
    assert printed["model"] == result.conditions["model"]
    keys = "name history restored tau_micro tau_macro per_slot speedup c state_bytes".split()
    for row in printed["drafters"]:
        assert set(keys) <= set(row)
        assert row["restored"] is (row["session"] == "restored")
        assert isinstance(row["per_slot"], list)


def test_plots_are_images(result: BenchResult, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    paths = plot_acceptance(result.samples, tmp_path)
    assert [path.name for path in paths] == ["acceptance-tau.png", "acceptance-slots.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in paths)


def row(conversation: str, drafter: str, **counts: Value) -> dict[str, Value]:
    parts = {"draft_ms": 0.0, "verify_ms": 0.0, "sample_ms": 0.0, "host_ms": 0.0}
    made: dict[str, Value] = {
        "conversation": conversation,
        "turn": 0,
        "drafter": drafter,
        "session": "fresh",
        "context_tokens": 10,
        "state_bytes": 5,
        "is_plain_answer": 1,
        "slots_accepted": "",
        "slots_left": "",
    }
    return made | parts | counts


PLAIN: Sequence[dict[str, Value]] = [
    row("a", "null", rounds=10, tokens=10, verify_ms=20.0),
    row("b", "null", rounds=30, tokens=30, verify_ms=60.0),
]
DRAFTED: Sequence[dict[str, Value]] = [
    row(
        "a", "x", rounds=5, tokens=10, verify_ms=8.0, draft_ms=2.0,
        slots_accepted="4 1", slots_left="5 4",
    ),
    row(
        "b", "x", rounds=10, tokens=30, verify_ms=30.0, host_ms=0.0,
        slots_accepted="8 5", slots_left="10 8",
    ),
]  # fmt: skip


def test_figures_are_those_of_the_sums() -> None:
    plain, drafted = figures_of([*PLAIN, *DRAFTED])
    assert (plain["tau_micro"], plain["speedup"], plain["c"]) == (1.0, 1.0, 1.0)
    assert drafted["tau_micro"] == pytest.approx(40 / 15, abs=1e-3)
    assert drafted["tau_macro"] == 2.5
    assert drafted["per_slot"] == "0.80 0.50"
    assert drafted["speedup"] == 2.0
    assert drafted["c"] == pytest.approx(4 / 3, abs=1e-3)
    assert (drafted["state_bytes"], drafted["requests"]) == (5, 2)
    assert drafted["draft_ms"] == pytest.approx(2 / 15, abs=1e-3)
    # of two conversations the extremes are those of one of them twice
    assert (drafted["tau_low"], drafted["tau_high"]) == (2.0, 3.0)
    assert (drafted["speedup_low"], drafted["speedup_high"]) == (2.0, 2.0)


def test_long_histories_are_a_group_of_their_own() -> None:
    long = [one | {"context_tokens": 3000, "conversation": "c"} for one in (PLAIN[0], DRAFTED[0])]
    figures = figures_of([*PLAIN, *DRAFTED, *long])
    assert [(one["drafter"], one["history"], one["requests"]) for one in figures] == [
        ("null", "short", 2),
        ("null", "long", 1),
        ("x", "short", 2),
        ("x", "long", 1),
    ]


@pytest.mark.parametrize("text", ["a,b\n1,2\n", "conversation,turn\nx,y\n"])
def test_what_is_no_table_of_requests_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "some.csv"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigurationError, match="is no table of requests"):
        read_result(path)
    with pytest.raises(ConfigurationError, match="is no table of requests"):
        read_result(tmp_path / "none.csv")
