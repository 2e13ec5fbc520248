"""What the `config.json` of a public drafter says, whichever project wrote it.

The same integers mean other layers in other projects, and the same names other alignments. Here
they become one set of words: taps are layers of the target whose raw output is read, from 0, and
`is_anchor_drafted` says whether slot 0 of a block is a draft.

Nothing here touches weights, so a refusal comes before any download of them. Dimensions that
tensors tell are read from the tensors (`models.drafter_shapes`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, cast

from dlite_agent.errors import DrafterMismatchError, UnsupportedCheckpointError
from dlite_agent.models.block_config import spread_taps
from dlite_agent.models.target import TargetConfig

__all__ = ["DrafterFamily", "DrafterFormat", "read_format"]

DrafterFamily = Literal["dspark", "dflash", "dflash2", "eagle3"]

Json = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class DrafterFormat:
    """A config in our words.

    Attributes:
        name: The drafter as the user named it.
        family: What kind it is.
        dialect: Whose config it is.
        layer: Fields of the decoder layers, as transformers names them.
        own: Fields of the drafter itself, wherever the file keeps them.
        taps: Layers of the target, in the order of `fc`'s columns.
        is_anchor_drafted: As in `BlockConfig`.
        has_frozen_ends: A stored embedding or head of the whole vocabulary is a copy of the
            target's.
    """

    name: str
    family: DrafterFamily
    dialect: str
    layer: Json
    own: Json
    taps: tuple[int, ...]
    is_anchor_drafted: bool = False
    has_frozen_ends: bool = True

    def number(self, *names: str, default: float | None = None) -> float:
        """The first of some fields that is there, of the drafter's own before the layers'.

        Raises:
            UnsupportedCheckpointError: None is there and there is no default, or it is no number.
        """
        for name in names:
            for fields in (self.own, self.layer):
                value = fields.get(name)
                if value is None:
                    continue
                if isinstance(value, bool) or not isinstance(value, int | float):
                    raise _damaged(self.name, name, value)
                return value
        if default is None:
            raise UnsupportedCheckpointError(
                f"{self.name!r}: its config has no {names[0]!r}; download the drafter completely"
            )
        return default

    def count(self, *names: str, default: int | None = None) -> int:
        """The same as a whole number."""
        value = self.number(*names, default=default)
        if value != int(value):
            raise _damaged(self.name, names[0], value)
        return int(value)

    def flag(self, name: str, *, default: bool = False) -> bool:
        """A field that is true or false, of the drafter's own before the layers'."""
        value = self.own.get(name, self.layer.get(name))
        if value is None:
            return default
        if not isinstance(value, bool):
            raise _damaged(self.name, name, value)
        return value

    def check_fits(self, target: TargetConfig) -> None:
        """See that the config is of a drafter for such a target.

        Raises:
            DrafterMismatchError: It is not; the message names the first thing that differs.
        """
        hidden = self.layer.get("target_hidden_size", self.layer.get("hidden_size"))
        hidden = self.own.get("target_hidden_size") or hidden
        for field, has, wants in (
            ("hidden_size", hidden, target.hidden_size),
            ("vocab_size", self.layer.get("vocab_size"), target.vocab_size),
            ("num_target_layers", self.own.get("num_target_layers"), target.num_layers),
        ):
            if has is not None and has != wants:
                raise DrafterMismatchError(
                    f"the drafter {self.name!r} was trained for a target with {field}={has}, and "
                    f"this one ({target.architecture}) has {wants}; name a drafter for this target "
                    "('dlite-agent drafters MODEL' lists some)"
                )
        outside = [tap for tap in self.taps if not 0 <= tap < target.num_layers]
        if outside:
            raise DrafterMismatchError(
                f"the drafter {self.name!r} reads the output of layer {outside[0]}, and this "
                f"target ({target.architecture}) has layers 0 to {target.num_layers - 1}"
                + (" (-1 would be the embedding, which is not tapped)" if outside[0] == -1 else "")
                + "; name a drafter for this target"
            )


def read_format(config: Json, name: str, target: TargetConfig) -> DrafterFormat:
    """Read a drafter's config.

    By `speculators_model_type`, then by `architectures`.

    Args:
        config: Content of `config.json`.
        name: The drafter as the user named it, for messages.
        target: Its target; fills in taps that the file leaves to a default.

    Raises:
        UnsupportedCheckpointError: It is of a kind that is not read, or damaged.
        DrafterMismatchError: It is for another target.
    """
    kind = config.get("speculators_model_type")
    architectures = config.get("architectures")
    architecture = architectures[0] if isinstance(architectures, list) and architectures else None
    if kind is not None:
        found = _speculators(config, name, target, kind)
    elif architecture in ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM"):
        found = _eagle3(config, name, target)
    elif architecture == "Qwen3Eagle3Model":
        taps = _taps(config, "target_layer_ids", name)
        found = DrafterFormat(name, "eagle3", "DeepSpec", config, config, taps)
    elif architecture == "Qwen3DSparkModel":
        taps = _taps(config, "target_layer_ids", name)
        family = _block_family("dflash", config)
        found = DrafterFormat(name, family, "DeepSpec", config, config, taps, True)
    elif architecture in ("DFlashDraftModel", "DFlash2DraftModel", "DSparkDraftModel"):
        found = _dflash(config, name, target, str(architecture))
    else:
        raise UnsupportedCheckpointError(
            f"{name!r}: its config names architectures={architectures!r} and "
            f"speculators_model_type={kind!r}, which is no drafter that is read here; there are "
            "DLite, DSpark, DFlash, DFlash2 and EAGLE-3 (docs/guides/public-drafters.md)"
        )
    found.check_fits(target)
    return found


def _speculators(config: Json, name: str, target: TargetConfig, kind: object) -> DrafterFormat:
    """Layers are numbered as entries of `hidden_states`: one more than ours."""
    layer = config.get("transformer_layer_config")
    if kind not in ("eagle3", "dflash", "dflash2", "dspark") or not isinstance(layer, Mapping):
        raise UnsupportedCheckpointError(
            f"{name!r}: speculators_model_type={kind!r} with transformer_layer_config of type "
            f"{type(layer).__name__} is not read; there are 'dspark', 'dflash', 'dflash2' and "
            "'eagle3'"
        )
    _refuse_domino(config, name)
    family: DrafterFamily = kind
    field = "aux_hidden_state_layer_ids"
    field = f"eagle_{field}" if family == "eagle3" else field
    if config.get(field) is not None:
        taps = tuple(entry - 1 for entry in _taps(config, field, name))
    elif family == "eagle3":
        count = target.num_layers
        taps = (1, count // 2 - 1, count - 4)
    else:
        taps = _default_taps(layer, target)
    is_drafted = _flag(config, "sample_from_anchor", family == "dspark", name)
    is_drafted = _flag(config, "shift_label", is_drafted, name)
    if family != "eagle3":
        family = _block_family(family, config)
    is_frozen = family != "eagle3"
    return DrafterFormat(name, family, "speculators", layer, config, taps, is_drafted, is_frozen)


def _eagle3(config: Json, name: str, target: TargetConfig) -> DrafterFormat:
    """Of SafeAI, AngelSlim, SpecForge and lmsys."""
    nested = config.get("eagle_config")
    own = {**config, **nested} if isinstance(nested, Mapping) else config
    if own.get("use_aux_hidden_state") is False:
        raise UnsupportedCheckpointError(
            f"{name!r} reads one layer of its target (use_aux_hidden_state=false), as EAGLE-1 and "
            "2 do; use a drafter of EAGLE-3"
        )
    field = "eagle_aux_hidden_state_layer_ids"
    if own.get(field) is not None:
        taps = _taps(own, field, name)
    else:
        taps = (1, target.num_layers // 2 - 1, target.num_layers - 4)
    return DrafterFormat(name, "eagle3", "EAGLE-3", config, own, taps, False, False)


def _dflash(config: Json, name: str, target: TargetConfig, architecture: str) -> DrafterFormat:
    """Of z-lab, and of SpecForge, which writes DSpark's in the same form."""
    nested = config.get("dflash_config")
    own = {**config, **nested} if isinstance(nested, Mapping) else config
    _refuse_domino(own, name)
    family: DrafterFamily = "dflash2" if architecture == "DFlash2DraftModel" else "dflash"
    is_dspark = architecture == "DSparkDraftModel" or own.get("projector_type") == "dspark"
    if family == "dflash":
        family = _block_family(family, own)
    if own.get("target_layer_ids") is not None:
        taps = _taps(own, "target_layer_ids", name)
    else:
        taps = _default_taps(config, target)
    is_drafted = _flag(own, "sample_from_anchor", is_dspark, name)
    dialect = "SpecForge" if is_dspark else "z-lab"
    return DrafterFormat(name, family, dialect, config, own, taps, is_drafted)


def _block_family(family: DrafterFamily, own: Json) -> DrafterFamily:
    """A Markov head makes it a DSpark drafter."""
    if family == "dflash2":
        return family
    return "dspark" if own.get("markov_rank") else "dflash"


def _refuse_domino(own: Json, name: str) -> None:
    if own.get("projector_type") == "domino":
        raise UnsupportedCheckpointError(
            f"{name!r} has projector_type='domino', whose head is not read here; use a DSpark or "
            "DFlash drafter"
        )


def _default_taps(layer: Json, target: TargetConfig) -> tuple[int, ...]:
    count = layer.get("num_hidden_layers")
    return spread_taps(target.num_layers, count if isinstance(count, int) else 5)


def _taps(own: Json, field: str, name: str) -> tuple[int, ...]:
    value = own.get(field)
    is_list = isinstance(value, list) and bool(value)
    if not is_list or not all(type(item) is int for item in cast(list[object], value)):
        raise _damaged(name, field, value)
    return tuple(cast(list[int], value))


def _flag(own: Json, field: str, default: bool, name: str) -> bool:
    value = own.get(field)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise _damaged(name, field, value)
    return value


def _damaged(name: str, field: str, value: object) -> UnsupportedCheckpointError:
    return UnsupportedCheckpointError(
        f"{name!r}: {field}={value!r} in its config is not what it should be; the checkpoint is "
        "damaged"
    )
