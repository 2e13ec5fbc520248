"""A public drafter that is named: by ChatDLite, from a folder and from the hub."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
from langchain_core.messages import BaseMessage, HumanMessage

from dlite_agent import ChatDLite, Engine
from dlite_agent.config import EngineConfig
from dlite_agent.drafters.load import load_drafter
from dlite_agent.errors import DrafterMismatchError, UnsupportedCheckpointError
from dlite_agent.models.block_files import block_json, write_block_drafter
from dlite_agent.models.dlite_config import DLiteConfig
from dlite_agent.models.dlite_files import write_dlite
from dlite_agent.models.weights import fingerprint, load_target, read_config
from tests.block_models import block_config, block_weights
from tests.dlite_models import random_weights
from tests.tiny_checkpoint import write_checkpoint


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"), seed=3)


@pytest.fixture(scope="module")
def drafter(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("drafter")
    config = block_config(read_config(str(checkpoint)))
    write_block_drafter(folder, config, block_weights(config), {})
    return folder


def answers(checkpoint: Path, drafter: str) -> tuple[list[str], dict[str, int]]:
    """Two turns of a conversation, and what was drafted."""
    model = ChatDLite(
        str(checkpoint), drafter=drafter, dtype="float64", temperature=0, max_tokens=40,
        max_kv_bytes=2**25,
    )  # fmt: skip
    messages: list[BaseMessage] = []
    drafted: dict[str, int] = {}
    try:
        for question in ("Hello", "And now?"):
            messages.append(HumanMessage(question))
            message = model.invoke(messages)
            messages.append(message)
            for source, count in message.response_metadata["dlite"]["drafted_by"].items():
                drafted[source] = drafted.get(source, 0) + count
    finally:
        Engine.shared(model._engine_config(model.model)).close()
    return [str(message.content) for message in messages], drafted


def test_chat_model_drafts_with_a_folder_and_answers_as_without(
    checkpoint: Path, drafter: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plain, _ = answers(checkpoint, "null")
    with caplog.at_level(logging.WARNING):
        drafted, sources = answers(checkpoint, f"{drafter}?window=64")
    assert drafted == plain
    assert sources["dspark"] > 10
    assert "first tokens agree" in caplog.text  # its weights are random


def test_drafter_of_another_model_is_refused_by_the_engine(
    checkpoint: Path, drafter: Path, tmp_path: Path
) -> None:
    shutil.copytree(drafter, tmp_path / "other")
    config = json.loads((drafter / "config.json").read_text())
    (tmp_path / "other" / "config.json").write_text(json.dumps(config | {"hidden_size": 128}))
    with pytest.raises(DrafterMismatchError, match="hidden_size=128, and this one"):
        Engine(EngineConfig(model=str(checkpoint), drafter=str(tmp_path / "other"))).load()


class FakeHub:
    """Serves one drafter's folder, and notes what is asked for."""

    def __init__(self, folder: Path, cache: Path) -> None:
        self.folder = folder
        self.cache = cache
        self.downloaded: list[str] = []

    def model_info(self, *_args: object, **_options: object) -> SimpleNamespace:
        files = [
            SimpleNamespace(rfilename=path.name, size=path.stat().st_size)
            for path in self.folder.iterdir()
        ]
        return SimpleNamespace(siblings=files, sha="0" * 40)

    def download(self, _name: str, file_name: str, **_options: object) -> str:
        self.cache.mkdir(exist_ok=True)
        self.downloaded.append(file_name)
        return str(shutil.copy(self.folder / file_name, self.cache / file_name))


def serve(remote: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    """Put a folder on the hub."""
    hub = FakeHub(remote, tmp_path / "cache")
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", hub.model_info)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", hub.download)
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *_, **__: None)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    return hub


def test_hub_drafter_is_downloaded_after_its_config_was_accepted(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    remote = tmp_path / "remote"
    config = block_config(read_config(str(checkpoint)))
    write_block_drafter(remote, config, block_weights(config), {})
    for name in ("tokenizer.json", "pytorch_model.bin", "README.md", "modeling.py"):
        (remote / name).write_text("{}")
    hub = serve(remote, tmp_path, monkeypatch)
    with Engine(EngineConfig(model=str(checkpoint), drafter="some/drafter")) as engine:
        assert engine.load().drafter == "from the hub: some/drafter, as asked for"
    assert set(hub.downloaded) == {"config.json", "model.safetensors"}
    assert hub.downloaded[0] == "config.json"
    hub.downloaded.clear()
    refused = block_json(config) | {"architectures": ["MedusaModel"]}
    (remote / "config.json").write_text(json.dumps(refused))
    with pytest.raises(UnsupportedCheckpointError, match="MedusaModel"):
        Engine(EngineConfig(model=str(checkpoint), drafter="some/drafter")).load()
    assert hub.downloaded == ["config.json"]


def test_dlite_drafter_of_the_hub_is_loaded_too(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    remote = tmp_path / "remote"
    config = DLiteConfig.for_target(
        read_config(str(checkpoint)), fingerprint(checkpoint), num_taps=2, rank=4
    )
    write_dlite(remote, config, random_weights(config), {})
    hub = serve(remote, tmp_path, monkeypatch)
    with load_target(str(checkpoint), max_kv_bytes=2**24) as target:
        drafter = load_drafter("some/dlite", target, fingerprint(checkpoint))
        assert drafter.name == "dlite"
        hub.downloaded.clear()
        with pytest.raises(DrafterMismatchError, match="trained for the checkpoint"):
            load_drafter("some/dlite", target, "f" * 16)
        with pytest.raises(DrafterMismatchError, match="keeps no history"):
            load_drafter("some/dlite?window=8", target, fingerprint(checkpoint))
    assert set(hub.downloaded) == {"config.json"}
