"""More drift cases, each with its bound: answers that text alone cannot give back, and changes.

An answer is forced token by token, so that a case is what it is named after. Cases have the numbers
of the catalogue; what a client changes by itself is in `test_drift`. Elsewhere: another template or
tokenizer (10, 17) and a restart (52) in `test_tiers`, turns at once (50) in `test_retries`.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dlite_agent.backend import ChatRequest
from dlite_agent.chat.messages import Message, ToolSpec
from dlite_agent.chat.openai_format import message_to_openai, messages_from_openai
from dlite_agent.chat.output_rules import OutputRules, ToolChoice
from dlite_agent.config import EngineConfig, SamplingParams
from dlite_agent.engine.service import ModelService, load_service
from dlite_agent.models.target import ForwardRows, TargetOutput
from dlite_agent.outputs import Generation, TurnStats
from tests.tiny_checkpoint import control_id, write_checkpoint

FIRST_CALL = 256
Ask = Callable[..., Generation]
TOOLS = (ToolSpec("read_file", "Read."), ToolSpec("write_file", "Write."))


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModelService]:
    folder: Path = write_checkpoint(tmp_path_factory.mktemp("checkpoint"), max_positions=4096)
    config = EngineConfig(
        model=str(folder), dtype="float64", drafter="null", max_kv_bytes=64 * 2**20, idle=False
    )
    service = load_service(config, lambda *_: None)
    yield service
    service.close()


@pytest.fixture
def ask(service: ModelService, monkeypatch: pytest.MonkeyPatch) -> Ask:
    """Answers a request with given pieces: bytes, names of control tokens, and ids."""
    target, left = service.model.target, [0]
    compute = target.forward_batch

    def forced(batch: Sequence[ForwardRows]) -> list[TargetOutput]:
        outputs = compute(batch)
        for output in outputs:
            for row in output.logits:
                row.fill_(-1e4)
                row[left.pop(0)] = 0.0
        return outputs

    monkeypatch.setattr(target, "forward_batch", forced)

    def answer(request: ChatRequest, *pieces: bytes | str | int) -> Generation:
        left[:] = [token for piece in pieces for token in token_ids(piece)]
        sampling = SamplingParams(temperature=0.0, max_tokens=len(left))
        request = replace(request, sampling=sampling, history=request.history or "as_generated")
        *_, last = service.run(request, time.perf_counter(), lambda: False)
        assert last.generation is not None
        return last.generation

    return answer


def token_ids(piece: bytes | str | int) -> list[int]:
    if isinstance(piece, bytes):
        return list(piece)
    return [control_id(piece) if isinstance(piece, str) else piece]


def begin(case: str, **options: Any) -> ChatRequest:
    options = {"template_kwargs": {"enable_thinking": False}} | options
    return ChatRequest((Message("system", "Fix."), Message("user", case)), tools=TOOLS, **options)


def then(request: ChatRequest, answer: Generation, *more: Message) -> ChatRequest:
    """The next request of a client that keeps what OpenAI's form tells it."""
    (message,) = messages_from_openai([message_to_openai(answer.message)])
    return replace(request, messages=(*request.messages, message, *more))


END, LOOK = "<|im_end|>", (b"Look.", "<|im_end|>")
CALL = ("<tool_call>", FIRST_CALL, "</tool_call>", END)
WRITTEN = ("<tool_call>", b'\n{"name": "read_file", "arguments": {}}\n', "</tool_call>", END)
RESULT, GO = Message("tool", "x = 1"), Message("user", "Go on.")
OPEN = {"template_kwargs": {}}


# --- B, E: what was sampled is not what its text would be ----------------------------------------

SAMPLED: dict[str, tuple[tuple[bytes | str | int, ...], dict[str, Any], int]] = {
    "9-no-thought-at-all": (LOOK, OPEN, 0),
    "11-other-tokens-of-the-same-text": (CALL, {}, 0),
    "12-a-newline-at-the-seam": ((b"\nLook.", END), {}, 0),
    "12-newlines-behind-a-thought": (("<think>", b"\nHm\n", "</think>", b"\n\n\nx", END), OPEN, 0),
    "15-half-a-character": ((b"x\xc3", END), {}, 0),
    "15-bytes-that-are-no-text": ((b"\xff\xfe ok", END), {}, 0),
    "16-a-marker-that-text-hides": ((b"a", "</think>", b"b", END), {}, 0),
    "16-an-empty-call": (("<tool_call>", b"\n", "</tool_call>", b"x", END), {}, 0),
    "41-42-ends-with-its-token": (LOOK, {}, 0),
    "44-stop-string": ((b"Look. STOP",), {"stop": ("STOP",)}, len("STOP") + 1),
    "45-cut-in-its-text": ((b"Look a",), {}, 1),
    "45-cut-in-a-thought": (("<think>", b"\nHm"), OPEN, 1),
    "45-cut-in-a-call": (("<tool_call>", b'\n{"name": "re'), {}, 1),
    "48-under-a-grammar": (WRITTEN, {"output": OutputRules(ToolChoice("required"))}, 0),
}


@pytest.mark.parametrize("case", SAMPLED)
def test_what_was_sampled_is_never_computed_again(ask: Ask, case: str) -> None:
    pieces, options, bound = SAMPLED[case]
    request = begin(case, **options)
    first = ask(request, *pieces)
    assert list(first.token_ids) == [token for piece in pieces for token in token_ids(piece)]
    second = ask(then(request, first, RESULT if first.message.tool_calls else GO), *LOOK)
    assert second.stats.replayed == ("generated",)
    assert second.stats.prefilled_tokens <= behind(first, second) + bound
    assert second.stats.prefilled_tokens <= second.stats.new_tokens + 1


# --- A, C, D: what changes from one request to the next -------------------------------------------


def behind(earlier: Generation, later: Generation) -> int:
    """Tokens of a later prompt behind what an earlier turn has in KV: all but its last token."""
    return later.stats.prompt_tokens - earlier.stats.prompt_tokens - len(earlier.token_ids) + 1


Change = Callable[[ChatRequest, int], ChatRequest]
NEW_TOOL = ToolSpec("run_tests", "Run.")


def toggled(request: ChatRequest, turn: int) -> ChatRequest:
    return replace(request, template_kwargs={"enable_thinking": turn % 2 == 0})


def allowed(request: ChatRequest, turn: int) -> ChatRequest:
    choice = ToolChoice("auto", (TOOLS[turn % 2].name,))
    return replace(request, output=OutputRules(choice))


def kwargs_from(turn: int) -> Change:
    more: dict[str, Any] = {"style": "a"}
    return lambda request, now: replace(
        request, template_kwargs={**request.template_kwargs, **(more if now >= turn else {})}
    )


def tools_from(turn: int) -> Change:
    return lambda request, now: replace(request, tools=(*TOOLS, NEW_TOOL) if now >= turn else TOOLS)


def system_from(turn: int) -> Change:
    head = Message("system", "It is 12:30. Fix.")
    return lambda request, now: (
        replace(request, messages=(head, *request.messages[1:])) if now >= turn else request
    )


def trimmed(request: ChatRequest, turn: int) -> ChatRequest:
    """From the third turn on the first result is cut."""
    index = next((i for i, m in enumerate(request.messages) if m.role == "tool"), 0)
    return reworded(request, index, "(cut)") if turn >= 2 else request


def reworded(request: ChatRequest, index: int, content: str) -> ChatRequest:
    messages = list(request.messages)
    messages[index] = replace(messages[index], content=content)
    return replace(request, messages=tuple(messages))


def summed_up(request: ChatRequest, turn: int) -> ChatRequest:
    """From the third turn on the first answer and its result are a summary."""
    if turn < 2:
        return request
    head, tail = request.messages[:2], request.messages[4:]
    return replace(request, messages=(*head, Message("user", "(a summary)"), *tail))


def talk(ask: Ask, case: str, change: Change, num_turns: int = 4) -> list[Generation]:
    """Turns with a call each."""
    request, turns = begin(case), []
    for number in range(num_turns):
        turns.append(ask(change(request, number), *CALL))
        result = Message("tool", f"{case}: result {number}")
        request = then(request, turns[-1], result)
    return turns


@pytest.mark.parametrize(
    "change", [toggled, allowed], ids=["6-thinking-toggled", "29-tools-filtered"]
)
def test_what_is_switched_turn_by_turn_costs_nothing(ask: Ask, change: Change) -> None:
    turns = talk(ask, change.__name__, change)
    for before, turn in itertools.pairwise(turns):
        assert turn.stats.prefilled_tokens == behind(before, turn)
        assert set(turn.stats.replayed) == {"generated"}


# Which turn of four pays, and behind which message of the prompt: 0 is its begin, 3 the first call.
CHANGED: dict[str, tuple[Change, int | None]] = {
    "5-template-variable": (kwargs_from(2), None),
    "28-tool-appended": (tools_from(2), None),
    "32-35-system-prompt": (system_from(2), None),
    "30-36-result-reworded": (trimmed, 0),
    "37-summary": (summed_up, 0),
}


@pytest.mark.parametrize("case", CHANGED)
def test_a_change_is_paid_once_and_from_where_it_is(ask: Ask, case: str) -> None:
    change, kept = CHANGED[case]
    turns = talk(ask, case, change)
    assert turns[1].stats.prefilled_tokens == behind(turns[0], turns[1])
    paid = turns[2].stats
    assert paid.miss is not None
    assert paid.prefilled_tokens > behind(turns[1], turns[2])
    if case == "37-summary":
        begun = turns[0].stats.prompt_tokens - len(OPENING)
        assert paid.prefilled_tokens <= paid.prompt_tokens - begun
    elif kept is not None:
        assert paid.prefilled_tokens <= behind(turns[kept], turns[2])
    assert turns[3].stats.prefilled_tokens == behind(turns[2], turns[3])


OPENING = "<|im_start|>assistant\n<think>\n\n</think>\n\n"  # one token a byte, or fewer


def test_26_tools_that_come_back_find_what_they_left(ask: Ask) -> None:
    def flapping(request: ChatRequest, turn: int) -> ChatRequest:
        return replace(request, tools=()) if turn == 2 else request

    turns = talk(ask, "26", flapping)
    assert turns[3].stats.prefilled_tokens <= behind(turns[1], turns[3])
    assert turns[2].stats.miss is not None
    assert turns[2].stats.miss.cause == "tools_changed"


def test_1_a_query_costs_the_answers_that_the_template_strips(ask: Ask) -> None:
    request = begin("1")
    first = ask(request, *CALL)
    request = then(request, first, RESULT)
    second = ask(request, *LOOK)
    request = then(request, second, GO)
    stats = ask(replace(request, history="template"), *LOOK).stats
    begun = first.stats.prompt_tokens - len(OPENING)
    assert behind(second, ask(request, *LOOK)) < stats.prefilled_tokens
    assert stats.prefilled_tokens <= stats.prompt_tokens - begun


def test_38_another_conversation_takes_nothing_away(ask: Ask) -> None:
    request = begin("38")
    first = ask(request, *CALL)
    for number in range(3):
        ask(replace(request, messages=(*request.messages[:1], Message("user", f"{number}"))), *LOOK)
    second = ask(then(request, first, RESULT), *LOOK)
    assert second.stats.prefilled_tokens == behind(first, second)


def test_39_what_is_asked_for_again_costs_one_token(ask: Ask) -> None:
    request = begin("39")
    first = ask(request, *CALL)
    request = then(request, first, RESULT)
    ask(request, *LOOK)
    again: TurnStats = ask(request, b"Other.", END).stats
    assert again.prefilled_tokens == 1
    edited = ask(reworded(request, 1, "39: another task"), *LOOK).stats
    assert edited.prefilled_tokens <= edited.prompt_tokens - len("<|im_start|>system\nFix.")


def test_18_text_that_only_grows_costs_what_it_grew_by(ask: Ask) -> None:
    text = "def f():\n    "
    first = ask(ChatRequest((), prompt=text), b"return 1\n")
    more = text + first.message.content + "    # so\n"
    second = ask(ChatRequest((), prompt=more), b"x")
    assert second.stats.prefilled_tokens <= behind(first, second) + 8
