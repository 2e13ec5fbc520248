"""A drafter's config made whole by the shapes of its tensors, and held against them, strictly."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from dlite_agent.errors import ConfigurationError, UnsupportedCheckpointError
from dlite_agent.models.block_config import (
    BlockConfig,
    BlockFamily,
    BlockHeadKind,
    Confidence,
    block_shapes,
)
from dlite_agent.models.drafter_format import DrafterFormat
from dlite_agent.models.eagle3_network import Eagle3Config, eagle3_shapes
from dlite_agent.models.rope_config import positive_number, read_rope

__all__ = ["block_config_of", "canonical_name", "check_manifest", "eagle3_config_of"]

Shapes = Mapping[str, tuple[int, ...]]

_ENDS = ("embed_tokens.weight", "lm_head.weight")
"""May be there as copies of the target's, or as tensors of the drafter's own."""
_OF_VERIFIER = ("verifier_lm_head.weight", "verifier_norm.weight")
"""Copies of the target's that only training reads."""
_MAPS = ("d2t", "t2d")


def canonical_name(stored: str) -> str:
    """A tensor's name as DeepSpec and z-lab would write it; `midlayer` is EAGLE-3's layer."""
    name = stored.removeprefix("model.").removeprefix("logit_head.")
    return re.sub(r"^midlayer\.", "layers.0.", name)


def block_config_of(found: DrafterFormat, shapes: Shapes) -> BlockConfig:
    """The config of a DSpark, DFlash or DFlash2 drafter.

    Args:
        found: What `config.json` says.
        shapes: By canonical name.

    Raises:
        UnsupportedCheckpointError: A tensor that tells a dimension is missing, or they contradict
            each other; the message names it.
    """
    size = _Sizes(found, shapes)
    hidden = size("fc.weight", 0)
    attention = "layers.0.self_attn."
    head_dim = size(f"{attention}q_norm.weight", 0)
    num_layers = 1 + max(
        int(number) for number in re.findall(r"\blayers\.(\d+)\.", " ".join(shapes))
    )
    head, rank = _head_of(found, size)
    is_window_causal = not found.flag(
        "sliding_window_non_causal",
        default=found.family == "dflash2" and found.dialect == "speculators",
    )
    rope = read_rope(found.layer, None, found.name, 32_768)
    own_rows = found.count("draft_vocab_size", default=0)
    vocab_size = found.count("vocab_size")
    with _blamed_on(found):
        return BlockConfig(
            family=_family(found),
            vocab_size=vocab_size,
            hidden_size=hidden,
            taps=found.taps,
            mask_token_id=found.count("mask_token_id"),
            block_size=found.count("block_size"),
            is_anchor_drafted=found.is_anchor_drafted,
            num_layers=num_layers,
            num_heads=size(f"{attention}q_proj.weight", 0) // head_dim,
            num_kv_heads=size(f"{attention}k_proj.weight", 0) // head_dim,
            head_dim=head_dim,
            intermediate_size=size("layers.0.mlp.gate_proj.weight", 0),
            rms_norm_eps=_eps(found),
            rope_theta=rope.theta,
            rope_scaling=rope.scaling,
            windows=_windows(found, num_layers),
            is_window_causal=is_window_causal,
            head=head,
            rank=rank,
            confidence=_confidence(found, shapes),
            shortlist=found.count("selector_top_k", default=16),
            conv_size=size("layers.0.attention_conv.base_kernel", 1, default=0),
            conv_group=found.count("conv_group_size", default=16),
            embedding_scale=found.number("input_embedding_scale", default=1.0),
            output_multiplier=found.number("output_multiplier", default=1.0),
            softcap=max(found.number("final_logit_softcapping", default=0.0), 0.0),
            draft_vocab_size=0 if own_rows == vocab_size else own_rows,
            num_target_layers=found.count("num_target_layers", default=0),
            target_fingerprint=str(found.own.get("target_fingerprint") or ""),
        )


def eagle3_config_of(found: DrafterFormat, shapes: Shapes) -> Eagle3Config:
    """The config of an EAGLE-3 drafter; its ends are the target's unless `check_manifest` differs.

    Args:
        found: What `config.json` says.
        shapes: By canonical name.

    Raises:
        UnsupportedCheckpointError: As in `block_config_of`; or it has more than one layer.
    """
    size = _Sizes(found, shapes)
    if any(name.startswith("layers.1.") for name in shapes):
        raise UnsupportedCheckpointError(
            f"{found.name!r} is an EAGLE-3 drafter of several layers; one is read, use another"
        )
    attention = "layers.0.self_attn."
    num_heads = found.count("num_attention_heads")
    head_dim = size(f"{attention}q_proj.weight", 0) // num_heads
    rope = read_rope(found.layer, None, found.name, 32_768)
    vocab_size = found.count("vocab_size")
    own_rows = found.count("draft_vocab_size", default=vocab_size)
    with _blamed_on(found):
        return Eagle3Config(
            vocab_size=vocab_size,
            hidden_size=size("fc.weight", 0),
            taps=found.taps,
            num_heads=num_heads,
            num_kv_heads=size(f"{attention}k_proj.weight", 0) // head_dim,
            head_dim=head_dim,
            intermediate_size=size("layers.0.mlp.gate_proj.weight", 0),
            rms_norm_eps=_eps(found),
            rope_theta=rope.theta,
            rope_scaling=rope.scaling,
            has_qk_norm=f"{attention}q_norm.weight" in shapes,
            is_residual_normed=found.flag("norm_before_residual"),
            is_input_normed=found.flag("norm_before_fc"),
            is_output_normed=found.dialect == "speculators" and found.flag("norm_output"),
            draft_vocab_size=0 if own_rows == vocab_size else own_rows,
            block_size=found.count("ttt_length", default=_proposed(found)),
        )


def check_manifest(
    config: BlockConfig | Eagle3Config, found: DrafterFormat, shapes: Shapes
) -> None:
    """See that the tensors are exactly those of the config.

    An embedding and a head of the whole vocabulary may be there beside; a head of fewer rows must
    be, with the ids of its rows.

    Raises:
        UnsupportedCheckpointError: A tensor is missing, unknown or of another shape; the message
            names it.
    """
    expected = block_shapes(config) if isinstance(config, BlockConfig) else eagle3_shapes(config)
    ends = dict.fromkeys(_ENDS, (config.vocab_size, config.hidden_size))
    allowed: dict[str, tuple[int, ...] | None] = {**dict.fromkeys(_OF_VERIFIER), **ends}
    if config.draft_vocab_size:
        expected["d2t"] = (config.draft_vocab_size,)
    allowed |= {"d2t": None, "t2d": (config.vocab_size,), **expected}
    for name, shape in shapes.items():
        if name.endswith("rotary_emb.inv_freq"):
            continue
        if name not in allowed:
            raise UnsupportedCheckpointError(
                f"{found.name!r} holds a tensor {name!r} that a {found.family} drafter with its "
                "config has not; it is of a version that is not read"
            )
        wanted = allowed[name]
        if wanted is not None and shape != wanted:
            raise UnsupportedCheckpointError(
                f"{found.name!r}: tensor {name!r} is {list(shape)}, but should be {list(wanted)}; "
                "config.json and weights do not belong together"
            )
    missing = [name for name in expected if name not in shapes]
    if missing:
        raise UnsupportedCheckpointError(
            f"{found.name!r} lacks {len(missing)} tensors, the first is {missing[0]!r}; download "
            "the drafter completely"
        )


class _Sizes:
    """Dimensions of tensors."""

    def __init__(self, found: DrafterFormat, shapes: Shapes) -> None:
        self._name = found.name
        self._shapes = shapes

    def __call__(self, tensor: str, axis: int, default: int | None = None) -> int:
        shape = self._shapes.get(tensor)
        if shape is None and default is not None:
            return default
        if shape is None or len(shape) <= axis or shape[axis] < 1:
            raise UnsupportedCheckpointError(
                f"{self._name!r}: tensor {tensor!r} is "
                f"{'missing' if shape is None else list(shape)}; download the drafter completely"
            )
        return shape[axis]


@contextmanager
def _blamed_on(found: DrafterFormat) -> Iterator[None]:
    """Say whose config it is that cannot be."""
    try:
        yield
    except UnsupportedCheckpointError:
        raise
    except ConfigurationError as error:
        raise UnsupportedCheckpointError(
            f"{found.name!r}: {error}; config.json and weights do not belong together"
        ) from error


def _eps(found: DrafterFormat) -> float:
    return positive_number(found.layer.get("rms_norm_eps", 1e-6), "rms_norm_eps", found.name)


def _family(found: DrafterFormat) -> BlockFamily:
    assert found.family != "eagle3", "asked for a block drafter"
    return found.family


def _head_of(found: DrafterFormat, size: _Sizes) -> tuple[BlockHeadKind, int]:
    if found.family == "dflash2":
        return "selector", size("candidate_selector.hidden_projection.weight", 0)
    if found.family == "dflash":
        return "none", 0
    kind = found.own.get("markov_head_type", "vanilla")
    if kind not in ("vanilla", "gated", "rnn"):
        raise UnsupportedCheckpointError(
            f"{found.name!r}: markov_head_type={kind!r} is not read; there are 'vanilla', 'gated' "
            "and 'rnn'"
        )
    return kind, size("markov_head.markov_w1.weight", 1)


def _confidence(found: DrafterFormat, shapes: Shapes) -> Confidence:
    """None where the tensors are not there: files without them are common."""
    is_there = any(name.startswith("confidence_head.") for name in shapes)
    if not is_there or not found.flag("enable_confidence_head"):
        return "none"
    return "token" if found.flag("confidence_head_with_markov", default=True) else "hidden"


def _windows(found: DrafterFormat, num_layers: int) -> tuple[int, ...]:
    kinds = found.layer.get("layer_types")
    if not isinstance(kinds, list) or "sliding_attention" not in kinds:
        return ()
    window = found.count("sliding_window")
    return tuple(window if kind == "sliding_attention" else 0 for kind in kinds[:num_layers])


def _proposed(found: DrafterFormat) -> int:
    """`speculative_tokens` of the first proposal method; 5 as in the papers' chains."""
    methods = found.own.get("speculators_config")
    methods = methods.get("proposal_methods") if isinstance(methods, Mapping) else None
    first = methods[0] if isinstance(methods, list) and methods else None
    count = first.get("speculative_tokens") if isinstance(first, Mapping) else None
    return count if isinstance(count, int) and count > 0 else 5
