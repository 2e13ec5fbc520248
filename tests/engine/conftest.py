from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dlite_agent.engine.service import ModelService
from tests.engine.loader import loader
from tests.tiny_checkpoint import write_checkpoint


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"), max_positions=4096)


@pytest.fixture
def load(folder: Path) -> Iterator[Callable[..., ModelService]]:
    """Loads `folder` with options of `EngineConfig`; what it loaded is closed after the test."""
    with loader(folder, prefill_chunk=32) as load:
        yield load
