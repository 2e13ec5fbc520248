"""Where a checkpoint's files are: the package, a folder, a GGUF file, or the Hugging Face hub.

A source lists files and reads the small JSON ones; weights of a hub checkpoint are downloaded only
by `fetch`, after the config was accepted. Only safetensors and GGUF are read: never a pickle, never
code from a repository.
"""

from __future__ import annotations

import errno
import json
import logging
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Protocol

from dlite_agent.errors import CapacityError, ModelNotFoundError, UnsupportedCheckpointError
from dlite_agent.models.gguf_source import PACKAGED, GGUFSource, gguf_of_folder, packaged_gguf

__all__ = [
    "CheckpointSource",
    "FolderSource",
    "HubSource",
    "Progress",
    "open_source",
    "read_json_file",
]

logger = logging.getLogger(__name__)

Progress = Callable[[str, float], None]
"""Called with what is being done (`"download"`, `"load"`) and the fraction of it that is done."""

_CONNECT_TIMEOUT_S = 8.0
_SIDE_FILES = frozenset(
    "config.json generation_config.json tokenizer.json tokenizer_config.json chat_template.jinja "
    "vocab.json merges.txt "
    "special_tokens_map.json added_tokens.json model.safetensors.index.json".split()
)
_INDEX_FILES = ("config.json", "model.safetensors.index.json")
_OFFLINE_ADVICE = (
    "check the name and the connection, or give the path of a folder; 'nano' needs no download"
)


class CheckpointSource(Protocol):
    """A checkpoint whose weights may still be far away."""

    name: str
    """As the user named it."""
    revision: str | None
    """Commit of the hub, if it is from there."""
    stored: str | None
    """How the weights are stored, where loading makes them larger."""

    def read_json(self, file_name: str) -> Mapping[str, object] | None:
        """Content of a small file, or None when there is no such file."""
        ...

    def fetch(self, progress: Progress | None) -> Path:
        """A local folder that holds all needed files, or the GGUF file."""
        ...


def open_source(model: str, revision: str | None) -> CheckpointSource:
    """Find a checkpoint.

    Args:
        model: `"nano"`, `"smollm2"`, a folder, a GGUF file, or a hub name.
        revision: Branch, tag or commit of a hub checkpoint.

    Raises:
        ModelNotFoundError: Nothing has this name, or the hub cannot be reached and has not been
            before.
        MissingDependencyError: It is in GGUF format or in a package, and that is not installed.
        UnsupportedCheckpointError: It holds no safetensors (but pickled weights, an adapter), or a
            damaged GGUF file.
    """
    if model == "nano":
        return FolderSource(Path(__file__).parent.parent / "nano" / "assets", model)
    if model in PACKAGED:
        return GGUFSource(packaged_gguf(model), model)
    try:
        folder = Path(model).expanduser()
        if model and folder.is_dir():
            file = gguf_of_folder(folder, model)
            return FolderSource(folder, model) if file is None else GGUFSource(file, model)
        is_file = folder.is_file()
    except (OSError, RuntimeError) as error:  # a name too long, no permission, no such user
        raise ModelNotFoundError(
            f"there is no folder {model!r} ({error}); check the path"
        ) from error
    if is_file:
        if folder.suffix == ".gguf":
            return GGUFSource(folder, model)
        raise ModelNotFoundError(
            f"{model!r} is a file, and no .gguf; give the folder that holds config.json and "
            "*.safetensors"
        )
    if model.startswith((".", "/", "~")) or model.count("/") > 1 or not model:
        raise ModelNotFoundError(f"there is no folder {model!r}; check the path")
    return _open_hub(model, revision)


class FolderSource:
    """A checkpoint in a local folder."""

    def __init__(self, folder: Path, name: str, revision: str | None = None) -> None:
        self.name = name
        self.revision = revision
        self.stored: str | None = None
        self._folder = folder
        _check_files((path.name for path in folder.iterdir()), name)

    def read_json(self, file_name: str) -> Mapping[str, object] | None:
        """Content of a JSON file of the folder."""
        path = self._folder / file_name
        return read_json_file(path, self.name) if path.is_file() else None

    def fetch(self, progress: Progress | None) -> Path:
        """The folder itself."""
        if progress is not None:
            progress("download", 1.0)
        return self._folder


class HubSource:
    """A checkpoint of the Hugging Face hub at one commit.

    Args:
        name: Hub name.
        revision: Commit.
        file_sizes: Bytes by file name; 0 when the hub does not say.
    """

    def __init__(self, name: str, revision: str, file_sizes: Mapping[str, int]) -> None:
        self.name = name
        self.revision: str | None = revision
        self.stored: str | None = None
        self._sizes = file_sizes
        _check_files(file_sizes, name)

    def read_json(self, file_name: str) -> Mapping[str, object] | None:
        """Download one small file and read it."""
        return (
            read_json_file(self._download(file_name), self.name)
            if file_name in self._sizes
            else None
        )

    def fetch(self, progress: Progress | None, *, weights_only: bool = False) -> Path:
        """Download what is needed and not yet there into the hub's cache.

        Args:
            progress: Called with `"download"` and a fraction.
            weights_only: Neither the tokenizer nor its template is needed.

        Raises:
            CapacityError: The disk has less room than the files need.
            ModelNotFoundError: The connection broke.
        """
        needed = [name for name in self._sizes if _is_needed(name)]
        if weights_only:
            needed = [name for name in needed if name in _INDEX_FILES or name not in _SIDE_FILES]
        missing_bytes = sum(self._sizes[name] for name in needed if self._cached(name) is None)
        self._check_disk(missing_bytes)
        total, done, folder = sum(self._sizes[name] for name in needed) or 1, 0, Path()
        for name in sorted(needed, key=self._sizes.__getitem__):
            folder = self._download(name).parent
            done += self._sizes[name]
            if progress is not None:
                progress("download", done / total)
        return folder

    def _cached(self, file_name: str) -> str | None:
        from huggingface_hub import try_to_load_from_cache

        path = try_to_load_from_cache(self.name, file_name, revision=self.revision)
        return path if isinstance(path, str) else None

    def _check_disk(self, needed_bytes: int) -> None:
        from huggingface_hub.constants import HF_HUB_CACHE

        folder = next(
            path for path in (Path(HF_HUB_CACHE), *Path(HF_HUB_CACHE).parents) if path.exists()
        )
        free_bytes = shutil.disk_usage(folder).free
        if needed_bytes > free_bytes:
            raise _disk_error(
                self.name,
                f"needs {needed_bytes} bytes, but {free_bytes} are free in {HF_HUB_CACHE!r}",
            )

    def _download(self, file_name: str) -> Path:
        from huggingface_hub import hf_hub_download
        from huggingface_hub.constants import HF_HUB_CACHE

        cached = self._cached(file_name)
        if cached is not None:
            return Path(cached)
        try:
            path = hf_hub_download(
                self.name, file_name, revision=self.revision, etag_timeout=_CONNECT_TIMEOUT_S
            )
        except _network_errors() as error:
            if isinstance(error, OSError) and error.errno == errno.ENOSPC:
                raise _disk_error(
                    self.name, f"no space left in {HF_HUB_CACHE!r} for {file_name!r}"
                ) from error
            raise _hub_error(self.name, self.revision, error) from error
        return Path(path)


def _open_hub(name: str, revision: str | None) -> CheckpointSource:
    """Ask the hub, or its cache when it cannot be reached. One request, no retries."""
    from huggingface_hub import HfApi, try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        info = HfApi().model_info(
            name, revision=revision, timeout=_CONNECT_TIMEOUT_S, files_metadata=True
        )
    except HFValidationError as error:
        raise ModelNotFoundError(
            f"{name!r} is neither a folder nor a hub name ({error}); {_OFFLINE_ADVICE}"
        ) from error
    except _network_errors() as error:
        cached = try_to_load_from_cache(name, "config.json", revision=revision)
        if isinstance(cached, str):
            logger.warning("hub unreachable, using the cache model=%s error=%s", name, error)
            return FolderSource(Path(cached).parent, name, Path(cached).parent.name)
        raise _hub_error(name, revision, error) from error
    sizes = {file.rfilename: file.size or 0 for file in info.siblings or []}
    return HubSource(name, info.sha or revision or "main", sizes)


def _network_errors() -> tuple[type[Exception], ...]:
    """OSError, as the hub's own errors are, and the base of its HTTP client's errors."""
    from huggingface_hub import errors

    return (OSError, errors.HTTPError)  # type: ignore[attr-defined]  # not listed as public


def _hub_error(name: str, revision: str | None, error: Exception) -> ModelNotFoundError:
    from huggingface_hub.errors import (
        GatedRepoError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    if isinstance(error, GatedRepoError):
        return ModelNotFoundError(
            f"{name!r} is gated: accept its licence on its hub page, then log in with 'hf auth "
            "login' or set HF_TOKEN"
        )
    if isinstance(error, RevisionNotFoundError):
        return ModelNotFoundError(
            f"{name!r} has no revision {revision!r}; leave revision out for the default branch"
        )
    if isinstance(error, RepositoryNotFoundError):
        return ModelNotFoundError(
            f"there is no folder and no public hub checkpoint {name!r}; check the spelling, or log "
            "in with 'hf auth login' if it is private"
        )
    return ModelNotFoundError(
        f"there is no folder {name!r} and the hub cannot be reached ({type(error).__name__}: "
        f"{error}); {_OFFLINE_ADVICE}"
    )


def _check_files(names: Iterable[str], model: str) -> None:
    """Refuse a checkpoint by the names of its files; the config has its say before weights do."""
    present = set(names)
    if any(name.endswith(".safetensors") and not name.startswith("adapter_") for name in present):
        if "config.json" not in present:
            raise ModelNotFoundError(
                f"{model!r} has weights but no config.json; download the checkpoint completely"
            )
        return
    if any(name.endswith(".gguf") for name in present):  # of the hub; see `gguf_of_folder`
        raise UnsupportedCheckpointError(
            f"{model!r} holds GGUF files, and one of the hub has to be named: run 'hf download "
            f"{model} FILE.gguf' and give the path that it prints"
        )
    if "adapter_config.json" in present:
        raise UnsupportedCheckpointError(
            f"{model!r} is an adapter; merge it into its base model and give that folder"
        )
    if any(name.endswith((".bin", ".pt", ".pth")) for name in present):
        raise UnsupportedCheckpointError(
            f"{model!r} holds pickled weights only, which can run code when they are loaded; "
            "convert them to safetensors"
        )
    if "config.json" not in present:  # else it can be planned for; loading misses the weights
        raise ModelNotFoundError(
            f"{model!r} holds no *.safetensors; give a folder with config.json, the tokenizer and "
            "safetensors weights"
        )


def _disk_error(model: str, what: str) -> CapacityError:
    return CapacityError(
        f"{model!r}: {what}; free some space or set HF_HOME to a folder on a larger disk"
    )


def _is_needed(file_name: str) -> bool:
    is_weight = file_name.startswith("model") and file_name.endswith(".safetensors")
    return "/" not in file_name and (is_weight or file_name in _SIDE_FILES)


def read_json_file(path: Path, model: str) -> Mapping[str, object]:
    """Content of a JSON file that holds an object.

    Raises:
        UnsupportedCheckpointError: It cannot be read or holds something else.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise UnsupportedCheckpointError(
            f"{model!r}: {path.name} cannot be read ({error}); download it again"
        ) from error
    if not isinstance(content, dict):
        raise UnsupportedCheckpointError(
            f"{model!r}: {path.name} holds no JSON object; download it again"
        )
    return content
