"""Checks of option values, by which `config` refuses with the field, the value and what to use."""

from __future__ import annotations

import math
import numbers
import operator
import os
from collections.abc import Mapping
from typing import cast

from dlite_agent.errors import ConfigurationError

__all__ = [
    "biases",
    "check_flags",
    "make_limits",
    "make_number",
    "make_paths",
    "make_texts",
    "make_whole",
    "one_of",
    "parse_variable",
    "token_ids",
]

_TOO_LARGE = 2**62  # torch counts bytes in 64 bits, with a sign


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


def check_flags(options: object, *names: str) -> None:
    """Refuse fields that are neither True nor False."""
    for name in names:
        value = getattr(options, name)
        if not isinstance(value, bool):
            raise ConfigurationError(f"{name} is {value!r}; use True or False")


def make_limits(options: object, *names: str, is_optional: bool = False) -> None:
    """Turn fields into ints of at least 1, or leave None where there may be no limit."""
    for name in names:
        value = make_whole(options, name)
        if value is None and not is_optional:
            raise ConfigurationError(f"{name} is None; use a whole number")
        if value is not None and value < 1:
            raise ConfigurationError(
                f"{name} is {value!r}, but must be at least 1; leave it out for the default"
            )
        if value is not None and value >= _TOO_LARGE:
            raise ConfigurationError(
                f"{name} is {value!r}, more than any machine has; use less than {_TOO_LARGE}, or "
                "leave it out for the default"
            )


def make_number(options: object, name: str) -> float | None:
    """Turn a field into a plain float; torch divides by no fraction and no 30-digit int."""
    value = getattr(options, name)
    if value is None:
        return None
    if not isinstance(value, numbers.Real):
        raise ConfigurationError(f"{name} is {value!r}; use a number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    object.__setattr__(options, name, number)  # frozen, and still under construction
    return number


def make_texts(options: object, *names: str, is_path: bool = False) -> None:
    """Turn fields into plain strs; `is_path`: from a `Path` as well."""
    for name in names:
        value = getattr(options, name)
        text = os.fspath(value) if is_path and isinstance(value, os.PathLike) else value
        if not isinstance(text, str) or "\0" in text:
            raise ConfigurationError(f"{name} is {value!r}; use a text")
        object.__setattr__(options, name, text)  # frozen, and still under construction


def make_paths(options: object, name: str) -> None:
    """Turn a field into a tuple of paths: from one, a list, or what `os.pathsep` separates."""
    value = getattr(options, name)
    parts = list(filter(None, value.split(os.pathsep))) if isinstance(value, str) else value
    parts = [parts] if isinstance(parts, os.PathLike) else parts
    if not isinstance(parts, list | tuple):
        raise ConfigurationError(f"{name} is {value!r}; use a list of paths")
    paths = tuple(os.fspath(p) if isinstance(p, os.PathLike) else p for p in parts)
    if not all(isinstance(p, str) and p and "\0" not in p for p in paths):
        raise ConfigurationError(f"{name} is {value!r}; use a list of paths")
    object.__setattr__(options, name, paths)  # frozen, and still under construction


def one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    """Refuse a value that is none of the allowed ones."""
    if value not in allowed:
        raise ConfigurationError(f"{name} is {value!r}; use one of {', '.join(map(repr, allowed))}")


def parse_variable(name: str, raw: str, kind: str) -> float | bool | str:
    """The value of a variable, by the annotation of its field."""
    if kind == "bool":
        known = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}
        if raw.lower() not in known:
            raise ConfigurationError(f"DLITE_{name.upper()} is {raw!r}; use true or false")
        return known[raw.lower()]
    if kind == "float":
        try:
            return float(raw)
        except ValueError:
            raise ConfigurationError(f"DLITE_{name.upper()} is {raw!r}; use a number") from None
    if "int" not in kind:
        return raw
    try:
        return int(raw)
    except ValueError:
        raise ConfigurationError(f"DLITE_{name.upper()} is {raw!r}; use a whole number") from None
