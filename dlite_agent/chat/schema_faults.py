"""Where in a schema the fault is, as far as a part of it is refused alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from dlite_agent.chat.messages import JSON

__all__ = ["fault_in"]

_MAPS = ("properties", "patternProperties")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SINGLE = ("items", "additionalProperties", "contains", "not")
_DEFINITIONS = ("$defs", "definitions")


def fault_in(
    schema: Mapping[str, JSON], refusal: Callable[[Mapping[str, JSON]], str | None]
) -> tuple[str, str] | None:
    """The path of the innermost part that is refused, such as `#/properties/a`, and why.

    Args:
        schema: The whole.
        refusal: Says why a schema is refused; None where it is not. Asked for the whole, and for
            parts along one path; each is given the definitions of the whole.
    """
    why = refusal(schema)
    if why is None:
        return None
    path, here = "#", schema
    definitions = {key: schema[key] for key in _DEFINITIONS if key in schema}
    found: Mapping[str, JSON] | None = schema
    while found is not None:
        found = None
        for name, part in _parts(here):
            inner = refusal({**definitions, **part})
            if inner is not None:
                path, why, here, found = f"{path}/{name}", inner, part, part
                break
    return path, why


def _parts(schema: Mapping[str, JSON]) -> Iterator[tuple[str, Mapping[str, JSON]]]:
    named: list[tuple[str, JSON]] = [(key, schema.get(key)) for key in _SINGLE]
    for key in _MAPS:
        inner = schema.get(key)
        if isinstance(inner, dict):
            named += [(f"{key}/{name}", value) for name, value in inner.items()]
    for key in _LISTS:
        inner = schema.get(key)
        if isinstance(inner, list):
            named += [(f"{key}/{number}", value) for number, value in enumerate(inner)]
    for name, value in named:
        if isinstance(value, dict):
            yield name, value
