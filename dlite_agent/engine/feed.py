"""Prefill a message while it is still growing: a tool's output as it comes.

What is computed is a prefix that the whole message will surely have too: up to the last line end,
less what a tokenizer could merge with what follows. The final request decides by its tokens, as
always; where they differ, what was fed is dropped.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from dlite_agent.chat.renderer import RenderedPrompt, Segment
from dlite_agent.decoding.steps import Steps
from dlite_agent.engine.admission import AdmittedRequest
from dlite_agent.engine.batch_share import BatchShare
from dlite_agent.engine.loading import LoadedModel
from dlite_agent.engine.publishing import keep_public, public_prefix
from dlite_agent.engine.sure_prefix import sure_prefix
from dlite_agent.engine.turn_session import find_session
from dlite_agent.errors import CapacityError
from dlite_agent.outputs import GenerationChunk
from dlite_agent.sessions.request import make_request

__all__ = ["feed_steps"]


def feed_steps(
    model: LoadedModel,
    admitted: AdmittedRequest,
    should_stop: Callable[[], bool],
    share: BatchShare,
) -> Steps[GenerationChunk, None]:
    """Compute what is sure to stay of a request whose last message is not complete.

    Yields no chunk. Does nothing where a session holds all of it already, or memory is short; what
    is public raises then.
    """
    is_public = admitted.request.is_public
    prefix = admitted.prompt if admitted.is_raw else _sure_prefix(admitted)
    request = replace(make_request(prefix.token_ids), tenant=admitted.request.tenant)
    if model.sessions.shared_length(request) >= len(prefix.token_ids) - 1:
        return
    try:
        found = yield from find_session(model, replace(admitted, prompt=prefix), should_stop, share)
    except CapacityError:
        if is_public:
            raise
        return  # the turn itself will wait, or say so
    if found is None:
        return
    session = found[0]
    began_s = time.perf_counter()
    try:
        report = yield from session.sync_steps(
            prefix.token_ids, should_stop=should_stop, chunk_rows=lambda: share.chunk_rows
        )
        model.tiers.note_prefill(report.prefilled, time.perf_counter() - began_s)
        stop = report.cached + report.prefilled
        if is_public and report.is_complete:
            keep_public(model, admitted, session)
        elif not is_public:
            admitted.memory.note_fed(session.session_id, report.cached, stop)
    finally:
        model.sessions.release(session, waits_for_tool=not is_public)


def _sure_prefix(admitted: AdmittedRequest) -> RenderedPrompt:
    """The prompt up to what may still change; the last message counts as an answer to drop."""
    request = admitted.request
    if request.is_public:
        return public_prefix(admitted)
    *before, last = request.messages
    whole_lines = last.content[: last.content.rfind("\n") + 1].rstrip()
    prompt, length = sure_prefix(
        admitted, lambda text: (*before, replace(last, content=whole_lines + text))
    )
    index = len(request.messages) - 1
    starts = (s.start for s in prompt.segments if s.message_index == index)
    start = min(next(starts, length), length)
    return RenderedPrompt(tuple(prompt.token_ids[:length]), (Segment(None, start, length),))
