"""mini-swe-agent's own loop, shell and LiteLLM model on nano, in this process and over HTTP."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import litellm
import pytest

from dlite_agent import Engine, EngineConfig
from dlite_agent.nano.evaluate import SEED_STRIDE
from dlite_agent.nano.mini import import_host, mini_issue
from dlite_agent.nano.world import Size, Task, make_task
from tests.serving.live_server import LiveServer, live_server

pytest.importorskip("minisweagent", reason="mini-swe-agent is not installed")
import_host()

from minisweagent.agents.default import DefaultAgent  # noqa: E402
from minisweagent.config import get_config_from_spec  # noqa: E402
from minisweagent.environments.local import LocalEnvironment  # noqa: E402
from minisweagent.models import get_model  # noqa: E402
from minisweagent.utils.serialize import recursive_merge  # noqa: E402

FOLDER = Path(__file__).parents[2] / "integrations" / "mini-swe-agent"
pytestmark = pytest.mark.host


@pytest.fixture(autouse=True)
def _nothing_is_tried_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT", "1")


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    """nano, which the tests in this process use as well."""
    with live_server(Engine.shared(EngineConfig.from_env(model="nano"))) as server:
        yield server
    Engine.close_all()


def run(task: Task, folder: Path, server: LiveServer | None = None) -> list[dict[str, Any]]:
    """Let the agent of mini.yaml and our configuration work; the trajectory's messages."""
    name = "dlite.yaml" if server is None else "dlite-server.yaml"
    specs = ("mini.yaml", str(FOLDER / name))
    config = recursive_merge(*[get_config_from_spec(spec) for spec in specs])
    if server is not None:
        config["model"]["model_kwargs"]["api_base"] = server.base_url
    environment = {**config["environment"], "cwd": str(task.materialise(folder)), "timeout": 20}
    agent = DefaultAgent(
        get_model(config=config["model"]),
        LocalEnvironment(**environment),
        system_template=config["agent"]["system_template"],
        instance_template=config["agent"]["instance_template"],
        step_limit=20,
    )
    agent.run(mini_issue(random.Random(task.seed), task))
    messages: list[dict[str, Any]] = agent.messages
    return messages


def turns(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The answers whose call the agent could read, with what the host stored of each."""
    return [message for message in messages if message["role"] == "assistant"]


def assert_only_new_tokens_are_prefilled(messages: list[dict[str, Any]]) -> None:
    stats = [turn["provider_specific_fields"]["dlite"] for turn in turns(messages)]
    for turn in stats[1:]:  # and the last sampled token, which has no KV yet
        assert turn["prefilled_tokens"] == turn["new_tokens"] + 1
        assert turn["cached_tokens"] + turn["prefilled_tokens"] == turn["prompt_tokens"]


def heldout(number: int, size: Size) -> Task:
    return make_task(number * SEED_STRIDE, split="heldout", size=size)


@pytest.mark.parametrize("way", ["in process", "over HTTP"])
def test_an_agent_solves_a_task_and_prefills_only_what_is_new(
    way: str, tmp_path: Path, server: LiveServer
) -> None:
    task = heldout(1, "tiny")
    messages = run(task, tmp_path, server if way == "over HTTP" else None)
    assert messages[-1]["extra"]["exit_status"] == "Submitted"
    assert task.solved(tmp_path)
    assert len(turns(messages)) > 3
    assert_only_new_tokens_are_prefilled(messages)
    for turn in turns(messages):
        usage = turn["extra"]["response"]["usage"]
        own = turn["provider_specific_fields"]["dlite"]
        assert usage["prompt_tokens"] == own["prompt_tokens"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == own["cached_tokens"]
        assert turn["extra"]["cost"] == 0.0


def test_a_fault_that_no_retry_repairs_ends_the_run_at_once(tmp_path: Path) -> None:
    model = get_model(
        config={
            "model_class": "dlite_agent.integrations.mini_swe_agent.DLiteModel",
            "model_name": f"dlite/{tmp_path / 'nothing'}",
        }
    )
    with pytest.raises(litellm.NotFoundError, match="nothing"):
        model.query([{"role": "user", "content": "Hi."}])


@pytest.mark.soak
@pytest.mark.parametrize("way", ["in process", "over HTTP"])
def test_ten_tasks_are_solved_but_two(way: str, tmp_path: Path, server: LiveServer) -> None:
    tasks = [heldout(number, "small") for number in range(1, 11)]
    solved = 0
    for number, task in enumerate(tasks):
        folder = tmp_path / str(number)
        messages = run(task, folder, server if way == "over HTTP" else None)
        assert_only_new_tokens_are_prefilled(messages)
        solved += task.solved(folder)
    print(f"mini-swe-agent {way}: {solved} of {len(tasks)} held-out tasks solved")
    assert solved >= 8
