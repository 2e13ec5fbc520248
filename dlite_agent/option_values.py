"""Checks of option values, by which `config` refuses with the field, the value and what to use."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import cast

from dlite_agent.errors import ConfigurationError

__all__ = ["biases", "make_whole", "one_of", "parse_variable", "token_ids"]


def biases(
    value: Mapping[int, float] | tuple[tuple[int, float], ...],
) -> tuple[tuple[int, float], ...]:
    """Sorted pairs of a token id and a finite number; JSON has ids as text."""
    try:
        pairs = cast(dict[object, object], dict(value))
    except (TypeError, ValueError):
        raise ConfigurationError(
            f"logit_bias is {value!r}; use a mapping of token ids to numbers"
        ) from None
    checked: dict[int, float] = {}
    for token_id, bias in pairs.items():
        try:
            number = (
                int(token_id) if isinstance(token_id, str) else operator.index(cast(int, token_id))
            )
        except (TypeError, ValueError):
            raise ConfigurationError(
                f"logit_bias has the key {token_id!r}; use token ids"
            ) from None
        if not isinstance(bias, int | float) or not -100.0 <= bias <= 100.0:
            raise ConfigurationError(
                f"logit_bias[{token_id!r}] is {bias!r}; use a number in [-100, 100]"
            )
        checked[number] = float(bias)
    return tuple(sorted(checked.items()))


def token_ids(value: object) -> tuple[int, ...]:
    """A tuple of plain ints from any list of stop token ids."""
    try:
        return tuple(operator.index(token_id) for token_id in value)  # type: ignore[attr-defined]  # what is no iterable is reported below
    except TypeError:
        raise ConfigurationError(f"stop_token_ids is {value!r}; use a list of token ids") from None


def make_whole(options: object, name: str) -> int | None:
    """Turn a field into a plain int (numpy's are neither JSON nor picklable everywhere)."""
    value = getattr(options, name)
    if value is None:
        return None
    try:
        whole = operator.index(value)
    except TypeError:
        raise ConfigurationError(f"{name} is {value!r}; use a whole number") from None
    object.__setattr__(options, name, whole)  # frozen, and still under construction
    return whole


def one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    """Refuse a value that is none of the allowed ones."""
    if value not in allowed:
        raise ConfigurationError(f"{name} is {value!r}; use one of {', '.join(map(repr, allowed))}")


def parse_variable(name: str, raw: str, kind: str) -> int | bool | str:
    """The value of a variable, by the annotation of its field."""
    if kind == "bool":
        known = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}
        if raw.lower() not in known:
            raise ConfigurationError(f"DLITE_{name.upper()} is {raw!r}; use true or false")
        return known[raw.lower()]
    if "int" not in kind:
        return raw
    try:
        return int(raw)
    except ValueError:
        raise ConfigurationError(f"DLITE_{name.upper()} is {raw!r}; use a whole number") from None
