"""Load a target: find its files, accept its config, check names and shapes, then read once."""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Mapping
from pathlib import Path

from dlite_agent.config import Quantization, SamplingParams
from dlite_agent.errors import (
    CapacityError,
    ConfigurationError,
    ModelNotFoundError,
)
from dlite_agent.generation_config import sampling_of
from dlite_agent.models.checkpoint_config import parse_config
from dlite_agent.models.checkpoint_source import (
    CheckpointSource,
    Progress,
    open_source,
    read_json_file,
)
from dlite_agent.models.device import free_memory_bytes, resolve_device, resolve_dtype
from dlite_agent.models.gguf_config import generation_json
from dlite_agent.models.gguf_file import GGUFFile
from dlite_agent.models.layer_weights import loaded_bytes, weight_shapes
from dlite_agent.models.target import TargetConfig
from dlite_agent.models.transformer import DenseTransformer
from dlite_agent.models.weight_files import WeightReader, stored_weights
from dlite_agent.rope_scaling import RopeScaling

__all__ = [
    "fingerprint",
    "load_target",
    "read_config",
    "resolve_checkpoint",
    "sampling_defaults",
    "stored_format",
]

logger = logging.getLogger(__name__)

_SAMPLE_BYTES = 4096
_MAX_SAMPLES = 256


def read_config(
    model: str, revision: str | None = None, rope_scaling: RopeScaling | None = None
) -> TargetConfig:
    """Shape of a checkpoint; reads configs only.

    Args:
        model: As for `load_target`.
        revision: Branch, tag or commit of a hub checkpoint.
        rope_scaling: As in `EngineConfig`.

    Raises:
        ModelNotFoundError: Nothing has this name.
        UnsupportedCheckpointError: We cannot run it; the message names why.
    """
    return _accept(open_source(model, revision), rope_scaling)


def stored_format(model: str, revision: str | None = None) -> str | None:
    """How a checkpoint that is not kept in its own precision is stored, e.g. a GGUF file's types.

    None for safetensors. Raises as `read_config`.
    """
    return open_source(model, revision).stored


def resolve_checkpoint(
    model: str, revision: str | None = None, progress: Progress | None = None
) -> Path:
    """The local folder of a checkpoint, or its GGUF file; downloads after the config was accepted.

    Args:
        model: As for `load_target`.
        revision: Branch, tag or commit of a hub checkpoint.
        progress: Called with `"download"` and a fraction.

    Raises:
        ModelNotFoundError: Nothing has this name, or the connection broke.
        UnsupportedCheckpointError: We cannot run it.
        CapacityError: The disk has no room for the download.
    """
    source = open_source(model, revision)
    # that an unknown rope type can be overridden is `load_target`'s business
    _accept(source, RopeScaling())
    return source.fetch(progress)


def load_target(  # noqa: PLR0913 - one argument per engine option
    model: str,
    *,
    revision: str | None = None,
    dtype: str = "auto",
    device: str = "auto",
    max_kv_bytes: int | None = None,
    max_context: int | None = None,
    rope_scaling: RopeScaling | None = None,
    quantize: Quantization | None = None,
    progress: Progress | None = None,
) -> DenseTransformer:
    """Load a checkpoint and reserve its KV pool.

    Args:
        model: `"nano"`, `"smollm2"`, a folder, a GGUF file, or a hub name.
        revision: Branch, tag or commit of a hub checkpoint.
        dtype: As in `EngineConfig`.
        device: As in `EngineConfig`.
        max_kv_bytes: Budget of the KV pool; None: a quarter of what is free beside the weights.
        max_context: Most tokens of a session; only checked against the checkpoint's limit.
        rope_scaling: As in `EngineConfig`.
        quantize: As in `EngineConfig`; `dtype="auto"` is then bfloat16.
        progress: Called with `"download"` or `"load"` and a fraction.

    Raises:
        ModelNotFoundError: Nothing has this name, or a weight file is missing.
        UnsupportedCheckpointError: We cannot run it, or a tensor is missing, unknown, of a wrong
            shape, damaged, or holds a NaN.
        ConfigurationError: An option does not fit the device or the checkpoint.
        CapacityError: Disk or memory has no room for the weights.
    """
    where = resolve_device(device)
    source = open_source(model, revision)
    config = _accept(source, rope_scaling)
    _check_context(config, max_context, model)
    folder = source.fetch(progress)
    num_weights = sum(math.prod(shape) for shape in weight_shapes(config).values())
    kind = resolve_dtype("bfloat16" if quantize and dtype == "auto" else dtype, where, num_weights)
    weights_bytes = loaded_bytes(config, kind.itemsize, quantize)
    free_bytes = free_memory_bytes(where)
    if weights_bytes > free_bytes:
        raise _no_room(source, f"{quantize or kind}", weights_bytes, free_bytes)
    told = (model, source.stored or "safetensors", weights_bytes, quantize or kind)
    logger.info("loading weights model=%s stored=%s bytes=%d kept_as=%s", *told)
    reader = WeightReader(stored_weights(folder, config, model), config, model, progress)
    kv_bytes = (free_bytes - weights_bytes) // 4 if max_kv_bytes is None else max_kv_bytes
    target = DenseTransformer(
        config,
        reader.read,
        dtype=kind,
        device=where,
        max_kv_bytes=kv_bytes,
        quantize=quantize,
    )
    target.fingerprint = fingerprint(folder, rope_scaling=rope_scaling, quantize=quantize)
    logger.info(
        "loaded model=%s dtype=%s device=%s kv_bytes=%d", model, kind, where, target.pool.max_bytes
    )
    return target


def _no_room(
    source: CheckpointSource, kept_as: str, weights_bytes: int, free_bytes: int
) -> CapacityError:
    stored = f"{source.stored}, " if source.stored is not None else ""
    return CapacityError(
        f"the weights of {source.name!r} ({stored}{kept_as} once loaded) take {weights_bytes} "
        f"bytes, but {free_bytes} are free; use a smaller model or dtype, or quantize='int8'"
    )


def _check_context(config: TargetConfig, max_context: int | None, model: str) -> None:
    if max_context is not None and max_context > config.max_position_embeddings:
        raise ConfigurationError(
            f"max_context={max_context} exceeds the {config.max_position_embeddings} positions "
            f"that {model!r} was made for; lower it, leave it out, or stretch the positions with "
            "rope_scaling"
        )


def sampling_defaults(path: Path) -> SamplingParams:
    """What `generation_config.json` or a GGUF file's metadata say about sampling; without a None.

    See `generation_config.sampling_of`.

    Args:
        path: As `resolve_checkpoint` gives it.

    Raises:
        UnsupportedCheckpointError: The file is damaged, or a field is no number or out of range.
    """
    where, content = _generation_config(path)
    return sampling_of(content, where)


def fingerprint(
    path: Path, *, rope_scaling: RopeScaling | None = None, quantize: Quantization | None = None
) -> str:
    """16 hex digits of a checkpoint and of the options that change what it computes.

    Of the config, every file's tensor header and samples of the data: at most 1 MiB a file beside
    the header, so it identifies and does not authenticate.

    Args:
        path: As `resolve_checkpoint` gives it.
        rope_scaling: As in `EngineConfig`; None and a default one that changes nothing differ.
        quantize: As in `EngineConfig`.
    """
    digest = hashlib.sha256()
    if path.suffix == ".gguf":
        header = GGUFFile(path, str(path)).header
        digest.update(header)
        _add_samples(digest, path, len(header))
    else:
        digest.update((path / "config.json").read_bytes())
        for file_path in sorted(path.glob("*.safetensors")):
            with file_path.open("rb") as file:
                header_bytes = int.from_bytes(file.read(8), "little")
                size = file_path.stat().st_size
                digest.update(f"{file_path.name} {size}".encode())
                digest.update(file.read(min(header_bytes, size)))
            _add_samples(digest, file_path, 8 + header_bytes)
    if rope_scaling is not None:
        digest.update(f"rope {rope_scaling.to_json()}".encode())
    if quantize is not None:
        digest.update(f"quantize {quantize}".encode())
    return digest.hexdigest()[:16]


def _add_samples(digest: hashlib._Hash, path: Path, start: int) -> None:
    size = path.stat().st_size
    step = max(_SAMPLE_BYTES, (size - start) // _MAX_SAMPLES)
    with path.open("rb") as file:
        for offset in range(start, size, step):
            file.seek(offset)
            digest.update(file.read(_SAMPLE_BYTES))


def _generation_config(path: Path) -> tuple[str, Mapping[str, object]]:
    """Where it is, for messages, and its content."""
    if path.suffix == ".gguf":
        return str(path), generation_json(GGUFFile(path, str(path)))
    file = path / "generation_config.json"
    return str(file), read_json_file(file, str(path)) if file.is_file() else {}


def _accept(source: CheckpointSource, rope_scaling: RopeScaling | None) -> TargetConfig:
    config = source.read_json("config.json")
    if config is None:
        raise ModelNotFoundError(
            f"{source.name!r} has no config.json; download the checkpoint completely"
        )
    generation = source.read_json("generation_config.json")
    return parse_config(config, generation, source.name, rope_scaling)
