"""Where a run computes: one CPU, or all that `accelerate` was started on."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Literal, Protocol

import torch
from torch import Tensor

from dlite_agent.errors import MissingDependencyError

if TYPE_CHECKING:
    from accelerate import Accelerator

__all__ = ["AcceleratedDevices", "Devices", "OneCPU", "find_devices"]


class Devices(Protocol):
    """Processes that train one drafter together, each with a device and a share of every step."""

    @property
    def device(self) -> torch.device:
        """Of this process."""
        ...

    @property
    def share(self) -> tuple[int, int]:
        """Number of this process, and how many there are."""
        ...

    def add_up(self, tensors: Iterable[Tensor]) -> None:
        """Replace tensors by their sums over all processes."""
        ...

    def wait(self) -> None:
        """Wait for all processes."""
        ...


class OneCPU:
    """This process and nothing else: two runs with one seed are equal to the last bit."""

    device = torch.device("cpu")
    share = (0, 1)

    def add_up(self, tensors: Iterable[Tensor]) -> None:
        """They are the sums."""

    def wait(self) -> None:
        """Nobody to wait for."""


class AcceleratedDevices:
    """What `accelerate launch` started, or the one device that accelerate prefers."""

    def __init__(self) -> None:
        self._accelerator: Accelerator = _accelerator()

    @property
    def device(self) -> torch.device:
        """As accelerate chose it."""
        device: torch.device = self._accelerator.device
        return device

    @property
    def share(self) -> tuple[int, int]:
        """As accelerate numbers them."""
        return self._accelerator.process_index, self._accelerator.num_processes

    def add_up(self, tensors: Iterable[Tensor]) -> None:
        """One reduction for each tensor."""
        if self._accelerator.num_processes > 1:
            for tensor in tensors:
                tensor.copy_(self._accelerator.reduce(tensor, reduction="sum"))

    def wait(self) -> None:
        """A barrier."""
        self._accelerator.wait_for_everyone()


def find_devices(name: Literal["auto", "cpu"]) -> Devices:
    """The devices of an option.

    Raises:
        MissingDependencyError: `auto`, and accelerate is not installed.
    """
    return OneCPU() if name == "cpu" else AcceleratedDevices()


def _accelerator() -> Accelerator:
    try:
        from accelerate import Accelerator
    except ImportError as error:
        raise MissingDependencyError(
            'align.device=auto needs accelerate; run: pip install "dlite-agent[train]", or use '
            "align.device=cpu"
        ) from error
    return Accelerator()
