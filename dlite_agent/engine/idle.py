"""What is computed while nobody asks for anything: the next prompt, as far as it is known.

In template mode the next request does not simply go on from what was sampled: templates drop the
thoughts of earlier turns at a new user message. What that prompt will begin with can be rendered as
soon as a turn has ended. It is built on a fork, in short chunks, of free memory only; the request
that comes finds it by its tokens, or finds that they differ, and then it is dropped.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections import OrderedDict
from dataclasses import dataclass
from typing import Never

from dlite_agent.chat.message_keys import seed_key
from dlite_agent.chat.messages import Message
from dlite_agent.decoding.steps import Pause, Steps
from dlite_agent.engine.admission import AdmittedRequest, plan_history
from dlite_agent.engine.loading import LoadedModel
from dlite_agent.errors import DLiteError
from dlite_agent.models.kv_pool import PAGE_ROWS
from dlite_agent.models.target import ForwardRows
from dlite_agent.sessions.prefix import SyncReport, common_prefix_length
from dlite_agent.sessions.session import Session

__all__ = ["IdleWork"]

logger = logging.getLogger(__name__)

# A request that comes meanwhile waits for one chunk at most. Shorter than the 50 ms that it may
# wait, since a chunk takes longer the more it attends to.
_CHUNK_S = 0.025
_FIRST_ROWS = 16
_MAX_ROWS = 256
# Fewer rows are prefilled by the request itself as quickly.
_WORTH_BUILDING = 16
_MAX_BUILT = 64
# Two continuations whose tokens have nothing in common: what both prompts share is sure to come.
_CONTINUATIONS = ("a", "\n")


@dataclass(slots=True)
class _Build:
    """A fork that grows.

    Attributes:
        fork: Not in the store before it is done, or a request comes.
        tenant: Whose it is.
        donor_id: The session that it was forked from.
        num_before: Rows that it shares with the donor.
        steps: The rest of the work.
    """

    fork: Session
    tenant: str
    donor_id: str
    num_before: int
    steps: Steps[Never, SyncReport]


class IdleWork:
    """Builds the next prompts of conversations. Used by the model's thread, between turns.

    Args:
        model: The parts.
    """

    def __init__(self, model: LoadedModel) -> None:
        self._model = model
        self._wanted: OrderedDict[str, tuple[AdmittedRequest, Message]] = OrderedDict()
        self._build: _Build | None = None
        self._chunk_rows = _FIRST_ROWS
        # By the session that was forked: the fork, and the rows that were computed for it.
        self._built: OrderedDict[str, tuple[str, int]] = OrderedDict()
        self.rows_computed = 0
        """Rows of all forwards so far."""

    @property
    def is_left(self) -> bool:
        """Whether `step` would do something."""
        return self._build is not None or bool(self._wanted)

    def note(self, session_id: str, admitted: AdmittedRequest, answer: Message) -> None:
        """A turn has ended; its conversation may go on with another prompt than its tokens."""
        config = self._model.config
        mode = admitted.request.history or config.history
        waits_for_tool = bool(answer.tool_calls)
        is_known = mode == "template" or (
            mode == "auto" and not waits_for_tool and admitted.memory.renderer.strips_thoughts
        )
        # The tool of an agent needs the processor; a person who reads does not.
        is_free = self._model.target.device.type != "cpu" or not waits_for_tool
        is_on = config.idle and not config.reproducible and config.reuse == "session"
        if is_known and is_free and is_on:
            self._wanted[session_id] = (admitted, answer)

    def step(self) -> None:
        """Compute one chunk, or find out what there is to compute."""
        try:
            if self._build is not None:
                self._compute_chunk(self._build)
            elif self._wanted:
                self._begin(*self._wanted.popitem(last=False))
        except (DLiteError, RuntimeError, MemoryError):
            logger.info("idle work failed; the next turn does it", exc_info=True)
            self._drop_build()

    def interrupt(self) -> None:
        """A request came: it may use what was built so far, and nothing goes on beside it."""
        if self._build is not None:
            self._finish(self._build)

    def settle(self, session_id: str) -> int:
        """Say which session a turn took; returns the rows that idle time computed for it.

        Where it took the one that was forked, the prompt was another than expected, and the fork is
        dropped.
        """
        self._wanted.pop(session_id, None)
        fork_id, _ = self._built.pop(session_id, ("", 0))
        if fork_id:
            self._discard(fork_id)
            return 0
        for donor_id, (built_id, rows) in self._built.items():
            if built_id == session_id:
                del self._built[donor_id]
                return rows
        return 0

    def _begin(self, session_id: str, wanted: tuple[AdmittedRequest, Message]) -> None:
        model, (admitted, answer) = self._model, wanted
        tenant = admitted.request.tenant
        if all(info.session_id != session_id for info in model.sessions.sessions()):
            return
        donor = model.sessions.get(session_id)
        if donor.busy:
            return
        prompt_ids = self._next_prompt(admitted, answer)
        common = common_prefix_length(donor.token_ids, prompt_ids)
        common = min(common, donor.kv.length, len(prompt_ids) - 1)
        pool = model.target.pool
        num_pages = -(-len(prompt_ids) // PAGE_ROWS) - common // PAGE_ROWS
        is_room = num_pages * pool.page_bytes <= pool.free_bytes
        if len(prompt_ids) - common < _WORTH_BUILDING or not is_room:
            return
        fork = donor.fork(common, session_id=secrets.token_hex(8))
        steps = fork.sync_steps(prompt_ids, chunk_rows=lambda: self._chunk_rows)
        self._build = _Build(fork, tenant, session_id, common, steps)

    def _next_prompt(self, admitted: AdmittedRequest, answer: Message) -> list[int]:
        """What the next prompt surely begins with, whatever is said next."""
        request, memory = admitted.request, admitted.memory
        seed = seed_key(request.tools, request.template_kwargs)
        prompts: list[list[int]] = []
        for text in _CONTINUATIONS:
            said = [Message("tool", text, tool_call_id=call.id) for call in answer.tool_calls]
            messages = (*request.messages, answer, *(said[:1] or [Message("user", text)]))
            plan = plan_history(self._model, memory, messages, seed, request.history)
            prompt = memory.renderer.render(
                messages,
                request.tools,
                template_kwargs=request.template_kwargs,
                splices=plan.splices,
                add_generation_prompt=False,
            )
            prompts.append(list(prompt.token_ids))
        return prompts[0][: common_prefix_length(*prompts)]

    def _compute_chunk(self, build: _Build) -> None:
        began_s = time.perf_counter()
        try:
            step: ForwardRows | Pause = next(build.steps)
            while isinstance(step, Pause):
                step = next(build.steps)
        except StopIteration:
            self._finish(build)
            return
        num_rows = len(step.token_ids)
        output = self._model.target.forward(
            step.token_ids, step.kv, logits_for=step.logits_for, taps=step.taps
        )
        self.rows_computed += num_rows
        try:
            build.steps.send(output)
        except StopIteration:
            self._finish(build)
        elapsed_s = max(time.perf_counter() - began_s, 1e-6)
        rows = int(num_rows * _CHUNK_S / elapsed_s)
        self._chunk_rows = max(1, min(rows, 2 * self._chunk_rows, _MAX_ROWS))

    def _finish(self, build: _Build) -> None:
        """Hand the fork over: from here on it is a session like any other."""
        self._build = None
        build.steps.close()
        num_rows = build.fork.kv.length - build.num_before
        if num_rows <= 0:
            build.fork.close()
            return
        self._model.sessions.adopt(build.fork, build.tenant)
        self._built[build.donor_id] = (build.fork.session_id, num_rows)
        while len(self._built) > _MAX_BUILT:
            self._built.popitem(last=False)
        logger.debug("idle session=%s rows=%d", build.fork.session_id, num_rows)

    def _drop_build(self) -> None:
        if self._build is not None:
            build, self._build = self._build, None
            build.steps.close()
            build.fork.close()

    def _discard(self, session_id: str) -> None:
        sessions = self._model.sessions
        for info in sessions.sessions():
            if info.session_id == session_id and not info.is_busy:
                sessions.discard(sessions.get(session_id))
