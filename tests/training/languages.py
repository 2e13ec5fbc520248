"""Small languages to learn, and what learns them: no target computes, its states are made up."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from dlite_agent.models.dlite_config import DLiteConfig
from dlite_agent.testing import tiny_config
from dlite_agent.training.frozen import FrozenEnds
from dlite_agent.training.learner import DLiteLearner
from dlite_agent.training.options import AlignOptions
from dlite_agent.training.records import Records
from dlite_agent.training.sources import StoredRecords
from dlite_agent.training.trainer import Trainer
from dlite_agent.training.windows import Windows
from tests.dlite_models import dlite_config

VOCAB, HIDDEN = 64, 64
TARGET = tiny_config(vocab_size=VOCAB, tie_word_embeddings=True)
FAST = AlignOptions(
    steps=60, batch_size=64, learning_rate=8e-3, autocast=False, save_every_s=1e9, log_every_s=1e9
)
BEFORE = 5
"""Rows of a window before its answer."""


def make_ends() -> FrozenEnds:
    """A target whose head reads its embedding: the state of a token is its own row."""
    embedding = torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(1)) * 0.7
    return FrozenEnds(embedding, embedding, torch.ones(HIDDEN), 1e-6)


def make_config(**choices: object) -> DLiteConfig:
    settings: dict[str, object] = {"rank": 16, "intermediate_size": 64, "num_layers": 1}
    return dlite_config(TARGET, **(settings | choices))


def make_trainer(
    work: Path, ends: FrozenEnds, options: AlignOptions = FAST, **choices: object
) -> Trainer:
    return Trainer(work, DLiteLearner(make_config(**choices), ends, seed=options.seed), options)


def source(records: Records, options: AlignOptions = FAST) -> StoredRecords:
    return StoredRecords(records, options, 7)


def answers(ends: FrozenEnds, rows: Tensor, noise: float, before: int = 0) -> Records:
    """Answers [N, S]: the last tap says the next token, the first one is noise.

    The first `before` rows of each are none of the answer's.
    """
    num, length = rows.shape
    next_ids = rows.flatten()
    generator = torch.Generator().manual_seed(3)
    first = torch.randn(len(next_ids), HIDDEN, generator=generator) * noise
    left = torch.arange(length - before, 0, -1)
    left = torch.cat([torch.zeros(before, dtype=torch.int64), left]).repeat(num)
    return Records(
        taps=torch.stack([first, ends.embed(next_ids) * 3.0], dim=1),
        next_ids=next_ids.to(torch.int32),
        best_ids=next_ids.to(torch.int32),
        left=left.to(torch.int32),
        positions=(torch.arange(length).repeat(num) + 5).to(torch.int32),
    )


def memorable(ends: FrozenEnds, before: int = 0) -> Records:
    """64 records to be learned by heart: 8 answers of 9 random tokens, told apart by noise."""
    generator = torch.Generator().manual_seed(2)
    return answers(ends, torch.randint(0, VOCAB, (8, before + 9), generator=generator), 1.0, before)


def windows(ends: FrozenEnds) -> Windows:
    """The same with rows before each answer."""
    return Windows(memorable(ends, BEFORE), torch.arange(8) * (BEFORE + 9))


def branching(count: int) -> Tensor:
    """A language where the first token is anybody's guess and decides all that follow."""
    starts = torch.randint(0, 8, (count,), generator=torch.Generator().manual_seed(4))
    tails = (starts.unsqueeze(1) + 8 * torch.arange(8)) % VOCAB
    return torch.cat([torch.full((count, 1), 63), tails], dim=1)
