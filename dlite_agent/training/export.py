"""The folder of a drafter as a hub wants it: config, weights, provenance and a card."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import cast

from torch import Tensor

from dlite_agent import __version__
from dlite_agent.models.dlite_config import DLiteConfig
from dlite_agent.models.dlite_files import write_dlite

__all__ = ["export_drafter", "model_card"]


def export_drafter(
    folder: Path,
    config: DLiteConfig,
    weights: Mapping[str, Tensor],
    provenance: Mapping[str, object],
) -> None:
    """Write `config.json`, `model.safetensors`, `provenance.json` and `README.md`.

    Args:
        folder: Made if missing.
        config: Shape of the drafter.
        weights: Its tensors.
        provenance: What it was trained from and with; `recipe` and `heldout` are read.
    """
    told = dict(provenance) | {"dlite_agent": __version__}
    write_dlite(folder, config, weights, told)
    (folder / "README.md").write_text(model_card(config, told), "utf-8")


def model_card(config: DLiteConfig, provenance: Mapping[str, object]) -> str:
    """What a reader must know before using the drafter, with the figures that were measured."""
    recipe = cast(Mapping[str, object], provenance["recipe"])
    heldout = cast(Mapping[str, object], provenance["heldout"])
    capture = cast(Mapping[str, object], recipe["capture"])
    shares = cast(tuple[float, ...], heldout["per_slot"])
    slots = " | ".join(f"{share:.3f}" for share in shares)
    numbers = " | ".join(map(str, range(len(shares))))
    return f"""---
base_model: {recipe["model"]}
library_name: dlite-agent
tags: [speculative-decoding, dlite]
---

# DLite drafter for {recipe["model"]}

Drafts up to {config.block_size} tokens from the hidden states of one position of its target, and
keeps no history of its own. It fits the checkpoint with the fingerprint
`{config.target_fingerprint}` and no other.

```python
from dlite_agent import Engine, EngineConfig

engine = Engine(EngineConfig(model="{recipe["model"]}", drafter="PATH OF THIS FOLDER"))
```

## Figures

Greedy, alone, on held-out turns of the transcripts that it was trained on, as training computes
them (step {provenance["step"]}): {heldout["num_rounds"]} rounds, τ {heldout["tau"]:.3f}. Share of
rounds that accepted at least so many tokens and one more:

| {numbers} |
|{"---|" * len(shares)}
| {slots} |

## How it was made

The target's own answers, temperature {capture["temperature"]}, `enable_thinking`
{capture["enable_thinking"]}; another thinking mode or another kind of text is accepted less. All
options are in `provenance.json`. {len(config.taps)} taps, {config.num_layers} layers, head
{config.head} of rank {config.rank}. An independent reimplementation of the paper's public summary.
"""
