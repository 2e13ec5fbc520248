"""Write nano as a Hugging Face folder: config, weights in bfloat16, tokenizer and chat template."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer

from dlite_agent.nano.chatml import control_id, template_text
from dlite_agent.nano.network import Network
from dlite_agent.nano.shape import NanoConfig

__all__ = ["export"]


def _write(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", "utf-8")


def export(network: Network, config: NanoConfig, tokenizer: Tokenizer, out: Path) -> None:
    """Write a folder that `AutoModelForCausalLM` and `AutoTokenizer` load.

    Args:
        network: The weights; left as they are.
        config: Shape of the network.
        tokenizer: Its tokenizer.
        out: Folder, made if missing; files of the same names are replaced.
    """
    out.mkdir(parents=True, exist_ok=True)
    end_ids = control_id(tokenizer, "<|endoftext|>"), control_id(tokenizer, "<|im_end|>")
    _write(out / "config.json", config.hugging_face(end_ids=end_ids))
    generation = {
        "bos_token_id": end_ids[0],
        "do_sample": False,
        "eos_token_id": [end_ids[1], end_ids[0]],
        "pad_token_id": end_ids[0],
    }
    _write(out / "generation_config.json", generation)
    tensors = {
        name: value.detach().to(torch.bfloat16).contiguous()
        for name, value in network.state_dict().items()
    }
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    tokenizer.save(str(out / "tokenizer.json"))
    template = template_text()
    (out / "chat_template.jinja").write_text(template + "\n", "utf-8")
    settings = {
        "add_bos_token": False,
        "add_prefix_space": False,
        "bos_token": None,
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "model_max_length": config.max_position_embeddings,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": None,
    }
    _write(out / "tokenizer_config.json", settings)
