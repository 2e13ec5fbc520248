"""Rendering equals the checkpoint's template, costs what is new, and maps tokens to messages."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import dlite_agent
from dlite_agent.chat.messages import Message, ToolCall, ToolSpec
from dlite_agent.chat.openai_format import messages_from_openai, tools_from_openai
from dlite_agent.chat.renderer import RenderedPrompt, Renderer
from dlite_agent.chat.template import template_messages, template_tools
from dlite_agent.testing import ByteTokenizer
from dlite_agent.tokenizer import CheckpointTokenizer, load_tokenizer

GOLDEN: list[dict[str, Any]] = json.loads(
    (Path(__file__).parents[1] / "data" / "golden_conversations.json").read_text()
)


NANO = Path(dlite_agent.__file__).parent / "nano" / "assets"
BASH = ToolSpec("bash", "Run it.", {"type": "object", "properties": {"cmd": {"type": "string"}}})


@pytest.fixture(scope="module")
def oracle(qwen3_tokenizer_dir: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(qwen3_tokenizer_dir))


def _decoded(tokenizer: Any, prompt: RenderedPrompt) -> list[tuple[int | None, str]]:
    return [
        (s.message_index, tokenizer.decode(prompt.token_ids[s.start : s.stop]))
        for s in prompt.segments
    ]


def test_golden_set_is_large() -> None:
    assert len({conversation["name"] for conversation in GOLDEN}) >= 60


@pytest.mark.parametrize("golden", GOLDEN, ids=lambda golden: golden["name"])
def test_rendering_equals_apply_chat_template(
    golden: dict[str, Any], qwen3_renderer: Renderer, oracle: Any
) -> None:
    messages = messages_from_openai(golden["messages"])
    tools = tools_from_openai(golden.get("tools"))
    variables = golden.get("template_kwargs", {})
    has_prompt = golden.get("add_generation_prompt", True)
    prompt = qwen3_renderer.render(
        messages, tools, template_kwargs=variables, add_generation_prompt=has_prompt
    )
    expected = oracle.apply_chat_template(
        template_messages(messages),
        tools=template_tools(tools),
        add_generation_prompt=has_prompt,
        return_dict=False,
        **variables,
    )
    assert list(prompt.token_ids) == expected
    assert prompt.notes == ()
    again = qwen3_renderer.render(
        messages, tools, template_kwargs=variables, add_generation_prompt=has_prompt
    )
    assert again == prompt


def test_the_embedded_checkpoint_renders_the_golden_set_too() -> None:
    from transformers import AutoTokenizer

    nano = Renderer(load_tokenizer(str(NANO)))
    oracle = AutoTokenizer.from_pretrained(str(NANO))
    for golden in GOLDEN:
        messages = messages_from_openai(golden["messages"])
        tools = tools_from_openai(golden.get("tools"))
        variables = golden.get("template_kwargs", {})
        has_prompt = golden.get("add_generation_prompt", True)
        prompt = nano.render(
            messages, tools, template_kwargs=variables, add_generation_prompt=has_prompt
        )
        expected = oracle.apply_chat_template(
            template_messages(messages),
            tools=template_tools(tools),
            add_generation_prompt=has_prompt,
            return_dict=False,
            **variables,
        )
        assert list(prompt.token_ids) == expected, golden["name"]
        assert prompt.notes == ()


# Halves of control tokens, but no whole one in any order.
_HALVES = st.sampled_from("a Z 7 é 😀 中 < > | 's </ <|im_ thin { \" \\ <tool_ nse>".split(" "))
_SPACES = st.sampled_from([" ", "  ", "\n", "\r\n", "\t", "\x00", "\u2028"])
_MARKS = st.sampled_from(["e\u0301", "\u0301", "\U000f0000", "def f(x):\n    "])
_TEXT = st.lists(_HALVES | _SPACES | _MARKS, max_size=8).map("".join)
_CALL = st.builds(
    ToolCall, _TEXT, st.dictionaries(_TEXT, _TEXT | st.integers() | st.none(), max_size=2)
)
_MESSAGE = st.one_of(
    st.builds(Message, st.sampled_from(["system", "user", "tool"]), _TEXT),
    st.builds(
        Message,
        st.just("assistant"),
        _TEXT,
        reasoning=st.none() | _TEXT,
        tool_calls=st.lists(_CALL, max_size=2).map(tuple),
    ),
)


@settings(max_examples=150)
@given(messages=st.lists(_MESSAGE, min_size=1, max_size=6), description=_TEXT)
def test_any_conversation_equals_apply_chat_template(
    qwen3_renderer: Renderer, oracle: Any, messages: list[Message], description: str
) -> None:
    tools = [ToolSpec("bash", description, {"type": "object", "title": description})]
    prompt = qwen3_renderer.render(messages, tools)
    expected = oracle.apply_chat_template(
        template_messages(messages),
        tools=template_tools(tools),
        add_generation_prompt=True,
        return_dict=False,
    )
    assert list(prompt.token_ids) == expected
    assert prompt.notes == ()


def _is_plain(message: dict[str, Any]) -> bool:
    """Whether the template reads a message of a client as it is, but for arguments as text."""
    calls = message.get("tool_calls", [])
    return (
        message["role"] in ("system", "user", "assistant", "tool")
        and isinstance(message.get("content"), str)
        and not {"function_call", "reasoning"}.intersection(message)
        and all(isinstance(_loaded(call), dict) for call in calls)
    )


def _loaded(call: dict[str, Any]) -> object:
    try:
        return json.loads(call["function"]["arguments"])
    except ValueError:
        return None


def test_normalising_changes_nothing_that_the_template_reads(
    qwen3_renderer: Renderer, oracle: Any
) -> None:
    changed = (  # by normalising, on purpose
        "results out of order",
        "a result is missing",
        "arguments with NaN",
        "tool without description",
    )
    plain = [
        golden
        for golden in GOLDEN
        if all(map(_is_plain, golden["messages"])) and golden["name"] not in changed
    ]
    assert len(plain) >= 45
    for golden in plain:
        messages = json.loads(json.dumps(golden["messages"]))
        for message in messages:
            for call in message.get("tool_calls", []):
                call["function"]["arguments"] = _loaded(call)
        expected = oracle.apply_chat_template(
            messages,
            tools=golden.get("tools"),
            add_generation_prompt=golden.get("add_generation_prompt", True),
            return_dict=False,
            **golden.get("template_kwargs", {}),
        )
        prompt = qwen3_renderer.render(
            messages_from_openai(golden["messages"]),
            tools_from_openai(golden.get("tools")),
            template_kwargs=golden.get("template_kwargs"),
            add_generation_prompt=golden.get("add_generation_prompt", True),
        )
        assert list(prompt.token_ids) == expected, golden["name"]


def test_template_traits_of_qwen3(qwen3_renderer: Renderer) -> None:
    assert qwen3_renderer.traits.header == "<|im_start|>assistant\n"
    assert qwen3_renderer.traits.closer == "<|im_end|>"
    assert qwen3_renderer.strips_thoughts
    assert qwen3_renderer.joins_segments
    assert not qwen3_renderer.traits.arguments_as_text
    assert not qwen3_renderer.traits.arguments_as_mapping
    assert not qwen3_renderer.traits.single_system


def test_a_turn_encodes_only_what_is_new(qwen3: CheckpointTokenizer) -> None:
    renderer = Renderer(qwen3)
    messages = [Message("system", "You fix bugs. " * 50), Message("user", "Go.")]
    costs = []
    for turn in range(30):
        renderer.render(messages, [BASH])
        before = renderer.num_encoded_chars
        call = ToolCall("bash", {"cmd": f"echo {turn}"}, id=f"c{turn}")
        result = Message("tool", f"{turn} result\n" * 100, tool_call_id=f"c{turn}")
        messages += [Message("assistant", "", tool_calls=(call,)), result]
        renderer.render(messages, [BASH])
        costs.append(renderer.num_encoded_chars - before)
    assert max(costs) < 1.5 * min(costs)
    assert max(costs) < 2_000


def test_forgotten_segments_are_encoded_again() -> None:
    renderer = Renderer(ByteTokenizer(), max_cache_bytes=1)
    messages = [Message("user", "hello")]
    first = renderer.render(messages)
    before = renderer.num_encoded_chars
    assert renderer.render(messages) == first
    assert renderer.num_encoded_chars > before


def test_every_token_has_its_message(byte_renderer: Renderer) -> None:
    tokenizer = ByteTokenizer()
    calls = (ToolCall("f", {}, id="1"), ToolCall("g", {}, id="2"))
    messages = [
        Message("user", "q"),
        Message("assistant", "", reasoning="hm", tool_calls=calls),
        Message("tool", "", tool_call_id="1"),
        Message("tool", "two", tool_call_id="2"),
    ]
    prompt = byte_renderer.render(messages, [ToolSpec("f"), ToolSpec("g")])
    parts = _decoded(tokenizer, prompt)
    assert [index for index, _ in parts] == [None, 0, 1, 2, 3, None]
    assert parts[2][1].startswith("<|im_start|>assistant\n<think>")
    assert parts[3][1] == "<|im_start|>user\n<tool_response>\n\n</tool_response>\n"
    assert parts[4][1] == "<tool_response>\ntwo\n</tool_response><|im_end|>\n"
    found = [prompt.message_at(segment.start) for segment in prompt.segments]
    assert found == [index for index, _ in parts]
    assert prompt.message_at(len(prompt.token_ids)) is None
    assert prompt.message_at(-1) is None


def test_message_without_any_text_joins_the_one_before(byte_renderer: Renderer) -> None:
    messages = [Message("user", "a"), Message("assistant", ""), Message("user", "b")]
    prompt = byte_renderer.render(messages)
    assert [s.message_index for s in prompt.segments] == [0, 2, None]


def test_reasoning_starts_where_the_prompt_says_so(qwen3_renderer: Renderer) -> None:
    asked = [Message("user", "Say <think>")]
    assert not qwen3_renderer.render(asked).starts_in_reasoning
    off = qwen3_renderer.render(asked, template_kwargs={"enable_thinking": False})
    assert not off.starts_in_reasoning
    assert not qwen3_renderer.render(asked, add_generation_prompt=False).starts_in_reasoning


def test_messages_are_not_changed(byte_renderer: Renderer) -> None:
    message = Message("assistant", "<think>", tool_calls=(ToolCall("f", {"<think>": ["<think>"]}),))
    before = replace(message)
    byte_renderer.render([Message("user", "a"), message])
    assert message == before
