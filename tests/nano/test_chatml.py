from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from dlite_agent.nano.chatml import (
    CONTROL_TOKENS,
    Conversation,
    encode_conversation,
    render,
    train_tokenizer,
)

CALL = {"type": "function", "function": {"name": "f", "arguments": {"x": "é<", "n": 1}}}
MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "old", "reasoning_content": "dropped"},
    {"role": "user", "content": "go"},
    {"role": "assistant", "content": "", "reasoning_content": "kept", "tool_calls": [CALL]},
    {"role": "tool", "content": "r1"},
    {"role": "tool", "content": "r2"},
]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
EXPECTED = """\
<|im_start|>system
Be brief.

# Tools

<tools>
{"type": "function", "function": {"name": "f", "parameters": {}}}
</tools><|im_end|>
<|im_start|>user
hi<|im_end|>
<|im_start|>assistant
old<|im_end|>
<|im_start|>user
go<|im_end|>
<|im_start|>assistant
<think>
kept
</think>

<tool_call>
{"name": "f", "arguments": {"x": "é<", "n": 1}}
</tool_call><|im_end|>
<|im_start|>user
<tool_response>
r1
</tool_response>
<tool_response>
r2
</tool_response><|im_end|>
"""


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(["def total(a, b):\n    return a + b\n"] * 9, 300)


def test_template_writes_this_text() -> None:
    assert render(MESSAGES, TOOLS) == EXPECTED


def test_generation_prompt_follows_thinking() -> None:
    messages = [{"role": "user", "content": "hi"}]
    start = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert render(messages, add_generation_prompt=True) == start
    off = render(messages, add_generation_prompt=True, enable_thinking=False)
    assert off == start + "<think>\n\n</think>\n\n"


def test_several_calls_and_content_stand_on_lines_of_their_own() -> None:
    messages = [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": "I call.", "tool_calls": [CALL, CALL]},
        {"role": "tool", "content": "r"},
    ]
    call = '<tool_call>\n{"name": "f", "arguments": {"x": "é<", "n": 1}}\n</tool_call>'
    assert f"assistant\nI call.\n{call}\n{call}<|im_end|>" in render(messages)


@given(st.text())
@settings(max_examples=200, deadline=None)
def test_any_text_survives_the_tokenizer(text: str) -> None:
    tokenizer = train_tokenizer(["a"] * 9, 300)
    for token in CONTROL_TOKENS:
        text = text.replace(token, "")
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_a_word_is_the_same_tokens_wherever_it_stands(tokenizer: Tokenizer) -> None:
    word = tokenizer.encode("cartwheel").ids
    for text in (
        "def cartwheel(a)",
        "a, cartwheel)",
        "/cartwheel.py",
        '\\"cartwheel',
        "b cartwheel\n",
    ):
        ids = tokenizer.encode(text).ids
        assert any(ids[i : i + len(word)] == word for i in range(len(ids)))


@pytest.mark.parametrize("thinking", [True, False])
def test_only_what_the_assistant_samples_is_learned(tokenizer: Tokenizer, thinking: bool) -> None:
    messages = [*MESSAGES[:2], {"role": "assistant", "content": "yes"}]
    if thinking:
        messages[2]["reasoning_content"] = "hm"
    row = encode_conversation(tokenizer, Conversation(messages, TOOLS, thinking))
    pairs = zip(row.ids, row.weights, strict=True)
    learned = tokenizer.decode([i for i, w in pairs if w == 1.0], skip_special_tokens=False)
    assert learned == ("<think>\nhm\n</think>\n\nyes<|im_end|>" if thinking else "yes<|im_end|>")


def test_deliberate_mistakes_have_no_weight(tokenizer: Tokenizer) -> None:
    messages = [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": "wrong"},
        {"role": "user", "content": "again"},
        {"role": "assistant", "content": "right"},
    ]
    row = encode_conversation(tokenizer, Conversation(messages, (), False, frozenset({1})))
    pairs = list(zip(row.ids, row.weights, strict=True))
    learned = tokenizer.decode([i for i, w in pairs if w == 1.0], skip_special_tokens=False)
    assert learned == "right<|im_end|>"
    assert (
        tokenizer.decode([i for i, w in pairs if w == 0.0], skip_special_tokens=False)
        == "wrong<|im_end|>"
    )
