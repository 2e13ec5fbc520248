"""What a value built by hand may hold: checked where it is made, so that no turn fails inside."""

from __future__ import annotations

from collections.abc import Mapping

from dlite_agent.errors import RequestError

__all__ = ["JSON_ADVICE", "OPTIONAL_TEXT", "check_fields", "is_json", "make_tuple"]

JSON_ADVICE = (
    "JSON (mappings with texts or numbers for keys, lists, texts, numbers, booleans, None) of at "
    "most 100 mappings and lists inside each other"
)
OPTIONAL_TEXT = "a text or None"


def check_fields(owner: object, checks: Mapping[str, tuple[bool, str]]) -> None:
    """Refuse a value whose fields are of another type.

    Args:
        owner: Whose fields.
        checks: Field → whether it is right, and what to use instead.

    Raises:
        RequestError: One is not.
    """
    for name, (is_right, advice) in checks.items():
        if not is_right:
            where = f"{type(owner).__name__}.{name}"
            raise RequestError(f"{where} is {getattr(owner, name)!r}; use {advice}")


def make_tuple(owner: object, name: str, kind: type, advice: str) -> None:
    """Turn a field into a tuple of `kind`, from a tuple or a list of it.

    Raises:
        RequestError: It is something else; a single text is no list of texts.
    """
    value = getattr(owner, name)
    is_right = isinstance(value, tuple | list) and all(isinstance(item, kind) for item in value)
    check_fields(owner, {name: (is_right, advice)})
    object.__setattr__(owner, name, tuple(value))  # frozen, and still under construction


def is_json(value: object) -> bool:
    """Whether a value can be written as JSON; of any depth, without recursion.

    Keys may be numbers and None: Python writes them as texts.
    """
    waiting = [value]
    seen: set[int] = set()  # containers, for those that hold themselves
    while waiting:
        inner = waiting.pop()
        if isinstance(inner, Mapping | list | tuple):
            if id(inner) in seen:
                continue
            seen.add(id(inner))
            if isinstance(inner, Mapping):
                if not all(key is None or isinstance(key, str | int | float) for key in inner):
                    return False
                waiting += inner.values()
            else:
                waiting += inner
        elif inner is not None and not isinstance(inner, str | int | float):
            return False
    return True
