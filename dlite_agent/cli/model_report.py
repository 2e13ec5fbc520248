"""How a model fits into memory, from its configs alone: no weights are opened or downloaded."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dlite_agent.config import EngineConfig
from dlite_agent.errors import DLiteError
from dlite_agent.rope_scaling import RopeScaling

if TYPE_CHECKING:
    from dlite_agent.models.target import TargetConfig

__all__ = ["ModelReport", "inspect_model"]

_SPARE_SHARE = 0.1
"""Share of the memory that is left to activations and the rest of the process."""
_DEFAULT_KV_SHARE = 0.25
"""What `max_kv_bytes=None` takes of the memory beside the weights (`models.weights`)."""
# Qwen3's model cards scale from 32,768 positions; its configs add room for an answer.
_TRAINED = {40_960: 32_768}


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
        quantize: `"int8"` when the report is for that, else "".
        weight_bytes: Once loaded, at `dtype`; a tied head counts twice.
        stored: How the weights are stored where loading makes them larger (GGUF), else "".
        kv_bytes_per_token: At `dtype`.
        memory_bytes: Memory that was planned for.
        context_that_fits: Tokens of KV beside the weights, of the rope limit at most; 0 when the
            weights do not fit.
        default_context: Tokens of KV when `max_kv_bytes` is left out.
        rope_limit: Most positions that the checkpoint, or the override, allows.
        rope_scaling: How positions are stretched; "" when they are not.
        advice: For a person.
        drafters: What may be named as `drafter=`, and what each does here.
    """

    model: str
    supported: bool
    refusal: str | None = None
    architecture: str = ""
    parameters: int = 0
    dtype: str = ""
    quantize: str = ""
    weight_bytes: int = 0
    stored: str = ""
    kv_bytes_per_token: int = 0
    memory_bytes: int = 0
    context_that_fits: int = 0
    default_context: int = 0
    rope_limit: int = 0
    rope_scaling: str = ""
    advice: list[str] = field(default_factory=list)
    drafters: dict[str, str] = field(default_factory=dict)

    @property
    def runs_here(self) -> bool:
        """Whether it is supported and its weights leave room for a context."""
        return self.supported and self.context_that_fits > 0


def inspect_model(
    config: EngineConfig, *, memory_bytes: int, is_planned: bool = False
) -> ModelReport:
    """Read a model's configs and say what it takes.

    Args:
        config: The model, and the options of which its size and context depend.
        memory_bytes: Memory to plan for.
        is_planned: For a GPU that is not here.
    """
    import torch

    from dlite_agent.models.device import resolve_device, resolve_dtype
    from dlite_agent.models.layer_weights import loaded_bytes, weight_shapes
    from dlite_agent.models.weights import read_config, stored_format

    name, quantize = config.model, config.quantize
    override = None if config.rope_scaling is None else RopeScaling.parse(config.rope_scaling)
    try:
        shape = read_config(name, config.revision, override)
        stored = stored_format(name, config.revision)
    except DLiteError as error:
        return ModelReport(model=name, supported=False, refusal=str(error))
    parameters = sum(math.prod(shape) for shape in weight_shapes(shape).values())
    wanted = "bfloat16" if quantize and config.dtype == "auto" else config.dtype
    if not is_planned:
        weight_type = resolve_dtype(wanted, resolve_device(config.device), parameters)
    else:
        weight_type = torch.bfloat16 if wanted == "auto" else getattr(torch, wanted)
    weight_bytes = loaded_bytes(shape, weight_type.itemsize, quantize)
    per_token = shape.kv_bytes_per_token(weight_type.itemsize)
    rope_limit = shape.max_position_embeddings
    room = int(memory_bytes * (1 - _SPARE_SHARE)) - weight_bytes
    fits = max(0, min(room // per_token, rope_limit))
    default_bytes = int((memory_bytes - weight_bytes) * _DEFAULT_KV_SHARE)
    default_context = max(0, min(default_bytes // per_token, fits))
    is_stretched = shape.rope_scaling.rope_type != "default"
    return ModelReport(
        model=name,
        supported=True,
        architecture=shape.architecture,
        parameters=parameters,
        dtype=str(weight_type).removeprefix("torch."),
        quantize=quantize or "",
        weight_bytes=weight_bytes,
        stored=stored or "",
        kv_bytes_per_token=per_token,
        memory_bytes=memory_bytes,
        context_that_fits=fits,
        default_context=default_context,
        rope_limit=rope_limit,
        rope_scaling=str(shape.rope_scaling) if is_stretched else "",
        advice=_advice(shape, fits, default_context, per_token),
        drafters=_drafters(shape, config),
    )


def _advice(shape: TargetConfig, fits: int, default_context: int, per_token: int) -> list[str]:
    advice = []
    rope_limit = shape.max_position_embeddings
    if not fits:
        advice.append(
            "the weights leave no room for a context: use a smaller model, dtype='bfloat16', "
            "quantize='int8', or a device with more memory"
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
    if shape.rope_scaling.rope_type == "default":
        scaling = {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": _TRAINED.get(rope_limit, rope_limit),
        }
        advice.append(
            f"the rope limit, {rope_limit:,} tokens, is what the checkpoint was made for; where "
            "its model card advises yarn beyond that, pass it as rope_scaling (here --rope-scaling "
            f"'{json.dumps(scaling)}')"
        )
    else:
        advice.append(
            f"the rope limit, {rope_limit:,} tokens, is that of rope scaling "
            f"({shape.rope_scaling}), which also changes short answers a little"
        )
    return advice


def _drafters(shape: TargetConfig, config: EngineConfig) -> dict[str, str]:
    from dlite_agent.drafters.load import explain_drafter
    from dlite_agent.models.checkpoint_source import FolderSource, open_source

    source = open_source(config.model, config.revision)
    checkpoint = source.fetch(None) if isinstance(source, FolderSource) else None
    names = ("auto", "suffix", "lookup", "null")
    return {name: explain_drafter(name, shape, checkpoint) for name in names}
