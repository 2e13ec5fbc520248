"""Read what a checkpoint's config says about rotary positions, and how far they reach."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import NamedTuple

from dlite_agent.errors import ConfigurationError, UnsupportedCheckpointError
from dlite_agent.rope_scaling import RopeScaling

__all__ = ["Rope", "declared_positions", "positive_number", "read_rope"]

logger = logging.getLogger(__name__)

Json = Mapping[str, object]


class Rope(NamedTuple):
    """Base of the frequencies, how they are stretched, and the most positions."""

    theta: float
    scaling: RopeScaling
    max_positions: int


def read_rope(config: Json, override: RopeScaling | None, name: str, max_positions: int) -> Rope:
    """Read `rope_parameters` (transformers 5) over `rope_scaling` and `rope_theta` (4).

    The most positions are the config's `max_position_embeddings`. Where that is still the length
    before stretching, as in the configs that model cards advise for yarn, it is factor times
    original length; with an override it always is.

    Args:
        config: Content of config.json.
        override: Replaces the config's scaling.
        name: The model, for messages.
        max_positions: Where the config names none.

    Raises:
        UnsupportedCheckpointError: The config's scaling is of an unknown kind, or damaged.
    """
    stored = _stored_fields(config, name)
    theta = positive_number(stored.pop("rope_theta", 10_000.0), "rope_theta", name)
    if theta <= 1:
        raise UnsupportedCheckpointError(
            f"{name!r}: rope_theta={theta!r} in its config is not above 1; the checkpoint is "
            "damaged"
        )
    declared = config.get("max_position_embeddings")
    declared = max_positions if declared is None else declared
    if not isinstance(declared, int) or isinstance(declared, bool) or declared < 1:
        raise UnsupportedCheckpointError(
            f"{name!r}: max_position_embeddings={declared!r} in its config is not a positive "
            "whole number; the checkpoint is damaged"
        )
    if override is None:
        own = _with_original(_parse(stored, name), declared)
        return Rope(theta, own, _reach(own, declared))
    trained = stored.get("original_max_position_embeddings")
    scaling = _with_original(override, trained if isinstance(trained, int) else declared)
    return Rope(theta, scaling, _stretched(scaling, trained, declared))


def declared_positions(
    model: str, rope_scaling: RopeScaling | Mapping[str, object] | str | None
) -> int | None:
    """The most positions by a local checkpoint's config; None for what is no such folder.

    Args:
        model: `"nano"` or a folder.
        rope_scaling: As in `EngineConfig`.
    """
    folder = Path(__file__).parents[1] / "nano" / "assets" if model == "nano" else Path(model)
    override = None if rope_scaling is None else RopeScaling.parse(rope_scaling)
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        return read_rope(config, override, model, config["max_position_embeddings"]).max_positions
    except (OSError, ValueError, TypeError, KeyError):
        return None


def positive_number(value: object, field: str, name: str) -> float:
    """A field of config.json as a float.

    Raises:
        UnsupportedCheckpointError: It is no positive number.
    """
    if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
        raise UnsupportedCheckpointError(
            f"{name!r}: {field}={value!r} in its config is not a positive number; the checkpoint "
            "is damaged"
        )
    return float(value)


def _stored_fields(config: Json, name: str) -> dict[str, object]:
    stored: dict[str, object] = {}
    for field in ("rope_theta", "partial_rotary_factor"):
        if config.get(field) is not None:
            stored[field] = config[field]
    for source in ("rope_scaling", "rope_parameters"):
        value = config.get(source)
        if isinstance(value, Mapping):
            stored |= {field: item for field, item in value.items() if item is not None}
    if "original_max_position_embeddings" in config:  # there it wins, as in transformers
        stored["original_max_position_embeddings"] = config["original_max_position_embeddings"]
    nested = next((field for field, item in stored.items() if isinstance(item, Mapping)), None)
    if nested is not None:
        raise UnsupportedCheckpointError(
            f"{name!r} has rotary positions of its own for {nested!r} layers; not supported, use a "
            "checkpoint whose layers are alike"
        )
    partial = stored.pop("partial_rotary_factor", 1.0)
    if partial != 1.0:
        raise UnsupportedCheckpointError(
            f"{name!r} has partial_rotary_factor={partial!r}; not supported, use a checkpoint that "
            "rotates whole heads"
        )
    return stored


def _parse(stored: dict[str, object], name: str) -> RopeScaling:
    kind = stored.get("rope_type", stored.get("type", "default"))
    if kind == "default":
        return RopeScaling()
    known = {field.name for field in fields(RopeScaling)} | {"type"}
    unknown = sorted(set(stored) - known) if kind in ("linear", "llama3", "yarn") else []
    if unknown:  # transformers ignores them, too
        logger.warning("unknown rope fields model=%s fields=%s", name, ",".join(unknown))
    try:
        return RopeScaling.parse({field: stored[field] for field in stored if field in known})
    except ConfigurationError as error:
        raise UnsupportedCheckpointError(f"{name!r}: {error}") from error


def _with_original(scaling: RopeScaling, original: int) -> RopeScaling:
    if scaling.rope_type not in ("yarn", "llama3") or scaling.original_max_position_embeddings:
        return scaling
    return replace(scaling, original_max_position_embeddings=original)


def _reach(scaling: RopeScaling, declared: int) -> int:
    if scaling.rope_type != "yarn" or scaling.original_max_position_embeddings is None:
        return declared
    return max(declared, int(scaling.factor * scaling.original_max_position_embeddings))


def _stretched(scaling: RopeScaling, trained: object, declared: int) -> int:
    original = scaling.original_max_position_embeddings
    if original is None:
        original = trained if isinstance(trained, int) else declared
    return int(scaling.factor * original)
