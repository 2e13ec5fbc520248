"""The shape of nano."""

from __future__ import annotations

from dataclasses import asdict, dataclass

__all__ = ["NanoConfig"]


@dataclass(frozen=True, slots=True)
class NanoConfig:
    """Shape of the network; the defaults are those of `nano`."""

    vocab_size: int = 1536
    hidden_size: int = 224
    num_hidden_layers: int = 8
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 64
    intermediate_size: int = 640
    rope_theta: float = 1_000_000.0
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 65_536

    def hugging_face(self, *, end_ids: tuple[int, int]) -> dict[str, object]:
        """Write the `config.json` of `Qwen3ForCausalLM`.

        Args:
            end_ids: Ids of `<|endoftext|>` and `<|im_end|>`.
        """
        shape = asdict(self)
        theta = shape.pop("rope_theta")
        return shape | {
            "architectures": ["Qwen3ForCausalLM"],
            "attention_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": end_ids[0],
            "eos_token_id": end_ids[1],
            "hidden_act": "silu",
            "initializer_range": 0.02,
            "model_type": "qwen3",
            "rope_scaling": None,
            "rope_theta": theta,
            "sliding_window": None,
            "tie_word_embeddings": True,
            "dtype": "bfloat16",
            "use_cache": True,
            "use_sliding_window": False,
        }
