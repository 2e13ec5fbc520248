"""What the parser reads from a turn, the template renders back to the same tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlite_agent.chat.messages import Message, ToolCall
from dlite_agent.chat.renderer import Renderer, Tokenizer
from dlite_agent.chat.stream_parser import StreamParser
from dlite_agent.testing import ByteTokenizer
from dlite_agent.tokenizer import load_tokenizer

NANO = Path(__file__).parents[2] / "dlite_agent" / "nano" / "assets"
QUESTION = Message("user", "Go on.")


@pytest.fixture(scope="module", params=["bytes", "nano"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return ByteTokenizer() if request.param == "bytes" else load_tokenizer(str(NANO))


@pytest.fixture(scope="module")
def renderer(tokenizer: Tokenizer) -> Renderer:
    return Renderer(tokenizer)


def sampled(renderer: Renderer, tokenizer: Tokenizer, answer: Message) -> list[int]:
    """The ids of an answer from behind the generation prompt to its stop token."""
    prompt = renderer.render((QUESTION,), (), template_kwargs={}).token_ids
    whole = renderer.render(
        (QUESTION, answer), (), template_kwargs={}, add_generation_prompt=False
    ).token_ids
    assert whole[: len(prompt)] == prompt
    stop = tokenizer.control_tokens["<|im_end|>"]
    return list(whole[len(prompt) : len(prompt) + whole[len(prompt) :].index(stop) + 1])


def parsed(tokenizer: Tokenizer, ids: list[int]) -> Message:
    parser = StreamParser(tokenizer, new_call_id=lambda: "id")
    parser.feed(ids)
    turn = parser.finish("stop")
    assert turn.unparsed == ()
    return turn.message


TEXT = st.text(st.sampled_from("ab é\t{}\"'\\<你👋\n"), max_size=12)
BODY = TEXT.map(lambda text: text.strip("\n"))
CALLS = st.lists(
    st.builds(
        ToolCall,
        st.sampled_from(["f", "read_file"]),
        st.dictionaries(TEXT, TEXT | st.integers() | st.booleans() | st.none(), max_size=2),
    ),
    max_size=2,
).map(tuple)


@settings(max_examples=60)
@given(reasoning=BODY.filter(str.strip), content=BODY, calls=CALLS)
def test_answer_is_read_as_it_was_rendered(
    renderer: Renderer,
    tokenizer: Tokenizer,
    reasoning: str,
    content: str,
    calls: tuple[ToolCall, ...],
) -> None:
    answer = Message("assistant", content, reasoning.strip(), calls)
    ids = sampled(renderer, tokenizer, answer)
    message = parsed(tokenizer, ids)
    assert message.reasoning == answer.reasoning
    assert message.content == content
    assert [(c.name, c.arguments) for c in message.tool_calls] == [
        (c.name, c.arguments) for c in calls
    ]
    assert sampled(renderer, tokenizer, message) == ids


@pytest.mark.parametrize(
    "content", ["", "Hi", "Hi.\n", "<tool_call>", "a </think> b", "<|im_end|>"]
)
def test_quoted_markers_come_back_as_text(
    renderer: Renderer, tokenizer: Tokenizer, content: str
) -> None:
    calls: Any = (ToolCall("f", {"a": f"x {content} <tool_call> </tool_call>"}),)
    for answer in (
        Message("assistant", content, "hm </think>"),
        Message("assistant", content, "hm <tool_call>", calls),
    ):
        message = parsed(tokenizer, sampled(renderer, tokenizer, answer))
        assert message.content == content
        assert message.reasoning == answer.reasoning
        assert [c.arguments for c in message.tool_calls] == [c.arguments for c in answer.tool_calls]
