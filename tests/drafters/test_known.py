"""Which drafters are listed for a model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from dlite_agent.drafters.known import drafters_beside, public_drafters
from dlite_agent.models.block_files import write_block_drafter
from dlite_agent.models.dlite_config import DLiteConfig
from dlite_agent.models.dlite_files import write_dlite
from dlite_agent.testing import tiny_config
from tests import drafter_folders
from tests.block_models import block_config, block_weights
from tests.dlite_models import random_weights


def test_drafters_beside_a_checkpoint_fit_by_fingerprint_or_are_told_why_not(
    tmp_path: Path,
) -> None:
    target = tiny_config()
    dlite = DLiteConfig.for_target(target, "a" * 16, num_taps=2, rank=4)
    write_dlite(tmp_path / "dlite", dlite, random_weights(dlite), {})
    config = block_config(target, target_fingerprint="a" * 16)
    write_block_drafter(tmp_path / "dspark", config, block_weights(config), {})
    other = replace(config, target_fingerprint="b" * 16)
    write_block_drafter(tmp_path / "other", other, block_weights(config), {})
    plain = replace(config, target_fingerprint="")
    write_block_drafter(tmp_path / "plain", plain, block_weights(config), {})
    drafter_folders.write_drafter(tmp_path / "what", {"architectures": ["Medusa"]}, {})
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "weights.gguf").write_bytes(b"")
    for checkpoint in (tmp_path, tmp_path / "weights.gguf"):
        found = {
            Path(drafter.name).name: drafter
            for drafter in drafters_beside(checkpoint, target, "a" * 16)
        }
        assert {name: drafter.fits for name, drafter in found.items()} == {
            "dlite": True,
            "dspark": True,
            "other": False,
            "plain": True,
            "what": False,
        }
        assert "by fingerprint" in found["dspark"].why
        assert "of this shape" in found["plain"].why
        assert "b" * 16 in found["other"].why
        assert found["what"].family == "unknown"


def test_public_drafters_are_found_by_name_and_by_shape() -> None:
    qwen3 = replace(tiny_config(), vocab_size=151_936, hidden_size=2560, num_layers=36)
    by_name = public_drafters("Qwen/Qwen3-4B", qwen3)
    assert "deepseek-ai/dspark_qwen3_4b_block7" in [drafter.name for drafter in by_name]
    assert {drafter.family for drafter in by_name} == {"dspark", "dflash", "eagle3"}
    assert all(drafter.fits for drafter in by_name)
    by_folder = public_drafters("/models/qwen3-4b/", qwen3)
    assert by_folder == by_name
    tuned = public_drafters("me/my-coder", qwen3)
    assert [drafter.name for drafter in tuned] == [drafter.name for drafter in by_name]
    assert not any(drafter.fits for drafter in tuned)
    assert public_drafters("nano", tiny_config()) == []
