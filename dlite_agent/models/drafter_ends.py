"""Both ends of a drafter: the target's embedding and head, or those that it brings.

Most checkpoints hold copies of the target's, frozen in training; a copy is compared and not kept,
and one that differs shows a drafter of another target.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from dlite_agent.errors import DrafterMismatchError, UnsupportedCheckpointError
from dlite_agent.models.drafter_format import DrafterFormat
from dlite_agent.models.drafter_tensors import DrafterTensors
from dlite_agent.models.linear import make_linear
from dlite_agent.models.target import TargetModel

__all__ = ["DrafterEnds", "ends_of"]

logger = logging.getLogger(__name__)

_NUM_SAMPLES = 16
_NUM_PROBES = 4
_EMBEDDING_TOLERANCE = 2.0**-7
"""Of the largest element: the last bit of bfloat16."""
_HEAD_TOLERANCE = 0.05
"""Of the largest logit: products of bfloat16, and a target's head that was quantized."""


@dataclass(frozen=True, slots=True)
class DrafterEnds:
    """Where a drafter's tokens come from and go to.

    Attributes:
        dtype: Type that the target computes in, and the drafter too.
        device: Where both are.
        embed: Ids of the target [n] to [n, E].
        project: Normed states [n, E] to logits [n, rows], float32 or wider.
        target_ids: The target's id of each row, [rows] int64; None: row and id are the same.
    """

    dtype: torch.dtype
    device: torch.device
    embed: Callable[[Tensor], Tensor]
    project: Callable[[Tensor], Tensor]
    target_ids: Tensor | None = None

    @classmethod
    def of(cls, target: TargetModel) -> DrafterEnds:
        """The target's own."""
        return cls(target.dtype, target.device, target.embed, target.project)


def ends_of(found: DrafterFormat, tensors: DrafterTensors, target: TargetModel) -> DrafterEnds:
    """The ends of a drafter; tensors that are the target's are not kept.

    Args:
        found: Its format.
        tensors: All of them; checked.
        target: What it drafts for.

    Raises:
        DrafterMismatchError: It holds a frozen copy of another target's embedding or head.
        UnsupportedCheckpointError: `d2t` or `t2d` name ids that there are not, or disagree.
    """
    ends = DrafterEnds.of(target)
    shapes = tensors.shapes
    if "embed_tokens.weight" in shapes and not _is_embedding(tensors, target):
        _refuse_frozen(found, "embed_tokens.weight")
        own = tensors.read("embed_tokens.weight").to(target.device, target.dtype).clone()
        ends = replace(ends, embed=lambda token_ids: functional.embedding(token_ids, own))
    rows = shapes.get("lm_head.weight", (0,))[0]
    target_ids = _target_ids(found, tensors, target, rows) if "d2t" in shapes else None
    if not rows or (target_ids is None and _is_head(tensors, target)):
        return ends
    if target_ids is None:
        _refuse_frozen(found, "lm_head.weight")
    head = make_linear(tensors.read("lm_head.weight").to(target.device, target.dtype))
    wide = torch.float64 if target.dtype == torch.float64 else torch.float32
    return replace(ends, project=lambda states: head(states).to(wide), target_ids=target_ids)


def _refuse_frozen(found: DrafterFormat, tensor: str) -> None:
    if found.has_frozen_ends:
        raise DrafterMismatchError(
            f"the drafter {found.name!r} holds {tensor!r} of the target that it was trained for, "
            "and this target's is another: of the same shape, with other weights; name a drafter "
            "for this target"
        )
    logger.warning("drafter=%s brings its own %s, other than the target's", found.name, tensor)


def _target_ids(
    found: DrafterFormat, tensors: DrafterTensors, target: TargetModel, rows: int
) -> Tensor | None:
    """`i + d2t[i]` of each row; None where that is i."""
    offsets = tensors.read("d2t").to(torch.int64)
    if offsets.shape[0] != rows:
        raise UnsupportedCheckpointError(
            f"{found.name!r}: tensor 'd2t' has {offsets.shape[0]} rows, and 'lm_head.weight' has "
            f"{rows}; they do not belong together"
        )
    ids = torch.arange(rows) + offsets
    if int(ids.min()) < 0 or int(ids.max()) >= target.config.vocab_size:
        raise UnsupportedCheckpointError(
            f"{found.name!r}: tensor 'd2t' names ids outside 0 to {target.config.vocab_size - 1}; "
            "the drafter is damaged"
        )
    if "t2d" in tensors.shapes:
        known = tensors.read("t2d").to(torch.bool)
        if int(known.sum()) != rows or not bool(known[ids].all()):
            raise UnsupportedCheckpointError(
                f"{found.name!r}: tensors 'd2t' and 't2d' name different ids; the drafter is "
                "damaged"
            )
    if rows == target.config.vocab_size and not bool(offsets.any()):
        return None
    return ids.to(target.device)


def _samples(rows: int) -> Tensor:
    return torch.linspace(0, rows - 1, _NUM_SAMPLES).to(torch.int64)


def _is_embedding(tensors: DrafterTensors, target: TargetModel) -> bool:
    ids = _samples(target.config.vocab_size)
    own = tensors.read("embed_tokens.weight")[ids].to(torch.float32)
    theirs = target.embed(ids.to(target.device)).to("cpu", torch.float32)
    return bool((own - theirs).abs().max() <= _EMBEDDING_TOLERANCE * theirs.abs().max())


def _is_head(tensors: DrafterTensors, target: TargetModel) -> bool:
    """Whether both give the same logits to some vectors: the target's weight may be packed."""
    ids = _samples(target.config.vocab_size)
    weight = tensors.read("lm_head.weight")[ids].to(torch.float32)
    generator = torch.Generator().manual_seed(0)
    probes = torch.randn(_NUM_PROBES, weight.shape[1], generator=generator)
    theirs = target.project(probes.to(target.device, target.dtype))[:, ids.to(target.device)]
    own = probes @ weight.t()
    gap = (own - theirs.to("cpu", torch.float32)).abs().max()
    return bool(gap <= _HEAD_TOLERANCE * own.abs().max())
