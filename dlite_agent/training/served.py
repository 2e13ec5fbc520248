"""A saved drafter in the real loop beside what training computes; a difference gets its name."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from dlite_agent.chat.messages import JSON, Message
from dlite_agent.drafters.dlite import load_dlite
from dlite_agent.engine.loading import LoadedModel
from dlite_agent.errors import DrafterMismatchError
from dlite_agent.models.dlite_files import read_dlite
from dlite_agent.models.weights import fingerprint, resolve_checkpoint
from dlite_agent.training.evaluate import MAX_DIFFERENCE, Turn, check_served, serve
from dlite_agent.training.frozen import FrozenEnds
from dlite_agent.training.learner import DLiteLearner
from dlite_agent.training.measure import draft_all
from dlite_agent.training.records import Records
from dlite_agent.training.simulate import Acceptance, accepted_at, walk_rounds

__all__ = ["Beside", "evaluate", "likely_cause", "require_equal", "template_digest"]

_CANNED = (
    Message("system", "s"),
    Message("user", "u"),
    Message("assistant", "a", reasoning="r"),
    Message("user", "v"),
)


@dataclass(frozen=True, slots=True)
class Beside:
    """Two figures of the same thing.

    Attributes:
        trained: As training computes it.
        served: As the loop serves it.
        by_position: Share of all positions, and not of rounds, that `trained` is right at as far.
        cause: What is most likely wrong where they differ, else empty.
    """

    trained: Acceptance
    served: Acceptance
    by_position: tuple[float, ...]
    cause: str


def template_digest(model: LoadedModel, enable_thinking: bool | None) -> str:
    """What tells one chat template and thinking mode from another: ids of a canned conversation."""
    kwargs: dict[str, JSON] = {}
    if enable_thinking is not None:
        kwargs["enable_thinking"] = enable_thinking
    ids = model.renderer.render(_CANNED, (), template_kwargs=kwargs).token_ids
    return hashlib.sha256(str(list(ids)).encode()).hexdigest()[:16]


def evaluate(
    model: LoadedModel,
    folder: Path,
    data: tuple[Records, list[Turn]],
    captured: Mapping[str, object],
    enable_thinking: bool | None,
) -> Beside:
    """A saved drafter's acceptance as training computes it, and as the loop serves it.

    Args:
        model: The target, loaded without a drafter.
        folder: Of the drafter.
        data: Records of the held-out turns, and the turns: greedy answers of the target.
        captured: With what they were captured: `taps`, `template`, `enable_thinking`.
        enable_thinking: The mode that it is to be served in.

    Raises:
        DrafterMismatchError: The drafter is for another target, or the records were captured with
            other taps, another template or mode.
    """
    records, turns = data
    identity = fingerprint(resolve_checkpoint(model.config.model, model.config.revision))
    drafter = load_dlite(folder, model.target, identity)
    config, tensors = read_dlite(folder)
    taps = list(config.taps)
    if captured["taps"] != taps:
        raise DrafterMismatchError(
            f"tap: the drafter reads the layers {taps}, and the records hold {captured['taps']}; "
            "capture again with the drafter's taps"
        )
    _check_template(model, captured, enable_thinking)
    learner = DLiteLearner(config, FrozenEnds.of(model.target), tensors)
    blocks = draft_all(learner, records)
    block_size = config.block_size
    trained = Acceptance.of(*walk_rounds(records, blocks), block_size)
    rounds = serve(model.target, drafter, turns)
    served = rounds.acceptance(block_size)
    cause = ""
    try:
        check_served(trained, served)
    except DrafterMismatchError:
        cause = likely_cause(records, blocks, served, rounds.num_different)
    left = records.left[records.usable()] - 1
    everywhere = Acceptance.of(accepted_at(records, blocks), left, block_size)
    return Beside(trained, served, everywhere.per_slot, cause)


def require_equal(found: Beside) -> None:
    """See that every slot is served as it was trained.

    Raises:
        DrafterMismatchError: One differs by more than 2 points; the message names tap, alignment,
            template or mode.
    """
    try:
        check_served(found.trained, found.served)
    except DrafterMismatchError as error:
        raise DrafterMismatchError(f"{found.cause}: {error}") from error


def _check_template(
    model: LoadedModel, captured: Mapping[str, object], enable_thinking: bool | None
) -> None:
    if captured["template"] == template_digest(model, enable_thinking):
        return
    then = captured["enable_thinking"]
    if captured["template"] == template_digest(model, then if isinstance(then, bool) else None):
        raise DrafterMismatchError(
            f"mode: the records were captured with enable_thinking={then!r}, and it is to be "
            f"served with {enable_thinking!r}; capture in the mode that it is served in"
        )
    raise DrafterMismatchError(
        "template: the checkpoint's chat template is not the one that the records were captured "
        "with; capture again"
    )


def likely_cause(
    records: Records, blocks: torch.Tensor, served: Acceptance, num_different: int
) -> str:
    """What is most likely wrong where figures differ: tap, alignment or template.

    Args:
        records: Of the held-out turns.
        blocks: What training drafts at all usable positions, [N, B] int64.
        served: What the loop accepted.
        num_different: Turns that the target answered otherwise than they were captured.
    """
    if num_different:
        return (
            f"template or weights ({num_different} answers are not the captured ones, so the "
            "target itself answers otherwise)"
        )
    for step in (-1, 1):
        moved = Acceptance.of(*walk_rounds(records, blocks.roll(step, 1)), blocks.shape[1])
        pairs = zip(moved.per_slot[1:-1], served.per_slot[1:-1], strict=True)
        if all(abs(a - b) <= MAX_DIFFERENCE for a, b in pairs):
            return f"alignment (served as if slots were moved by {step})"
    return "tap or alignment (the same answers, other drafts)"
