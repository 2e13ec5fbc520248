"""Which drafter an engine runs: the one that was named, or a controller over what fits."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from pathlib import Path

from dlite_agent.chat.messages import Message
from dlite_agent.chat.renderer import Renderer
from dlite_agent.config import EngineConfig
from dlite_agent.decoding.asking_cost import frozen_asking_s, measure_asking_s
from dlite_agent.decoding.controller import Controller, Source
from dlite_agent.decoding.load import Load
from dlite_agent.drafters.dlite import DLiteDrafter, load_dlite
from dlite_agent.drafters.drafter import Drafter, DraftState
from dlite_agent.drafters.load import (
    BESIDE_NAME,
    copying_drafter,
    drafter_beside,
    explain_drafter,
    is_loaded_drafter,
    load_drafter,
)
from dlite_agent.drafters.suffix import SuffixState
from dlite_agent.drafters.workspace import WorkspaceIndex
from dlite_agent.errors import CapacityError, DrafterMismatchError
from dlite_agent.kernels.ngram_kernels import load_ngram_kernels
from dlite_agent.kernels.row_kernels import load_row_kernels
from dlite_agent.models.cost_cache import cost_key, read_cost_table, write_cost_table
from dlite_agent.models.cost_table import (
    CostTable,
    cost_clock,
    frozen_cost_table,
    measure_cost_table,
)
from dlite_agent.models.target import TargetModel
from dlite_agent.models.weights import fingerprint as fingerprint_of
from dlite_agent.models.weights import resolve_checkpoint
from dlite_agent.tokenizer import load_tokenizer

__all__ = ["TenantDrafters", "cost_table_of", "make_drafter", "make_drafters", "question_ids"]

logger = logging.getLogger(__name__)

_BUDGET_S = 1.0
_QUESTION = "Write a Python function that returns the n-th Fibonacci number, and explain it."


class TenantDrafters:
    """The drafter of an engine for each tenant; nothing that one learnt is read by another's.

    They share weights and the cost table. Owned by one thread.

    Args:
        make: Makes a tenant's.
        max_tenants: Most that are remembered; the least recently asked for is forgotten, but for
            the sessions that have it.
    """

    def __init__(self, make: Callable[[str], Drafter], *, max_tenants: int = 256) -> None:
        self._make = make
        self._max_tenants = max_tenants
        self._drafters: OrderedDict[str, Drafter] = OrderedDict()

    def of(self, tenant: str = "") -> Drafter:
        """A tenant's drafter."""
        if tenant not in self._drafters:
            self._drafters[tenant] = self._make(tenant)
        self._drafters.move_to_end(tenant)
        if len(self._drafters) > self._max_tenants:
            self._drafters.popitem(last=False)
        return self._drafters[tenant]


def make_drafters(
    config: EngineConfig,
    target: TargetModel,
    load: Load,
    report: Callable[[str, float], None],
    workspaces: WorkspaceIndex | None = None,
) -> TenantDrafters:
    """The drafters of an engine.

    `"auto"` is a controller; a drafter that is named drafts whenever it has something, whatever
    that costs, which is what its own figures are measured with.

    Args:
        config: Names the drafter; `reproducible` freezes what the controller reads.
        target: What it drafts for, loaded; on a machine where it was never measured before, it is
            measured now.
        load: The other turns of a forward; whoever schedules sets it.
        report: Hears the stage, as `tasks.Progress`.
        workspaces: What each tenant's other sessions know.

    Raises:
        DrafterMismatchError: There is no drafter of this name, or it does not fit.
    """
    checkpoint = resolve_checkpoint(config.model, config.revision)
    explain_drafter(config.drafter, target.config, checkpoint)  # a name of nobody is an error

    ngrams = load_ngram_kernels(config.cache_folder()) if target.uses_kernels else None

    def copying(tenant: str) -> Drafter:
        workspace = None if workspaces is None else partial(workspaces.of, tenant)
        return copying_drafter(config.drafter, target.config, workspace, ngrams)

    if is_loaded_drafter(config.drafter):
        loaded = _load_named(config, checkpoint, target, report)
        return TenantDrafters(lambda _: loaded)
    if config.drafter != "auto":
        return TenantDrafters(copying)
    computing = _sources_beside(config, checkpoint, target)
    costs = cost_table_of(config, target, report)

    def controlled(tenant: str) -> Drafter:
        sources = [Source(copying(tenant), _match_length), *computing]
        return Controller(
            sources,
            costs,
            load=load,
            clock=None if config.reproducible else cost_clock(target),
            name=f"auto({'+'.join(source.drafter.name for source in sources)})",
        )

    return TenantDrafters(controlled)


def make_drafter(
    config: EngineConfig,
    target: TargetModel,
    load: Load,
    report: Callable[[str, float], None],
) -> Drafter:
    """The drafter of an engine that serves nobody else; see `make_drafters`."""
    return make_drafters(config, target, load, report).of()


def _load_named(
    config: EngineConfig,
    checkpoint: Path,
    target: TargetModel,
    report: Callable[[str, float], None],
) -> Drafter:
    """The drafter with weights that an option names, tested on a question of our own."""
    beside = drafter_beside(checkpoint)
    if config.drafter == BESIDE_NAME and beside is not None:
        return _load_dlite(config, beside, target)
    report("drafter", 0.0)
    return load_drafter(
        config.drafter,
        target,
        fingerprint_of(checkpoint),
        kernels=None if config.audit else load_row_kernels(config.cache_folder()),
        test_prompt=question_ids(checkpoint),
        progress=lambda _stage, share: report("drafter", share),
    )


def question_ids(checkpoint: Path) -> list[int]:
    """A question in a checkpoint's own template, for `drafters.self_test`."""
    renderer = Renderer(load_tokenizer(str(checkpoint)))
    return list(renderer.render([Message("user", _QUESTION)]).token_ids)


def _sources_beside(config: EngineConfig, checkpoint: Path, target: TargetModel) -> list[Source]:
    """The DLite drafter in the checkpoint's folder, where there is one and it fits."""
    beside = drafter_beside(checkpoint)
    if beside is None:
        return []
    try:
        return [_dlite_source(config, beside, target)]
    except DrafterMismatchError as error:
        logger.warning("drafter=%s is left out: %s", beside, error)
        return []


def _dlite_source(config: EngineConfig, folder: Path, target: TargetModel) -> Source:
    """With what a block costs: measured, or by its bytes where no clock may decide."""
    drafter = _load_dlite(config, folder, target)
    if config.reproducible:
        return Source(drafter, asking_s=frozen_asking_s(drafter.block_bytes))
    asking_s = measure_asking_s(drafter, target, clock=cost_clock(target))
    logger.info("measured drafter=%s block_ms=%.3f", drafter.name, asking_s * 1e3)
    return Source(drafter, asking_s=asking_s)


def _load_dlite(config: EngineConfig, folder: Path, target: TargetModel) -> DLiteDrafter:
    """A DLite drafter for the checkpoint as it is stored, whatever options change in it.

    Its drafts are verified: with weights in eight bits, or other positions, they are accepted less
    often at worst.
    """
    identity = target.fingerprint
    if config.quantize is not None or config.rope_scaling is not None:
        identity = fingerprint_of(resolve_checkpoint(config.model, config.revision))
    kernels = load_row_kernels(config.cache_folder()) if target.uses_kernels else None
    drafter = load_dlite(folder, target, identity, kernels=kernels)
    if config.rope_scaling is not None:
        logger.warning(
            "drafter=%s was trained without rope_scaling=%r: fewer of its tokens may be accepted; "
            "what is written stays the target's",
            folder,
            str(config.rope_scaling),
        )
    return drafter


def cost_table_of(
    config: EngineConfig,
    target: TargetModel,
    report: Callable[[str, float], None],
) -> CostTable:
    """What a forward costs here: frozen, known from an earlier start, or measured now."""
    frozen = frozen_cost_table(target.config, target.dtype.itemsize)
    if config.audit:  # every forward has the same rows, drafted or padded
        return CostTable((1,), (frozen.step_s,), origin="frozen")
    if config.reproducible:
        return frozen
    folder, key = config.cache_folder(), cost_key(target)
    table = read_cost_table(folder, key) if folder is not None else None
    if table is not None:
        return table
    report("measuring", 0.0)
    began_s = time.perf_counter()
    try:
        table = measure_cost_table(target, budget_s=_BUDGET_S)
    except CapacityError:  # no page is free beside what somebody else holds
        return frozen
    logger.info(
        "measured step_ms=%.3f rows_8=%.2f rows_33=%.2f took_s=%.2f",
        table.step_s * 1e3,
        table.round_s(8) / table.step_s,
        table.round_s(33) / table.step_s,
        time.perf_counter() - began_s,
    )
    if folder is not None:
        write_cost_table(folder, key, table)
    return table


def _match_length(state: DraftState | None) -> int:
    return state.matched if isinstance(state, SuffixState) else 0
