"""Requests that our own OpenAPI description allows, and those that it does not: none is a 5xx."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis.errors import Unsatisfiable

from dlite_agent.config import EngineConfig
from dlite_agent.engine.engine import Engine
from tests.serving.live_server import LIMIT_S, LiveServer, live_server
from tests.tiny_checkpoint import write_checkpoint


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    # A short context: what is not refused is answered, and may ask for as many tokens as there are.
    folder = write_checkpoint(tmp_path_factory.mktemp("checkpoint"), max_positions=64)
    with Engine(EngineConfig(str(folder), dtype="float64")) as engine:
        engine.load()
        with live_server(engine) as running:
            yield running


@pytest.mark.parametrize(
    ("path", "num_examples"),
    [
        pytest.param("/v1/chat/completions", 3, id="sample"),
        pytest.param("", 200, id="soak", marks=[pytest.mark.soak, pytest.mark.timeout(1800)]),
    ],
)
def test_no_request_is_a_server_error(server: LiveServer, path: str, num_examples: int) -> None:
    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    operations = [result.ok() for result in schema.get_all_operations()]
    operations = [operation for operation in operations if path in operation.path]
    assert operations
    statuses = Counter[int]()

    def send(case: schemathesis.Case) -> None:
        answer = case.call(base_url=server.url, timeout=LIMIT_S)
        statuses[answer.status_code] += 1
        assert answer.status_code < 500, answer.text

    limits = settings(
        max_examples=num_examples,
        suppress_health_check=list(HealthCheck),
        database=None,
        deadline=None,
        derandomize=True,
    )
    for operation, mode in itertools.product(operations, schemathesis.GenerationMode):
        with suppress(Unsatisfiable):  # nothing about this operation can be wrong
            limits(given(operation.as_strategy(mode))(send))()
    assert 400 in statuses
