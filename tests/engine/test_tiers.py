"""Engines that keep their sessions: on disk for the next engine, and until they are purged."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from dlite_agent.backend import ChatRequest
from dlite_agent.chat.messages import Message
from dlite_agent.config import EngineConfig
from dlite_agent.engine.engine import Engine
from dlite_agent.engine.session_tasks import SessionCommand, SessionReply
from dlite_agent.outputs import Generation
from dlite_agent.sessions.kept import BRANCH_OF, BRANCH_UNTIL, now_s
from dlite_agent.sessions.manifest import MANIFEST, read_manifest
from tests.conversations import Agent, respaced, sampled
from tests.tiny_checkpoint import control_id, write_checkpoint


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


def manifests(config: EngineConfig) -> dict[str, Path]:
    return {path.parent.name: path for path in Path(config.kv_disk).rglob(MANIFEST)}


def drop_a_branch(config: EngineConfig) -> tuple[ChatRequest, Generation, Generation]:
    """Take a turn twice, and end: the request, the answer that was dropped, and the other one."""
    bias = {control_id("<|im_end|>"): -100}  # so that there is something to drop
    request = replace(
        Agent("fix it", hint="thread").request(),
        sampling=replace(sampled(1), logit_bias=bias),
        history="as_generated",
    )
    with Engine(config) as engine:
        dropped = engine.generate(request)
        other = engine.generate(replace(request, sampling=replace(sampled(2), logit_bias=bias)))
        assert other.stats.session_id == dropped.stats.session_id
        assert other.stats.rewound_tokens >= 32
        assert len(engine.sessions()) == 4, "the session and its branch, in memory and on disk"
    return request, dropped, other


def go_on(engine: Engine, request: ChatRequest, answer: Generation) -> Generation:
    said = (answer.message, Message("user", "Go on."))
    return engine.generate(replace(request, messages=(*request.messages, *said)))


def test_what_a_turn_dropped_is_found_again_after_a_restart(config: EngineConfig) -> None:
    request, dropped, other = drop_a_branch(config)
    assert len(manifests(config)) == 2
    with Engine(config) as engine:
        turn = go_on(engine, request, dropped)
        assert turn.stats.origin == "restored"
        assert turn.stats.session_id != other.stats.session_id
        num_known = len(dropped.prompt_token_ids) + len(dropped.token_ids)
        assert turn.stats.cached_tokens >= num_known - 2
        assert go_on(engine, request, other).stats.session_id == other.stats.session_id
    for path in manifests(config).values():  # both are sessions like any other now
        assert read_manifest(path.parent).labels.keys().isdisjoint({BRANCH_OF, BRANCH_UNTIL})


def branch_of(config: EngineConfig, session_id: str) -> Path:
    """Its manifest."""
    (branch,) = (path for name, path in manifests(config).items() if name != session_id)
    assert read_manifest(branch.parent).labels[BRANCH_OF] == session_id
    return branch


def test_a_branch_goes_with_its_session(config: EngineConfig) -> None:
    *_, other = drop_a_branch(config)
    session_id = other.stats.session_id
    branch_of(config, session_id)
    with Engine(config) as engine:
        engine.ask(SessionCommand("delete", session_id), SessionReply)
        assert engine.sessions() == ()
    assert manifests(config) == {}


def test_a_branch_goes_after_five_minutes(config: EngineConfig) -> None:
    request, dropped, other = drop_a_branch(config)
    branch = branch_of(config, other.stats.session_id)
    manifest = read_manifest(branch.parent)
    assert 0 < float(manifest.labels[BRANCH_UNTIL]) - now_s() <= 300
    labels = dict(manifest.labels) | {BRANCH_UNTIL: repr(now_s())}
    branch.write_bytes(replace(manifest, labels=labels).to_bytes())
    with Engine(config) as engine:
        assert len(engine.sessions()) == 1
        assert go_on(engine, request, dropped).stats.prefilled_tokens > 32
    assert not branch.exists()


def test_why_the_last_turn_was_not_free_is_told_after_a_restart(config: EngineConfig) -> None:
    agent = Agent("fix it", hint="thread")
    with Engine(config) as engine:
        take(engine, agent)
        agent.messages[1] = Message("user", "fix that")
        miss = take(engine, agent).stats.miss
        assert miss is not None
    with Engine(config) as engine:
        found = engine.ask(SessionCommand("find", "thread"), SessionReply)
    figures = json.loads(found.last_turn)
    assert figures["session_id"] == found.session_id == agent.turns[-1].stats.session_id
    assert (figures["miss"]["cause"], figures["miss"]["tokens"]) == (miss.cause, miss.tokens)
    assert miss.cause == "message_edited"


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


@contextmanager
def owned_by_another_process(folder: Path) -> Iterator[None]:
    """Holds the lock of a folder, as an engine there does, until it is told to end."""
    program = (
        "import fcntl, sys; file = open(sys.argv[1], 'w'); fcntl.flock(file, fcntl.LOCK_EX); "
        "print('held', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", program, str(folder / "lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        yield
        process.communicate(b"")


def test_a_folder_of_another_process_is_left_to_it(
    config: EngineConfig, caplog: pytest.LogCaptureFixture
) -> None:
    with Engine(config) as engine:
        take(engine, Agent("fix it"))
    (folder,) = (path for path in Path(config.kv_disk).iterdir() if path.is_dir())
    with (
        owned_by_another_process(folder),
        caplog.at_level(logging.WARNING),
        Engine(config) as engine,
    ):
        assert take(engine, Agent("fix it")).stats.origin == "cold"
        assert {session.tier for session in engine.sessions()} == {"device"}
    assert "being written by another engine or process" in caplog.text
    with Engine(config) as engine:
        assert take(engine, Agent("fix it")).stats.origin == "restored"


def changed_template(folder: Path) -> None:
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text(encoding="utf-8"))
    template = settings["chat_template"]
    settings["chat_template"] = template.replace("<|im_start|>", "<|im_start|>the ")
    path.write_text(json.dumps(settings), encoding="utf-8")


def changed_tokenizer(folder: Path) -> None:
    """Two bytes change places: the ids of old sessions are other text now."""
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text(encoding="utf-8"))
    vocab = tokenizer["model"]["vocab"]
    vocab["e"], vocab["f"] = vocab["f"], vocab["e"]
    path.write_text(json.dumps(tokenizer), encoding="utf-8")


@pytest.mark.parametrize("change", ["template", "tokenizer", "history", "thinking"])
def test_what_changed_over_a_restart_is_what_a_fresh_engine_would_make_of_it(
    tmp_path: Path, change: str
) -> None:
    model = write_checkpoint(tmp_path / "model", max_positions=4096)
    config = EngineConfig(
        model=str(model),
        dtype="float64",
        drafter="null",
        max_kv_bytes=32 * 2**20,
        kv_disk=str(tmp_path / "kept"),
    )
    agent = Agent("fix it")
    with Engine(config) as engine:
        for _ in range(2):
            take(engine, agent)
    request = agent.request(max_tokens=10)
    if change == "template":
        changed_template(model)
    elif change == "tokenizer":
        changed_tokenizer(model)
    elif change == "history":
        config = replace(config, history="template")
    else:
        request = replace(request, template_kwargs={"enable_thinking": False})
    with Engine(config) as engine, Engine(replace(config, kv_disk="off")) as fresh:
        ours, theirs = engine.generate(request), fresh.generate(request)
    if change != "thinking":  # the journal still knows what was sampled: thoughts come back
        assert ours.prompt_token_ids == theirs.prompt_token_ids
        assert ours.token_ids == theirs.token_ids
    assert ours.stats.cached_tokens + ours.stats.prefilled_tokens == ours.stats.prompt_tokens
    assert ours.stats.cached_tokens < ours.stats.prompt_tokens - 10
    prompt = replace(request, prompt=ours.prompt_token_ids)
    with Engine(replace(config, kv_disk="off")) as cold:
        assert cold.generate(prompt).token_ids == ours.token_ids
