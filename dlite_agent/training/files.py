"""Files of a run, each written whole or not at all; a full disk is said, and costs nothing else."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from dlite_agent.errors import CapacityError

__all__ = ["write_json", "write_tensors"]


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> None:
    """Write a safetensors file; a kill leaves the old one or the new one.

    Raises:
        CapacityError: It could not be written; what was there before still is.
    """
    content = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    _write(path, lambda part: save_file(content, part, dict(metadata or {})))


def write_json(path: Path, content: object) -> None:
    """Write a JSON file; otherwise as `write_tensors`."""
    text = json.dumps(content) + "\n"
    _write(path, lambda part: part.write_text(text, "utf-8"))


def _write(path: Path, write: Callable[[Path], object]) -> None:
    part = path.with_name(f"{path.name}.part")
    try:
        write(part)
        part.chmod(0o644)  # safetensors keeps it to the user
        part.replace(path)
    except (OSError, SafetensorError) as error:
        part.unlink(missing_ok=True)
        raise CapacityError(
            f"{str(path)!r} cannot be written ({error}); what was saved before is whole: make room "
            "and run the same command again"
        ) from error
