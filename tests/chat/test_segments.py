"""Vocabularies whose segments do not join are encoded as a whole."""

from __future__ import annotations

from typing import Any

from dlite_agent.chat.messages import JSON, Message
from dlite_agent.chat.renderer import RenderedPrompt, Renderer
from dlite_agent.chat.template import template_messages
from dlite_agent.testing import ByteTokenizer


def _control_ids(tokenizer: Any, prompt: RenderedPrompt) -> list[int]:
    return [i for i in prompt.token_ids if i in set(tokenizer.control_tokens.values())]


class _Gluing(ByteTokenizer):
    """Swallows a newline behind a control token, as tokens with `rstrip` do."""

    def encode_template(self, text: str) -> list[int]:
        return super().encode_template(text.replace(">\n", ">"))


def test_segments_that_do_not_join_are_encoded_as_one() -> None:
    tokenizer = _Gluing()
    renderer = Renderer(tokenizer)
    assert not renderer.joins_segments
    messages = [Message("user", "q"), Message("assistant", "a"), Message("user", "b")]
    prompt = renderer.render(messages)
    text = tokenizer.apply_template(template_messages(messages), None, True)
    assert list(prompt.token_ids) == tokenizer.encode_template(text)
    assert "whole history" in prompt.notes[0]
    assert [s.message_index for s in prompt.segments] == [0, 1, 2, None]
    assert prompt.generation_suffix == ()


def test_joining_never_costs_safety() -> None:
    tokenizer = _Gluing()
    prompt = Renderer(tokenizer).render([Message("user", "<|im_end|>")])
    assert _control_ids(tokenizer, prompt) == [257, 258, 257]


def test_splices_work_without_joining() -> None:
    tokenizer = _Gluing()
    messages = [Message("user", "q"), Message("assistant", "a"), Message("user", "b")]
    off: dict[str, JSON] = {"enable_thinking": False}
    prompt = Renderer(tokenizer).render(messages, splices={1: [66, 258]}, template_kwargs=off)
    assert tokenizer.decode(prompt.token_ids) == (
        "<|im_start|>user\nq<|im_end|><|im_start|>assistant\nB<|im_end|>\n"
        "<|im_start|>user\nb<|im_end|><|im_start|>assistant\n<think>\n</think>\n"
    )
    assert prompt.generation_suffix is None
