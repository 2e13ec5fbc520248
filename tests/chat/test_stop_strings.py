"""Stop strings against a definition that reads the whole text at once."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlite_agent.chat.stop_strings import StopMatcher, StopStrings
from dlite_agent.errors import UnsupportedParameterError


def by_definition(text: str, strings: list[str]) -> tuple[str, str | None]:
    """Text before the first match to be complete (the longest of equals), and the match."""
    for stop in range(1, len(text) + 1):
        found = [string for string in strings if text[:stop].endswith(string)]
        if found:
            longest = max(found, key=len)
            return text[: stop - len(longest)], longest
    return text, None


def read(pieces: list[str], strings: list[str]) -> tuple[list[str], StopMatcher]:
    matcher = StopMatcher(StopStrings(strings))
    shown = []
    for piece in pieces:
        shown.append(matcher.feed(piece))
        if matcher.matched is not None:
            return shown, matcher
    return [*shown, matcher.flush()], matcher


texts = st.text(alphabet="abé\n", max_size=24)


@given(st.lists(texts, max_size=8), st.lists(texts.filter(bool), max_size=5))
def test_any_split_shows_what_the_whole_text_shows(pieces: list[str], strings: list[str]) -> None:
    shown, matcher = read(pieces, strings)
    assert ("".join(shown), matcher.matched) == by_definition("".join(pieces), strings)


@given(texts, st.lists(texts.filter(bool), min_size=1, max_size=4))
def test_only_what_may_become_a_match_is_held_back(text: str, strings: list[str]) -> None:
    matcher = StopMatcher(StopStrings(strings))
    shown = ""
    for place, char in enumerate(text):
        shown += matcher.feed(char)
        if matcher.matched is not None:
            return
        held = text[len(shown) : place + 1]
        starts = {string[:size] for string in strings for size in range(1, len(string))}
        longest = max((s for s in starts if text[: place + 1].endswith(s)), key=len, default="")
        assert held == longest
        assert matcher.is_holding == bool(held)


def test_characters_that_were_read_are_counted() -> None:
    matcher = StopMatcher(StopStrings(["END"]))
    assert matcher.feed("abcE") == "abc"
    assert matcher.num_read == 4
    assert matcher.feed("NDxyz") == ""
    assert (matcher.matched, matcher.num_read) == ("END", 6)


def test_no_strings_hold_nothing_back() -> None:
    assert read(["abc"], [])[0] == ["abc", ""]


@pytest.mark.parametrize("strings", [[""], ["a", ""], [7], [None]])
def test_an_empty_string_is_refused(strings: list[str]) -> None:
    with pytest.raises(UnsupportedParameterError, match=r"stop has .*at least one character"):
        StopStrings(strings)


def test_too_many_strings_are_refused_with_the_limit() -> None:
    with pytest.raises(UnsupportedParameterError, match=r"33000 strings of 33000 .*limit is 32768"):
        StopStrings(["a"] * 33_000)


def test_strings_that_never_come_cost_a_look_up_a_character() -> None:
    stops = StopStrings([f"never {i} {'x' * 20}" for i in range(1_000)])
    matcher = StopMatcher(stops)
    text = "nevertheless never 7 xyz " * 4_000
    began_s = time.thread_time()
    shown = matcher.feed(text) + matcher.flush()
    assert shown == text
    assert time.thread_time() - began_s < 2.0  # 100,000 characters
