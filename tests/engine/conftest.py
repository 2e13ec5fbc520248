from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dlite_agent.config import EngineConfig
from dlite_agent.engine.service import ModelService, load_service
from tests.tiny_checkpoint import write_checkpoint


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"), max_positions=4096)


@pytest.fixture
def load(folder: Path) -> Iterator[Callable[..., ModelService]]:
    """Loads `folder` with options of `EngineConfig`; what it loaded is closed after the test."""
    services: list[ModelService] = []

    def loader(**options: object) -> ModelService:
        options = {"dtype": "float64", "max_kv_bytes": 32 * 2**20, "prefill_chunk": 32} | options
        config = EngineConfig(model=str(folder), **options)  # type: ignore[arg-type]
        services.append(load_service(config, lambda stage, fraction: None))
        return services[-1]

    yield loader
    for service in services:
        service.close()
