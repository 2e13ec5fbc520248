"""Load a target: find its files, accept its config, check names and shapes, then read once."""

from __future__ import annotations

import hashlib
import logging
import math
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from dlite_agent.config import SamplingParams
from dlite_agent.errors import (
    CapacityError,
    ConfigurationError,
    ModelNotFoundError,
    UnsupportedCheckpointError,
)
from dlite_agent.models.checkpoint_config import parse_config
from dlite_agent.models.checkpoint_source import (
    CheckpointSource,
    Progress,
    open_source,
    read_json_file,
)
from dlite_agent.models.device import free_memory_bytes, resolve_device, resolve_dtype
from dlite_agent.models.layer_weights import weight_shapes
from dlite_agent.models.target import TargetConfig
from dlite_agent.models.transformer import DenseTransformer

__all__ = ["fingerprint", "load_target", "read_config", "resolve_checkpoint", "sampling_defaults"]

logger = logging.getLogger(__name__)

_SAMPLE_BYTES = 4096
_MAX_SAMPLES = 256


def read_config(model: str, revision: str | None = None) -> TargetConfig:
    """Shape of a checkpoint; reads configs only.

    Raises:
        ModelNotFoundError: Nothing has this name.
        UnsupportedCheckpointError: We cannot run it; the message names why.
    """
    return _accept(open_source(model, revision))


def resolve_checkpoint(
    model: str, revision: str | None = None, progress: Progress | None = None
) -> Path:
    """The local folder of a checkpoint; downloads from the hub only after the config was accepted.

    Args:
        model: `"nano"`, a folder, or a hub name.
        revision: Branch, tag or commit of a hub checkpoint.
        progress: Called with `"download"` and a fraction.

    Raises:
        ModelNotFoundError: Nothing has this name, or the connection broke.
        UnsupportedCheckpointError: We cannot run it.
        CapacityError: The disk has no room for the download.
    """
    source = open_source(model, revision)
    _accept(source)
    return source.fetch(progress)


def load_target(  # noqa: PLR0913 - one argument per engine option
    model: str,
    *,
    revision: str | None = None,
    dtype: str = "auto",
    device: str = "auto",
    max_kv_bytes: int | None = None,
    max_context: int | None = None,
    progress: Progress | None = None,
) -> DenseTransformer:
    """Load a checkpoint and reserve its KV pool.

    Args:
        model: `"nano"`, a folder, or a hub name.
        revision: Branch, tag or commit of a hub checkpoint.
        dtype: As in `EngineConfig`.
        device: As in `EngineConfig`.
        max_kv_bytes: Budget of the KV pool; None: a quarter of what is free beside the weights.
        max_context: Most tokens of a session; only checked against the checkpoint's limit.
        progress: Called with `"download"` or `"load"` and a fraction.

    Raises:
        ModelNotFoundError: Nothing has this name, or a weight file is missing.
        UnsupportedCheckpointError: We cannot run it, or a tensor is missing, unknown or of a wrong
            shape.
        ConfigurationError: An option does not fit the device or the checkpoint.
        CapacityError: Disk or memory has no room for the weights.
    """
    where = resolve_device(device)
    source = open_source(model, revision)
    config = _accept(source)
    if max_context is not None and max_context > config.max_position_embeddings:
        raise ConfigurationError(
            f"max_context={max_context} exceeds the {config.max_position_embeddings} positions "
            f"that {model!r} was made for; lower it or leave it out"
        )
    folder = source.fetch(progress)
    num_weights = sum(math.prod(shape) for shape in weight_shapes(config).values())
    kind = resolve_dtype(dtype, where, num_weights)
    weights_bytes = num_weights * kind.itemsize
    free_bytes = free_memory_bytes(where)
    if weights_bytes > free_bytes:
        raise CapacityError(
            f"the weights of {model!r} take {weights_bytes} bytes in {kind}, but {free_bytes} are "
            f"free on {str(where)!r}; use a smaller model or dtype"
        )
    reader = _WeightReader(folder, config, model, progress)
    kv_bytes = (free_bytes - weights_bytes) // 4 if max_kv_bytes is None else max_kv_bytes
    target = DenseTransformer(config, reader.read, dtype=kind, device=where, max_kv_bytes=kv_bytes)
    logger.info(
        "loaded model=%s dtype=%s device=%s kv_bytes=%d", model, kind, where, target.pool.max_bytes
    )
    return target


def sampling_defaults(folder: Path) -> SamplingParams:
    """What `generation_config.json` says about sampling, without a None.

    `do_sample` absent or false is greedy. When sampling, a missing field has transformers' default
    (temperature 1, top_k 50, top_p 1).

    Raises:
        UnsupportedCheckpointError: The file is damaged, or a field is no number or out of range.
    """
    path = folder / "generation_config.json"
    content = read_json_file(path, str(folder)) if path.is_file() else {}
    if content.get("do_sample", False) is not True:
        return SamplingParams(temperature=0.0, top_k=0, top_p=1.0)

    def number(field: str, default: float) -> float:
        value = content.get(field)
        if value is None:
            return default
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise UnsupportedCheckpointError(
                f"{path}: {field}={value!r} is not a number; repair the file"
            )
        return float(value)

    try:
        return SamplingParams(
            temperature=number("temperature", 1.0),
            top_k=int(number("top_k", 50)),
            top_p=number("top_p", 1.0),
        )
    except ConfigurationError as error:
        if isinstance(error, UnsupportedCheckpointError):
            raise
        raise UnsupportedCheckpointError(f"{path}: {error}; repair the file") from error


def fingerprint(folder: Path) -> str:
    """16 hex digits of the config, of every file's tensor header and of samples of the data.

    Reads at most 1 MiB a file, so it identifies and does not authenticate.
    """
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for path in sorted(folder.glob("*.safetensors")):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}".encode())
        with path.open("rb") as file:
            header_bytes = int.from_bytes(file.read(8), "little")
            digest.update(file.read(min(header_bytes, size)))
            step = max(_SAMPLE_BYTES, (size - header_bytes) // _MAX_SAMPLES)
            for offset in range(8 + header_bytes, size, step):
                file.seek(offset)
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()[:16]


def _accept(source: CheckpointSource) -> TargetConfig:
    config = source.read_json("config.json")
    if config is None:
        raise ModelNotFoundError(
            f"{source.name!r} has no config.json; download the checkpoint completely"
        )
    return parse_config(config, source.read_json("generation_config.json"), source.name)


class _WeightReader:
    """Reads tensors by name from one or several safetensors files.

    Names and shapes of all tensors are checked from the files' headers before the first is read.
    """

    def __init__(
        self, folder: Path, config: TargetConfig, model: str, progress: Progress | None
    ) -> None:
        self._model = model
        self._progress = progress
        self._num_read = 0
        self._expected = weight_shapes(config)
        self._files = {path: _open_file(path, model) for path in _weight_files(folder, model)}
        self._place: dict[str, Path] = {}
        for path, file in self._files.items():
            self._place |= dict.fromkeys(file.keys(), path)  # type: ignore[no-untyped-call]  # safetensors
        self._check(config)

    def read(self, name: str) -> Tensor:
        """A tensor as it is in the file."""
        path = self._place[name]
        try:
            tensor: Tensor = self._files[path].get_tensor(name)  # type: ignore[no-untyped-call]  # safetensors
        except SafetensorError as error:
            raise _damaged(path, self._model, error) from error
        self._num_read += 1
        if self._progress is not None:
            self._progress("load", self._num_read / len(self._expected))
        return tensor

    def _check(self, config: TargetConfig) -> None:
        for name, path in self._place.items():
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
            stored = self._files[path].get_slice(name)  # type: ignore[no-untyped-call]  # safetensors
            shape = tuple(stored.get_shape())
            if shape != expected:
                raise UnsupportedCheckpointError(
                    f"{self._model!r}: tensor {name!r} is {list(shape)}, but the config asks for "
                    f"{list(expected)}; config.json and weights do not belong together"
                )
        missing = [name for name in self._expected if name not in self._place]
        if missing:
            raise UnsupportedCheckpointError(
                f"{self._model!r} lacks {len(missing)} tensors, the first is {missing[0]!r}; "
                "download the checkpoint completely"
            )


def _weight_files(folder: Path, model: str) -> list[Path]:
    """The shards that the index names, or the single file."""
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


def _open_file(path: Path, model: str) -> safe_open:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise _damaged(path, model, error) from error


def _damaged(path: Path, model: str, error: Exception) -> UnsupportedCheckpointError:
    return UnsupportedCheckpointError(
        f"{model!r}: {path.name} is damaged ({error}); download it again"
    )
