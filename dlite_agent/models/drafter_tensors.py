"""The tensors of a public drafter, by the names that we use, from safetensors only."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor

from dlite_agent.errors import UnsupportedCheckpointError
from dlite_agent.models.drafter_shapes import canonical_name
from dlite_agent.models.weight_files import open_weights, weight_paths

__all__ = ["DrafterTensors"]

_FLOAT_TYPES = ("F64", "F32", "F16", "BF16")
_MAP_TYPES = {"d2t": ("I64", "I32"), "t2d": ("BOOL", "U8")}


class DrafterTensors:
    """Names, shapes and types from the files' headers; a tensor is read when it is asked for.

    Args:
        folder: With the drafter's files.
        name: As the user named it, for messages.

    Raises:
        ModelNotFoundError: A file is missing.
        UnsupportedCheckpointError: A file is damaged, a tensor is of a type that is not read, or
            two have the same name.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self._name = name
        self._places: dict[str, tuple[Path, str]] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._files = {path: open_weights(path, name) for path in weight_paths(folder, name)}
        for path, file in self._files.items():
            for stored in file.keys():  # type: ignore[no-untyped-call]  # noqa: SIM118 - safetensors
                piece = file.get_slice(stored)  # type: ignore[no-untyped-call]  # safetensors
                self._add(path, stored, tuple(piece.get_shape()), piece.get_dtype())

    def read(self, name: str) -> Tensor:
        """A tensor as it is stored.

        Raises:
            UnsupportedCheckpointError: It cannot be read, or holds a NaN or an infinity.
        """
        path, stored = self._places[name]
        try:
            tensor: Tensor = self._files[path].get_tensor(stored)  # type: ignore[no-untyped-call]  # safetensors
        except SafetensorError as error:
            raise UnsupportedCheckpointError(
                f"{self._name!r}: {path.name} is damaged ({error}); download it again"
            ) from error
        if tensor.is_floating_point() and not all(map(torch.isfinite, torch.aminmax(tensor))):
            raise UnsupportedCheckpointError(
                f"{self._name!r}: tensor {stored!r} holds NaN or infinite values; download the "
                "drafter again, or use another"
            )
        return tensor

    def _add(self, path: Path, stored: str, shape: tuple[int, ...], kind: str) -> None:
        name = canonical_name(stored)
        if name in self._places:
            raise UnsupportedCheckpointError(
                f"{self._name!r} holds both {self._places[name][1]!r} and {stored!r}, which are "
                "the same tensor; use another copy"
            )
        known = _MAP_TYPES.get(name, _FLOAT_TYPES)
        if kind not in known:
            raise UnsupportedCheckpointError(
                f"{self._name!r}: tensor {stored!r} is stored as {kind}, and only "
                f"{', '.join(known)} are read; use the unquantized drafter"
            )
        self._places[name] = path, stored
        self.shapes[name] = shape
