"""Where a drafter's weights start from: another DLite drafter, or a DSpark one."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from dlite_agent.errors import DrafterMismatchError
from dlite_agent.models.checkpoint_source import open_source
from dlite_agent.models.dlite_config import DLiteConfig, dlite_shapes
from dlite_agent.models.weight_files import open_weights, weight_paths

__all__ = ["taken_over", "warm_start"]


def warm_start(name: str, config: DLiteConfig) -> dict[str, Tensor]:
    """Read a drafter's tensors, and take over those that fit.

    Args:
        name: Folder or hub name of a DLite or DSpark drafter.
        config: Of the drafter that starts.

    Raises:
        ModelNotFoundError: There is none.
        UnsupportedCheckpointError: A file is damaged.
        DrafterMismatchError: Nothing of it fits.
    """
    folder = open_source(name, None).fetch(None)
    tensors: dict[str, Tensor] = {}
    for path in weight_paths(folder, name):
        with open_weights(path, name) as file:
            for key in file.keys():  # noqa: SIM118 - safetensors
                if not key.startswith(("embed_tokens.", "lm_head.")):
                    tensors[key] = file.get_tensor(key)
    return taken_over(tensors, config, name)


def taken_over(tensors: Mapping[str, Tensor], config: DLiteConfig, name: str) -> dict[str, Tensor]:
    """The tensors of another drafter that have the name and shape of ours.

    DSpark's layers are ours (same names, shapes and form). Its fusing matrix `fc` joins the taps
    side by side; the mean of its parts is where our one matrix for all taps starts.

    Args:
        tensors: Of the other drafter.
        config: Of ours.
        name: For messages.

    Raises:
        DrafterMismatchError: None fits.
    """
    shapes = dlite_shapes(config)
    found = {
        key: tensor.to(torch.float32)
        for key, tensor in tensors.items()
        if shapes.get(key) == tuple(tensor.shape)
    }
    fused = tensors.get("fc.weight")
    if fused is not None and fused.shape[0] == config.hidden_size:
        parts = fused.float().unflatten(1, (-1, config.hidden_size))  # [E, taps, E]
        if config.composition == "sequence":
            found["context_proj.weight"] = parts.mean(dim=1)
    if not any(key.startswith("layers.") and key.endswith("_proj.weight") for key in found):
        raise DrafterMismatchError(
            f"no matrix of the layers of {name!r} has the shape of this drafter's; set "
            "drafter.intermediate_size and the heads as there, or leave `start` out"
        )
    return found
