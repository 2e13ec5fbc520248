"""Finding a checkpoint: folders, the hub, its cache, and what is refused before a download."""

from __future__ import annotations

import errno
import shutil
import time
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
from huggingface_hub import errors as hub_errors
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

from dlite_agent.errors import CapacityError, ModelNotFoundError, UnsupportedCheckpointError
from dlite_agent.models.checkpoint_source import open_source
from dlite_agent.models.weights import load_target, read_config, resolve_checkpoint
from tests.models.checkpoints import write_folder, write_json

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class FakeHub:
    """Stands where huggingface_hub's functions do, and serves one folder."""

    def __init__(self, folder: Path, cache: Path) -> None:
        self.folder = folder
        self.snapshot = cache / "snapshots" / COMMIT
        self.downloaded: list[str] = []
        self.list_error: Exception | None = None
        self.download_error: Exception | None = None
        self.extra_sizes: dict[str, int | None] = {}

    def model_info(self, _api: object, _name: str, **options: object) -> SimpleNamespace:
        assert options["timeout"]
        if self.list_error is not None:
            raise self.list_error
        sizes = {path.name: path.stat().st_size for path in self.folder.iterdir()}
        files = [
            SimpleNamespace(rfilename=name, size=size)
            for name, size in (sizes | self.extra_sizes).items()
        ]
        return SimpleNamespace(siblings=files, sha=COMMIT)

    def hf_hub_download(self, _name: str, file_name: str, **options: object) -> str:
        assert options["revision"] == COMMIT
        if self.download_error is not None:
            raise self.download_error
        self.snapshot.mkdir(parents=True, exist_ok=True)
        self.downloaded.append(file_name)
        return str(shutil.copy(self.folder / file_name, self.snapshot / file_name))

    def try_to_load_from_cache(self, _name: str, file_name: str, **_options: object) -> str | None:
        path = self.snapshot / file_name
        return str(path) if path.is_file() else None


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    fake = FakeHub(write_folder(tmp_path / "remote", shards=2), tmp_path / "cache")
    write_json(fake.folder / "generation_config.json", {"eos_token_id": 3})
    (fake.folder / "README.md").write_text("a card")
    (fake.folder / "pytorch_model.bin").write_bytes(b"a pickle")
    monkeypatch.setattr(
        huggingface_hub.HfApi, "model_info", lambda *args, **kw: fake.model_info(*args, **kw)
    )
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fake.hf_hub_download)
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", fake.try_to_load_from_cache)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    return fake


def http_error(kind: type[hub_errors.HfHubHTTPError]) -> hub_errors.HfHubHTTPError:
    response = SimpleNamespace(request=None, headers={}, status_code=404)
    return kind("the hub says no", response=response)


def test_hub_checkpoint_is_downloaded_after_its_config_was_accepted(hub: FakeHub) -> None:
    steps: list[tuple[str, float]] = []
    folder = resolve_checkpoint("some/model", None, lambda *step: steps.append(step))
    assert folder == hub.snapshot
    assert sorted(hub.downloaded) == [
        "config.json",
        "generation_config.json",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
    ]
    assert hub.downloaded[:2] == ["config.json", "generation_config.json"]
    fractions = [fraction for name, fraction in steps if name == "download"]
    assert fractions == sorted(fractions)
    assert fractions[-1] == 1.0


def test_reading_a_config_downloads_no_weights(hub: FakeHub) -> None:
    assert read_config("some/model").eos_token_ids == (3,)
    assert hub.downloaded == ["config.json", "generation_config.json"]


def test_refused_checkpoint_downloads_no_weights(hub: FakeHub) -> None:
    write_folder(hub.folder, shards=2, quantization_config={"quant_method": "awq"})
    with pytest.raises(UnsupportedCheckpointError, match="'awq'"):
        resolve_checkpoint("some/model-AWQ")
    assert hub.downloaded == ["config.json", "generation_config.json"]


def test_files_in_the_cache_are_not_downloaded_again(hub: FakeHub) -> None:
    resolve_checkpoint("some/model")
    hub.downloaded.clear()
    resolve_checkpoint("some/model")
    assert hub.downloaded == []


def test_unreachable_hub_falls_back_to_its_cache(
    hub: FakeHub, caplog: pytest.LogCaptureFixture
) -> None:
    resolve_checkpoint("some/model")
    hub.list_error = ConnectionError("no route")
    assert resolve_checkpoint("some/model") == hub.snapshot
    assert "using the cache" in caplog.text


def test_unreachable_hub_without_cache_is_said_at_once(hub: FakeHub) -> None:
    hub.list_error = ConnectionError("no route")
    with pytest.raises(ModelNotFoundError, match=r"cannot be reached .*no route.*'nano' needs no"):
        read_config("some/model")


def test_disk_without_room_is_refused_with_numbers(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage(10**9, 10**9, 1000))
    hub.extra_sizes = {"model-00001-of-00002.safetensors": 8_000_000_000}
    with pytest.raises(CapacityError, match=r"needs 8\d{9} bytes, but 1000 are free .*HF_HOME"):
        resolve_checkpoint("some/model")
    assert "model-00002-of-00002.safetensors" not in hub.downloaded


def test_disk_that_fills_up_is_said(hub: FakeHub) -> None:
    hub.download_error = OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(CapacityError, match="no space left"):
        resolve_checkpoint("some/model")


def test_connection_that_breaks_is_said(hub: FakeHub) -> None:
    hub.download_error = ConnectionError("reset")
    with pytest.raises(ModelNotFoundError, match="reset"):
        resolve_checkpoint("some/model")


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (GatedRepoError, "gated: accept its licence .*hf auth login"),
        (RepositoryNotFoundError, "no public hub checkpoint .*check the spelling"),
        (RevisionNotFoundError, "no revision 'v9'"),
        (hub_errors.HfHubHTTPError, "cannot be reached"),
    ],
)
def test_answers_of_the_hub_are_explained(
    hub: FakeHub, kind: type[hub_errors.HfHubHTTPError], message: str
) -> None:
    hub.list_error = http_error(kind)
    with pytest.raises(ModelNotFoundError, match=message):
        read_config("some/model", "v9")


def test_gated_config_is_explained(hub: FakeHub) -> None:
    hub.download_error = http_error(GatedRepoError)
    with pytest.raises(ModelNotFoundError, match="gated"):
        read_config("some/model")


def test_size_that_the_hub_does_not_say_counts_nothing(hub: FakeHub) -> None:
    hub.extra_sizes = {"config.json": None}
    assert resolve_checkpoint("some/model") == hub.snapshot


def test_hub_checkpoint_without_config_is_not_found(hub: FakeHub) -> None:
    (hub.folder / "config.json").unlink()
    with pytest.raises(ModelNotFoundError, match=r"no config\.json"):
        read_config("some/model")


def test_unknown_hub_name_fails_within_seconds() -> None:
    """Nothing is faked here: the tests run offline."""
    started = time.perf_counter()
    with pytest.raises(ModelNotFoundError, match="there is no folder 'nobody/nothing'"):
        read_config("nobody/nothing")
    assert time.perf_counter() - started < 10


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("./nowhere", "there is no folder './nowhere'"),
        ("/no/such/folder", "there is no folder"),
        ("~/no-such-folder", "there is no folder"),
        ("a/b/c", "there is no folder 'a/b/c'"),
        ("~no-such-user/model", "there is no folder '~no-such-user/model'"),
        ("x" * 300, "there is no folder 'xxx"),
        ("/" + "x" * 300, "there is no folder '/xxx"),
        ("", "there is no folder ''"),
        ("two words", "neither a folder nor a hub name"),
        ("-x/y..z", "neither a folder nor a hub name"),
    ],
)
def test_wrong_path_is_not_asked_of_the_hub(model: str, message: str) -> None:
    with pytest.raises(ModelNotFoundError, match=message):
        open_source(model, None)


@pytest.mark.parametrize(
    ("files", "kind", "message"),
    [
        (
            ["a.gguf", "b.gguf"],
            UnsupportedCheckpointError,
            r"2 GGUF files; name one, e\.g\. .*a\.gguf",
        ),
        (["config.json", "pytorch_model.bin"], UnsupportedCheckpointError, "pickled"),
        (["config.json", "consolidated.00.pth"], UnsupportedCheckpointError, "pickled"),
        (
            ["adapter_config.json", "adapter_model.safetensors"],
            UnsupportedCheckpointError,
            "merge it into its base model",
        ),
        (["model.safetensors"], ModelNotFoundError, r"no config\.json"),
        ([], ModelNotFoundError, r"holds no \*\.safetensors"),
    ],
)
def test_folder_is_refused_by_its_files(
    tmp_path: Path, files: list[str], kind: type[Exception], message: str
) -> None:
    for name in files:
        (tmp_path / name).write_bytes(b"{}")
    with pytest.raises(kind, match=message):
        open_source(str(tmp_path), None)


def test_config_alone_is_enough_to_plan_but_not_to_load(tmp_path: Path) -> None:
    folder = write_folder(tmp_path)
    for path in folder.glob("*.safetensors"):
        path.unlink()
    assert read_config(str(folder)).architecture == "Qwen3ForCausalLM"
    with pytest.raises(ModelNotFoundError, match=r"no \*\.safetensors"):
        load_target(str(folder))


def test_quantized_config_is_named_before_missing_weights(tmp_path: Path) -> None:
    content = {"model_type": "qwen3", "quantization_config": {"quant_method": "awq"}}
    write_json(tmp_path / "config.json", content)
    with pytest.raises(UnsupportedCheckpointError, match="quantized with 'awq'"):
        load_target(str(tmp_path))


def test_file_instead_of_a_folder_is_explained(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ModelNotFoundError, match=r"is a file, and no \.gguf; give the folder"):
        open_source(str(tmp_path / "model.safetensors"), None)


def test_folder_is_used_where_it_is(tmp_path: Path) -> None:
    steps: list[tuple[str, float]] = []
    folder = write_folder(tmp_path / "here")
    assert resolve_checkpoint(str(folder), None, lambda *step: steps.append(step)) == folder
    assert steps == [("download", 1.0)]


@pytest.mark.parametrize("text", ["{", "[1]", "\udcff"])
def test_damaged_json_is_named(tmp_path: Path, text: str) -> None:
    folder = write_folder(tmp_path)
    (folder / "config.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(UnsupportedCheckpointError, match=r"config\.json .*download it again"):
        read_config(str(folder))
