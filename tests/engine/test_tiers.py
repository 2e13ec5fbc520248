"""Engines that keep their sessions: on disk for the next engine, and until they are purged."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import pytest

from dlite_agent.config import EngineConfig
from dlite_agent.engine.engine import Engine
from dlite_agent.outputs import Generation
from tests.conversations import Agent, respaced
from tests.tiny_checkpoint import write_checkpoint


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"), max_positions=4096)


@pytest.fixture
def config(checkpoint: Path, tmp_path: Path) -> EngineConfig:
    return EngineConfig(
        model=str(checkpoint),
        dtype="float64",
        drafter="null",
        max_kv_bytes=32 * 2**20,
        kv_disk=str(tmp_path / "kept"),
    )


def take(engine: Engine, agent: Agent, tenant: str = "") -> Generation:
    generation = engine.generate(replace(agent.request(), tenant=tenant))
    agent.take(generation)
    return generation


def test_an_agent_that_was_stopped_goes_on_without_a_prefill(config: EngineConfig) -> None:
    stopped, steady = Agent("fix it", edit=respaced), Agent("fix it", edit=respaced)
    with Engine(replace(config, kv_disk="off")) as engine:
        for _ in range(4):
            take(engine, steady)
        assert {session.tier for session in engine.sessions()} == {"device"}
    for number in range(4):
        with Engine(config) as engine:
            stats = take(engine, stopped).stats
            assert stats.origin == ("restored" if number else "cold")
            if number:
                # One row more is computed, to be compared with what was saved.
                expected = steady.turns[number].stats.prefilled_tokens + 1
                assert stats.prefilled_tokens == expected
                assert stats.prefilled_tokens + stats.cached_tokens == stats.prompt_tokens
            assert stats.session_id == stopped.turns[0].stats.session_id
    assert [t.token_ids for t in stopped.turns] == [t.token_ids for t in steady.turns]


def test_an_engine_in_a_process_of_its_own_saves_before_it_ends(config: EngineConfig) -> None:
    agent = Agent("fix it", edit=respaced)
    with Engine(replace(config, isolation="process", threads=1)) as engine:
        take(engine, agent)
        (session,) = (s for s in engine.sessions() if s.tier == "disk")
        assert session.num_tokens > 100
        assert engine.sessions("nobody") == ()
    with Engine(config) as engine:
        assert take(engine, agent).stats.origin == "restored"
        assert engine.purge() == 1
        assert engine.sessions() == ()


def test_purged_sessions_and_their_turns_are_gone(config: EngineConfig) -> None:
    agents = {name: Agent("fix it", edit=respaced) for name in ("a", "b")}
    with Engine(config) as engine:
        for name, agent in agents.items():
            take(engine, agent, name)
        assert engine.purge(older_than_s=3600.0) == 0
        assert engine.purge(tenant="a") == 1
        assert {session.tenant for session in engine.sessions()} == {"b"}
        assert take(engine, agents["a"], "a").stats.replayed == ("rendered",)
    with Engine(config) as engine:
        assert take(engine, agents["b"], "b").stats.origin == "restored"
        assert engine.purge(older_than_s=0.0) == 2
    folder = Path(config.kv_disk)
    assert not list(folder.rglob("*.safetensors"))
    assert not list(folder.rglob("manifest.json"))


def test_two_engines_on_one_folder_both_answer(
    config: EngineConfig, caplog: pytest.LogCaptureFixture
) -> None:
    with Engine(config) as first, Engine(replace(config, max_batch=2)) as second:
        take(first, Agent("fix it"))
        with caplog.at_level(logging.WARNING):
            assert take(second, Agent("fix it")).stats.origin == "cold"
        assert "no session is kept on disk" in caplog.text
        assert "being written by another engine" in caplog.text


def test_a_folder_that_cannot_be_used_costs_a_warning(
    config: EngineConfig, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        caplog.at_level(logging.WARNING),
        Engine(replace(config, kv_disk="/dev/null/kept")) as engine,
    ):
        assert take(engine, Agent("fix it")).stats.origin == "cold"
    assert "no session is kept on disk: cannot keep sessions in" in caplog.text
