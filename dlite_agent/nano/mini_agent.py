"""nano under mini-swe-agent's own loop: a model for its `DefaultAgent` and a run on a task."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from dlite_agent.backend import ChatBackend, ChatRequest
from dlite_agent.chat.messages import JSON
from dlite_agent.chat.openai_format import (
    message_to_openai,
    messages_from_openai,
    tools_from_openai,
)
from dlite_agent.config import SamplingParams
from dlite_agent.errors import MissingDependencyError
from dlite_agent.nano.agent import AgentRun
from dlite_agent.nano.mini import BASH_TOOL, import_host, mini_config, mini_issue
from dlite_agent.nano.world import Task
from dlite_agent.outputs import Generation

__all__ = ["MiniModel", "run_mini"]

MAX_STEPS = 20


@dataclass(slots=True)
class MiniModel:
    """A model for mini-swe-agent 2.4 that answers with a `ChatBackend`, greedily.

    Attributes:
        backend: Does the work; not closed here.
        enable_thinking: Passed to the chat template; None leaves its default.
        generations: Every finished turn.
        config: Unused; the host's protocol asks for it.
    """

    backend: ChatBackend
    enable_thinking: bool | None
    generations: list[Generation]
    config: Any = None

    def query(self, messages: list[dict[str, str]], **_: Any) -> dict[str, Any]:
        """Answer the history; mini-swe-agent's own parser reads the calls."""
        from minisweagent.models.utils.actions_toolcall import parse_toolcall_actions

        kwargs: dict[str, JSON] = {}
        if self.enable_thinking is not None:
            kwargs["enable_thinking"] = self.enable_thinking
        request = ChatRequest(
            messages_from_openai([_without_extra(message) for message in messages]),
            tools_from_openai([BASH_TOOL]),
            SamplingParams(temperature=0.0, max_tokens=512),
            template_kwargs=kwargs,
        )
        generation = self.backend.generate(request)
        self.generations.append(generation)
        answer: dict[str, Any] = dict(message_to_openai(generation.message))
        calls = [
            SimpleNamespace(id=call["id"], function=SimpleNamespace(**call["function"]))
            for call in answer.get("tool_calls") or ()
        ]
        actions = parse_toolcall_actions(
            calls,
            format_error_template=str(mini_config()["model"]["format_error_template"]),
            template_kwargs={"finish_reason": generation.finish_reason},
        )
        answer["extra"] = {"actions": actions, "cost": 0.0}
        return answer

    def format_message(self, **fields: object) -> dict[str, object]:
        """Keep a message as it is."""
        return fields

    def format_observation_messages(
        self,
        message: Mapping[str, Any],
        outputs: list[dict[str, object]],
        template_vars: dict[str, object] | None = None,
    ) -> list[dict[str, object]]:
        """Render the results of the calls with mini-swe-agent's own template."""
        from minisweagent.models.utils.actions_toolcall import format_toolcall_observation_messages

        observations: list[dict[str, object]] = format_toolcall_observation_messages(
            actions=message["extra"]["actions"],
            outputs=outputs,
            observation_template=str(mini_config()["model"]["observation_template"]),
            template_vars=template_vars,
        )
        return observations

    def get_template_vars(self, **_: object) -> dict[str, object]:
        """Add nothing to the templates."""
        return {}

    def serialize(self) -> dict[str, object]:
        """Describe the model for mini-swe-agent's trajectory."""
        return {"info": {"config": {"model_type": "dlite_agent.nano"}}}


def _without_extra(message: Mapping[str, str]) -> dict[str, object]:
    return {key: value for key, value in message.items() if key != "extra"}


def run_mini(
    backend: ChatBackend, task: Task, folder: Path, *, enable_thinking: bool | None = None
) -> AgentRun:
    """Let mini-swe-agent's `DefaultAgent` work on a task with its own templates and a real shell.

    Args:
        backend: The model.
        task: What to repair.
        folder: Where the repository is written to; made if missing. Commands run there, and are
            not confined to it.
        enable_thinking: Passed to the chat template; None leaves its default.

    Raises:
        MissingDependencyError: mini-swe-agent is not installed.
    """
    try:
        import_host()
        from minisweagent.agents.default import DefaultAgent
        from minisweagent.environments.local import LocalEnvironment
    except ImportError:
        raise MissingDependencyError(
            'mini-swe-agent is not installed; run: pip install "dlite-agent[train]"'
        ) from None
    model = MiniModel(backend, enable_thinking, [])
    config = mini_config()
    environment = LocalEnvironment(
        cwd=str(task.materialise(folder)), timeout=20, env=dict(_mapping(config["environment"]))
    )
    agent = DefaultAgent(
        model,
        environment,
        system_template=config["agent"]["system_template"],
        instance_template=config["agent"]["instance_template"],
        step_limit=MAX_STEPS,
    )
    start = time.perf_counter()
    result = agent.run(mini_issue(random.Random(task.seed), task))
    status = str(result.get("exit_status"))
    return AgentRun(
        task.solved(folder),
        tuple(model.generations),
        time.perf_counter() - start,
        None if status == "Submitted" else status,
    )


def _mapping(section: Mapping[str, object]) -> Mapping[str, str]:
    values = section.get("env")
    assert isinstance(values, dict)
    return values
