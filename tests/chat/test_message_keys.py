"""Chained keys: equal for every way to send one history back, different for every edit."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlite_agent.chat.message_keys import (
    canonical_arguments,
    chain_keys,
    reasoning_digest,
    seed_key,
    turn_forms,
)
from dlite_agent.chat.messages import JSON, Message, ToolCall, ToolSpec, UnparsedToolCall

SEED = seed_key((), {})
EDIT = {"path": "src/a.py", "lines": [1, 2], "text": "    return 1\n"}
HISTORY = (
    Message("system", "You fix bugs."),
    Message("user", "Fix it."),
    Message(
        "assistant",
        "I look first.",
        reasoning="hm",
        tool_calls=(ToolCall("ls", {}, id="a"), ToolCall("edit", EDIT, id="b")),
    ),
    Message("tool", "a.py\n", tool_call_id="a"),
    Message("tool", "done", tool_call_id="b"),
)

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)
json_objects = st.dictionaries(st.text(), json_values, max_size=4)


def with_turn(**changes: object) -> tuple[Message, ...]:
    return (*HISTORY[:2], replace(HISTORY[2], **changes), *HISTORY[3:])  # type: ignore[arg-type]


def with_arguments(arguments: JSON) -> tuple[Message, ...]:
    calls = HISTORY[2].tool_calls
    return with_turn(tool_calls=(calls[0], replace(calls[1], arguments=arguments)))


def renamed(history: tuple[Message, ...], names: dict[str, str | None]) -> tuple[Message, ...]:
    return tuple(
        replace(
            message,
            tool_calls=tuple(replace(c, id=names[c.id or ""]) for c in message.tool_calls),
            tool_call_id=names[message.tool_call_id] if message.tool_call_id else None,
        )
        for message in history
    )


@pytest.mark.parametrize(
    "history",
    [
        pytest.param(with_turn(reasoning=None), id="reasoning dropped"),
        pytest.param(with_turn(reasoning="something else"), id="reasoning replaced"),
        pytest.param(with_turn(content="\n I look first.\n\n"), id="assistant content padded"),
        pytest.param(with_turn(name="agent"), id="speaker named"),
        pytest.param(with_arguments(json.dumps(EDIT)), id="arguments as JSON text"),
        pytest.param(with_arguments(json.dumps(EDIT, indent=2)), id="JSON re-spaced"),
        pytest.param(
            with_arguments(json.dumps(EDIT, sort_keys=True, separators=(",", ":"))),
            id="JSON compact, keys sorted",
        ),
        pytest.param(with_arguments(json.dumps(json.dumps(EDIT))), id="JSON encoded twice"),
        pytest.param(with_arguments(dict(reversed(EDIT.items()))), id="keys re-ordered"),
        pytest.param(with_arguments({**EDIT, "lines": [1.0, 2.0]}), id="1 written as 1.0"),
        pytest.param(renamed(HISTORY, {"a": "x", "b": "y"}), id="ids regenerated"),
        pytest.param(renamed(HISTORY, {"a": None, "b": None}), id="ids dropped"),
        pytest.param(renamed(HISTORY, {"a": "", "b": ""}), id="ids blanked"),
    ],
)
def test_what_clients_change_by_themselves_keeps_the_keys(history: tuple[Message, ...]) -> None:
    assert chain_keys(history, SEED) == chain_keys(HISTORY, SEED)


@pytest.mark.parametrize(
    ("history", "first_changed"),
    [
        pytest.param((Message("system", "You fix bugs. "), *HISTORY[1:]), 0, id="system padded"),
        pytest.param((HISTORY[0], Message("user", "Fix it.\n"), *HISTORY[2:]), 1, id="user padded"),
        pytest.param(with_turn(content="I look, first."), 2, id="assistant content edited"),
        pytest.param(with_turn(content="I  look first."), 2, id="spaces inside content"),
        pytest.param(with_turn(tool_calls=HISTORY[2].tool_calls[:1]), 2, id="call removed"),
        pytest.param(with_turn(tool_calls=HISTORY[2].tool_calls[::-1]), 2, id="calls swapped"),
        pytest.param(with_arguments({**EDIT, "path": "src/b.py"}), 2, id="argument changed"),
        pytest.param(
            with_arguments({**EDIT, "text": "  return 1\n"}), 2, id="indentation in a string"
        ),
        pytest.param(with_arguments({**EDIT, "lines": [2, 1]}), 2, id="list re-ordered"),
        pytest.param(with_arguments({**EDIT, "lines": ["1", 2]}), 2, id="number made a string"),
        pytest.param(with_arguments({**EDIT, "lines": [True, 2]}), 2, id="number made a boolean"),
        pytest.param(
            (*HISTORY[:3], replace(HISTORY[3], content="a.py"), HISTORY[4]), 3, id="result trimmed"
        ),
        pytest.param(
            (*HISTORY[:3], replace(HISTORY[3], tool_call_id="b"), HISTORY[4]),
            3,
            id="result of another call",
        ),
        pytest.param((*HISTORY[:3], *HISTORY[:2:-1]), 3, id="results swapped"),
    ],
)
def test_an_edit_changes_the_keys_from_there_on(
    history: tuple[Message, ...], first_changed: int
) -> None:
    original, edited = chain_keys(HISTORY, SEED), chain_keys(history, SEED)
    assert edited[:first_changed] == original[:first_changed]
    assert not set(edited[first_changed:]) & set(original)


def test_key_of_a_message_depends_on_nothing_behind_it() -> None:
    assert chain_keys(HISTORY[:3], SEED) == chain_keys(HISTORY, SEED)[:3]


def test_fields_do_not_run_into_each_other() -> None:
    first = Message("assistant", "a", tool_calls=(ToolCall("b", {}),))
    second = Message("assistant", "ab", tool_calls=(ToolCall("", {}),))
    assert chain_keys((first,), SEED) != chain_keys((second,), SEED)


def test_results_without_ids_count_as_in_order_even_beside_results_with_ids() -> None:
    second, first = replace(HISTORY[3], tool_call_id="b"), replace(HISTORY[4], tool_call_id=None)
    swapped = (*HISTORY[:3], second, first)
    named = (*HISTORY[:3], second, replace(first, tool_call_id="a"))
    assert chain_keys(swapped, SEED) == chain_keys(named, SEED)


def test_more_results_than_calls_are_no_error() -> None:
    history = (*HISTORY, Message("tool", "stray", tool_call_id="a"), Message("tool", "stray"))
    assert len(set(chain_keys(history, SEED))) == len(history)


def test_seed_ignores_order_of_tools_and_schema_keys() -> None:
    schema: dict[str, JSON] = {"type": "object", "properties": {"a": {"type": "string"}}}
    shuffled = dict(reversed(schema.items()))
    tools = (ToolSpec("ls", "List.", schema), ToolSpec("rm", "Remove."))
    assert seed_key(tools, {}) == seed_key((tools[1], ToolSpec("ls", "List.", shuffled)), {})


def test_seed_covers_tools_and_the_variables_that_shape_the_history() -> None:
    tool = ToolSpec("ls", "List.")
    seeds = {
        seed_key((), {}),
        seed_key((tool,), {}),
        seed_key((replace(tool, description="List!"),), {}),
        seed_key((), {"preserve_thinking": True}),
    }
    assert len(seeds) == 4


def test_seed_ignores_variables_of_the_generation_prompt() -> None:
    assert seed_key((), {"enable_thinking": False}) == seed_key((), {"enable_thinking": True})
    assert seed_key((), {"enable_thinking": False}) == SEED


def turn_keys(*arguments: Any) -> tuple[bytes, ...]:
    return tuple(form.key for form in turn_forms(*arguments))


def test_key_of_an_answer_is_the_one_that_it_has_when_it_comes_back() -> None:
    previous = chain_keys(HISTORY[:2], SEED)[-1]
    assert turn_keys(previous, HISTORY[2]) == (chain_keys(HISTORY[:3], SEED)[-1],)


def test_answer_that_spells_a_thought_out_may_come_back_as_that_thought() -> None:
    answer = Message("assistant", "<think>say</think>\n\nYes.", reasoning="hm")
    kept, dropped = turn_forms(SEED, answer)
    assert kept == (*chain_keys((answer,), SEED), reasoning_digest("hm"))
    moved = Message("assistant", "Yes.", reasoning="say")
    assert dropped == (*chain_keys((moved,), SEED), reasoning_digest("say"))
    assert turn_forms(SEED, replace(answer, reasoning=None)) == (dropped,)


def test_answer_with_a_broken_call_has_a_key_without_and_one_with_it() -> None:
    broken = UnparsedToolCall('{"name": "ls", ', "unexpected end", "c", name="ls")
    keys = turn_keys(SEED, Message("assistant", "Look."), (broken,))
    dropped = Message("assistant", "Look.")
    echoed = replace(dropped, tool_calls=(ToolCall("ls", broken.text, id="z"),))
    assert keys == (*chain_keys((dropped,), SEED), *chain_keys((echoed,), SEED))


def test_broken_call_without_a_name_counts_as_one_with_an_empty_name() -> None:
    broken = UnparsedToolCall("}", "no name", "c")
    echoed = Message("assistant", tool_calls=(ToolCall("", "}"),))
    assert turn_keys(SEED, Message("assistant"), (broken,))[1:] == chain_keys((echoed,), SEED)


@pytest.mark.parametrize("nothing", [None, "", "  ", "null", {}, "{}"])
def test_missing_arguments_are_empty_arguments(nothing: JSON) -> None:
    assert canonical_arguments(nothing) == b"{}"


@pytest.mark.parametrize(
    "text",
    ["not json", '{"a": 1', "NaN", "1e999", "[" * 100_000, '"\\ud800"', "9" * 5000],
    ids=["words", "cut", "NaN", "overflow", "nested", "surrogate", "digits"],
)
def test_odd_argument_text_is_no_error_and_equals_only_itself(text: str) -> None:
    assert canonical_arguments(text) == canonical_arguments(text + "\n")
    assert canonical_arguments(text) != canonical_arguments("x" + text)


def test_arguments_that_no_json_has_are_no_error() -> None:
    odd = {"path": complex(1, 2), 3: "three", None: 0, "a": 1}
    assert canonical_arguments(odd)  # type: ignore[arg-type]  # hosts build messages by hand


def test_text_of_text_of_text_is_unpacked_only_so_far() -> None:
    text = json.dumps(EDIT)
    for _ in range(5):
        text = json.dumps(text)
    assert canonical_arguments(text) != canonical_arguments(EDIT)


@given(json_objects)
def test_arguments_equal_their_json_text_in_any_spacing_and_order(value: dict[str, JSON]) -> None:
    text = json.dumps(dict(reversed(value.items())), indent=1)
    assert canonical_arguments(text) == canonical_arguments(value)


@settings(max_examples=50)
@given(json_objects, json_objects)
def test_different_arguments_differ(left: dict[str, JSON], right: dict[str, JSON]) -> None:
    same = canonical_arguments(left) == canonical_arguments(right)
    if same:  # Python says so too: it holds 1 == 1.0, and only more than JSON does (True == 1)
        assert left == right
    elif left == right:
        assert "true" in json.dumps([left, right]) or "false" in json.dumps([left, right])


@given(st.text())
def test_blank_reasoning_is_none_and_ends_do_not_count(text: str) -> None:
    digest = reasoning_digest(text)
    assert (digest == b"") == (text.strip() == "")
    assert reasoning_digest(f"\n{text} \n") == digest
    assert reasoning_digest(None) == b""


def test_reasoning_that_differs_inside_has_another_digest() -> None:
    assert reasoning_digest("a b") != reasoning_digest("a  b")
