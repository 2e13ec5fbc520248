"""Whatever ids an answer has: sent back by any client, it is spliced as it was sampled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlite_agent.chat.message_keys import chain_keys, seed_key, turn_forms
from dlite_agent.chat.messages import Message, UnparsedToolCall
from dlite_agent.chat.openai_format import message_to_openai, messages_from_openai
from dlite_agent.chat.renderer import Renderer, Tokenizer
from dlite_agent.chat.replay import ReplayPlan, plan_replay
from dlite_agent.chat.stream_parser import StreamParser
from dlite_agent.sessions.journal import Journal, JournalRecord
from dlite_agent.testing import ByteTokenizer
from dlite_agent.tokenizer import load_tokenizer

NANO = Path(__file__).parents[2] / "dlite_agent" / "nano" / "assets"
ASKED = (Message("system", "Be brief."), Message("user", "Go on."))
SEED = seed_key((), {})


@pytest.fixture(scope="module", params=["bytes", "nano", "qwen3"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    if request.param == "bytes":
        return ByteTokenizer()
    if request.param == "nano":
        return load_tokenizer(str(NANO))
    return load_tokenizer(str(request.getfixturevalue("qwen3_tokenizer_dir")))


@pytest.fixture(scope="module")
def renderer(tokenizer: Tokenizer) -> Renderer:
    return Renderer(tokenizer)


class Sampled(NamedTuple):
    """What a model may write: markers as ids, the same spelled out, calls, layout."""

    pieces: list[tuple[str, bool]]
    is_closed: bool

    def ids(self, tokenizer: Tokenizer) -> list[int]:
        ids: list[int] = []
        for text, is_control in self.pieces:
            encode = tokenizer.encode_template if is_control else tokenizer.encode_untrusted
            ids += encode(text)
        return ids + [tokenizer.control_tokens["<|im_end|>"]] * self.is_closed


CALL = '{"name": "f", "arguments": {"a": "<think>"}}'
MARKERS = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
TEXTS = [
    *MARKERS,
    "<|im_end|>",
    "<tool_response>",
    CALL,
    "{",
    "\n",
    "\n\n",
    " ",
    "\u2028",
    "é",
    "x",
]
SAMPLED = st.builds(
    Sampled,
    st.lists(
        st.tuples(st.sampled_from(TEXTS), st.just(False))
        | st.tuples(st.sampled_from(MARKERS), st.just(True)),
        max_size=8,
    ),
    st.booleans(),
)


def dropped(message: Message) -> Message:
    return replace(message, reasoning=None)


def over_openai(message: Message) -> Message:
    return messages_from_openai([message_to_openai(message)])[0]


CLIENTS: dict[str, Callable[[Message], Message]] = {
    "as it was": lambda message: message,
    "without its thought": dropped,
    "over OpenAI's format": over_openai,
    "over it, without its thought": lambda message: over_openai(dropped(message)),
    "there and back twice": lambda message: over_openai(over_openai(message)),
    "ends stripped": lambda message: replace(
        over_openai(message), content=over_openai(message).content.strip()
    ),
}


def record(
    journal: Journal, ids: Sequence[int], message: Message, unparsed: Sequence[UnparsedToolCall]
) -> None:
    previous = chain_keys(ASKED, SEED)[-1]
    for form in turn_forms(previous, message, unparsed):
        journal.record(form.key, JournalRecord(tuple(ids), form.reasoning_digest, "s"))


def replayed(journal: Journal, message: Message) -> ReplayPlan:
    return plan_replay((*ASKED, message), SEED, journal, mode="as_generated")


@settings(max_examples=150)
@given(sampled=SAMPLED, client=st.sampled_from(list(CLIENTS)))
def test_the_next_prompt_goes_on_from_what_was_sampled(
    renderer: Renderer, tokenizer: Tokenizer, sampled: Sampled, client: str
) -> None:
    prompt = renderer.render(ASKED)
    ids = sampled.ids(tokenizer)
    parser = StreamParser(tokenizer)
    parser.feed(ids)
    parsed = parser.finish("stop" if sampled.is_closed else "length")
    journal = Journal()
    record(journal, prompt.turn_record(ids) or (), parsed.message, parsed.unparsed)
    came_back = CLIENTS[client](parsed.message)
    plan = replayed(journal, came_back)
    assert [turn.is_spliced for turn in plan.turns] == [True], (parsed.message, came_back)
    after = renderer.render((*ASKED, came_back, Message("user", "Why?")), splices=plan.splices)
    expected = (*prompt.token_ids, *ids)
    assert after.token_ids[: len(expected)] == expected
    assert after.spliced == {2}


@pytest.mark.parametrize("as_sent", [lambda message: message, over_openai])
@pytest.mark.parametrize(
    ("content", "reasoning", "edited"),
    [
        ("<think>a</think>b", None, "<think>c</think>b"),
        ("<think>a</think>b", None, "<think>a</think>c"),
        ("<think>a</think>b", "r", "<think>c</think>b"),
        ("<think>a</think>b", "r", "b"),
        ("<think>a", None, "<think>c"),
        ("x <think>a</think>", None, "x"),
        ("a</think>b", None, "b"),
    ],
)
def test_a_spelled_out_thought_that_was_edited_is_an_edit(
    as_sent: Callable[[Message], Message], content: str, reasoning: str | None, edited: str
) -> None:
    generated = Message("assistant", content, reasoning)
    journal = Journal()
    record(journal, (7, 8, 9), generated, ())
    for message in (generated, replace(generated, content=edited)):
        plan = replayed(journal, as_sent(message))
        assert plan.turns[0].is_spliced == (message is generated)
