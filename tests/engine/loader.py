"""Loads the parts of an engine, to be used by a test without its thread."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from dlite_agent.config import EngineConfig
from dlite_agent.engine.service import ModelService, load_service


@contextmanager
def loader(folder: Path, **defaults: object) -> Iterator[Callable[..., ModelService]]:
    """A function of options of `EngineConfig`; what it loaded is closed at the end."""
    usual: dict[str, object] = {"dtype": "float64", "max_kv_bytes": 32 * 2**20}
    services: list[ModelService] = []

    def load(**options: object) -> ModelService:
        config = EngineConfig(model=str(folder), **(usual | defaults | options))  # type: ignore[arg-type]  # of a test
        services.append(load_service(config, lambda stage, fraction: None))
        return services[-1]

    yield load
    for service in services:
        service.close()
