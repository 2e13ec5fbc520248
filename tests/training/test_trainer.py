"""A run learns, resumes to the same losses, and stops at what is wrong with nothing lost."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dlite_agent.errors import CapacityError, ConfigurationError, UnsupportedCheckpointError
from dlite_agent.training import files
from dlite_agent.training.learner import Part
from dlite_agent.training.measure import bigram_share, draft_all, measure
from dlite_agent.training.options import AlignOptions
from dlite_agent.training.records import Records
from dlite_agent.training.simulate import Acceptance, accepted_at, walk_rounds
from dlite_agent.training.trainer import NonFiniteLossError, Trainer
from tests.training.languages import (
    FAST,
    answers,
    branching,
    make_ends,
    make_trainer,
    memorable,
    source,
)


def test_records_are_learned_by_heart(tmp_path: Path) -> None:
    ends = make_ends()
    records = memorable(ends)
    trainer = make_trainer(tmp_path, ends)
    before = measure(trainer.learner, records)
    assert trainer.run(source(records))
    after = measure(trainer.learner, records)
    assert before.per_slot[0] < 0.3
    assert min(after.per_slot) > 0.95
    assert after.tau > 6.0
    assert trainer.place.per_slot[0] > 0.5


@pytest.mark.parametrize(("head", "wins"), [("recurrent", True), ("token", True), ("none", False)])
def test_only_a_sequential_head_follows_a_branch(tmp_path: Path, head: str, wins: bool) -> None:
    ends = make_ends()
    # the target does not know the branch before it is there: its state at the anchor is the same
    records = answers(ends, branching(64), noise=0.0)
    records.taps[::9] = 0.1
    trainer = make_trainer(tmp_path, ends, head=head)
    trainer.run(source(records))
    batch = records.batch(torch.arange(0, len(records), 9), 7)
    with torch.no_grad():
        logits = trainer.learner.logits(Part(batch))
    agrees = (logits.argmax(dim=-1) == batch.best_ids).float().mean(dim=0)
    assert agrees[0] < 0.4, "nobody can know the branch"
    assert (agrees[1:].min() > 0.95) == wins


CUT = AlignOptions(steps=9, batch_size=48, autocast=False)


def losses(trainer: Trainer, records: Records) -> list[float]:
    found = []
    given = source(records, trainer.options)
    while not trainer.is_done:
        trainer.step_once(given)
        found.append(trainer.place.loss)
    return found


def test_run_that_was_cut_goes_on_to_the_same_losses(tmp_path: Path) -> None:
    ends = make_ends()
    records = memorable(ends)
    whole = losses(make_trainer(tmp_path / "whole", ends, CUT), records)
    first = make_trainer(tmp_path / "cut", ends, CUT)
    assert not first.run(source(records, CUT), max_s=0.0)
    for _ in range(4):
        first.step_once(source(records, CUT))
    first.save()
    first.step_once(source(records, CUT))  # lost with the process
    again = make_trainer(tmp_path / "cut", ends, CUT)
    assert again.place.step == 4
    assert losses(again, records) == whole[4:]
    assert again.run(source(records, CUT))


def test_records_of_a_step_may_be_computed_in_parts(tmp_path: Path) -> None:
    ends = make_ends()
    records = memorable(ends)
    whole = losses(make_trainer(tmp_path / "whole", ends, CUT), records)
    parts = losses(make_trainer(tmp_path / "parts", ends, replace(CUT, part_size=20)), records)
    assert parts == pytest.approx(whole, rel=1e-4)


def test_tokens_that_answers_use_are_learned_alone(tmp_path: Path) -> None:
    ends = make_ends()
    records = memorable(ends)
    few = replace(FAST, max_vocab=20)
    trainer = make_trainer(tmp_path / "few", ends, few, head="copy")
    given = source(records, few)
    ids = given.common_ids(20)
    counts = torch.bincount(records.next_ids, minlength=64)
    assert len(ids) == 20
    assert ids.tolist() == sorted(ids.tolist())
    left_out = [token for token in range(64) if token not in ids.tolist()]
    assert int(counts[ids].min()) >= int(counts[left_out].max())
    part = given.parts(0, (0, 1))[0]
    whole = trainer.learner.logits(part)
    torch.testing.assert_close(trainer.learner.logits(part, ids), whole[..., ids])
    assert given.common_ids(1000).tolist() == records.next_ids.unique().tolist()
    trainer.run(given)
    drafted = draft_all(trainer.learner, records)
    right = records.batch(records.usable(), 7)
    is_common = torch.isin(right.best_ids, ids) & right.valid
    # a token that was left out is missed, and what stands behind it in a block
    assert (drafted == right.best_ids)[is_common].float().mean() > 0.6


def test_share_without_records_adds_nothing(tmp_path: Path) -> None:
    ends = make_ends()
    trainer = make_trainer(tmp_path, ends, CUT)
    given = source(memorable(ends), CUT)
    given.parts = lambda step, share: []  # type: ignore[method-assign]
    trainer.step_once(given)
    assert trainer.place.loss == 0.0


def test_state_of_another_run_is_refused(tmp_path: Path) -> None:
    ends = make_ends()
    make_trainer(tmp_path, ends).save()
    with pytest.raises(ConfigurationError, match="holds a run with steps=60, not 7"):
        make_trainer(tmp_path, ends, replace(FAST, steps=7))
    with pytest.raises(ConfigurationError, match="rank=16, not 4"):
        make_trainer(tmp_path, ends, rank=4)
    make_trainer(tmp_path, ends, replace(FAST, save_every_s=3.0))


def test_loss_that_is_not_finite_stops_the_run_and_keeps_the_last_state(tmp_path: Path) -> None:
    ends = make_ends()
    records = memorable(ends)
    trainer = make_trainer(tmp_path, ends)
    trainer.step_once(source(records))
    trainer.save()
    records.taps[:] = float("nan")
    with pytest.raises(NonFiniteLossError, match="at step 1 the loss is nan"):
        trainer.run(source(records))
    again = make_trainer(tmp_path, ends)
    assert again.place.step == 1
    assert all(bool(torch.isfinite(weight).all()) for weight in again.learner.weights.values())


def test_truncated_state_is_named_and_the_one_before_it_goes_on(tmp_path: Path) -> None:
    ends = make_ends()
    records = memorable(ends)
    trainer = make_trainer(tmp_path, ends)
    for _ in range(3):
        trainer.step_once(source(records))
        trainer.save()
    first, last = sorted(tmp_path.glob("state-*"))
    last.write_bytes(last.read_bytes()[:5000])
    with pytest.raises(UnsupportedCheckpointError, match=rf"go on from {first.name}, delete it"):
        make_trainer(tmp_path, ends)
    last.unlink()
    assert make_trainer(tmp_path, ends).place.step == 2


def test_full_disk_stops_the_run_and_keeps_the_last_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = make_ends()
    records = memorable(ends)
    trainer = make_trainer(tmp_path, ends)
    trainer.save()

    def write_some(_tensors: object, path: Path, _metadata: object) -> None:
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(files, "save_file", write_some)
        with pytest.raises(CapacityError, match=r"No space left .* make room"):
            trainer.run(source(records), max_s=0.0)
    assert [path.name for path in tmp_path.iterdir()] == ["state-00000000.safetensors"]
    assert make_trainer(tmp_path, ends).place.step == 0


def test_run_without_records_is_refused() -> None:
    nothing = answers(make_ends(), torch.zeros(3, 1, dtype=torch.int64), noise=0.0)
    with pytest.raises(ConfigurationError, match="there are no records"):
        source(nothing)


@pytest.mark.parametrize(
    "wrong", [{"steps": 0}, {"clip": -1.0}, {"warmup": -0.1}, {"device": "tpu"}]
)
def test_options_out_of_range_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(wrong))):
        AlignOptions(**wrong)  # type: ignore[arg-type]


def test_rate_rises_and_falls() -> None:
    options = AlignOptions(steps=100, learning_rate=1.0, warmup=0.1, final_rate=0.1)
    assert options.rate(0) == pytest.approx(0.1)
    assert options.rate(9) == pytest.approx(1.0)
    assert options.rate(100) == pytest.approx(0.1)
    assert options.rate(55) == pytest.approx(0.55, abs=0.01)


def test_bigram_knows_what_followed_most_often() -> None:
    ends = make_ends()
    learned = answers(ends, torch.tensor([[5, 6, 5, 6, 5, 7, 9]]), noise=0.0)
    heldout = answers(ends, torch.tensor([[5, 6, 5, 7, 8], [9, 6, 5, 6, 5]]), noise=0.0)
    # 5 is followed by 6, twice of three times, 6 by 5, and 7 by 9; nothing follows 9
    found = bigram_share((learned.next_ids, learned.left), heldout)
    assert found == pytest.approx(5 / 8)


def test_positions_are_all_asked_and_rounds_are_not() -> None:
    records = answers(make_ends(), torch.tensor([[3, 1, 4, 1, 5]]), noise=0.0)
    blocks = torch.tensor([[1, 4, 9], [9, 9, 9], [1, 9, 9], [9, 9, 9]])
    assert accepted_at(records, blocks).tolist() == [2, 0, 1, 0]
    assert walk_rounds(records, blocks)[0].tolist() == [2, 0]


def test_acceptance_counts_what_rounds_commit() -> None:
    # three rounds: 7 of many; 2 of 5 left and the target's own; 3 of 3, the stop token among them
    measured = Acceptance.of(torch.tensor([7, 2, 3]), torch.tensor([20, 5, 3]), 7)
    assert measured.num_rounds == 3
    assert measured.num_tokens == 8 + 3 + 3
    assert measured.tau == pytest.approx(14 / 3)
    assert measured.per_slot == pytest.approx((1.0, 1.0, 2 / 3, 0.5, 0.5, 1.0, 1.0))
