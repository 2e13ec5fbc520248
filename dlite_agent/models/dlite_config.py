"""What a DLite drafter is made of: its config, and the tensors that follow from it.

From the paper: taps of several layers with the first and the last among them, composition along the
sequence, a parallel backbone, a sequential head before the vocabulary projection, blocks of seven.
Everything else is ours, and a field here where it can be another way.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Literal, cast, get_args

from dlite_agent.errors import ConfigurationError, UnsupportedCheckpointError
from dlite_agent.models.target import TargetConfig

__all__ = [
    "FORMAT_VERSION",
    "Composition",
    "DLiteConfig",
    "HeadKind",
    "PositionFeature",
    "dlite_shapes",
    "even_taps",
]

FORMAT_VERSION = 1
"""Of the checkpoint; a file of another version is refused."""
ARCHITECTURE = "DLiteDrafter"
POSITION_FREQUENCIES = 8
COPY_LENGTHS = 9
"""Lengths of a match that the copying head tells apart: none, 1 to 7, and 8 or more."""

Composition = Literal["sequence", "feature"]
HeadKind = Literal["none", "token", "recurrent", "copy"]
PositionFeature = Literal["none", "log-absolute"]


@dataclass(frozen=True, slots=True)
class DLiteConfig:
    """Shape of a drafter.

    Attributes:
        target_fingerprint: Of the checkpoint that it was trained for, by `models.weights`; empty:
            of any checkpoint of this shape, which only a test wants.
        vocab_size: V of the target.
        hidden_size: E of the target and of the drafter.
        num_target_layers: L of the target.
        taps: Layers of the target whose residual stream is read, ascending.
        composition: `sequence` gives the backbone a context token for each tap; `feature` one for
            all taps, which are concatenated along the channels (what DSpark and DFlash do).
        context_positions: How many of the last verified positions are read, where the last forward
            had them.
        position_feature: `log-absolute` adds a context token that tells the anchor's position.
        num_layers: Decoder layers of the backbone.
        num_heads: H.
        num_kv_heads: K.
        head_dim: D.
        intermediate_size: Width of the SwiGLU.
        head: What a slot knows of the block's tokens before it: nothing, the one before, or all; or
            all of them, and what followed such tokens in the session's ids (`copy_hint`).
        rank: r of the sequential head.
        block_size: Most drafted tokens.
        rms_norm_eps: Epsilon of every norm.
        rope_theta: Base of the rotary embedding. The context stands at 0 and the block at 1 to
            `block_size`, however long the history is.
    """

    target_fingerprint: str
    vocab_size: int
    hidden_size: int
    num_target_layers: int
    taps: tuple[int, ...]
    composition: Composition = "sequence"
    context_positions: int = 1
    position_feature: PositionFeature = "none"
    num_layers: int = 2
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    intermediate_size: int = 640
    head: HeadKind = "recurrent"
    rank: int = 64
    block_size: int = 7
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10_000.0

    def __post_init__(self) -> None:
        positive = (
            "vocab_size hidden_size num_target_layers context_positions num_layers num_heads "
            "num_kv_heads head_dim intermediate_size rank block_size"
        ).split()
        for name in positive:
            if getattr(self, name) < 1:
                raise ConfigurationError(f"{name} is {getattr(self, name)!r}; use at least 1")
        for name, kind in (
            ("composition", Composition),
            ("head", HeadKind),
            ("position_feature", PositionFeature),
        ):
            if getattr(self, name) not in get_args(kind):
                raise ConfigurationError(
                    f"{name} is {getattr(self, name)!r}; use one of "
                    f"{', '.join(map(repr, get_args(kind)))}"
                )
        is_ascending = list(self.taps) == sorted(set(self.taps))
        if not self.taps or not is_ascending or self.taps[-1] >= self.num_target_layers:
            raise ConfigurationError(
                f"taps is {self.taps!r}; use ascending layers from 0 to "
                f"{self.num_target_layers - 1}"
            )
        if self.taps[0] < 0 or self.num_heads % self.num_kv_heads or self.head_dim % 2:
            raise ConfigurationError(
                f"taps={self.taps!r}, num_heads={self.num_heads!r}, num_kv_heads="
                f"{self.num_kv_heads!r} and head_dim={self.head_dim!r} do not fit together; use "
                "layers from 0, query heads in whole groups and an even head_dim"
            )

    @classmethod
    def for_target(
        cls, target: TargetConfig, fingerprint: str, *, num_taps: int = 14, **choices: object
    ) -> DLiteConfig:
        """The default drafter of a target: layers of its shape, rank min(512, E // 5).

        Args:
            target: Its shape.
            fingerprint: Of its checkpoint.
            num_taps: How many layers are tapped, evenly, unless `choices` has `taps`.
            choices: Fields that are not the default.

        Raises:
            ConfigurationError: A choice has no such name, or a value is out of range.
        """
        made: dict[str, object] = {
            "target_fingerprint": fingerprint,
            "vocab_size": target.vocab_size,
            "hidden_size": target.hidden_size,
            "num_target_layers": target.num_layers,
            "taps": even_taps(target.num_layers, num_taps),
            "num_heads": target.num_heads,
            "num_kv_heads": target.num_kv_heads,
            "head_dim": target.head_dim,
            "intermediate_size": target.intermediate_size,
            "rank": max(1, min(512, target.hidden_size // 5)),
            "rms_norm_eps": target.rms_norm_eps,
        }
        unknown = set(choices) - {field.name for field in fields(cls)}
        if unknown:
            raise ConfigurationError(
                f"a DLite drafter has no choice {sorted(unknown)[0]!r}; use one of "
                f"{', '.join(sorted(field.name for field in fields(cls)))}"
            )
        return cls(**(made | choices))  # type: ignore[arg-type]  # checked by __post_init__

    @property
    def num_context(self) -> int:
        """Context tokens when all positions are there."""
        per_position = len(self.taps) if self.composition == "sequence" else 1
        return self.context_positions * per_position + (self.position_feature != "none")

    def to_json(self) -> dict[str, object]:
        """Content of `config.json`."""
        return {"architectures": [ARCHITECTURE], "format_version": FORMAT_VERSION} | asdict(self)

    @classmethod
    def from_json(cls, content: Mapping[str, object], where: str) -> DLiteConfig:
        """Read a `config.json`.

        Args:
            content: Of the file.
            where: For messages.

        Raises:
            UnsupportedCheckpointError: It is no DLite config, of another version, lacks a field,
                or has one that we do not know.
        """
        if content.get("architectures") != [ARCHITECTURE]:
            raise UnsupportedCheckpointError(
                f"{where}: architectures is {content.get('architectures')!r}, not "
                f"{[ARCHITECTURE]!r}; name the folder of a DLite drafter"
            )
        if content.get("format_version") != FORMAT_VERSION:
            raise UnsupportedCheckpointError(
                f"{where}: format_version is {content.get('format_version')!r}, and this version "
                f"of dlite-agent reads {FORMAT_VERSION}; train again, or use the version that "
                "wrote it"
            )
        known = {field.name for field in fields(cls)}
        given = {key: value for key, value in content.items() if key in known}
        unknown = sorted(set(content) - known - {"architectures", "format_version"})
        missing = sorted(known - set(given))
        if unknown or missing:
            raise UnsupportedCheckpointError(
                f"{where}: unknown fields {unknown}, missing fields {missing}; the file is not as "
                "it was written"
            )
        try:
            taps = tuple(cast(list[int], given["taps"]))
            return cls(**(given | {"taps": taps}))  # type: ignore[arg-type]  # checked by __post_init__
        except (TypeError, ConfigurationError) as error:
            raise UnsupportedCheckpointError(f"{where}: {error}; repair the file") from error


def even_taps(num_layers: int, count: int) -> tuple[int, ...]:
    """`count` layers, evenly spread, the first and the last among them; all if there are fewer.

    Raises:
        ConfigurationError: `count` is below 2.
    """
    if count < 2:
        raise ConfigurationError(f"num_taps is {count!r}; use at least 2: the first and the last")
    if count >= num_layers:
        return tuple(range(num_layers))
    return tuple(round(index * (num_layers - 1) / (count - 1)) for index in range(count))


def dlite_shapes(config: DLiteConfig) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors of a checkpoint."""
    hidden, rank, dim = config.hidden_size, config.rank, config.head_dim
    query, key = config.num_heads * dim, config.num_kv_heads * dim
    num_taps, positions = len(config.taps), config.context_positions
    is_sequence = config.composition == "sequence"
    shapes: dict[str, tuple[int, ...]] = {
        "context_norm.weight": (num_taps, hidden),
        "context_proj.weight": (hidden, hidden if is_sequence else num_taps * hidden),
        "context_embedding.weight": (positions * (num_taps if is_sequence else 1), hidden),
        "slot_embedding.weight": (config.block_size, hidden),
        "norm.weight": (hidden,),
    }
    if config.position_feature == "log-absolute":
        shapes["position_proj.weight"] = (hidden, 2 * POSITION_FREQUENCIES)
        shapes["position_embedding.weight"] = (1, hidden)
    for layer in range(config.num_layers):
        shapes |= {
            f"layers.{layer}.{name}": shape
            for name, shape in {
                "input_layernorm.weight": (hidden,),
                "self_attn.q_proj.weight": (query, hidden),
                "self_attn.k_proj.weight": (key, hidden),
                "self_attn.v_proj.weight": (key, hidden),
                "self_attn.o_proj.weight": (hidden, query),
                "self_attn.q_norm.weight": (dim,),
                "self_attn.k_norm.weight": (dim,),
                "post_attention_layernorm.weight": (hidden,),
                "mlp.gate_proj.weight": (config.intermediate_size, hidden),
                "mlp.up_proj.weight": (config.intermediate_size, hidden),
                "mlp.down_proj.weight": (hidden, config.intermediate_size),
            }.items()
        }
    if config.head in ("recurrent", "copy"):
        shapes |= {
            "head.token_proj.weight": (2 * rank, hidden),
            "head.hidden_proj.weight": (2 * rank, hidden),
            "head.state_proj.weight": (2 * rank, rank),
            "head.bias": (2 * rank,),
        }
    elif config.head == "token":
        shapes["head.token_proj.weight"] = (rank, hidden)
    if config.head == "copy":
        shapes |= {
            "head.copy_proj.weight": (2 * rank, hidden),
            "head.copy_length.weight": (COPY_LENGTHS, 2 * rank),
            "head.copy_gain.weight": (1, rank),
            "head.copy_bias": (COPY_LENGTHS,),
        }
    if config.head != "none":
        shapes["head.out_proj.weight"] = (hidden, rank)
    return shapes
