"""How rotary positions are stretched beyond the length that a checkpoint was trained at."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Literal, Self, cast

from dlite_agent.errors import ConfigurationError

__all__ = ["RopeScaling", "RopeType"]

RopeType = Literal["default", "linear", "llama3", "yarn"]

_TYPES = ("default", "linear", "llama3", "yarn")
_REFUSED = {
    "dynamic": "its frequencies change with the length of the prompt, so that no cached key could "
    "be kept",
    "longrope": "its frequencies change with the length of the prompt, so that no cached key could "
    "be kept",
    "mrope": "its positions have three axes, for images",
}
_ADVICE = (
    "use 'default', 'linear', 'llama3' or 'yarn'; where the checkpoint asks for another, "
    'rope_scaling={"rope_type": "default"} runs it within the length that it was trained at'
)


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """Rope scaling, with the names of transformers' `rope_parameters`.

    The formulas are in `kernels.rope_frequencies`.

    Attributes:
        rope_type: `"default"` stretches nothing.
        factor: By how much; at least 1.
        original_max_position_embeddings: Length that the checkpoint was trained at; None: its
            `max_position_embeddings`. Of yarn and llama3.
        rope_theta: Base of the frequencies; None: the checkpoint's.
        attention_factor: Multiplies cosines and sines; None: by yarn's formula. Of yarn.
        beta_fast: Frequencies with more turns than this are not stretched. Of yarn.
        beta_slow: Frequencies with fewer turns than this are stretched fully. Of yarn.
        mscale: With `mscale_all_dim`, part of the attention factor. Of yarn.
        mscale_all_dim: See `mscale`.
        truncate: Whether yarn's range of frequencies is rounded outwards to whole ones.
        low_freq_factor: Wavelengths above original / this are stretched fully. Of llama3.
        high_freq_factor: Wavelengths below original / this are not stretched. Of llama3.

    Raises:
        ConfigurationError: A value is out of range.
    """

    rope_type: RopeType = "default"
    factor: float = 1.0
    original_max_position_embeddings: int | None = None
    rope_theta: float | None = None
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0

    def __post_init__(self) -> None:
        if self.rope_type not in _TYPES:
            reason = _REFUSED.get(str(self.rope_type))
            is_known = f"rope_type {self.rope_type!r} is not supported"
            raise ConfigurationError(
                f"{is_known}: {reason}; {_ADVICE}" if reason else f"{is_known}; {_ADVICE}"
            )
        for name in _POSITIVE:
            value = getattr(self, name)
            if value is not None and not _is_positive(value):
                raise ConfigurationError(f"{name} of rope_scaling is {value!r}; use a number > 0")
        if self.factor < 1:
            raise ConfigurationError(f"factor of rope_scaling is {self.factor!r}; use at least 1")
        original = self.original_max_position_embeddings
        if original is not None and not isinstance(original, int):
            raise ConfigurationError(
                f"original_max_position_embeddings of rope_scaling is {original!r}; use a whole "
                "number"
            )
        if not isinstance(self.truncate, bool):
            raise ConfigurationError(
                f"truncate of rope_scaling is {self.truncate!r}; use true or false"
            )
        if self.beta_fast <= self.beta_slow or self.high_freq_factor <= self.low_freq_factor:
            raise ConfigurationError(
                f"rope_scaling has beta_fast={self.beta_fast!r}, beta_slow={self.beta_slow!r}, "
                f"high_freq_factor={self.high_freq_factor!r} and low_freq_factor="
                f"{self.low_freq_factor!r}; the first and the third must be the larger"
            )

    @classmethod
    def parse(cls, given: Mapping[str, object] | str | RopeScaling) -> Self:
        """Read a mapping in either spelling of transformers (`rope_type` or the older `type`).

        Args:
            given: The mapping, or JSON of it, as on a command line; a field that is None is left
                out.

        Raises:
            ConfigurationError: It names no scaling or an unknown field, or a value is out of range.
        """
        if isinstance(given, RopeScaling):
            return cast(Self, given)
        if isinstance(given, str):
            given = _from_json(given)
        if not isinstance(given, Mapping):
            raise ConfigurationError(
                f'rope_scaling is {given!r}; use a mapping such as {{"rope_type": "yarn", '
                '"factor": 4.0, "original_max_position_embeddings": 32768}'
            )
        values = {name: value for name, value in given.items() if value is not None}
        kind = values.pop("type", None)
        values.setdefault("rope_type", kind)
        known = {field.name for field in fields(cls)}
        unknown = sorted(set(values) - known)
        if unknown:
            raise ConfigurationError(
                f"{unknown[0]!r} is no field of rope_scaling; known: {', '.join(sorted(known))}"
            )
        if values["rope_type"] in _TYPES[1:] and "factor" not in values:
            raise ConfigurationError(
                f"rope_scaling {values['rope_type']!r} has no factor; name one, e.g. 4.0"
            )
        return cls(**values)  # type: ignore[arg-type]  # checked by __post_init__

    def to_json(self) -> str:
        """All fields as JSON, always in the same order; part of a model's fingerprint."""
        return json.dumps(asdict(self))

    def __str__(self) -> str:
        """The fields that are not at their default, e.g. `yarn factor=4.0`."""
        plain = RopeScaling()
        told = [
            f"{field.name}={getattr(self, field.name)}"
            for field in fields(self)
            if field.name != "rope_type" and getattr(self, field.name) != getattr(plain, field.name)
        ]
        return " ".join([self.rope_type, *told])


_POSITIVE = (
    "factor original_max_position_embeddings rope_theta attention_factor beta_fast beta_slow "
    "mscale mscale_all_dim low_freq_factor high_freq_factor"
).split()


def _is_positive(value: object) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and 0 < cast(float, value) < float("inf")


def _from_json(text: str) -> Mapping[str, object]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ConfigurationError(
            f"rope_scaling is {text!r}, which is no JSON ({error}); use e.g. "
            '\'{"rope_type": "yarn", "factor": 4.0}\''
        ) from None
    return cast(Mapping[str, object], value)
