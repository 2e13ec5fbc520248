"""What llguidance says of a grammar that it refuses, for whoever wrote the schema."""

from __future__ import annotations

import re

__all__ = ["refusal"]

_SEND_LENIENT = "or send strict=false"
# In the order in which they are looked for: what llguidance writes, what it means, what to do.
_MEANINGS = (
    (
        "oneOf constraints",
        "the branches of a oneOf overlap",
        f"make them differ in a required const, use anyOf, {_SEND_LENIENT}",
    ),
    ("Unimplemented keys", "", f"leave it out, {_SEND_LENIENT}"),
    ("Unknown format", "", f"leave it out, {_SEND_LENIENT}"),
    ("Unsatisfiable", "", "simplify it, as nothing can satisfy it"),
    ("fuel exhausted", "it is too large for a grammar", "shorten it"),
    ("too large", "", "shorten it"),
    ("limit", "", "shorten it"),
)


def refusal(error: str) -> str:
    """One line: what cannot be enforced, and what to do about it."""
    lines = error.strip().splitlines()
    reason = lines[0].partition("failed to compile JSON schema: ")[2] or lines[0]
    causes = [line for line in lines if line.startswith("error: ")]
    if causes and reason.endswith(":"):  # the lines between show where in its own text it was
        reason = f"{reason} {causes[0]}"
    reason = re.sub(r'Unimplemented keys: \["(.*)"\]', _keywords, reason)
    for words, meaning, advice in _MEANINGS:
        if words in error:
            return f"a schema of the request cannot be enforced: {meaning or reason}; {advice}"
    advice = f"simplify it, {_SEND_LENIENT}"
    return f"a schema of the request cannot be enforced: {reason}; {advice}"


def _keywords(found: re.Match[str]) -> str:
    return "Unimplemented keys: " + found[1].replace('", "', ", ")
