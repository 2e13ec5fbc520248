"""Read tensors by their Hugging Face names from safetensors files or a GGUF file, and check them.

Names, shapes and types are checked from the files' headers before the first tensor is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from dlite_agent.errors import ModelNotFoundError, UnsupportedCheckpointError
from dlite_agent.models.checkpoint_source import Progress, read_json_file
from dlite_agent.models.gguf_config import from_stored_order, ignored_names, stored_name
from dlite_agent.models.gguf_file import GGUFFile
from dlite_agent.models.layer_weights import weight_shapes
from dlite_agent.models.target import TargetConfig

__all__ = ["StoredWeights", "WeightReader", "open_weights", "stored_weights", "weight_paths"]

_FLOAT_TYPES = ("F64", "F32", "F16", "BF16")


class StoredWeights(Protocol):
    """The tensors of a checkpoint."""

    shapes: Mapping[str, tuple[int, ...]]
    """By Hugging Face name; a tensor that has none is there under its own."""

    def read(self, name: str) -> Tensor:
        """A tensor in the float type that it is stored in, or float32."""
        ...


def stored_weights(path: Path, config: TargetConfig, model: str) -> StoredWeights:
    """Open the weights of a folder, or of a GGUF file.

    Raises:
        ModelNotFoundError: A file is missing.
        UnsupportedCheckpointError: A file is damaged, or a tensor is of an integer or scaled type.
    """
    if path.suffix == ".gguf":
        return _GGUFWeights(GGUFFile(path, model), config)
    return _SafetensorsWeights(path, model)


class WeightReader:
    """Reads each tensor of a model once.

    Args:
        stored: Where from.
        config: What the model needs.
        model: As the user named it, for messages.
        progress: Called with `"load"` and a fraction.

    Raises:
        UnsupportedCheckpointError: A tensor is missing, unknown or of a wrong shape.
    """

    def __init__(
        self, stored: StoredWeights, config: TargetConfig, model: str, progress: Progress | None
    ) -> None:
        self._stored = stored
        self._model = model
        self._progress = progress
        self._num_read = 0
        self._expected = weight_shapes(config)
        self._check(config)

    def read(self, name: str) -> Tensor:
        """A tensor as it is stored.

        Raises:
            UnsupportedCheckpointError: It cannot be read, or holds a NaN or an infinity.
        """
        tensor = self._stored.read(name)
        low, high = torch.aminmax(tensor)  # both are NaN if anything is; 15 times as fast as a mask
        if not (torch.isfinite(low) and torch.isfinite(high)):
            raise UnsupportedCheckpointError(
                f"{self._model!r}: tensor {name!r} holds NaN or infinite values; download the "
                "checkpoint again, or use another"
            )
        self._num_read += 1
        if self._progress is not None:
            self._progress("load", self._num_read / len(self._expected))
        return tensor

    def _check(self, config: TargetConfig) -> None:
        shapes = self._stored.shapes
        for name, shape in shapes.items():
            expected = self._expected.get(name)
            if expected is None:
                if name.endswith("rotary_emb.inv_freq") or (
                    name == "lm_head.weight" and config.tie_word_embeddings
                ):
                    continue  # old checkpoints keep both; neither says anything new
                raise UnsupportedCheckpointError(
                    f"{self._model!r} holds a tensor {name!r} that {config.architecture!r} has "
                    "not; the config does not belong to these weights"
                )
            if shape != expected:
                raise UnsupportedCheckpointError(
                    f"{self._model!r}: tensor {name!r} is {list(shape)}, but the config asks for "
                    f"{list(expected)}; config.json and weights do not belong together"
                )
        missing = [name for name in self._expected if name not in shapes]
        if missing:
            raise UnsupportedCheckpointError(
                f"{self._model!r} lacks {len(missing)} tensors, the first is {missing[0]!r}; "
                "download the checkpoint completely"
            )


class _SafetensorsWeights:
    def __init__(self, folder: Path, model: str) -> None:
        self._model = model
        self._files = {path: open_weights(path, model) for path in weight_paths(folder, model)}
        self._place: dict[str, Path] = {}
        shapes: dict[str, tuple[int, ...]] = {}
        self.shapes: Mapping[str, tuple[int, ...]] = shapes
        for path, file in self._files.items():
            for name in file.keys():  # type: ignore[no-untyped-call]  # noqa: SIM118 - safetensors
                self._place[name] = path
                stored = file.get_slice(name)  # type: ignore[no-untyped-call]  # safetensors
                shapes[name] = tuple(stored.get_shape())
                if stored.get_dtype() not in _FLOAT_TYPES:
                    raise UnsupportedCheckpointError(
                        f"{model!r}: tensor {name!r} is stored as {stored.get_dtype()}, and only "
                        f"{', '.join(_FLOAT_TYPES)} are read; use the unquantized checkpoint"
                    )

    def read(self, name: str) -> Tensor:
        path = self._place[name]
        try:
            tensor: Tensor = self._files[path].get_tensor(name)  # type: ignore[no-untyped-call]  # safetensors
        except SafetensorError as error:
            raise _damaged(path, self._model, error) from error
        return tensor


class _GGUFWeights:
    def __init__(self, file: GGUFFile, config: TargetConfig) -> None:
        self._file = file
        self._head_dim = config.head_dim
        stored = {stored_name(name): name for name in weight_shapes(config)}
        self.shapes: Mapping[str, tuple[int, ...]] = {
            stored.get(name, name): tensor.shape
            for name, tensor in file.tensors.items()
            if name not in ignored_names(file)
        }

    def read(self, name: str) -> Tensor:
        tensor = self._file.read(stored_name(name))
        return from_stored_order(self._file, name, tensor, self._head_dim)


def weight_paths(folder: Path, model: str) -> list[Path]:
    """The shards that the index names, or the single file.

    Raises:
        ModelNotFoundError: A file is missing.
        UnsupportedCheckpointError: The index is damaged.
    """
    index_path = folder / "model.safetensors.index.json"
    if not index_path.is_file():
        files = sorted(folder.glob("model*.safetensors")) or sorted(folder.glob("*.safetensors"))
        if not files:
            raise ModelNotFoundError(
                f"{model!r}: no *.safetensors in {str(folder)!r}; download the checkpoint "
                "completely"
            )
        return files
    weight_map = read_json_file(index_path, model).get("weight_map")
    if not isinstance(weight_map, dict):
        raise UnsupportedCheckpointError(
            f"{model!r}: {index_path.name} has no 'weight_map'; download it again"
        )
    files = [folder / Path(str(name)).name for name in sorted(set(weight_map.values()))]
    missing = [path.name for path in files if not path.is_file()]
    if missing:
        raise ModelNotFoundError(
            f"{model!r}: {len(missing)} of {len(files)} weight files are missing, the first is "
            f"{missing[0]!r}; download the checkpoint completely"
        )
    return files


def open_weights(path: Path, model: str) -> safe_open:
    """Open a safetensors file.

    Raises:
        UnsupportedCheckpointError: It is damaged.
    """
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise _damaged(path, model, error) from error


def _damaged(path: Path, model: str, error: Exception) -> UnsupportedCheckpointError:
    return UnsupportedCheckpointError(
        f"{model!r}: {path.name} is damaged ({error}); download it again"
    )
