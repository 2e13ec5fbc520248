"""The optimizer: orthogonalised momentum for matrices, Adam for embedding and norms.

Source: Muon (Keller Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/), with its
quintic Newton-Schulz coefficients; matrices of one shape are orthogonalised together.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

__all__ = ["Optimizer"]

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_STEPS = 5
_BETAS = (0.9, 0.98)
_GAIN_RATE = 5.0  # the last norm sets the scale of the logits, which must grow several times over


def _orthogonalise(g: Tensor) -> Tensor:
    """Bring the singular values of [N, rows, columns] near 1."""
    a, b, c = _COEFFICIENTS
    x = g.bfloat16()
    is_tall = x.shape[1] > x.shape[2]
    x = x.transpose(1, 2) if is_tall else x
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(_STEPS):
        gram = x @ x.transpose(1, 2)
        x = a * x + (b * gram + c * gram @ gram) @ x
    result: Tensor = (x.transpose(1, 2) if is_tall else x).float()
    return result


class Optimizer:
    """One step for all parameters of a network; its state is a flat dict of tensors.

    Args:
        network: Whose parameters to update, in place.
        momentum: Of the matrices.
        weight_decay: Of the matrices.
    """

    def __init__(
        self, network: nn.Module, momentum: float = 0.95, weight_decay: float = 0.01
    ) -> None:
        self._parameters = dict(network.named_parameters())
        self._momentum, self._decay = momentum, weight_decay
        self._state: dict[str, Tensor] = {"step": torch.zeros(())}
        self._groups: dict[tuple[int, ...], list[str]] = {}
        for name, parameter in self._parameters.items():
            self._state[f"first.{name}"] = torch.zeros_like(parameter)
            if self._is_matrix(name):
                self._groups.setdefault(tuple(parameter.shape), []).append(name)
            else:
                self._state[f"second.{name}"] = torch.zeros_like(parameter)

    @staticmethod
    def _is_matrix(name: str) -> bool:
        return name.endswith("proj.weight")

    def state(self) -> dict[str, Tensor]:
        """Return the state; the tensors are live."""
        return self._state

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Copy a saved state in."""
        for name, value in self._state.items():
            value.copy_(state[name])

    @torch.no_grad()
    def step(self, matrix_lr: float, other_lr: float) -> None:
        """Update every parameter from its gradient and drop the gradients."""
        self._state["step"] += 1
        for names in self._groups.values():
            self._step_matrices(names, matrix_lr)
        for name, parameter in self._parameters.items():
            if not self._is_matrix(name):
                is_gain = parameter.dim() == 1
                self._step_other(name, parameter, other_lr * (_GAIN_RATE if is_gain else 1.0))
            parameter.grad = None

    def _step_matrices(self, names: list[str], lr: float) -> None:
        updates = []
        for name in names:
            gradient = self._parameters[name].grad
            assert gradient is not None
            first = self._state[f"first.{name}"].lerp_(gradient, 1 - self._momentum)
            updates.append(gradient.lerp(first, self._momentum))
        rows, columns = updates[0].shape
        scale = max(1.0, rows / columns) ** 0.5
        for name, update in zip(names, _orthogonalise(torch.stack(updates)), strict=True):
            self._parameters[name].mul_(1 - lr * self._decay).add_(update, alpha=-lr * scale)

    def _step_other(self, name: str, parameter: Tensor, lr: float) -> None:
        gradient = parameter.grad
        assert gradient is not None
        step = float(self._state["step"])
        first = self._state[f"first.{name}"].lerp_(gradient, 1 - _BETAS[0])
        second = self._state[f"second.{name}"].lerp_(gradient.square(), 1 - _BETAS[1])
        scale = lr / (1 - _BETAS[0] ** step)
        root = (second / (1 - _BETAS[1] ** step)).sqrt_().add_(1e-8)
        parameter.addcdiv_(first, root, value=-scale)
