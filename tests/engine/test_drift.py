"""The drift cases of agents' clients, each with its bound: what a turn computes beyond what is new.

The tiny model's tokens spell a whole call at once, which rendering never does: every turn that is
rendered instead of spliced has other tokens (drift of class B, re-tokenised text).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dlite_agent.backend import ChatRequest
from dlite_agent.chat.messages import Message
from dlite_agent.config import EngineConfig
from dlite_agent.decoding.stopping import StopRules
from dlite_agent.engine.service import ModelService, load_service
from dlite_agent.outputs import Generation, prefill_amplification
from dlite_agent.sampling import KeyedNoise, Sampler
from tests import clients
from tests.clients import Client, edited
from tests.conversations import sampled
from tests.tiny_checkpoint import write_checkpoint


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"), max_positions=4096)


def load(folder: Path, **options: Any) -> ModelService:
    options = {"dtype": "float64", "max_kv_bytes": 64 * 2**20, "drafter": "null"} | options
    return load_service(EngineConfig(model=str(folder), **options), lambda *_: None)


@pytest.fixture(scope="module")
def service(folder: Path) -> Iterator[ModelService]:
    service = load(folder)
    yield service
    service.close()


def generate(service: ModelService, request: ChatRequest) -> Generation:
    *_, last = service.run(request, time.perf_counter(), lambda: False)
    assert last.generation is not None
    return last.generation


def converse(service: ModelService, client: Client, num_calls: int = 2) -> Client:
    """Talk until the model has called a tool so often, and its results were read."""
    while num_calls >= 0:
        client.take(generate(service, client.request()))
        num_calls -= bool(client.turns[-1].message.tool_calls)
        assert len(client.turns) < 20
    return client


def cold_answer(service: ModelService, turn: Generation) -> tuple[int, ...]:
    """What an empty session answers to the same ids with the same parameters."""
    stats, prompt_ids = turn.stats, turn.prompt_token_ids
    session = service.model.sessions.acquire_new(prompt_ids)
    session.sync(prompt_ids)
    sampling = sampled(stats.seed, 40).with_defaults(service.model.defaults)
    sampler = Sampler(sampling, KeyedNoise.derive(stats.seed, 0, prompt_ids))
    limits = StopRules(service.model.stop_token_ids, 40)
    rounds = list(session.decode(sampler, limits))
    service.model.sessions.discard(session)
    return tuple(i for round_ in rounds for i in round_.token_ids)


def spelled(service: ModelService, turn: Generation) -> bytes:
    return b"".join(map(service.model.tokenizer.token_bytes, turn.prompt_token_ids))


def amplification(client: Client) -> float:
    return prefill_amplification([turn.stats for turn in client.turns])


NO_THINKING = {"template_kwargs": {"enable_thinking": False}}
AS_GENERATED: dict[str, dict[str, Any]] = {
    "append-only": {},
    "2-no-thinking": {"options": NO_THINKING},
    "3-reasoning-dropped": {
        "rewrite": clients.of_answers(lambda m: m.pop("reasoning_content", None))
    },
    "4-reasoning-renamed": {"rewrite": clients.of_answers(clients.rename_reasoning)},
    "7-reasoning-inline": {"rewrite": clients.of_answers(clients.think_inline)},
    "8-reasoning-empty": {"rewrite": clients.of_answers(lambda m: m.update(reasoning_content=""))},
    "19-keys-reordered": {
        "rewrite": clients.arguments_as(
            lambda value: clients.json.dumps(dict(reversed(value.items())))
        )
    },
    "20-compact": {
        "rewrite": clients.arguments_as(
            lambda value: clients.json.dumps(value, separators=(",", ":"))
        )
    },
    "20-indented": {
        "rewrite": clients.arguments_as(lambda value: clients.json.dumps(value, indent=2))
    },
    "21-escaped": {"rewrite": clients.arguments_as(clients.escaped)},
    "23-objects": {"rewrite": clients.arguments_as(lambda value: value)},
    "23-encoded-twice": {
        "rewrite": clients.arguments_as(lambda value: clients.json.dumps(clients.json.dumps(value)))
    },
    "24-ids-renamed": {"rewrite": clients.renamed_ids},
    "24-ids-missing": {"rewrite": clients.without_ids},
    "24-results-reordered": {"rewrite": clients.results_reversed},
    "27-28-tools-reordered": {"shuffle": clients.shuffled_tools},
    "31-parts": {"rewrite": clients.in_parts},
    "31-ends-stripped": {
        "rewrite": clients.of_answers(lambda m: m.update(content=(m["content"] or "").strip()))
    },
    "50-hint": {"options": {"session_hint": "thread"}},
}


@pytest.mark.parametrize("case", AS_GENERATED)
def test_what_clients_change_by_themselves_costs_nothing(service: ModelService, case: str) -> None:
    client = converse(service, Client(f"fix {case}", **AS_GENERATED[case]))
    assert amplification(client) == 1.0
    for turn in client.turns[1:]:
        assert turn.stats.prefilled_tokens == turn.stats.new_tokens + 1
        assert set(turn.stats.replayed) == {"generated"}
        assert turn.stats.miss is None or turn.stats.miss.tokens == 0
    assert cold_answer(service, client.turns[-1]) == client.turns[-1].token_ids


def test_each_oddity_is_reported_once(service: ModelService) -> None:
    def untidy(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        messages = clients.renamed_ids(messages)
        return AS_GENERATED["19-keys-reordered"]["rewrite"](messages)

    client = Client("fix oddities", rewrite=untidy, shuffle=clients.shuffled_tools)
    converse(service, client)
    reported = [turn.stats.miss for turn in client.turns[1:]]
    assert all(miss is None or not miss.tokens for miss in reported)
    oddities = reported[-1].oddities if reported[-1] is not None else ()
    assert len(oddities) == len({text.partition(": ")[2] for text in oddities})
    assert any("tools: re-ordered" in text for text in oddities)
    assert any("arguments written in another way" in text for text in oddities)
    assert sum("ids of calls renamed" in text for text in oddities) == 1


# --- edits: honoured, always --------------------------------------------------------------------


def answered(service: ModelService, task: str) -> tuple[Client, int]:
    """A conversation, and the index of its first message with a call."""
    client = converse(service, Client(task))
    messages = client.request().messages
    return client, next(i for i, message in enumerate(messages) if message.tool_calls)


def other_argument(message: Message) -> dict[str, Any]:
    call = message.tool_calls[0]
    return {"tool_calls": (replace(call, arguments={"path": "    x.py"}), *message.tool_calls[1:])}


@pytest.mark.parametrize(
    ("change", "cause", "text"),
    [
        (other_argument, "message_edited", b'"    x.py"'),
        (lambda m: {"content": "edited" + m.content}, "message_edited", b"edited"),
        (lambda m: {"reasoning": "Another."}, "reasoning_changed", b"<think>\nAnother.\n</think>"),
    ],
    ids=["39-argument", "39-content", "39-thought"],
)
def test_an_edit_of_an_answer_is_honoured_and_computed_from_there_on(
    service: ModelService, change: Callable[[Message], dict[str, Any]], cause: str, text: bytes
) -> None:
    client, index = answered(service, f"edit {text!r}")
    request = client.request()
    messages = edited(request.messages, index, **change(request.messages[index]))
    request = replace(request, messages=messages)
    ours = generate(service, request)
    turn = next(turn for turn in client.turns if turn.message.tool_calls)
    stats = ours.stats
    assert stats.prefilled_tokens <= stats.prompt_tokens - turn.stats.prompt_tokens + 1
    number = client.turns.index(turn)
    assert stats.replayed[number] == "rendered"
    assert text in spelled(service, ours)
    assert stats.miss is not None
    assert (stats.miss.cause, stats.miss.message_index) == (cause, index)
    assert stats.miss.was != stats.miss.now
    assert cold_answer(service, ours) == ours.token_ids


def test_indentation_that_was_fixed_in_an_answer_is_honoured(service: ModelService) -> None:
    client = converse(service, Client("fix the indentation"))
    request = client.request()
    index = next(i for i, m in enumerate(request.messages) if m.role == "assistant")
    message = request.messages[index]
    spaced = message.content.strip() or "x"
    middle = max(1, len(spaced) // 2)
    content = spaced[:middle] + "    " + spaced[middle:]
    ours = generate(
        service, replace(request, messages=edited(request.messages, index, content=content))
    )
    assert content.encode() in spelled(service, ours)
    assert ours.stats.miss is not None
    assert ours.stats.miss.cause == "message_edited"


Rewrite = Callable[[tuple[Message, ...]], tuple[Message, ...]]


def cut_result(messages: tuple[Message, ...]) -> tuple[Message, ...]:
    index = next(i for i, message in enumerate(messages) if message.role == "tool")
    return edited(messages, index, content="(cut)")


def without_first_pair(messages: tuple[Message, ...]) -> tuple[Message, ...]:
    later = next(i for i, m in enumerate(messages) if i > 2 and m.role == "assistant")
    return (*messages[:2], *messages[later:])


@pytest.mark.parametrize(
    ("rewrite", "cause", "index"),
    [
        (lambda m: edited(m, 0, content="You repair programs. Now: 12:31."), "timestamp", 0),
        (lambda m: edited(m, 0, content="You write programs. Now: 12:30."), "system_changed", 0),
        (cut_result, "history_trimmed", None),
        (without_first_pair, "history_trimmed", 2),
        (lambda m: edited(m, 1, content="another task"), "message_edited", 1),
    ],
    ids=["32-timestamp", "35-system", "36-elided", "37-trimmed", "39-user"],
)
def test_a_changed_history_is_named(
    service: ModelService, rewrite: Rewrite, cause: str, index: int | None
) -> None:
    client = Client(f"history {cause} {index}")
    client.messages[0]["content"] = "You repair programs. Now: 12:30."
    converse(service, client)
    request = client.request()
    changed = rewrite(request.messages)
    miss = generate(service, replace(request, messages=changed)).stats.miss
    assert miss is not None
    assert miss.cause == cause
    assert index is None or miss.message_index == index
    assert miss.tokens > 0
    assert miss.advice


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ({"tools": ()}, "tools_changed"),
        ({"template_kwargs": {"style": "short"}}, "settings_changed"),
    ],
)
def test_a_changed_head_is_named(
    folder: Path, service: ModelService, changes: dict[str, Any], cause: str
) -> None:
    client = converse(service, Client(f"head {cause}"))
    stats = generate(service, replace(client.request(), **changes)).stats
    if cause == "settings_changed":  # the template does not use it: the tokens are the same
        assert stats.replayed[0] == "rendered"
    assert stats.miss is not None
    assert stats.miss.cause == cause
    assert stats.miss.tokens > 0


def test_a_new_query_strips_thoughts_and_as_generated_keeps_them(service: ModelService) -> None:
    for history, cause in (("auto", "thoughts_stripped"), ("as_generated", None)):
        client = converse(service, Client(f"query {history}", options=NO_THINKING))
        client.messages.append({"role": "user", "content": "and now?"})
        stats = generate(service, replace(client.request(), history=history)).stats
        assert (stats.miss.cause if stats.miss is not None else None) == cause
        if cause is None:
            assert stats.prefilled_tokens == stats.new_tokens + 1


def test_a_turn_that_was_forgotten_is_rendered_and_says_so(service: ModelService) -> None:
    client = converse(
        service, Client("forget", rewrite=AS_GENERATED["3-reasoning-dropped"]["rewrite"])
    )
    service.model.tenants.of().journal.clear()
    miss = generate(service, client.request()).stats.miss
    assert miss is not None
    assert miss.cause in ("rendered_again", "reasoning_dropped")


def test_a_session_that_was_evicted_is_named(service: ModelService) -> None:
    client = converse(service, Client("evict"))
    for info in service.model.sessions.sessions():
        service.model.sessions.discard(service.model.sessions.get(info.session_id))
    stats = generate(service, client.request()).stats
    assert stats.miss is not None
    assert (stats.miss.cause, stats.miss.message_index) == ("evicted", None)
    assert set(stats.replayed) == {"generated"}, "the journal outlives the KV"


def test_an_answer_that_was_cut_misses_nothing(service: ModelService) -> None:
    ask = ChatRequest((Message("user", "cut it"),), sampling=sampled(1, 12), history="as_generated")
    cut = generate(service, ask)
    assert cut.finish_reason == "length"
    more = (*ask.messages, cut.message, Message("user", "go on"))
    stats = generate(service, replace(ask, messages=more)).stats
    assert stats.prefilled_tokens > stats.new_tokens
    assert stats.miss is None


def test_the_first_turn_of_a_conversation_misses_nothing(service: ModelService) -> None:
    assert generate(service, Client("something new").request()).stats.miss is None


def test_a_turn_handle_finds_its_session_where_ids_are_gone(service: ModelService) -> None:
    client = converse(service, Client("handles", rewrite=clients.without_ids))
    request = client.request()
    index = max(i for i, m in enumerate(request.messages) if m.role == "assistant")
    messages = edited(request.messages, index, turn=client.turns[-1].stats.turn)
    stats = generate(service, replace(request, messages=messages)).stats
    assert stats.origin == "tool_call"
    assert stats.session_id == client.turns[-1].stats.session_id
