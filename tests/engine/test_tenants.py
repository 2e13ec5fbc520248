"""Nothing of one tenant is used for another."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace

import pytest

from dlite_agent.backend import ChatRequest
from dlite_agent.chat.messages import Message
from dlite_agent.config import EngineConfig
from dlite_agent.engine.service import ModelService, load_service
from dlite_agent.outputs import Generation
from tests.conversations import READ_FILE, sampled
from tests.tiny_checkpoint import write_checkpoint


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModelService]:
    folder = write_checkpoint(tmp_path_factory.mktemp("checkpoint"))
    config = EngineConfig(model=str(folder), dtype="float64", max_kv_bytes=32 * 2**20)
    service = load_service(config, lambda *_: None)
    yield service
    service.close()


def generate(service: ModelService, request: ChatRequest) -> Generation:
    *_, last = service.run(request, time.perf_counter(), lambda: False)
    assert last.generation is not None
    return last.generation


def test_the_same_conversation_of_another_tenant_is_new(service: ModelService) -> None:
    first = ChatRequest(
        (Message("system", "Read files."), Message("user", "Read it all, please.")),
        tools=(READ_FILE,),
        sampling=sampled(0, 40),
        session_hint="thread",
        tenant="us",
    )
    turn = generate(service, first)
    answer = replace(turn.message, turn=turn.stats.turn)
    second = replace(first, messages=(*first.messages, answer, Message("tool", "done")))
    ours = generate(service, second)
    assert ours.stats.replayed == ("generated",)
    assert ours.stats.prefilled_tokens == ours.stats.new_tokens + 1

    encoded = service.model.tenants.of("them").renderer.num_encoded_chars
    theirs = generate(service, replace(second, tenant="them"))
    stats = theirs.stats
    assert (stats.origin, stats.cached_tokens) == ("cold", 0)
    assert stats.replayed == ("rendered",), "neither journal nor handle is known"
    assert stats.new_tokens == stats.prompt_tokens, "nor that they were seen before"
    assert stats.miss is None, "nor what the conversation looked like"
    assert "workspace" not in stats.drafted_by
    memory = service.model.tenants.of("them")
    assert memory.renderer.num_encoded_chars > encoded + 100, "segments are encoded anew"
    assert memory.session_of_hint("thread") == stats.session_id
    assert service.model.tenants.of("us").session_of_hint("thread") == ours.stats.session_id
    again = generate(service, replace(second, sampling=sampled(1, 40)))
    assert again.stats.cached_tokens == ours.stats.prompt_tokens - 1


def test_tools_of_another_tenant_keep_their_own_order(service: ModelService) -> None:
    write = replace(READ_FILE, name="write_file")
    forms = {name: service.model.tenants.of(name).tools for name in ("a", "b")}
    assert forms["a"].first_seen((READ_FILE, write)) == (READ_FILE, write)
    assert forms["b"].first_seen((write, READ_FILE)) == (write, READ_FILE)


def test_the_tenant_that_was_not_seen_for_longest_is_forgotten(service: ModelService) -> None:
    tenants = service.model.tenants
    kept = tenants.of("kept")
    for number in range(300):
        tenants.of(f"tenant-{number}")
        assert tenants.of("kept") is kept
    first = tenants.of("tenant-0")
    assert len(first.journal) == 0
