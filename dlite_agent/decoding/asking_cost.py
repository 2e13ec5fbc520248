"""What it costs to ask a drafter that computes, before it was ever asked."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from dlite_agent.drafters.drafter import Drafter
from dlite_agent.models.cost_table import FROZEN_BYTES_PER_S, MAX_ROWS
from dlite_agent.models.target import TargetHidden, TargetModel
from dlite_agent.sampling import KeyedNoise

__all__ = ["frozen_asking_s", "measure_asking_s"]

_BUDGET_S = 0.25
_MAX_BLOCKS = 8


def frozen_asking_s(num_bytes: int) -> float:
    """Seconds from the bytes that a block reads, the same on every machine.

    For `reproducible=True`; on the machine of `frozen_cost_table`.
    """
    return num_bytes / FROZEN_BYTES_PER_S


def measure_asking_s(
    drafter: Drafter,
    target: TargetModel,
    *,
    budget_s: float = _BUDGET_S,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """The shortest time of a whole block from made-up taps; between turns, in the target's thread.

    What is drafted does not matter, and the work does not depend on it. Whatever else runs on the
    machine only adds, hence the shortest.

    Args:
        drafter: Needs no state, or one that is as good when it knows a single token.
        target: What it drafts for.
        budget_s: Stop after about so many seconds; two blocks are always drafted.
        clock: Seconds.
    """
    layer_ids = drafter.requires.layer_ids
    shape = (len(layer_ids), 1, target.config.hidden_size)
    states = torch.ones(shape, dtype=target.dtype, device=target.device)
    hidden = TargetHidden(states, layer_ids) if layer_ids else None
    state = drafter.start([0])
    times: list[float] = []
    began_s = time.perf_counter()
    while len(times) < 2 or (len(times) < _MAX_BLOCKS and time.perf_counter() - began_s < budget_s):
        started_s = clock()
        drafter.propose(state, 0, hidden, 0, KeyedNoise(0), MAX_ROWS - 1)
        times.append(clock() - started_s)
    return min(times)
