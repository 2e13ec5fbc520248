"""Function templates: a docstring that states the rule, the right body, and bodies with one bug.

`{a}`, `{b}` and `{c}` stand for parameter names and `{k}` for a small constant. Each template
says what its arguments are with one letter a parameter: `i` a positive integer, `s` a short text,
`t` a part of that text, `v` a list of integers.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

__all__ = ["TEMPLATES", "Template", "draw_arguments"]


@dataclass(frozen=True, slots=True)
class Template:
    """One kind of function.

    Attributes:
        name: Stable name of the template.
        kinds: One letter a parameter (see the module).
        doc: The docstring; it determines the body.
        body: The right expression.
        bugs: Wrong expressions with the kind of each bug.
    """

    name: str
    kinds: str
    doc: str
    body: str
    bugs: tuple[tuple[str, str], ...]


_TABLE = r"""
plus|ii|{a} plus {b}|{a} + {b}
  sign: {a} - {b}; sign: {a} * {b}
minus|ii|{a} minus {b}|{a} - {b}
  sign: {a} + {b}; swapped: {b} - {a}
times|ii|{a} times {b}|{a} * {b}
  sign: {a} + {b}; sign: {a} ** {b}
divided|ii|{a} divided by {b}|{a} // {b}
  sign: {a} % {b}; sign: {a} * {b}
remainder|ii|the remainder of {a} by {b}|{a} % {b}
  sign: {a} // {b}; swapped: {b} % {a}
power|ii|{a} to the power of {b}|{a} ** {b}
  sign: {a} * {b}; swapped: {b} ** {a}
larger|ii|the larger of {a} and {b}|max({a}, {b})
  function: min({a}, {b})
smaller|ii|the smaller of {a} and {b}|min({a}, {b})
  function: max({a}, {b})
distance|ii|the distance of {a} and {b}|abs({a} - {b})
  sign: abs({a} + {b})
above|ii|whether {a} is above {b}|{a} > {b}
  compare: {a} < {b}; boundary: {a} >= {b}
below|ii|whether {a} is below {b}|{a} < {b}
  compare: {a} > {b}; boundary: {a} <= {b}
atleast|ii|whether {a} is at least {b}|{a} >= {b}
  boundary: {a} > {b}; compare: {a} <= {b}
atmost|ii|whether {a} is at most {b}|{a} <= {b}
  boundary: {a} < {b}; compare: {a} >= {b}
equals|ii|whether {a} equals {b}|{a} == {b}
  compare: {a} != {b}
differs|ii|whether {a} differs from {b}|{a} != {b}
  compare: {a} == {b}
sum3|iii|{a} plus {b} plus {c}|{a} + {b} + {c}
  sign: {a} + {b} - {c}; name: {a} + {b} + {a}
mad|iii|{a} times {b} plus {c}|{a} * {b} + {c}
  sign: {a} * {b} - {c}; name: {a} * {b} + {b}
less2|iii|{a} minus {b} minus {c}|{a} - {b} - {c}
  sign: {a} - {b} + {c}; name: {a} - {b} - {b}
add_constant|i|{a} plus {k}|{a} + {k}
  number: {a} + {l}; sign: {a} - {k}
less_constant|i|{a} minus {k}|{a} - {k}
  number: {a} - {l}; sign: {a} + {k}
timesk|i|{a} times {k}|{a} * {k}
  number: {a} * {l}; sign: {a} + {k}
over_constant|i|whether {a} is above {k}|{a} > {k}
  number: {a} > {l}; compare: {a} < {k}
multiple|i|whether {a} is a multiple of {k}|{a} % {k} == 0
  compare: {a} % {k} != 0; number: {a} % {k} == 1
capped|i|{a} but at most {k}|min({a}, {k})
  function: max({a}, {k}); number: min({a}, {l})
raised|i|{a} but at least {k}|max({a}, {k})
  function: min({a}, {k}); number: max({a}, {l})
half|i|half of {a}|{a} // 2
  sign: {a} * 2; number: {a} // 3
double|i|double of {a}|{a} * 2
  sign: {a} // 2; number: {a} * 3
square|i|the square of {a}|{a} ** 2
  sign: {a} * 2; number: {a} ** 3
next|i|the number after {a}|{a} + 1
  sign: {a} - 1; number: {a} + 2
previous|i|the number before {a}|{a} - 1
  sign: {a} + 1; number: {a} - 2
even|i|whether {a} is even|{a} % 2 == 0
  number: {a} % 2 == 1; number: {a} % 3 == 0
odd|i|whether {a} is odd|{a} % 2 == 1
  number: {a} % 2 == 0; number: {a} % 3 == 1
upper|s|{a} in upper case|{a}.upper()
  method: {a}.lower(); method: {a}.title()
lower|s|{a} in lower case|{a}.lower()
  method: {a}.upper(); method: {a}.title()
strip|s|{a} without outer spaces|{a}.strip()
  method: {a}.lstrip(); method: {a}.rstrip()
reverse|s|{a} in reverse|{a}[::-1]
  slice: {a}[:-1]; slice: {a}[::2]
head|s|the first letter of {a}|{a}[0]
  index: {a}[1]; index: {a}[-1]
tail|s|the last letter of {a}|{a}[-1]
  index: {a}[0]; index: {a}[-2]
unhead|s|{a} without its first letter|{a}[1:]
  slice: {a}[:1]; slice: {a}[2:]
untail|s|{a} without its last letter|{a}[:-1]
  slice: {a}[-1:]; slice: {a}[:-2]
starts|st|whether {a} starts with {b}|{a}.startswith({b})
  method: {a}.endswith({b}); swapped: {b}.startswith({a})
ends|sT|whether {a} ends with {b}|{a}.endswith({b})
  method: {a}.startswith({b}); swapped: {b}.endswith({a})
joined|ss|{a} followed by {b}|{a} + {b}
  swapped: {b} + {a}; name: {a} + {a}
dashed|ss|{a} and {b} with a dash between|{a} + "-" + {b}
  swapped: {b} + "-" + {a}; number: {a} + "_" + {b}
repeated|si|{a} repeated {b} times|{a} * {b}
  method: {a} + str({b})
within|ts|whether {a} occurs in {b}|{a} in {b}
  missing: {a} not in {b}; swapped: {b} in {a}
letters|s|how many letters {a} has|len({a})
  offbyone: len({a}) - 1; offbyone: len({a}) + 1
total|v|the sum of {a}|sum({a})
  function: max({a}); function: len({a})
largest|v|the largest of {a}|max({a})
  function: min({a}); function: sum({a})
smallest|v|the smallest of {a}|min({a})
  function: max({a}); function: sum({a})
items|v|how many items {a} has|len({a})
  function: sum({a}); offbyone: len({a}) - 1
ascending|v|{a} from low to high|sorted({a})
  number: sorted({a}, reverse=True); function: list({a})
descending|v|{a} from high to low|sorted({a}, reverse=True)
  function: sorted({a})
front|vi|the first {b} items of {a}|{a}[:{b}]
  slice: {a}[{b}:]; slice: {a}[-{b}:]
rear|vi|the last {b} items of {a}|{a}[-{b}:]
  slice: {a}[:{b}]; slice: {a}[{b}:]
evens|v|the even numbers of {a}|[i for i in {a} if i % 2 == 0]
  number: [i for i in {a} if i % 2 == 1]
member|iv|whether {a} is in {b}|{a} in {b}
  missing: {a} not in {b}
absent|iv|whether {a} is missing from {b}|{a} not in {b}
  missing: {a} in {b}
empty|v|whether {a} is empty|not {a}
  missing: bool({a})
"""


def _parse(line: str, bugs: str) -> Template:
    name, kinds, doc, body = line.split("|")
    pairs = (bug.split(": ", 1) for bug in bugs.strip().split("; "))
    return Template(name, kinds, doc, body, tuple((kind, wrong) for kind, wrong in pairs))


_LINES = _TABLE.strip().splitlines()

TEMPLATES: tuple[Template, ...] = tuple(map(_parse, _LINES[::2], _LINES[1::2]))
"""Every kind of function, with its bugs."""


def _text(rng: random.Random) -> str:
    letters = "abcdefghiklmnoprstuwy"
    return "".join(rng.choice(letters) for _ in range(rng.randint(3, 5)))


def draw_arguments(rng: random.Random, template: Template) -> tuple[object, ...]:
    """Draw the arguments of a call, one a parameter, of the kinds that the template names."""
    values: list[object] = []
    for kind in template.kinds:
        if kind == "i":
            top = 5 if template.name == "power" else 4 if "v" in template.kinds else 12
            again = values and isinstance(values[-1], int) and rng.random() < 0.3
            values.append(values[-1] if again else rng.randint(2, top))
        elif kind == "v":
            values.append([] if rng.random() < 0.1 else rng.sample(range(1, 10), rng.randint(3, 4)))
        elif kind == "s" and template.name == "strip":
            values.append(" " * rng.randint(1, 2) + _text(rng) + " ")
        else:
            values.append(_text(rng))
    if template.name == "starts" and rng.random() < 0.7:
        values[1] = str(values[0])[:2]
    if template.name == "ends" and rng.random() < 0.7:
        values[1] = str(values[0])[-2:]
    if template.name == "within" and rng.random() < 0.7:
        values[0] = str(values[1])[1:]
    if template.name in {"upper", "lower"}:
        values[0] = str(values[0]).title()
    return tuple(values)
