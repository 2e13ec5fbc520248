"""Figures of a run reach those who watch it: read back from what was written."""

from __future__ import annotations

import importlib.util
import json
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from dlite_agent.errors import ConfigurationError, MissingDependencyError
from dlite_agent.training.options import AlignOptions
from dlite_agent.training.recipe import Recipe
from dlite_agent.training.stages import train_stage
from dlite_agent.training.tracking import ReportTo, find_tracker
from tests.training.languages import make_config, make_ends, memorable, source

OPTIONS = AlignOptions(
    steps=3, batch_size=16, autocast=False, device="cpu", save_every_s=0.0, log_every_s=0.0
)


def train(folder: Path, report_to: ReportTo) -> list[dict[str, object]]:
    """A short run, and the rows of its curve."""
    ends = make_ends()
    records = memorable(ends)
    recipe = Recipe("tiny", ("nowhere",), str(folder), str(folder / "out"), align=OPTIONS)
    model, data = (make_config(), ends), (source(records, OPTIONS), records)
    assert train_stage(recipe, "align", model, data, report_to=report_to)
    lines = (folder / "align" / "curve.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def log_records(content: bytes) -> Iterator[bytes]:
    """Records of a LevelDB log, which wandb writes behind a header of seven bytes."""
    at, block, record = 7, 32768, b""
    while at < len(content):
        if block - at % block < 7:  # no room for a record's head: padding
            at += block - at % block
            continue
        _, size, kind = struct.unpack_from("<IHB", content, at)
        record += content[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # whole, or its last part
            yield record
            record = b""


def logged(rows: list[dict[str, object]], name: str) -> list[tuple[int, float]]:
    return [(int(str(row["step"])), float(str(row[name]))) for row in rows if name in row]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_event_file_holds_what_the_curve_holds(tmp_path: Path) -> None:
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    rows = train(tmp_path, "tensorboard")
    events = reader.EventAccumulator(str(tmp_path / "align"))
    events.Reload()
    for name in ("loss", "heldout_tau"):
        found = [(event.step, event.value) for event in events.Scalars(name)]
        expected = logged(rows, name)
        assert [step for step, _ in found] == [step for step, _ in expected]
        assert [value for _, value in found] == pytest.approx([value for _, value in expected])
    tags = events.Tags()["scalars"]
    assert {"slot_0", "slot_6", "heldout_slot_0", "heldout_slot_6"} <= set(tags)


@pytest.mark.soak  # its service takes ten seconds to start and to stop
def test_offline_run_holds_what_the_curve_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb")
    from wandb.proto.wandb_internal_pb2 import Record

    monkeypatch.setenv("WANDB_MODE", "offline")
    rows = train(tmp_path, "wandb")
    (file,) = tmp_path.glob("align/wandb/offline-run-*/*.wandb")
    found: list[tuple[int, float]] = []
    for data in log_records(file.read_bytes()):
        record = Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "history":
            items = {item.nested_key[0]: item.value_json for item in record.history.item}
            if "loss" in items:
                found.append((record.history.step.num, json.loads(items["loss"])))
    assert dict(found) == pytest.approx(dict(logged(rows, "loss")))


def test_without_a_key_the_way_on_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    with pytest.raises(ConfigurationError, match="WANDB_MODE=offline"):
        find_tracker("wandb", tmp_path, "run")


def test_tracker_that_is_not_installed_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingDependencyError, match="pip install wandb"):
        find_tracker("wandb", tmp_path, "run")
