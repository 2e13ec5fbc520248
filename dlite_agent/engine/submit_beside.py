"""Submitting from an event loop, which others need meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from dlite_agent.backend import ChatRequest

__all__ = ["submitted"]

Cancel = Callable[[], None]
_SMALL = 64  # messages and tools; 5,000 take tens of milliseconds


async def submitted(request: ChatRequest, submit: Callable[[], Cancel]) -> Cancel:
    """Call `submit`; for a long request in a thread, since packing it for a process takes long.

    Where the caller is cancelled meanwhile, what was submitted is cancelled as well.

    Args:
        request: What is submitted.
        submit: Submits it, and returns what cancels it.
    """
    if len(request.messages) + len(request.tools) <= _SMALL:
        return submit()
    submitting = asyncio.create_task(asyncio.to_thread(submit))
    try:
        return await asyncio.shield(submitting)
    except asyncio.CancelledError:
        submitting.add_done_callback(_undo)
        raise


def _undo(submitting: asyncio.Task[Cancel]) -> None:
    if not submitting.cancelled() and submitting.exception() is None:
        submitting.result()()
