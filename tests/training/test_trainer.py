"""Alignment learns, resumes to the same losses, and stops at what is not finite."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from dlite_agent.errors import ConfigurationError
from dlite_agent.models.dlite_config import DLiteConfig
from dlite_agent.testing import tiny_config
from dlite_agent.training.frozen import FrozenEnds
from dlite_agent.training.records import Records
from dlite_agent.training.simulate import Acceptance, simulate
from dlite_agent.training.trainer import Aligner, AlignOptions, NonFiniteLossError
from tests.dlite_models import dlite_config

VOCAB, HIDDEN = 64, 64
FAST = AlignOptions(
    steps=120, batch_size=64, learning_rate=4e-3, autocast=False, save_every_s=1e9, log_every_s=1e9
)


def make_ends() -> FrozenEnds:
    """A target whose head reads its embedding: the state of a token is its own row."""
    embedding = torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(1)) * 0.7
    return FrozenEnds(embedding, embedding, torch.ones(HIDDEN), 1e-6)


def make_config(**choices: object) -> DLiteConfig:
    target = tiny_config(vocab_size=VOCAB, tie_word_embeddings=True)
    settings = {"rank": 16, "intermediate_size": 64, "num_layers": 1} | choices
    return dlite_config(target, **settings)


def answers(ends: FrozenEnds, rows: Tensor, noise: float, seed: int = 3) -> Records:
    """Answers [N, S]: the last tap says the next token, the first one is noise."""
    num, length = rows.shape
    next_ids = rows.flatten()
    certain = ends.embed(next_ids) * 3.0
    generator = torch.Generator().manual_seed(seed)
    first = torch.randn(len(next_ids), HIDDEN, generator=generator) * noise
    left = torch.arange(length, 0, -1).repeat(num)
    positions = torch.arange(length).repeat(num) + 5
    return Records(
        taps=torch.stack([first, certain], dim=1),
        next_ids=next_ids.to(torch.int32),
        best_ids=next_ids.to(torch.int32),
        left=left.to(torch.int32),
        positions=positions.to(torch.int32),
    )


def memorable(ends: FrozenEnds) -> Records:
    """64 records to be learned by heart: 8 answers of 9 random tokens, told apart by noise."""
    rows = torch.randint(0, VOCAB, (8, 9), generator=torch.Generator().manual_seed(2))
    return answers(ends, rows, noise=1.0)


def test_records_are_learned_by_heart(tmp_path: Path) -> None:
    ends = make_ends()
    records = memorable(ends)
    aligner = Aligner(tmp_path, make_config(num_layers=2), FAST, ends)
    before = simulate(aligner.student, ends, records)
    assert aligner.run(records)
    after = simulate(aligner.student, ends, records)
    assert before.per_slot[0] < 0.3
    assert min(after.per_slot[:7]) > 0.95
    assert after.tau > 6.0
    assert aligner.place.per_slot[0] > 0.8


def branching(count: int) -> Tensor:
    """A language where the first token is anybody's guess and decides all that follow."""
    starts = torch.randint(0, 8, (count,), generator=torch.Generator().manual_seed(4))
    steps = torch.arange(8)
    tails = (starts.unsqueeze(1) + 8 * steps) % VOCAB
    return torch.cat([torch.full((count, 1), 63), tails], dim=1)


@pytest.mark.parametrize(("head", "wins"), [("recurrent", True), ("token", True), ("none", False)])
def test_only_a_sequential_head_follows_a_branch(tmp_path: Path, head: str, wins: bool) -> None:
    ends = make_ends()
    rows = branching(64)
    # the target does not know the branch before it is there: its state at the anchor is the same
    records = answers(ends, rows, noise=0.0)
    records.taps[::9] = 0.1
    aligner = Aligner(tmp_path, make_config(head=head), FAST, ends)
    aligner.run(records)
    batch = records.batch(torch.arange(0, len(records), 9), 7)
    from dlite_agent.training.student import StudentInput

    given = StudentInput(batch.taps, batch.anchor_ids, batch.previous_ids, batch.positions)
    with torch.no_grad():
        logits = ends.logits(aligner.student.states(given))
    agrees = (logits.argmax(dim=-1) == batch.best_ids).float().mean(dim=0)
    assert agrees[0] < 0.4, "nobody can know the branch"
    assert (agrees[1:].min() > 0.95) == wins


def losses(aligner: Aligner, records: Records) -> list[float]:
    found = []
    while not aligner.is_done:
        aligner.step_once(records)
        found.append(aligner.place.loss)
    return found


def test_run_that_was_cut_goes_on_to_the_same_losses(tmp_path: Path) -> None:
    ends = make_ends()
    records = memorable(ends)
    options = AlignOptions(steps=12, batch_size=48, autocast=False)
    whole = losses(Aligner(tmp_path / "whole", make_config(), options, ends), records)
    first = Aligner(tmp_path / "cut", make_config(), options, ends)
    assert not first.run(records, max_s=0.0)
    for _ in range(5):
        first.step_once(records)
    first.save()
    first.step_once(records)  # lost with the process
    again = Aligner(tmp_path / "cut", make_config(), options, ends)
    assert again.place.step == 5
    assert losses(again, records) == whole[5:]
    assert len(list((tmp_path / "cut").glob("state-*"))) == 1
    assert again.run(records)


def test_state_of_another_run_is_refused(tmp_path: Path) -> None:
    ends = make_ends()
    Aligner(tmp_path, make_config(), FAST, ends).save()
    other = AlignOptions(steps=7, batch_size=64, learning_rate=4e-3, autocast=False)
    with pytest.raises(ConfigurationError, match="holds a run with steps=120, not 7"):
        Aligner(tmp_path, make_config(), other, ends)
    with pytest.raises(ConfigurationError, match="rank=16, not 4"):
        Aligner(tmp_path, make_config(rank=4), FAST, ends)


def test_loss_that_is_not_finite_stops_the_run_and_keeps_the_last_state(tmp_path: Path) -> None:
    ends = make_ends()
    records = memorable(ends)
    aligner = Aligner(tmp_path, make_config(), FAST, ends)
    aligner.step_once(records)
    aligner.save()
    records.taps[:] = float("nan")
    with pytest.raises(NonFiniteLossError, match="at step 1 the loss is nan"):
        aligner.run(records)
    again = Aligner(tmp_path, make_config(), FAST, ends)
    assert again.place.step == 1
    assert all(bool(torch.isfinite(tensor).all()) for tensor in again.weights.values())
    assert json.loads((tmp_path / "place.json").read_text())["step"] == 1


def test_run_without_records_is_refused(tmp_path: Path) -> None:
    ends = make_ends()
    nothing = answers(ends, torch.zeros(3, 1, dtype=torch.int64), noise=0.0)
    with pytest.raises(ConfigurationError, match="there are no records"):
        Aligner(tmp_path, make_config(), FAST, ends).run(nothing)


@pytest.mark.parametrize("wrong", [{"steps": 0}, {"clip": -1.0}, {"warmup": -0.1}])
def test_options_out_of_range_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(wrong))):
        AlignOptions(**wrong)  # type: ignore[arg-type]


def test_rate_rises_and_falls() -> None:
    options = AlignOptions(steps=100, learning_rate=1.0, warmup=0.1, final_rate=0.1)
    assert options.rate(0) == pytest.approx(0.1)
    assert options.rate(9) == pytest.approx(1.0)
    assert options.rate(100) == pytest.approx(0.1)
    assert options.rate(55) == pytest.approx(0.55, abs=0.01)


def test_acceptance_counts_what_rounds_commit() -> None:
    # three rounds: 7 of many; 2 of 5 left and the target's own; 3 of 3, the stop token among them
    measured = Acceptance.of(torch.tensor([7, 2, 3]), torch.tensor([20, 5, 3]), 7)
    assert measured.num_rounds == 3
    assert measured.num_tokens == 8 + 3 + 3
    assert measured.tau == pytest.approx(14 / 3)
    assert measured.per_slot == pytest.approx((1.0, 1.0, 2 / 3, 0.5, 0.5, 1.0, 1.0))
