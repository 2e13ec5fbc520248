from __future__ import annotations

from pathlib import Path

import pytest

from dlite_agent.bench.decode import DRAFTERS, bench_decode
from dlite_agent.config import EngineConfig
from dlite_agent.errors import ConfigurationError
from tests.tiny_checkpoint import write_checkpoint


def test_every_drafter_decodes_every_text(tmp_path: Path) -> None:
    config = EngineConfig(model=str(write_checkpoint(tmp_path / "model")), dtype="float32")
    result = bench_decode(config, repeats=1, is_quick=True, synthetic_acceptance=1.0)
    names = [*DRAFTERS, "synthetic(1)"]
    assert [(row["text"], row["drafter"]) for row in result.rows] == [
        (text, name) for text in ("agent", "prose", "random") for name in names
    ]
    by_name = {(row["text"], row["drafter"]): row for row in result.rows}
    for text in ("agent", "prose", "random"):
        assert by_name[text, "null"]["tau"] == 1.0
        assert by_name[text, "null"]["repeats"] == 1
        assert by_name[text, "null"]["to_null"] == 1.0
        assert float(by_name[text, "synthetic(1)"]["tau"] or 0) > 4.0
        tokens = {by_name[text, name]["tokens"] for name in names}
        assert len(tokens) == 1, "all drafters write the same text"
    assert result.conditions["synthetic_acceptance"] == 1.0


def test_acceptance_that_is_no_chance_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="between 0 and 1"):
        bench_decode(EngineConfig(), synthetic_acceptance=1.5)
