"""The folder of a DLite drafter: `config.json` and `model.safetensors`, read strictly."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from dlite_agent.errors import ModelNotFoundError, UnsupportedCheckpointError
from dlite_agent.models.checkpoint_source import read_json_file
from dlite_agent.models.dlite_config import DLiteConfig, dlite_shapes

__all__ = ["CONFIG_NAME", "WEIGHTS_NAME", "read_dlite", "read_dlite_config", "write_dlite"]

CONFIG_NAME = "config.json"
WEIGHTS_NAME = "model.safetensors"


def read_dlite_config(folder: Path) -> DLiteConfig:
    """Read the config of a drafter's folder.

    Raises:
        ModelNotFoundError: There is none.
        UnsupportedCheckpointError: It is no DLite config, or is damaged.
    """
    path = folder / CONFIG_NAME
    if not path.is_file():
        raise ModelNotFoundError(
            f"{str(folder)!r} has no {CONFIG_NAME}; name the folder of a DLite drafter"
        )
    return DLiteConfig.from_json(read_json_file(path, str(folder)), str(path))


def read_dlite(folder: Path) -> tuple[DLiteConfig, dict[str, Tensor]]:
    """Read a drafter; every tensor is there, of the right shape, and finite.

    Raises:
        ModelNotFoundError: A file is missing.
        UnsupportedCheckpointError: A file is damaged; the message names the tensor.
    """
    config = read_dlite_config(folder)
    path = folder / WEIGHTS_NAME
    if not path.is_file():
        raise ModelNotFoundError(
            f"{str(folder)!r} has no {WEIGHTS_NAME}; copy the drafter completely"
        )
    tensors: dict[str, Tensor] = {}
    try:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - safetensors
                tensors[name] = file.get_tensor(name)
    except (SafetensorError, OSError) as error:
        raise UnsupportedCheckpointError(
            f"{str(path)!r} cannot be read ({error}); copy the drafter again"
        ) from error
    _check(tensors, config, str(path))
    return config, tensors


def write_dlite(
    folder: Path,
    config: DLiteConfig,
    tensors: Mapping[str, Tensor],
    provenance: Mapping[str, object],
) -> None:
    """Write a drafter's folder; weights in bfloat16. A kill leaves the old files or the new ones.

    Args:
        folder: Made if missing.
        config: Its shape.
        tensors: All of `dlite_shapes`.
        provenance: What it was trained from and with; becomes `provenance.json`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    _check(tensors, config, str(folder))
    kept = {
        name: value.detach().to("cpu", torch.bfloat16).contiguous()
        for name, value in tensors.items()
    }
    part = folder / f"{WEIGHTS_NAME}.part"
    save_file(kept, part, metadata={"format": "pt"})
    part.chmod(0o644)  # safetensors keeps it to the user
    part.replace(folder / WEIGHTS_NAME)
    for name, content in (("provenance.json", provenance), (CONFIG_NAME, config.to_json())):
        part = folder / f"{name}.part"
        part.write_text(json.dumps(content, indent=2) + "\n", "utf-8")
        part.replace(folder / name)


def _check(tensors: Mapping[str, Tensor], config: DLiteConfig, where: str) -> None:
    expected = dlite_shapes(config)
    for name in [*expected, *tensors]:
        if name not in tensors:
            raise UnsupportedCheckpointError(
                f"{where}: tensor {name!r} is missing; config and weights do not belong together"
            )
        if name not in expected:
            raise UnsupportedCheckpointError(
                f"{where}: tensor {name!r} is unknown; config and weights do not belong together"
            )
        tensor = tensors[name]
        if tuple(tensor.shape) != expected[name]:
            raise UnsupportedCheckpointError(
                f"{where}: tensor {name!r} is {list(tensor.shape)}, but the config asks for "
                f"{list(expected[name])}; config and weights do not belong together"
            )
        if not tensor.is_floating_point() or not bool(torch.isfinite(tensor).all()):
            raise UnsupportedCheckpointError(
                f"{where}: tensor {name!r} holds what is no finite number; train or copy it again"
            )
