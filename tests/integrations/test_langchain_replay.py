"""An answer that went through LangChain is found again, whatever ids it had."""

from __future__ import annotations

import functools
import json
import operator

from hypothesis import given, settings
from hypothesis import strategies as st
from langchain_core.messages import BaseMessage, message_to_dict, messages_from_dict

from dlite_agent.chat.message_keys import chain_keys, seed_key, turn_forms
from dlite_agent.chat.messages import Message
from dlite_agent.chat.replay import plan_replay
from dlite_agent.chat.stream_parser import StreamParser
from dlite_agent.integrations.langchain_messages import (
    ChunkWriter,
    message_from_generation,
    messages_from_langchain,
)
from dlite_agent.outputs import Generation, GenerationChunk, TurnStats
from dlite_agent.sessions.journal import Journal, JournalRecord
from dlite_agent.testing import ByteTokenizer, ScriptedEngine

ASKED = (Message("user", "Go on."),)
SEED = seed_key((), {})
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "<think>", "b": [1.0, null]}}\n</tool_call>'
MARKERS = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<|im_end|>"]
# Text in which markers are ids, and text in which they are spelled out.
PIECES = st.lists(
    st.tuples(st.sampled_from([*MARKERS[:4], CALL, "{", "\n", " ", "é", "x"]), st.booleans()),
    max_size=8,
)


def streamed(chunks: list[GenerationChunk], version: str | None) -> BaseMessage:
    writer = ChunkWriter(ScriptedEngine([], model_name="tiny"), version)
    written = [part.message for chunk in chunks for part in writer.write(chunk)]
    return functools.reduce(operator.add, written)


@settings(max_examples=150)
@given(pieces=PIECES, is_streamed=st.booleans(), is_stored=st.booleans())
def test_an_answer_is_found_again_after_langchain(
    pieces: list[tuple[str, bool]], is_streamed: bool, is_stored: bool
) -> None:
    tokenizer = ByteTokenizer()
    ids: list[int] = []
    for text, is_control in pieces:
        ids += (tokenizer.encode_template if is_control else tokenizer.encode_untrusted)(text)
    parser = StreamParser(tokenizer)
    chunks = [GenerationChunk(tuple(parser.feed([token_id])), (token_id,)) for token_id in ids]
    parsed = parser.finish("stop")
    generation = Generation(
        parsed.message, parsed.finish_reason, TurnStats(), tuple(ids), (), parsed.unparsed
    )
    chunks.append(GenerationChunk(parsed.deltas, generation=generation))
    journal = Journal()
    for form in turn_forms(chain_keys(ASKED, SEED)[-1], parsed.message, parsed.unparsed):
        journal.record(form.key, JournalRecord(ids, form.reasoning_digest))
    answer: BaseMessage = message_from_generation(generation, "tiny")
    if is_streamed:
        answer = streamed(chunks, None)
    if is_stored:
        (answer,) = messages_from_dict(json.loads(json.dumps([message_to_dict(answer)])))
    came_back = messages_from_langchain([answer])
    plan = plan_replay((*ASKED, *came_back), SEED, journal, mode="as_generated")
    assert plan.splices == {1: tuple(ids)}, (parsed.message, came_back)
