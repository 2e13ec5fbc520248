"""Public prefixes: what the operator declares is computed once, and nothing else is shared."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from dlite_agent.backend import ChatRequest
from dlite_agent.chat.messages import Message, ToolSpec
from dlite_agent.config import EngineConfig
from dlite_agent.engine.engine import Engine
from dlite_agent.engine.service import ModelService, load_service
from dlite_agent.errors import CapacityError, ConfigurationError, RequestError
from dlite_agent.models.kv_pool import PAGE_ROWS
from dlite_agent.outputs import Generation
from dlite_agent.sessions.public import PUBLIC
from tests.conversations import READ_FILE, sampled

SYSTEM = Message("system", "You repair programs. " * 20)
OPENING = ChatRequest((SYSTEM,), (READ_FILE,), is_partial=True, is_public=True)
WRITE_FILE = replace(READ_FILE, name="write_file")

Loader = Callable[..., ModelService]


@pytest.fixture
def service(load: Loader) -> ModelService:
    service = load()
    publish(service, OPENING)
    return service


def publish(service: ModelService, request: ChatRequest) -> None:
    assert list(service.run(request, time.perf_counter(), lambda: False)) == []


def ask(
    service: ModelService,
    text: str,
    tenant: str,
    *,
    system: Message = SYSTEM,
    tools: tuple[ToolSpec, ...] = (READ_FILE,),
) -> Generation:
    request = ChatRequest((system, Message("user", text)), tools, sampled(3, 20), tenant=tenant)
    *_, last = service.run(request, time.perf_counter(), lambda: False)
    assert last.generation is not None
    return last.generation


def public_ids(service: ModelService) -> list[int]:
    (info,) = (i for i in service.model.sessions.sessions() if i.tenant == PUBLIC)
    return service.model.sessions.get(info.session_id).token_ids


def test_every_tenant_begins_behind_the_public_prefix(service: ModelService, load: Loader) -> None:
    num_public = len(public_ids(service))
    assert num_public > PAGE_ROWS, "there is a page to be shared"
    cold = load(reuse="none")
    for tenant in ("us", "them", ""):
        turn = ask(service, "Read it all.", tenant)
        assert turn.stats.cached_tokens == num_public
        assert turn.stats.prefilled_tokens == turn.stats.prompt_tokens - num_public
        assert turn.stats.new_tokens == turn.stats.prefilled_tokens, "what is public is not new"
        assert turn.token_ids == ask(cold, "Read it all.", tenant).token_ids


def test_not_one_token_more_than_what_was_published_is_shared(service: ModelService) -> None:
    ids = public_ids(service)
    ours = ask(service, "Read alpha.py, and tell me what it does.", "us")
    assert list(ours.prompt_token_ids[: len(ids)]) == ids
    theirs = ask(service, "Read alpha.py, and tell me what it does.", "them")
    assert theirs.prompt_token_ids == ours.prompt_token_ids
    assert theirs.stats.cached_tokens == len(ids)
    again = ask(service, "Read alpha.py, and tell me what it does.", "us")
    assert again.stats.cached_tokens == again.stats.prompt_tokens - 1
    assert public_ids(service) == ids, "nobody goes on with it"


def test_a_prefix_of_what_was_published_is_shared_and_another_text_is_not(
    service: ModelService,
) -> None:
    other = ask(service, "Read it.", "us", system=Message("system", "You repair cars."))
    assert 0 < other.stats.cached_tokens < len(public_ids(service))
    shared = other.stats.cached_tokens
    assert list(other.prompt_token_ids[:shared]) == public_ids(service)[:shared]
    theirs = ask(service, "Read it.", "them", system=Message("system", "You repair cars."))
    assert theirs.stats.cached_tokens == shared, "the rest of it is ours"


def test_a_session_behind_a_public_prefix_drafts_with_its_own_tenants_figures(
    load: Loader,
) -> None:
    service = load(drafter="suffix")
    publish(service, OPENING)
    sessions = service.model.sessions
    drafters = {
        tenant: sessions.get(ask(service, "Read it.", tenant).stats.session_id)._drafter
        for tenant in ("us", "them")
    }
    (public,) = (i.session_id for i in sessions.sessions() if i.tenant == PUBLIC)
    assert len({*map(id, drafters.values()), id(sessions.get(public)._drafter)}) == 3


def test_tools_in_another_order_are_the_public_ones(load: Loader) -> None:
    service = load()
    publish(service, replace(OPENING, tools=(READ_FILE, WRITE_FILE)))
    turn = ask(service, "Read it.", "us", tools=(WRITE_FILE, READ_FILE))
    assert turn.stats.cached_tokens == len(public_ids(service))


def test_its_pages_are_kept_and_counted_once(load: Loader) -> None:
    service = load(max_kv_bytes=8 * 2**18)  # eight pages
    publish(service, OPENING)
    pool, num_public = service.model.target.pool, len(public_ids(service))
    assert pool.used_bytes == -(-num_public // PAGE_ROWS) * pool.page_bytes
    first = ask(service, "Read first.", "us")
    num_rows = first.stats.prompt_tokens + first.stats.completion_tokens - 1
    # Its own are the copy of the page that the public prefix ends in, and what follows it.
    own = -(-num_rows // PAGE_ROWS) - num_public // PAGE_ROWS
    assert pool.used_bytes == (-(-num_public // PAGE_ROWS) + own) * pool.page_bytes
    for number in range(12):
        turn = ask(service, f"Read {number}.", f"tenant-{number}")
        assert turn.stats.cached_tokens == num_public, "it is never evicted"
    assert len(service.model.sessions) < 12


def test_what_does_not_fit_is_refused(load: Loader) -> None:
    service = load(max_kv_bytes=5 * 2**18)
    publish(service, OPENING)
    other = replace(OPENING, messages=(Message("system", "Cars. " * 120),))
    with pytest.raises(CapacityError, match="cannot be evicted"):
        publish(service, other)
    assert ask(service, "Read it.", "us").stats.cached_tokens == len(public_ids(service))


def test_the_public_tenant_is_nobodys(service: ModelService) -> None:
    with pytest.raises(RequestError, match="nobody's"):
        publish(service, ChatRequest((SYSTEM,), tenant=PUBLIC, is_partial=True))
    with pytest.raises(RequestError, match="is_public"):
        ChatRequest((SYSTEM,), is_public=True)


def test_purge_keeps_it_and_unpublish_does_not(folder: Path) -> None:
    config = EngineConfig(str(folder), dtype="float64", drafter="null", max_kv_bytes=2**23)
    with Engine(config) as engine:
        engine.publish((SYSTEM,), (READ_FILE,))
        request = ChatRequest((SYSTEM, Message("user", "Read.")), (READ_FILE,), sampled(0, 5))
        num_public = engine.generate(request).stats.cached_tokens
        assert num_public > PAGE_ROWS
        assert engine.purge() == 1
        assert [session.tenant for session in engine.sessions()] == [PUBLIC]
        assert engine.generate(replace(request, tenant="us")).stats.cached_tokens == num_public
        assert engine.unpublish() == 1
        assert engine.generate(replace(request, tenant="them")).stats.cached_tokens == 0


@pytest.fixture
def opening_file(tmp_path: Path) -> Path:
    path = tmp_path / "opening.json"
    function = {"name": "read_file", "description": "Read a file.", "parameters": {}}
    function["parameters"] = dict(READ_FILE.parameters)
    body = {
        "messages": [{"role": "system", "content": SYSTEM.content}],
        "tools": [{"type": "function", "function": function}],
    }
    path.write_text(json.dumps(body), encoding="utf-8")
    return path


def test_files_of_the_configuration_are_published_before_the_first_request(
    folder: Path, opening_file: Path, tmp_path: Path
) -> None:
    config = EngineConfig(
        str(folder),
        dtype="float64",
        drafter="null",
        max_kv_bytes=2**23,
        public_prefixes=(str(opening_file),),
        kv_disk=str(tmp_path / "kept"),
    )
    rows = []
    for _ in range(2):
        service = load_service(config, lambda *_: None)
        rows.append(service.model.target.rows_computed)
        turn = ask(service, "Read it.", "us")
        assert turn.stats.cached_tokens >= len(public_ids(service))
        service.close()
    assert rows[1] == 2, "the next process reads it, compares one row and computes the last one"


@pytest.mark.parametrize("content", [None, "{", "[]", '{"messages": []}', '{"messages": [1]}'])
def test_a_file_that_cannot_be_used_is_named(
    folder: Path, tmp_path: Path, content: str | None
) -> None:
    path = tmp_path / "opening.json"
    if content is not None:
        path.write_text(content, encoding="utf-8")
    config = EngineConfig(str(folder), max_kv_bytes=2**23, public_prefixes=(str(path),))
    with pytest.raises(ConfigurationError, match=r"opening\.json"):
        load_service(config, lambda *_: None)


def test_the_files_come_from_the_environment_too() -> None:
    environ = {"DLITE_PUBLIC_PREFIXES": "a.json:b.json", "DLITE_PARK_AFTER_S": "5"}
    config = EngineConfig.from_env(environ)
    assert config.public_prefixes == ("a.json", "b.json")
    assert config.park_after_s == 5.0
    assert EngineConfig(public_prefixes=Path("a.json")).public_prefixes == ("a.json",)  # type: ignore[arg-type]
    for wrong in ([1], ("",), 7):
        with pytest.raises(ConfigurationError, match="public_prefixes"):
            EngineConfig(public_prefixes=wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="DLITE_PARK_AFTER_S"):
        EngineConfig.from_env({"DLITE_PARK_AFTER_S": "soon"})
