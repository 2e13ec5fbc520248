"""What a block drafter with a history of its own is made of: DSpark, DFlash and DFlash2.

Their checkpoints differ in names, in how they number the target's layers and in whether slot 0 of a
block is a draft; behind `models.drafter_dialects` they are one `BlockConfig`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Literal, get_args

from dlite_agent.errors import ConfigurationError
from dlite_agent.models.target import TargetConfig
from dlite_agent.rope_scaling import RopeScaling

__all__ = [
    "BlockConfig",
    "BlockFamily",
    "BlockHeadKind",
    "Confidence",
    "block_shapes",
    "spread_taps",
]

BlockFamily = Literal["dspark", "dflash", "dflash2"]
BlockHeadKind = Literal["none", "vanilla", "gated", "rnn", "selector"]
Confidence = Literal["none", "hidden", "token"]


@dataclass(frozen=True, slots=True)
class BlockConfig:
    """Shape of a drafter.

    Attributes:
        family: What its blocks are called.
        vocab_size: V of the target.
        hidden_size: E of the target and of the drafter.
        taps: Layers of the target whose raw output is read, in the order of `fc`'s columns.
        mask_token_id: What the slots behind the anchor are filled with.
        block_size: B, slots of a block, the anchor's among them.
        is_anchor_drafted: Slot k proposes token k + 1 after the anchor (all of DeepSpec's); False:
            slot k proposes token k, and slot 0 nothing (DFlash of z-lab and DFlash2).
        num_layers: Decoder layers.
        num_heads: H.
        num_kv_heads: K.
        head_dim: D.
        intermediate_size: Width of the SwiGLU.
        rms_norm_eps: Epsilon of every norm.
        rope_theta: Base of the rotary embedding, the draft's own.
        rope_scaling: How it is stretched, the draft's own.
        windows: How far back each layer's slots attend, in tokens; 0: to the first. Empty: all 0.
        is_window_causal: In layers with a window, a slot does not attend to later slots.
        head: What a slot knows of the block's tokens before it. `vanilla`, `gated` and `rnn` are
            DSpark's Markov heads, `selector` is DFlash2's.
        rank: r of the head.
        confidence: What DSpark's predictor of acceptance reads: nothing, the slot's state, or that
            and the token before it.
        shortlist: How many of a slot's best tokens the selector chooses among.
        conv_size: Taps of DFlash2's convolutions over the slots; 0: there are none.
        conv_group: Neighbouring channels that share a dynamic coefficient.
        embedding_scale: Of the block's input.
        output_multiplier: Of the base logits.
        softcap: c of c·tanh(logits / c); 0: none.
        draft_vocab_size: Rows of a head of its own; 0: the target's head.
        num_target_layers: L of the target, where the file says so; 0: it does not.
        target_fingerprint: Of the checkpoint that it was trained for; only ours say so.
    """

    family: BlockFamily
    vocab_size: int
    hidden_size: int
    taps: tuple[int, ...]
    mask_token_id: int
    block_size: int = 7
    is_anchor_drafted: bool = True
    num_layers: int = 5
    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    intermediate_size: int = 9728
    rms_norm_eps: float = 1e-6
    rope_theta: float = 1_000_000.0
    rope_scaling: RopeScaling = field(default_factory=RopeScaling)
    windows: tuple[int, ...] = ()
    is_window_causal: bool = True
    head: BlockHeadKind = "none"
    rank: int = 0
    confidence: Confidence = "none"
    shortlist: int = 16
    conv_size: int = 0
    conv_group: int = 16
    embedding_scale: float = 1.0
    output_multiplier: float = 1.0
    softcap: float = 0.0
    draft_vocab_size: int = 0
    num_target_layers: int = 0
    target_fingerprint: str = ""

    def __post_init__(self) -> None:
        for name in _POSITIVE:
            if getattr(self, name) < 1:
                raise ConfigurationError(f"{name} is {getattr(self, name)!r}; use at least 1")
        if self.head not in get_args(BlockHeadKind) or self.confidence not in get_args(Confidence):
            raise ConfigurationError(
                f"head={self.head!r} and confidence={self.confidence!r}; use one of "
                f"{get_args(BlockHeadKind)} and one of {get_args(Confidence)}"
            )
        if not self.taps or len(set(self.taps)) < len(self.taps) or min(self.taps) < 0:
            raise ConfigurationError(
                f"taps is {self.taps!r}; use distinct layers, the first of which is 0"
            )
        if self.num_heads % self.num_kv_heads or self.head_dim % 2:
            raise ConfigurationError(
                f"num_heads={self.num_heads!r}, num_kv_heads={self.num_kv_heads!r} and head_dim="
                f"{self.head_dim!r} do not fit together; use query heads in whole groups and an "
                "even head_dim"
            )
        if self.windows and len(self.windows) != self.num_layers:
            raise ConfigurationError(f"windows is {self.windows!r}; name one for each layer")
        if self.head != "none" and self.rank < 1:
            raise ConfigurationError(f"rank is {self.rank!r} with a {self.head} head; use a rank")
        if self.confidence == "token" and self.head in ("none", "selector"):
            raise ConfigurationError("the confidence reads the Markov head's tokens; name a head")
        if self.conv_size and self.hidden_size % self.conv_group:
            raise ConfigurationError(
                f"conv_group is {self.conv_group!r}; use a divisor of {self.hidden_size}"
            )

    @classmethod
    def for_target(
        cls, target: TargetConfig, fingerprint: str, *, num_taps: int = 5, **choices: object
    ) -> BlockConfig:
        """A DSpark drafter for a target, with layers of its shape.

        Taps are spread from layer 1 to layer L - 3, as in the public checkpoints.

        Args:
            target: Its shape.
            fingerprint: Of its checkpoint.
            num_taps: How many layers are tapped, unless `choices` has `taps`.
            choices: Fields that are not the default.

        Raises:
            ConfigurationError: A choice has no such name, or a value is out of range.
        """
        made: dict[str, object] = {
            "family": "dspark",
            "vocab_size": target.vocab_size,
            "hidden_size": target.hidden_size,
            "taps": spread_taps(target.num_layers, num_taps),
            "mask_token_id": target.vocab_size - 1,
            "num_heads": target.num_heads,
            "num_kv_heads": target.num_kv_heads,
            "head_dim": target.head_dim,
            "intermediate_size": target.intermediate_size,
            "rms_norm_eps": target.rms_norm_eps,
            "rope_theta": target.rope_theta,
            "rope_scaling": target.rope_scaling,
            "head": "vanilla",
            "rank": max(1, min(256, target.hidden_size // 5)),
            "num_target_layers": target.num_layers,
            "target_fingerprint": fingerprint,
        }
        unknown = set(choices) - {item.name for item in fields(cls)}
        if unknown:
            raise ConfigurationError(f"a block drafter has no choice {sorted(unknown)[0]!r}")
        return cls(**(made | choices))  # type: ignore[arg-type]  # checked by __post_init__

    @property
    def num_drafts(self) -> int:
        """Most tokens of a block."""
        return self.block_size if self.is_anchor_drafted else self.block_size - 1


_POSITIVE = (
    "vocab_size hidden_size block_size num_layers num_heads num_kv_heads head_dim "
    "intermediate_size shortlist"
).split()


def spread_taps(num_layers: int, count: int) -> tuple[int, ...]:
    """Layers from 1 to L - 3, evenly: [1, 9, 17, 25, 33] of 36 (z-lab's rule)."""
    first, last = min(1, num_layers - 1), max(num_layers - 3, min(1, num_layers - 1))
    if count == 1:
        return (last,)
    step = (last - first) / (count - 1)
    return tuple(sorted({round(first + index * step) for index in range(count)}))


def block_shapes(config: BlockConfig) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors, as DeepSpec and z-lab call them."""
    hidden, dim, ffn = config.hidden_size, config.head_dim, config.intermediate_size
    query, key = config.num_heads * dim, config.num_kv_heads * dim
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (query, hidden),
        "self_attn.k_proj.weight": (key, hidden),
        "self_attn.v_proj.weight": (key, hidden),
        "self_attn.o_proj.weight": (hidden, query),
        "self_attn.q_norm.weight": (dim,),
        "self_attn.k_norm.weight": (dim,),
        "post_attention_layernorm.weight": (hidden,),
        "mlp.gate_proj.weight": (ffn, hidden),
        "mlp.up_proj.weight": (ffn, hidden),
        "mlp.down_proj.weight": (hidden, ffn),
    }
    if config.conv_size:
        coefficients = 2 * config.conv_size * (hidden // config.conv_group)
        for conv in ("attention_conv", "mlp_conv"):
            layer[f"{conv}.base_kernel"] = (2, config.conv_size, hidden)
            layer[f"{conv}.kernel_projection.weight"] = (coefficients, hidden)
    shapes = {
        "fc.weight": (hidden, len(config.taps) * hidden),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    for index in range(config.num_layers):
        shapes |= {f"layers.{index}.{name}": shape for name, shape in layer.items()}
    return shapes | _head_shapes(config)


def _head_shapes(config: BlockConfig) -> dict[str, tuple[int, ...]]:
    hidden, rank = config.hidden_size, config.rank
    rows = config.draft_vocab_size or config.vocab_size
    shapes: dict[str, tuple[int, ...]] = {}
    if config.head == "selector":
        shapes["candidate_selector.predecessor_codebook"] = (config.vocab_size, rank)
        shapes["candidate_selector.successor_codebook"] = (rows, rank)
        shapes["candidate_selector.hidden_projection.weight"] = (rank, hidden)
    elif config.head != "none":
        shapes["markov_head.markov_w1.weight"] = (config.vocab_size, rank)
        shapes["markov_head.markov_w2.weight"] = (rows, rank)
    if config.head == "gated":
        shapes["markov_head.gate_proj.weight"] = (rank, hidden + rank)
        shapes["markov_head.gate_proj.bias"] = (rank,)
    if config.head == "rnn":
        shapes["markov_head.joint_proj.weight"] = (3 * rank, 2 * rank + hidden)
        shapes["markov_head.joint_proj.bias"] = (3 * rank,)
    if config.confidence != "none":
        width = hidden + (rank if config.confidence == "token" else 0)
        shapes["confidence_head.proj.weight"] = (1, width)
        shapes["confidence_head.proj.bias"] = (1,)
    if config.draft_vocab_size:
        shapes["lm_head.weight"] = (rows, hidden)
    return shapes
