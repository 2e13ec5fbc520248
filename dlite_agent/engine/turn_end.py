"""The end of a turn: what is noted beside its session, and our errors."""

from __future__ import annotations

import json

import torch

from dlite_agent.engine.admission import AdmittedRequest
from dlite_agent.errors import CapacityError, ConfigurationError
from dlite_agent.outputs import Generation, turn_figures
from dlite_agent.sessions.kept import ANSWER_START, HINT, LAST_TURN, TENANT

__all__ = ["translated", "turn_labels"]


def turn_labels(admitted: AdmittedRequest, generation: Generation | None) -> dict[str, str]:
    """What is saved beside a session: whose it is, where its answer begins, what its turn cost.

    Of a turn without an end, what is noted of the one before stays.
    """
    told = {} if generation is None else {LAST_TURN: json.dumps(turn_figures(generation))}
    request, start = admitted.request, admitted.turn_start
    answer_start = len(admitted.prompt.token_ids) if start is None else start
    return {
        TENANT: request.tenant,
        HINT: request.session_hint or "",
        ANSWER_START: str(answer_start),
        **told,
    }


def translated(error: Exception, dtype: torch.dtype) -> Exception | None:
    """Our error for what torch and Python raise, or None."""
    if isinstance(error, FloatingPointError):
        damaged = "the weights hold NaN or infinity: get the checkpoint again"
        is_wide = dtype in (torch.float32, torch.float64)
        advice = damaged if is_wide else f"load the model with dtype='float32', or {damaged}"
        return ConfigurationError(f"{error}; {advice}")
    is_memory = isinstance(error, MemoryError | torch.OutOfMemoryError)
    if is_memory or "DefaultCPUAllocator" in str(error):
        return CapacityError(
            f"no memory for this turn: {error}; shorten the prompt, or lower max_kv_bytes or "
            "prefill_chunk"
        )
    return None
