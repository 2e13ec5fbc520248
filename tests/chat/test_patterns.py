"""Patterns of schemas: what they are found in, and whole texts."""

from __future__ import annotations

import re

import pytest

from dlite_agent.chat.patterns import example, examples, whole_text


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        (r"\.py$", ".py"),
        (r"^\S+@\S+\.com$", "a@a.com"),
        (r"^[^/]+/[^/]+$", "a/a"),
        (r"^(foo|ba)-\d+$", "ba-0"),
        ("[A-Z]", "A"),
        ("^https?://", "http://"),
        (r"^\w{3,}$", "aaa"),
        (r"^\d{4}-\d\d$", "0000-00"),
        ("^#(?:[0-9a-f]{3}){1,2}?$", "#aaa"),
        ("(?P<x>q)(?:z)*", "q"),
        ("^abc|x$", "x"),
        ("a{2}|", ""),
        (r"[]x]\]", "]]"),
        (r"\x41\u0042\n", "AB\n"),
        (r"[^\x00-\x7f]", "é"),
    ],
)
def test_example_is_short_and_matches(pattern: str, text: str) -> None:
    assert example(pattern) == text
    assert re.fullmatch(whole_text(pattern), text)
    assert bool(re.fullmatch(whole_text(pattern), f"<{text}>")) is bool(
        re.search(pattern, f"<{text}>")
    )


@pytest.mark.parametrize(
    "pattern",
    [r"^(?=.*\d).*$", r"(a)\1", "(?i)x", r"\bword", "a^b", "a$b", "(^a|b)", "(a", "a)", "[a", "*a"],
)
def test_what_is_not_read_has_no_example(pattern: str) -> None:
    assert example(pattern) is None
    with pytest.raises(ValueError, match="the pattern"):
        whole_text(pattern)


def test_a_pattern_that_matches_nothing_has_no_example() -> None:
    assert example(r"[^\s\S]") is None


def test_examples_of_a_schema_come_from_everywhere_in_it() -> None:
    schema = {
        "$defs": {"T": {"type": "string", "format": "email"}},
        "properties": {"a": {"anyOf": [{"pattern": "^a+$"}, {"$ref": "#/$defs/T"}]}},
        "items": {"format": "unheard-of"},
    }
    assert list(examples(schema)) == ["a@b.co", "a"]  # type: ignore[arg-type]
