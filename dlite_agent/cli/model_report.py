"""How a model fits into memory, from its configs alone: no weights are opened or downloaded."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dlite_agent.errors import DLiteError

if TYPE_CHECKING:
    from dlite_agent.models.target import TargetConfig

__all__ = ["ModelReport", "inspect_model"]

_SPARE_SHARE = 0.1
"""Share of the memory that is left to activations and the rest of the process."""
_DEFAULT_KV_SHARE = 0.25
"""What `max_kv_bytes=None` takes of the memory beside the weights (`models.weights`)."""


@dataclass(frozen=True, slots=True)
class ModelReport:
    """Whether and how a model fits.

    Attributes:
        model: As asked for.
        supported: Whether this version runs it.
        refusal: Why not, and what to do; None when supported.
        architecture: The checkpoint's own name for it.
        parameters: Number of weights, from the config's shapes.
        dtype: What the sizes are for.
        weight_bytes: At `dtype`.
        kv_bytes_per_token: At `dtype`.
        memory_bytes: Memory that was planned for.
        context_that_fits: Tokens of KV beside the weights, of the rope limit at most; 0 when the
            weights do not fit.
        default_context: Tokens of KV when `max_kv_bytes` is left out.
        rope_limit: `max_position_embeddings`.
        advice: For a person.
        drafters: What may be named as `drafter=`, and what each does here.
    """

    model: str
    supported: bool
    refusal: str | None = None
    architecture: str = ""
    parameters: int = 0
    dtype: str = ""
    weight_bytes: int = 0
    kv_bytes_per_token: int = 0
    memory_bytes: int = 0
    context_that_fits: int = 0
    default_context: int = 0
    rope_limit: int = 0
    advice: list[str] = field(default_factory=list)
    drafters: dict[str, str] = field(default_factory=dict)

    @property
    def runs_here(self) -> bool:
        """Whether it is supported and its weights leave room for a context."""
        return self.supported and self.context_that_fits > 0


def inspect_model(name: str, *, dtype: str, device: str, memory_bytes: int) -> ModelReport:
    """Read a model's configs and say what it takes.

    Args:
        name: As for `EngineConfig.model`.
        dtype: As for `EngineConfig.dtype`.
        device: As for `EngineConfig.device`, or `"planned"` for a GPU that is not here.
        memory_bytes: Memory to plan for.
    """
    import torch

    from dlite_agent.models.device import resolve_device, resolve_dtype
    from dlite_agent.models.layer_weights import weight_shapes
    from dlite_agent.models.weights import read_config

    try:
        config = read_config(name)
    except DLiteError as error:
        return ModelReport(model=name, supported=False, refusal=str(error))
    parameters = sum(math.prod(shape) for shape in weight_shapes(config).values())
    if device != "planned":
        weight_type = resolve_dtype(dtype, resolve_device(device), parameters)
    else:
        weight_type = torch.bfloat16 if dtype == "auto" else getattr(torch, dtype)
    weight_bytes = parameters * weight_type.itemsize
    per_token = config.kv_bytes_per_token(weight_type.itemsize)
    rope_limit = config.max_position_embeddings
    room = int(memory_bytes * (1 - _SPARE_SHARE)) - weight_bytes
    fits = max(0, min(room // per_token, rope_limit))
    default_bytes = int((memory_bytes - weight_bytes) * _DEFAULT_KV_SHARE)
    default_context = max(0, min(default_bytes // per_token, fits))
    return ModelReport(
        model=name,
        supported=True,
        architecture=config.architecture,
        parameters=parameters,
        dtype=str(weight_type).removeprefix("torch."),
        weight_bytes=weight_bytes,
        kv_bytes_per_token=per_token,
        memory_bytes=memory_bytes,
        context_that_fits=fits,
        default_context=default_context,
        rope_limit=rope_limit,
        advice=_advice(rope_limit, fits, default_context, per_token),
        drafters=_drafters(config),
    )


def _advice(rope_limit: int, fits: int, default_context: int, per_token: int) -> list[str]:
    advice = []
    if not fits:
        advice.append(
            "the weights leave no room for a context: use a smaller model, dtype='bfloat16', or a "
            "device with more memory"
        )
    elif default_context < fits:
        advice.append(
            f"by default the KV pool takes a quarter of what is free, {default_context:,} tokens "
            f"of all sessions together; max_kv_bytes={fits * per_token} makes it {fits:,}"
        )
    if 0 < fits < rope_limit:
        advice.append(
            f"memory ends before the rope limit: max_context={fits} refuses longer prompts early"
        )
    advice.append(
        f"the rope limit, {rope_limit:,} tokens, is the checkpoint's max_position_embeddings: "
        "max_context cannot raise it, and rope scaling (yarn) is refused by this version; a longer "
        "context needs a checkpoint that was trained for it"
    )
    return advice


def _drafters(config: TargetConfig) -> dict[str, str]:
    from dlite_agent.drafters.load import explain_drafter

    return {name: explain_drafter(name, config) for name in ("auto", "lookup", "null")}
