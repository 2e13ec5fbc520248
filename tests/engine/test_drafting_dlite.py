"""A DLite drafter that is named, and one that lies beside the checkpoint."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from dlite_agent.config import EngineConfig
from dlite_agent.decoding.controller import Controller
from dlite_agent.decoding.load import Load
from dlite_agent.drafters.dlite import DLiteDrafter
from dlite_agent.drafters.drafter import Drafter
from dlite_agent.drafters.load import BESIDE_NAME, drafter_beside, explain_drafter
from dlite_agent.engine.drafting import make_drafter
from dlite_agent.engine.loading import load_engine_target
from dlite_agent.engine.tasks import unheard
from dlite_agent.errors import DrafterMismatchError
from dlite_agent.models.dlite_config import DLiteConfig
from dlite_agent.models.dlite_files import write_dlite
from dlite_agent.models.weights import fingerprint, load_target
from tests.dlite_models import random_weights
from tests.tiny_checkpoint import write_checkpoint


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "model")


def put_drafter(folder: Path, checkpoint: Path, identity: str) -> None:
    with load_target(str(checkpoint), max_kv_bytes=2**24) as target:
        config = DLiteConfig.for_target(target.config, identity, num_taps=2, rank=4)
    write_dlite(folder, config, random_weights(config), {})


def make(checkpoint: Path, drafter: str, **options: object) -> Drafter:
    config = EngineConfig(
        model=str(checkpoint),
        drafter=drafter,
        reproducible=True,
        max_kv_bytes=2**24,
        **options,  # type: ignore[arg-type]
    )
    with load_engine_target(config, unheard) as target:
        return make_drafter(config, target, Load(), lambda stage, share: None)


def test_named_folder_is_that_drafter_alone(checkpoint: Path, tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    put_drafter(folder, checkpoint, fingerprint(checkpoint))
    assert isinstance(make(checkpoint, str(folder)), DLiteDrafter)
    with load_target(str(checkpoint), max_kv_bytes=2**24) as target:
        assert explain_drafter(str(folder), target.config).startswith("dlite: ")


def test_drafter_beside_the_checkpoint_is_asked_too(checkpoint: Path) -> None:
    assert drafter_beside(checkpoint) is None
    assert make(checkpoint, "auto").name == "auto(suffix)"
    put_drafter(checkpoint / BESIDE_NAME, checkpoint, fingerprint(checkpoint))
    drafter = make(checkpoint, "auto")
    assert isinstance(drafter, Controller)
    assert drafter.name == "auto(suffix+dlite)"
    assert drafter.requires.positions == "last"
    with load_target(str(checkpoint), max_kv_bytes=2**24) as target:
        assert explain_drafter("auto", target.config, checkpoint).startswith("suffix and dlite")


def test_drafter_that_lies_beside_can_be_named_too(checkpoint: Path) -> None:
    with pytest.raises(DrafterMismatchError, match="there is no drafter 'dlite'"):
        make(checkpoint, "dlite")
    put_drafter(checkpoint / BESIDE_NAME, checkpoint, fingerprint(checkpoint))
    assert isinstance(make(checkpoint, "dlite"), DLiteDrafter)


def test_nano_is_drafted_for_by_its_own() -> None:
    assert isinstance(make(Path("nano"), "dlite"), DLiteDrafter)
    assert make(Path("nano"), "auto").name == "auto(suffix+dlite)"


@pytest.mark.parametrize("is_reproducible", [False, True])
def test_what_a_block_costs_is_known_before_the_first(
    checkpoint: Path, is_reproducible: bool
) -> None:
    """As measured; by its bytes where nothing measured may decide, the same each time."""
    put_drafter(checkpoint / BESIDE_NAME, checkpoint, fingerprint(checkpoint))
    config = EngineConfig(model=str(checkpoint), cache_dir="off", reproducible=is_reproducible)
    with load_target(str(checkpoint), max_kv_bytes=2**24) as target:
        made = [make_drafter(config, target, Load(), unheard) for _ in range(2)]
    costs: list[list[float]] = []
    for drafter in made:
        assert isinstance(drafter, Controller)
        costs.append([asked.asking_s for asked in drafter.asked_sources])
    looked_up, computed = costs[0]
    assert 0.0 < looked_up < computed < 1.0
    assert (costs[0] == costs[1]) is is_reproducible


def test_drafter_stays_valid_for_weights_in_eight_bits_and_is_doubted_at_other_positions(
    checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    put_drafter(checkpoint / BESIDE_NAME, checkpoint, fingerprint(checkpoint))
    with caplog.at_level(logging.WARNING):
        assert make(checkpoint, "auto", quantize="int8").name == "auto(suffix+dlite)"
    assert not caplog.text
    scaling = {"rope_type": "linear", "factor": 2.0}
    with caplog.at_level(logging.WARNING):
        assert make(checkpoint, "auto", rope_scaling=scaling).name == "auto(suffix+dlite)"
    assert "was trained without rope_scaling='linear factor=2.0'" in caplog.text


def test_drafter_of_another_checkpoint_is_refused_or_left_out(
    checkpoint: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    put_drafter(checkpoint / BESIDE_NAME, checkpoint, "f" * 16)
    with caplog.at_level(logging.WARNING):
        assert make(checkpoint, "auto").name == "auto(suffix)"
    assert "was trained for the checkpoint" in caplog.text
    with load_target(str(checkpoint), max_kv_bytes=2**24) as target:
        told = explain_drafter("auto", target.config, checkpoint)
    assert told.startswith("suffix: where it pays; the one in dlite/ is left out: ")
    with pytest.raises(DrafterMismatchError, match="was trained for the checkpoint"):
        make(checkpoint, str(checkpoint / BESIDE_NAME))
