"""The scripted engine behaves like an engine: figures, limits, cancelling, errors."""

from __future__ import annotations

import itertools
import subprocess
import sys

import pytest

from dlite_agent.backend import ChatBackend, ChatRequest
from dlite_agent.chat.messages import Message, ToolSpec
from dlite_agent.config import SamplingParams
from dlite_agent.errors import CapacityError, RequestError
from dlite_agent.testing import ScriptedEngine


def ask(text: str, **options: object) -> ChatRequest:
    return ChatRequest((Message("user", text),), **options)  # type: ignore[arg-type]


def test_it_is_a_backend_that_says_what_its_script_says() -> None:
    engine: ChatBackend = ScriptedEngine(["One.", lambda request: request.messages[-1].content])
    assert engine.generate(ask("?")).message.content == "One."
    assert engine.generate(ask("echo")).message.content == "echo"
    engine.close()


def test_script_that_ends_says_so() -> None:
    engine = ScriptedEngine(["One."])
    engine.generate(ask("?"))
    with pytest.raises(RequestError, match="request 2 and the script has 1 turns"):
        engine.generate(ask("?"))


def test_exception_of_the_script_is_raised() -> None:
    engine = ScriptedEngine([CapacityError("full"), "One."])
    with pytest.raises(CapacityError, match="full"):
        engine.generate(ask("?"))
    assert engine.generate(ask("?")).message.content == "One."


def test_shared_prompt_counts_as_cached() -> None:
    engine = ScriptedEngine(["One.", "Two."])
    first = engine.generate(ask("What is it?"))
    follow_up = (Message("user", "What is it?"), first.message, Message("user", "And?"))
    second = engine.generate(ChatRequest(follow_up))
    assert first.stats.cached_tokens == 0
    assert second.stats.cached_tokens == first.stats.prompt_tokens
    assert second.stats.new_tokens == second.stats.prompt_tokens - second.stats.cached_tokens
    assert second.stats.prompt_tokens == engine.count_tokens(follow_up)
    assert engine.count_tokens(follow_up, (ToolSpec("f"),)) > engine.count_tokens(follow_up)


def test_max_tokens_cuts() -> None:
    engine = ScriptedEngine(["One two."])
    generation = engine.generate(ask("?", sampling=SamplingParams(max_tokens=3)))
    assert generation.message.content == "One"
    assert generation.finish_reason == "length"


async def test_unfinished_streams_are_counted() -> None:
    engine = ScriptedEngine(["a long answer"] * 3, tokens_per_round=1)
    for _ in itertools.islice(engine.stream(ask("?")), 2):
        pass
    assert engine.num_cancelled == 1
    stream = engine.astream(ask("?"))
    await anext(stream)
    await stream.aclose()  # type: ignore[attr-defined]
    assert engine.num_cancelled == 2
    await engine.agenerate(ask("?"))
    assert engine.num_cancelled == 2


def test_it_needs_no_torch() -> None:
    code = (
        "import sys; from dlite_agent.testing import ScriptedEngine; print('torch' in sys.modules)"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "False"


def test_a_prompt_without_messages_counts_as_one() -> None:
    engine = ScriptedEngine(["Yes."] * 2)
    first = engine.generate(ChatRequest((), prompt="Once upon")).stats
    again = engine.generate(ChatRequest((), prompt=tuple(b"Once upon a time"))).stats
    assert (first.prompt_tokens, first.cached_tokens) == (9, 0)
    assert (again.prompt_tokens, again.cached_tokens) == (16, 9)
