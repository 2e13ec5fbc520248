"""Run tasks on a loaded model: the service that an engine's host owns."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator

from dlite_agent.admission import plan_history
from dlite_agent.chat.message_keys import seed_key
from dlite_agent.config import EngineConfig
from dlite_agent.drafters.load import explain_drafter
from dlite_agent.loading import LoadedModel, load_model
from dlite_agent.tasks import (
    Count,
    CountTokens,
    EngineInfo,
    Event,
    Inspect,
    Progress,
    Task,
    Usage,
)
from dlite_agent.turn import run_turn

__all__ = ["ModelService", "load_service"]

logger = logging.getLogger(__name__)


class ModelService:
    """Runs tasks on a loaded model; a `tasks.Service`.

    Args:
        model: Owned from now on.
        load_s: Seconds that loading took.
    """

    def __init__(self, model: LoadedModel, *, load_s: float = 0.0) -> None:
        self.model = model
        target, config = model.target, model.config
        self.info = EngineInfo(
            model=config.model,
            max_context=model.max_context,
            drafter=explain_drafter(config.drafter, target.config),
            dtype=str(target.dtype).removeprefix("torch."),
            device=str(target.device),
            max_kv_bytes=target.pool.max_bytes,
            load_s=load_s,
        )

    def run(
        self, task: Task, submitted_s: float, should_stop: Callable[[], bool]
    ) -> Iterator[Event]:
        """Run one task; see `tasks.Service.run`."""
        match task:
            case CountTokens():
                yield self._count(task)
            case Inspect():
                yield self._usage()
            case _:
                yield from run_turn(self.model, task, submitted_s, should_stop)

    def close(self) -> None:
        """Give sessions, weights and KV back."""
        self.model.sessions.close()
        self.model.target.close()

    def _count(self, task: CountTokens) -> Count:
        model = self.model
        plan = plan_history(model, task.messages, seed_key(task.tools, {}))
        prompt = model.renderer.render(
            task.messages, task.tools, splices=plan.splices, add_generation_prompt=False
        )
        return Count(len(prompt.token_ids))

    def _usage(self) -> Usage:
        pool = self.model.target.pool
        return Usage(
            kv_used_bytes=pool.used_bytes,
            kv_free_bytes=pool.free_bytes,
            num_sessions=len(self.model.sessions),
            rows_computed=self.model.target.rows_computed,
        )


def load_service(config: EngineConfig, progress: Progress) -> ModelService:
    """Load what a configuration names, and log one line about it; see `loading.load_model`."""
    began_s = time.perf_counter()
    service = ModelService(load_model(config, progress), load_s=time.perf_counter() - began_s)
    logger.info("ready %s", " ".join(f"{name}={value}" for name, value in _fields(service.info)))
    return service


def _fields(info: EngineInfo) -> list[tuple[str, object]]:
    return [
        ("model", info.model),
        ("dtype", info.dtype),
        ("device", info.device),
        ("max_context", info.max_context),
        ("kv_bytes", info.max_kv_bytes),
        ("load_s", f"{info.load_s:.2f}"),
        ("drafter", repr(info.drafter)),
    ]
