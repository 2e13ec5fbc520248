"""`dlite-agent drafters`: what is listed, and what a check says."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path

import pytest

from dlite_agent.cli import drafters
from dlite_agent.cli.main import main
from dlite_agent.drafters.self_test import SelfTest
from dlite_agent.models.block_files import write_block_drafter
from dlite_agent.models.weights import fingerprint, read_config
from tests.block_models import block_config, block_weights
from tests.tiny_checkpoint import write_checkpoint


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = write_checkpoint(tmp_path / "model")
    config = block_config(read_config(str(folder)), target_fingerprint=fingerprint(folder))
    write_block_drafter(folder / "dspark", config, block_weights(config), {})
    return folder


def test_drafters_of_a_model_are_listed(
    checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["drafters", str(checkpoint)]) == 0
    said = capsys.readouterr().out
    assert str(checkpoint / "dspark") in said
    assert "dspark, fits: made for this checkpoint, by fingerprint" in said
    assert main(["drafters", str(checkpoint), "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert listed["model"] == str(checkpoint)
    assert [drafter["family"] for drafter in listed["drafters"]] == ["dspark"]
    assert main(["drafters", str(write_checkpoint(checkpoint.parent / "alone"))]) == 0
    assert "no trained drafter is known" in capsys.readouterr().err


def test_check_counts_right_tokens_in_every_reading(
    checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    drafter = str(checkpoint / "dspark")
    assert main(["drafters", str(checkpoint), "--check", drafter, "--json"]) == 1
    said = json.loads(capsys.readouterr().out)
    assert list(said["accepted"]) == [
        "as configured",
        "the other alignment (slot 0 does not draft)",
    ]
    assert said["num_blocks"] == 8
    assert "first tokens agree" in said["warning"]
    told = SelfTest(said["accepted"], said["first_right"], said["num_blocks"])
    drafters._tell(Namespace(json=False), told)
    assert "as configured" in capsys.readouterr().out


def test_check_of_a_dlite_drafter_points_to_its_own_measure(
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = Path(__file__).parents[2] / "dlite_agent" / "nano" / "assets" / "dlite"
    assert main(["drafters", "nano", "--check", str(folder)]) == 0
    assert "train eval" in capsys.readouterr().err
