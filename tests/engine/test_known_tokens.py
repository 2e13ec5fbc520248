from __future__ import annotations

from dlite_agent.chat.renderer import RenderedPrompt, Segment
from dlite_agent.engine.known_tokens import KnownTokens

START, END = 1, 2
CONTROLS = frozenset({START, END})
NEWLINE = 10


def prompt(*messages: list[int], generation: tuple[int, ...] = (START, 9)) -> RenderedPrompt:
    """Messages as [START, body…, END, NEWLINE], and a generation prompt."""
    ids: list[int] = []
    segments = []
    for index, body in enumerate(messages):
        start = len(ids)
        ids += [START, *body, END, NEWLINE]
        segments.append(Segment(index, start, len(ids)))
    segments.append(Segment(None, len(ids), len(ids) + len(generation)))
    return RenderedPrompt((*ids, *generation), tuple(segments))


def keys(*names: str) -> tuple[bytes, ...]:
    return tuple(name.encode() for name in names)


def test_everything_of_a_first_prompt_is_new() -> None:
    first = prompt([5, 6])
    assert KnownTokens().count_new(first, keys("a"), CONTROLS) == len(first.token_ids)


def test_what_was_sampled_is_known_and_what_closes_it_is_new() -> None:
    known = KnownTokens()
    known.add(prompt([5, 6]).token_ids, keys("a"), [20, 21, END])
    known.add_answer(keys("b"), is_closed=True)
    second = prompt([5, 6], [9, 20, 21], [7])
    assert known.count_new(second, keys("a", "b", "c"), CONTROLS) == len([10, 1, 7, 2, 10, 1, 9])


def test_a_turn_that_was_cut_gets_its_closing_token_anew() -> None:
    known = KnownTokens()
    known.add(prompt([5, 6]).token_ids, keys("a"), [20, 21])
    known.add_answer(keys("b"), is_closed=False)
    second = prompt([5, 6], [9, 20, 21], [7])
    assert known.count_new(second, keys("a", "b", "c"), CONTROLS) == 8


def test_a_message_that_has_to_be_rendered_differently_is_not_new() -> None:
    known = KnownTokens()
    known.add(prompt([5, 6]).token_ids, keys("a"), [20, 21, 22, END])
    known.add_answer(keys("b"), is_closed=True)
    second = prompt([5, 6], [9, 30, 31, 32], [7])  # other ids for the same answer
    assert known.count_new(second, keys("a", "b", "c"), CONTROLS) == 7


def test_the_longest_equal_prefix_counts_inside_an_edited_message() -> None:
    known = KnownTokens()
    known.add(prompt([5, 6, 7, 8]).token_ids, keys("a"), [20, END])
    edited = prompt([5, 6, 7, 99])
    assert known.count_new(edited, keys("x"), CONTROLS) == len(edited.token_ids) - 4


def test_a_prompt_that_was_read_before_is_known_to_its_end() -> None:
    known = KnownTokens()
    first = prompt([5, 6])
    known.add(first.token_ids, keys("a"), [])
    assert known.count_new(first, keys("a"), CONTROLS) == 0
    known.add_answer(keys("a"), is_closed=True)  # read before it was sampled: all of it is known
    assert known.count_new(prompt([5, 6], generation=()), keys("a"), CONTROLS) == 0


def test_a_template_that_hides_its_messages_is_compared_by_tokens_alone() -> None:
    known = KnownTokens()
    known.add([1, 5, 6], keys("a"), [])
    assert known.count_new(RenderedPrompt((1, 5, 7)), keys("a"), CONTROLS) == 1


def test_a_longer_history_replaces_the_shorter_ones_that_it_continues() -> None:
    known = KnownTokens()
    for length in range(1, 50):
        known.add(list(range(length)), (), [])
    assert len(known._sequences) == 1
    for first in range(100, 300):
        known.add([first], (), [])
    assert len(known._sequences) == 64


def test_what_a_running_turn_holds_is_new_to_nobody_else_and_is_forgotten_with_it() -> None:
    known = KnownTokens()
    first, second = prompt([5, 6, 7], [8]), prompt([5, 6, 7], [9])
    with known.running(first.token_ids):
        assert known.count_new(second, keys("a", "c"), CONTROLS) == 5
        with known.running(second.token_ids):
            assert known.count_new(second, keys("a", "c"), CONTROLS) == 0
    assert known.count_new(second, keys("a", "c"), CONTROLS) == len(second.token_ids)
