"""What a session has read and written is drafted in others, and changes none of their tokens."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import takewhile
from pathlib import Path

import pytest

from dlite_agent.engine.service import ModelService
from tests.conversations import Agent
from tests.engine.loader import loader
from tests.tiny_checkpoint import write_checkpoint

Load = Callable[..., ModelService]


@pytest.fixture
def load(tmp_path: Path) -> Iterator[Load]:
    folder = write_checkpoint(tmp_path / "model", max_positions=4096)
    with loader(folder, cache_dir="off") as load:
        yield load


def converse(service: ModelService, agent: Agent, num_turns: int, *, tenant: str = "") -> Agent:
    for _ in range(num_turns):
        request = replace(agent.request(), tenant=tenant)
        events = list(service.run(request, time.perf_counter(), lambda: False))
        generation = events[-1].generation
        assert generation is not None
        agent.take(generation)
    return agent


def knows(service: ModelService, ids: list[int]) -> bool:
    """Whether the workspace holds these ids in a row."""
    found = service.model.workspaces.of().copies(ids[:8], 1000, len(ids))
    return any(copy[: len(ids) - 8] == ids[8:] for length, copy in found if length == 8)


def sources(agent: Agent) -> set[str]:
    return {source for turn in agent.turns for source in turn.stats.drafted_by}


def test_tool_results_and_answers_reach_the_workspace_and_prompts_do_not(load: Load) -> None:
    service = load(drafter="suffix")
    agent = converse(service, Agent("fix it"), 4)
    encode = service.model.tokenizer.encode_untrusted
    unsent = list(takewhile(lambda message: message.role == "tool", reversed(agent.messages)))
    sent = agent.messages[: -len(unsent)]
    results = [message.content for message in sent if message.role == "tool"]
    answers = [list(turn.token_ids) for turn in agent.turns if len(turn.token_ids) > 8]
    assert results
    assert answers
    assert all(knows(service, encode(text)[-16:]) for text in results)
    assert all(knows(service, answer) for answer in answers)
    assert not knows(service, encode(agent.system))


def test_another_session_drafts_from_it_and_writes_what_it_would_have_written(load: Load) -> None:
    plain = converse(load(drafter="null"), Agent("fix that"), 4)
    service = load(drafter="suffix")
    converse(service, Agent("fix it"), 4)
    second = converse(service, Agent("fix that"), 4)
    assert [turn.token_ids for turn in second.turns] == [turn.token_ids for turn in plain.turns]
    assert "workspace" in sources(second)


def test_another_tenant_drafts_nothing_of_it(load: Load) -> None:
    service = load(drafter="suffix")
    converse(service, Agent("fix it"), 3, tenant="ours")
    assert not sources(converse(service, Agent("fix that"), 3, tenant="theirs")) - {"suffix"}
    assert "workspace" in sources(converse(service, Agent("fix that"), 3, tenant="ours"))


def test_a_baseline_without_sessions_shares_nothing(load: Load) -> None:
    service = load(drafter="suffix", reuse="prefix")
    converse(service, Agent("fix it"), 2)
    assert service.model.workspaces.of().num_tokens == 0
