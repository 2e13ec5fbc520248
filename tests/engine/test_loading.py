from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import pytest

from dlite_agent.config import EngineConfig
from dlite_agent.engine.loading import LoadedModel, load_model
from dlite_agent.errors import (
    ConfigurationError,
    ContextLengthExceededError,
    DLiteError,
    UnsupportedCheckpointError,
)
from dlite_agent.process.child import _portable
from tests.tiny_checkpoint import control_id, write_checkpoint


def ignore(stage: str, fraction: float) -> None:
    pass


@pytest.fixture
def config(tmp_path: Path) -> EngineConfig:
    folder = write_checkpoint(tmp_path / "model", max_positions=2048)
    return EngineConfig(model=str(folder), dtype="float32", max_kv_bytes=8 * 2**20)


@pytest.fixture
def model(config: EngineConfig) -> Iterator[LoadedModel]:
    model = load_model(config, ignore)
    yield model
    model.sessions.close()
    model.target.close()


def test_a_turn_ends_at_the_checkpoint_s_ids_and_the_template_s(model: LoadedModel) -> None:
    assert model.closing_id == control_id("<|im_end|>")
    assert control_id("<|im_end|>") in model.stop_token_ids
    assert control_id("<|im_start|>") in model.control_ids


def test_the_context_is_what_checkpoint_option_and_memory_allow(config: EngineConfig) -> None:
    for options, expected in (
        ({}, 2048),
        ({"max_context": 100}, 100),
        ({"max_kv_bytes": 256 * 2 * 2 * 2 * 16 * 4}, 256),
    ):
        model = load_model(replace(config, **options), ignore)
        assert model.max_context == expected
        model.target.close()


def test_threads_of_a_host_are_not_changed(
    config: EngineConfig, caplog: pytest.LogCaptureFixture
) -> None:
    load_model(replace(config, threads=1), ignore).target.close()
    assert "threads=1 is ignored" in caplog.text


def test_a_tokenizer_of_another_checkpoint_is_refused(config: EngineConfig) -> None:
    path = Path(config.model) / "tokenizer.json"
    tokenizer = json.loads(path.read_text(encoding="utf-8"))
    extra = [f"<|extra_{number}|>" for number in range(30)]
    tokenizer["added_tokens"] += [
        {**tokenizer["added_tokens"][-1], "id": 300 + number, "content": text}
        for number, text in enumerate(extra)
    ]
    path.write_text(json.dumps(tokenizer), encoding="utf-8")
    with pytest.raises(UnsupportedCheckpointError, match="different checkpoints"):
        load_model(config, ignore)


def test_an_error_of_the_listener_ends_the_load(config: EngineConfig) -> None:
    def closed(stage: str, fraction: float) -> None:
        if stage == "tokenizer":
            raise ConfigurationError("closed")

    with pytest.raises(ConfigurationError, match="closed"):
        load_model(config, closed)


def test_the_oldest_hints_are_forgotten(model: LoadedModel) -> None:
    memory = model.tenants.of()
    for number in range(5000):
        memory.remember_hint(f"thread-{number}", f"session-{number}")
    assert memory.session_of_hint("thread-0") is None
    assert memory.session_of_hint("thread-4999") == "session-4999"
    assert memory.session_of_hint(None) is None
    assert model.tenants.of("somebody").session_of_hint("thread-4999") is None


class ForeignError(Exception):
    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} and {second}")


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ContextLengthExceededError(5, 6, 7), ContextLengthExceededError),
        (KeyError("x"), KeyError),
        (ForeignError("a", "b"), RuntimeError),  # cannot be unpickled
        (ValueError(lambda: None), RuntimeError),  # cannot be pickled
    ],
)
def test_an_error_crosses_the_pipe_with_its_class_or_as_text(
    error: Exception, expected: type[Exception]
) -> None:
    try:
        raise error
    except Exception as raised:  # noqa: BLE001  # whatever it is
        portable = _portable(raised)
    crossed = ForkingPickler.loads(ForkingPickler.dumps(portable))
    assert type(crossed) is expected
    if not isinstance(crossed, DLiteError):
        assert "test_loading.py" in str(crossed) + "".join(getattr(crossed, "__notes__", ()))
