"""Run tasks on a loaded model: the service that an engine's host owns."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from functools import partial

from dlite_agent.backend import ChatRequest
from dlite_agent.config import EngineConfig
from dlite_agent.decoding.steps import drive
from dlite_agent.engine.admission import prompt_ids
from dlite_agent.engine.batch_share import BatchShare
from dlite_agent.engine.conversations import free_sessions, load_conversation, save_conversation
from dlite_agent.engine.idle import IdleWork
from dlite_agent.engine.loading import LoadedModel, load_model
from dlite_agent.engine.publishing import publish_files
from dlite_agent.engine.scheduler import Scheduler, TurnSteps
from dlite_agent.engine.session_commands import run_command
from dlite_agent.engine.session_tasks import (
    Decoded,
    Detokenize,
    FreeSessions,
    LoadConversation,
    SaveConversation,
    SessionCommand,
    TokenIds,
    Tokenize,
)
from dlite_agent.engine.tasks import (
    Answer,
    Count,
    CountTokens,
    EngineInfo,
    Later,
    ListSessions,
    Progress,
    Purged,
    PurgeSessions,
    Question,
    SessionList,
    StoredSession,
    Ticket,
    Usage,
    closed_error,
)
from dlite_agent.engine.turn import turn_steps
from dlite_agent.outputs import GenerationChunk
from dlite_agent.sessions.kept import now_s
from dlite_agent.sessions.public import PUBLIC

__all__ = ["ModelService", "load_service"]

logger = logging.getLogger(__name__)


class ModelService:
    """Runs turns on a loaded model, together; a `tasks.Service`.

    Args:
        model: Owned from now on.
        load_s: Seconds that loading took.
    """

    def __init__(self, model: LoadedModel, *, load_s: float = 0.0) -> None:
        self.model = model
        target, config = model.target, model.config
        self._scheduler = Scheduler(
            target,
            # What an audit computes must not depend on who else is there.
            max_batch=1 if config.audit else config.max_batch,
            prefill_chunk=config.prefill_chunk,
            load=model.load,
        )
        self._idle = model.idle = IdleWork(model)
        self.info = EngineInfo(
            model=config.model,
            max_context=model.max_context,
            drafter=model.drafter_reason,
            dtype=str(target.dtype).removeprefix("torch."),
            device=str(target.device),
            max_kv_bytes=target.pool.max_bytes,
            load_s=load_s,
        )

    @property
    def num_turns(self) -> int:
        """See `tasks.Service.num_turns`."""
        return self._scheduler.num_turns

    @property
    def num_free(self) -> int:
        """See `tasks.Service.num_free`."""
        return self._scheduler.num_free

    @property
    def is_idle_work_left(self) -> bool:
        """See `tasks.Service.is_idle_work_left`."""
        return self._idle.is_left

    def idle_step(self) -> None:
        """See `tasks.Service.idle_step`."""
        self._idle.step()

    def answer(self, question: Question) -> Answer | Later:
        """See `tasks.Service.answer`."""
        self.model.saves.settle()
        match question:
            case CountTokens():
                return self._count(question)
            case ListSessions():
                return SessionList(tuple(self._sessions(question.tenant)))
            case PurgeSessions():
                return self._purge(question)
            case Tokenize():
                return TokenIds(prompt_ids(self.model, question))
            case Detokenize():
                return Decoded(self.model.tokenizer.decode(question.token_ids))
            case SessionCommand():
                return run_command(self.model, question)
            case FreeSessions():
                return Purged(free_sessions(self.model, question))
            case SaveConversation():
                return save_conversation(self.model, question)
            case LoadConversation():
                return Count(load_conversation(self.model, question))
            case _:
                return self._usage()

    def add(self, request: ChatRequest, ticket: Ticket) -> None:
        """See `tasks.Service.add`."""
        self._idle.interrupt()
        self.model.saves.settle()

        def begin(share: BatchShare) -> TurnSteps:
            return turn_steps(
                self.model, request, ticket.submitted_s, lambda: ticket.is_cancelled, share
            )

        self._scheduler.add(begin, ticket)

    def step(self) -> None:
        """See `tasks.Service.step`."""
        self.model.contention.start()
        self._scheduler.step()
        self.model.contention.stop()

    def run(
        self, request: ChatRequest, submitted_s: float, should_stop: Callable[[], bool]
    ) -> Iterator[GenerationChunk]:
        """Run one turn alone, beside the batch."""
        self._idle.interrupt()
        share = BatchShare(self.model.config.prefill_chunk)
        steps = turn_steps(self.model, request, submitted_s, should_stop, share)
        return drive(self.model.target, steps)

    def close(self, error: BaseException | None = None) -> None:
        """End what runs, and give sessions, weights and KV back."""
        self._idle.interrupt()
        self._scheduler.close(error or closed_error(self.model.config.model))
        self.model.saves.close()
        self.model.tiers.close()
        self.model.sessions.close()
        self.model.target.close()

    def _count(self, task: CountTokens) -> Count:
        request = ChatRequest(task.messages, task.tools)
        return Count(len(prompt_ids(self.model, Tokenize(request, add_generation_prompt=False))))

    def _usage(self) -> Usage:
        pool = self.model.target.pool
        return Usage(
            kv_used_bytes=pool.used_bytes,
            kv_free_bytes=pool.free_bytes,
            num_sessions=len(self.model.sessions),
            rows_computed=self.model.target.rows_computed,
        )

    def _sessions(self, tenant: str | None) -> Iterator[StoredSession]:
        for info in self.model.sessions.sessions():
            if tenant in (None, info.tenant):
                size, idle_s = info.nbytes, info.idle_s
                yield StoredSession(
                    info.session_id,
                    "device",
                    info.num_tokens,
                    size,
                    idle_s,
                    info.tenant,
                    info.is_pinned,
                    "parked" if info.is_parked else "running" if info.is_busy else "idle",
                )
        now = now_s()
        for tier, kept in self.model.tiers.kept():
            if tenant in (None, kept.tenant):
                size, idle_s = kept.nbytes, max(0.0, now - kept.used_at)
                yield StoredSession(
                    kept.session_id, tier, len(kept.trail), size, idle_s, kept.tenant
                )

    def _purge(self, task: PurgeSessions) -> Purged:
        model = self.model
        used = {info.session_id for info in model.sessions.sessions() if info.is_busy}
        if task.tenant != PUBLIC:  # of what is public nothing has to be forgotten
            used |= {session.session_id for session in self._sessions(PUBLIC)}
        limit_s = task.older_than_s or 0.0
        listed = list(self._sessions(task.tenant))
        used |= {session.session_id for session in listed if session.idle_s < limit_s}
        ids = {session.session_id for session in listed} - used
        for info in model.sessions.sessions():
            if info.session_id in ids:
                model.sessions.discard(model.sessions.get(info.session_id))
        model.tiers.remove(ids)
        tenants = {session.tenant for session in listed} | set(model.tenants.tenants())
        for tenant in tenants if task.tenant is None else {task.tenant}:
            turns = ids if task.older_than_s is not None else None
            model.tiers.forget_turns(tenant, model.tenants.of(tenant).journal, turns)
        return Purged(len(ids))


def load_service(config: EngineConfig, progress: Progress) -> ModelService:
    """Load what a configuration names, and log one line about it; see `loading.load_model`."""
    began_s = time.perf_counter()
    service = ModelService(load_model(config, progress), load_s=time.perf_counter() - began_s)
    try:
        run = partial(service.run, submitted_s=began_s, should_stop=lambda: False)
        publish_files(config.public_prefixes, run, progress)
    except BaseException as error:
        service.close(error)
        raise
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
