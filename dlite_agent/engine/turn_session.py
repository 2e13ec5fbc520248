"""Which session a turn runs on, and what it waits for before it has one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from dlite_agent.decoding.steps import Pause, Steps
from dlite_agent.engine.admission import AdmittedRequest
from dlite_agent.engine.batch_share import BatchShare
from dlite_agent.engine.loading import LoadedModel
from dlite_agent.errors import CapacityError, SessionBusyError
from dlite_agent.outputs import GenerationChunk
from dlite_agent.sessions.request import make_request
from dlite_agent.sessions.session import Session

__all__ = ["find_session"]

# Rows of an answer that are planned beside other turns. Agents' answers are shorter, mostly; a
# longer one goes on while there is room, and then waits.
_PLANNED_ROWS = 512


def find_session(
    model: LoadedModel,
    admitted: AdmittedRequest,
    should_stop: Callable[[], bool],
    share: BatchShare,
) -> Steps[GenerationChunk, tuple[Session, str, str | None] | None]:
    """Claim a session, its origin and the one that was hinted at; None when told to stop.

    Waits while another turn computes tokens that this one can fork, and while memory is short.
    """
    prompt_ids, sessions = admitted.prompt.token_ids, model.sessions
    tenant = admitted.request.tenant
    while not should_stop():
        reuses = model.config.reuse != "none"
        coming = sessions.coming_prefix(prompt_ids, tenant) if reuses and share.may_wait else None
        if coming is not None:
            while share.may_wait and not coming.is_over:
                yield Pause("prefix")
                if should_stop():
                    return None
            if coming.is_over:
                continue
        try:
            return (yield from _claim_steps(model, admitted, share))
        except SessionBusyError:
            if model.config.on_conflict != "wait" or not share.may_wait:
                raise
            yield Pause("prefix")
        except CapacityError:
            if not share.may_wait:
                raise
            yield Pause("admission")
    return None


def _claim_steps(
    model: LoadedModel, admitted: AdmittedRequest, share: BatchShare
) -> Steps[GenerationChunk, tuple[Session, str, str | None]]:
    """Claim a session now.

    Raises:
        CapacityError: There is no room for it.
    """
    prompt_ids, sessions = admitted.prompt.token_ids, model.sessions
    tenant = admitted.request.tenant
    answer_rows = min(admitted.sampling.max_tokens or 1, _PLANNED_ROWS)
    if model.config.reuse == "none":
        session = sessions.acquire_new(prompt_ids, answer_rows=answer_rows, tenant=tenant)
        return session, "cold", None
    hinted_id = _hinted_session(model, admitted)
    restored = yield from _restore_steps(model, admitted, answer_rows, share)
    if restored is not None:
        return restored, "restored", hinted_id
    session, origin = sessions.acquire(
        prompt_ids,
        hint_session_id=hinted_id,
        in_place_ids=frozenset(filter(None, [admitted.plan.owner_session_id])),
        turn_start=admitted.turn_start,
        answer_rows=answer_rows,
        drops_answers=admitted.request.num_choices == 1,
        tenant=tenant,
    )
    return session, origin, hinted_id


def _restore_steps(
    model: LoadedModel, admitted: AdmittedRequest, answer_rows: int, share: BatchShare
) -> Steps[GenerationChunk, Session | None]:
    """Claim a session that was kept outside of the pool, where that saves prefill."""
    request = replace(
        make_request(admitted.prompt.token_ids, answer_rows=answer_rows),
        drops_answers=admitted.request.num_choices == 1,
        tenant=admitted.request.tenant,
    )
    return (
        yield from model.tiers.restore_steps(request, admitted.turn_start, lambda: share.may_wait)
    )


def _hinted_session(model: LoadedModel, admitted: AdmittedRequest) -> str | None:
    """The session that the request's hint names; the baselines take no hints."""
    if model.config.reuse != "session":
        return None
    return admitted.memory.session_of_hint(admitted.request.session_hint)
