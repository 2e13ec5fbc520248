"""Quality is scored on a text, against bfloat16, with its conditions."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from dlite_agent.bench.quality import bench_quality
from dlite_agent.cli.main import main
from dlite_agent.errors import ConfigurationError
from dlite_agent.models.weights import load_target
from dlite_agent.tokenizer import load_tokenizer
from tests.tiny_checkpoint import write_checkpoint

TEXT = "A session keeps what it has computed, and a turn costs what is new. " * 40


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.md"
    path.write_text(TEXT)
    return path


def test_perplexity_is_that_of_a_plain_forward(folder: Path, text: Path) -> None:
    result = bench_quality(str(folder), text=text, is_quick=True)
    ids = load_tokenizer(str(folder)).encode_untrusted(TEXT)
    windows = [ids[:512], ids[len(ids) - 512 :]]
    losses = []
    with load_target(str(folder), dtype="float32") as target:
        for window in windows:
            with target.new_cache() as kv:
                given = torch.tensor(window)
                logits = target.forward(given, kv, logits_for=range(512)).logits
                wanted = torch.nn.functional.cross_entropy(logits[:-1], given[1:])
                losses.append(float(wanted))
    row = next(row for row in result.rows if row["weights"] == "float32")
    assert row["perplexity"] == pytest.approx(math.exp(sum(losses) / 2), rel=1e-4)
    assert result.conditions["tokens"] == 2 * 511


def test_bfloat16_agrees_with_itself_and_int8_nearly(folder: Path, text: Path) -> None:
    rows = bench_quality(str(folder), text=text, is_quick=True).rows
    plain, packed, wide = rows
    assert [row["weights"] for row in rows] == ["bfloat16", "int8", "float32"]
    assert (plain["agreement"], plain["to_bfloat16"]) == (1.0, 1.0)
    for row in (packed, wide):
        assert 0.5 < float(row["agreement"] or 0) < 1.0
        assert row["to_bfloat16"] == pytest.approx(1.0, abs=0.1)
    assert int(packed["step_bytes"] or 0) < 0.55 * int(plain["step_bytes"] or 0)


def test_verb_prints_figures_and_conditions(
    folder: Path, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["bench", "quality", "--model", str(folder), "--text", str(text), "--quick"]
    assert main([*arguments, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)["quality"]
    assert result["conditions"]["text"] == "text.md"
    assert len(result["rows"]) == 3
    assert main(arguments) == 0
    assert "agreement" in capsys.readouterr().out


def test_folder_of_markdown_is_read_whole(folder: Path, text: Path) -> None:
    result = bench_quality(str(folder), text=text.parent, is_quick=True)
    assert result.conditions["tokens"] == 2 * 511


def test_missing_or_short_text_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="name a file, or a folder of Markdown"):
        bench_quality(str(folder), text=tmp_path / "absent.md")
    (tmp_path / "short.md").write_text("too short")
    with pytest.raises(ConfigurationError, match=r"short\.md has 9 tokens; a window takes 512"):
        bench_quality(str(folder), text=tmp_path / "short.md")
