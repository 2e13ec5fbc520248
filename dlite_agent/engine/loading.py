"""Load everything that turns need."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dlite_agent.chat.renderer import Renderer
from dlite_agent.config import EngineConfig, SamplingParams
from dlite_agent.decoding.load import Load
from dlite_agent.drafters.load import explain_drafter
from dlite_agent.drafters.workspace import WorkspaceIndex
from dlite_agent.engine.contention import ContentionMeter
from dlite_agent.engine.drafting import make_drafters
from dlite_agent.engine.saves import Saves
from dlite_agent.engine.secret import machine_secret
from dlite_agent.engine.tasks import (
    Progress,
)
from dlite_agent.engine.tenant_memory import TenantMemories, TenantMemory
from dlite_agent.engine.turn_grammars import TurnGrammars
from dlite_agent.errors import UnsupportedCheckpointError
from dlite_agent.kernels.row_kernels import load_row_kernels
from dlite_agent.models.transformer import DenseTransformer
from dlite_agent.models.weights import (
    load_target,
    resolve_checkpoint,
    sampling_defaults,
)
from dlite_agent.rope_scaling import RopeScaling
from dlite_agent.sessions.store import SessionStore
from dlite_agent.sessions.tiers import Tiers, open_tiers
from dlite_agent.tokenizer import CheckpointTokenizer, load_tokenizer

__all__ = ["LoadedModel", "load_engine_target", "load_model"]

if TYPE_CHECKING:
    from dlite_agent.engine.idle import IdleWork

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class LoadedModel:
    """The parts of a turn, and what outlasts it. Owned by the thread that loaded it.

    Attributes:
        config: How it was loaded.
        target: The model; owns weights and KV pool.
        drafter_reason: Which one it is, and why.
        tokenizer: The checkpoint's, with its template.
        grammars: Constraints of turns.
        renderer: Messages to ids, for whoever is no tenant.
        tenants: What each tenant's turns left behind, beside KV.
        sessions: KV of earlier turns.
        tiers: Where they go when there is no room for them, and when the process ends.
        max_context: Most tokens of prompt and answer together.
        how_to_raise_context: What to do for more.
        defaults: Sampling where a request says nothing.
        stop_token_ids: Ids that end every turn.
        control_ids: Ids that only the template may produce.
        closing_id: The one that closes a message, if the template has one.
        workspaces: What sessions have read and written, for drafts of others.
        load: What else is in the forward of a turn, for whoever drafts.
        idle: What is computed between turns; None where turns run without a service.
        saves: What is being written of sessions beside the turns.
        contention: Watches the interpreter lock.
        has_advised_process: Whether the host was told about it.
    """

    config: EngineConfig
    target: DenseTransformer
    drafter_reason: str
    tokenizer: CheckpointTokenizer
    grammars: TurnGrammars
    renderer: Renderer
    tenants: TenantMemories
    sessions: SessionStore
    tiers: Tiers
    max_context: int
    how_to_raise_context: str
    defaults: SamplingParams
    stop_token_ids: frozenset[int]
    control_ids: frozenset[int]
    closing_id: int | None
    workspaces: WorkspaceIndex = field(default_factory=WorkspaceIndex)
    load: Load = field(default_factory=Load)
    idle: IdleWork | None = None
    saves: Saves = field(default_factory=Saves)
    contention: ContentionMeter = field(default_factory=ContentionMeter)
    has_advised_process: bool = False


def load_model(config: EngineConfig, progress: Progress) -> LoadedModel:
    """Load what a configuration names.

    Args:
        config: The configuration; where it runs is the caller's business.
        progress: Hears each stage; an error that it raises ends the load.

    Raises:
        ConfigurationError: See `models.weights.load_target` and `CheckpointTokenizer`.
        CapacityError: No room for the weights.
    """
    if config.isolation == "thread" and config.threads is not None:
        logger.warning(
            "threads=%d is ignored: the host's thread count is not ours to change; call "
            'torch.set_num_threads yourself, or use isolation="process"',
            config.threads,
        )
    stages = _Stages(config.model, progress)
    target = load_engine_target(config, stages.report)
    try:
        model = _assemble(config, target, stages)
    except BaseException:
        target.close()
        raise
    stages.report("ready", 1.0)
    return model


def load_engine_target(config: EngineConfig, progress: Progress) -> DenseTransformer:
    """Only the target that a configuration names, computing as in its engine.

    Raises:
        ConfigurationError: See `models.weights.load_target`.
        CapacityError: No room for the weights.
    """
    scaling = config.rope_scaling
    target = load_target(
        config.model,
        revision=config.revision,
        dtype=config.dtype,
        device=config.device,
        max_kv_bytes=config.max_kv_bytes,
        max_context=config.max_context,
        rope_scaling=None if scaling is None else RopeScaling.parse(scaling),
        quantize=config.quantize,
        progress=progress,
    )
    if config.audit:
        target.audit()
    else:
        target.use_kernels(load_row_kernels(config.cache_folder()))
    return target


def _context_limit(config: EngineConfig, target: DenseTransformer) -> tuple[int, str]:
    """Most tokens of a turn, and what to do for more."""
    row_bytes = target.config.kv_bytes_per_token(target.dtype.itemsize)
    limits = (
        (
            target.config.max_position_embeddings,
            "use a checkpoint with a longer context, or rope_scaling",
        ),
        (target.pool.max_bytes // row_bytes, "raise max_kv_bytes"),
        (config.max_context, "raise max_context"),
    )
    known = [(limit, advice) for limit, advice in limits if limit is not None]
    return min(known, key=lambda pair: pair[0])  # the first of equals


def _assemble(config: EngineConfig, target: DenseTransformer, stages: _Stages) -> LoadedModel:
    stages.report("tokenizer", 0.0)
    folder = resolve_checkpoint(config.model, config.revision)
    tokenizer = load_tokenizer(str(folder))
    if tokenizer.vocab_size > target.config.vocab_size:
        raise UnsupportedCheckpointError(
            f"the tokenizer of {config.model!r} has {tokenizer.vocab_size} ids, but the weights "
            f"only {target.config.vocab_size}; the files belong to different checkpoints"
        )
    renderer = Renderer(tokenizer, is_guarded=config.control_tokens == "guarded")
    load = Load()
    workspaces = WorkspaceIndex()
    drafters = make_drafters(config, target, load, stages.report, workspaces)
    max_context, how_to_raise = _context_limit(config, target)
    closing_id = tokenizer.control_tokens.get(renderer.traits.closer)
    ends = (closing_id, tokenizer.eos_token_id, *target.config.eos_token_ids)
    turn_ends = list(dict.fromkeys(i for i in ends if i is not None))
    defaults = sampling_defaults(folder)
    sessions = SessionStore(
        target,
        drafters.of,
        prefill_chunk=config.prefill_chunk,
        on_conflict=config.on_conflict,
    )
    saves = Saves()
    sessions.on_shortage = saves.reclaim
    tiers = open_tiers(config, sessions, target)
    made_by = tokenizer.fingerprint

    def prepare(tenant: str, memory: TenantMemory) -> None:
        tiers.attach(tenant, memory.journal, made_by)
        for hint, session_id in tiers.hints(tenant):
            memory.remember_hint(hint, session_id)

    secret = machine_secret(config.cache_folder())
    return LoadedModel(
        config=config,
        target=target,
        drafter_reason=explain_drafter(config.drafter, target.config, folder),
        tokenizer=tokenizer,
        grammars=TurnGrammars(
            tokenizer, target.config.vocab_size, turn_ends, renderer.traits.calls
        ),
        renderer=renderer,
        tenants=TenantMemories(renderer, secret, prepare=prepare),
        sessions=sessions,
        tiers=tiers,
        max_context=max_context,
        how_to_raise_context=how_to_raise,
        defaults=defaults,
        stop_token_ids=frozenset(turn_ends),
        closing_id=closing_id,
        workspaces=workspaces,
        saves=saves,
        load=load,
        control_ids=frozenset(tokenizer.control_tokens.values()),
    )


class _Stages:
    """Passes progress on, and logs one line when a stage begins."""

    def __init__(self, model: str, progress: Progress) -> None:
        self._model = model
        self._progress = progress
        self._stage = ""

    def report(self, stage: str, fraction: float) -> None:
        if stage != self._stage:
            self._stage = stage
            logger.info("loading model=%s stage=%s", self._model, stage)
        self._progress(stage, fraction)
