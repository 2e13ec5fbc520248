"""`ByteTokenizer`: bytes, control tokens, and Qwen3's message format."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlite_agent.chat.messages import JSON
from dlite_agent.testing import ByteTokenizer

TOKENIZER = ByteTokenizer()
IM_START, IM_END = (TOKENIZER.control_tokens[name] for name in ("<|im_start|>", "<|im_end|>"))


@given(st.text())
def test_untrusted_text_round_trips_without_control_ids(text: str) -> None:
    text += "<|im_end|>"
    ids = TOKENIZER.encode_untrusted(text)
    assert max(ids) < 256
    assert TOKENIZER.decode(ids) == text


def test_template_text_gives_control_ids() -> None:
    ids = TOKENIZER.encode_template("<|im_start|>é<|im_end|>")
    assert ids == [IM_START, 0xC3, 0xA9, IM_END]
    assert TOKENIZER.decode(ids) == "<|im_start|>é<|im_end|>"


def test_lone_surrogates_and_unknown_ids_do_no_harm() -> None:
    assert TOKENIZER.encode_untrusted("\ud800") == [ord("?")]
    assert TOKENIZER.token_bytes(256 + len(TOKENIZER.control_tokens)) == b""


@pytest.mark.parametrize("content", ["file.py", None])
def test_conversation_is_rendered_like_qwen3(content: str | None) -> None:
    call: JSON = {"type": "function", "function": {"name": "ls", "arguments": {"path": "é"}}}
    raw: JSON = {"type": "function", "function": {"name": "ls", "arguments": "{broken"}}
    messages: list[dict[str, JSON]] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "First"},
        {"role": "assistant", "content": "ok", "reasoning_content": "forgotten"},
        {"role": "user", "content": "Second"},
        {
            "role": "assistant",
            "content": content,
            "reasoning_content": "kept",
            "tool_calls": [call, raw],
        },
        {"role": "tool", "content": "a"},
        {"role": "tool", "content": "b"},
    ]
    tools: list[dict[str, JSON]] = [{"type": "function", "function": {"name": "ls"}}]
    text = TOKENIZER.apply_template(messages, tools, True, enable_thinking=False)
    spoken = f"{content}\n" if content else ""
    assert text == (
        "<|im_start|>system\nBe brief.\n\n# Tools\n\n<tools>\n"
        '{"type": "function", "function": {"name": "ls"}}\n</tools><|im_end|>\n'
        "<|im_start|>user\nFirst<|im_end|>\n"
        "<|im_start|>assistant\nok<|im_end|>\n"
        "<|im_start|>user\nSecond<|im_end|>\n"
        f"<|im_start|>assistant\n<think>\nkept\n</think>\n\n{spoken}"
        '<tool_call>\n{"name": "ls", "arguments": {"path": "é"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "ls", "arguments": {broken}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\na\n</tool_response>\n"
        "<tool_response>\nb\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )


def test_tools_without_a_system_message_make_one() -> None:
    text = TOKENIZER.apply_template([{"role": "user", "content": "hi"}], [{"a": 1}], False)
    assert text.startswith('<|im_start|>system\n# Tools\n\n<tools>\n{"a": 1}\n</tools><|im_end|>\n')
    assert text.endswith("<|im_start|>user\nhi<|im_end|>\n")


def test_empty_assistant_turn_is_empty() -> None:
    text = TOKENIZER.apply_template([{"role": "assistant", "content": None}], None, False)
    assert text == "<|im_start|>assistant\n<|im_end|>\n"
