"""Windows hold what was before an answer, and those who read it see what they may and no more."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from dlite_agent.errors import ConfigurationError, UnsupportedCheckpointError
from dlite_agent.models.block_config import BlockConfig
from dlite_agent.testing import tiny_qwen3
from dlite_agent.training.capture import Transcript, capture
from dlite_agent.training.dspark import DSparkLearner
from dlite_agent.training.learner import DLiteLearner, Learner
from dlite_agent.training.measure import measure
from dlite_agent.training.records import Records
from dlite_agent.training.teacher import TeacherLearner, without_history
from dlite_agent.training.trainer import Trainer
from dlite_agent.training.windows import StoredWindows, Windows
from tests.training.languages import BEFORE, FAST, TARGET, make_config, make_ends, windows

IDS = [3, 14, 15, 9, 26, 5, 35, 8, 97, 93, 2, 38, 46]


def test_window_holds_every_row_from_its_first_to_the_last_answer() -> None:
    target = tiny_qwen3(dtype="float64")
    transcript = Transcript(IDS, [(4, 7), (9, 13)])
    answers = capture(target, transcript, (0, 1))
    rows = capture(target, transcript, (0, 1), first_row=1)
    assert answers is not None
    assert rows is not None
    assert rows.positions.tolist() == list(range(2, 13))
    assert rows.left.tolist() == [0, 0, 3, 2, 1, 0, 0, 4, 3, 2, 1]
    assert rows.span_starts().tolist() == [2, 7]
    kept = rows.left > 0
    torch.testing.assert_close(rows.taps[kept], answers.taps, atol=1e-12, rtol=1e-12)
    assert rows.next_ids[kept].tolist() == answers.next_ids.tolist()
    one = Windows.of([rows, rows])
    assert one.bounds(1) == (11, 22)
    assert one.usable(1).tolist() == [13, 14, 18, 19, 20]
    assert len(one.first(1).rows) == 11


def test_windows_are_read_as_they_were_written(tmp_path: Path) -> None:
    made = windows(make_ends())
    made.save(tmp_path / "a.safetensors")
    read = Windows.load(tmp_path / "a.safetensors")
    both = Windows.join([read, read])
    assert both.starts.tolist() == [*made.starts.tolist(), *(made.starts + len(made.rows)).tolist()]
    assert torch.equal(both.rows.taps[len(made.rows) :], made.rows.taps)
    (tmp_path / "a.safetensors").write_bytes(b"no tensors at all")
    with pytest.raises(UnsupportedCheckpointError, match="capture again"):
        Windows.load(tmp_path / "a.safetensors")


def test_step_takes_anchors_of_some_windows_and_the_marked_ones_more() -> None:
    made = windows(make_ends())
    marks = torch.zeros(len(made.rows), dtype=torch.uint8)
    marks[BEFORE] = 1  # the first record of window 0
    marked = Windows(replace(made.rows, marks=marks), made.starts)
    options = replace(FAST, batch_size=8, emphasis=1000)
    source = StoredWindows(marked, options, 7, anchors=2)
    again = StoredWindows(marked, options, 7, anchors=2)
    firsts = 0
    for step in range(4):
        parts, same = source.parts(step, (0, 1)), again.parts(step, (0, 1))
        assert len(parts) == 4
        for part, other in zip(parts, same, strict=True):
            assert torch.equal(part.records.taps, other.records.taps)
            assert part.history is not None
            own = part.history.taps[part.history.rows]
            assert torch.equal(own, part.records.taps.squeeze(2))
            is_window_0 = torch.equal(part.history.taps[0], made.rows.taps[0])
            firsts += is_window_0 and int(part.history.rows[0]) == BEFORE
    assert firsts == 2, "window 0 comes twice in two epochs, its marked anchor with it"
    halves = [source.parts(0, (index, 2)) for index in range(2)]
    assert [len(half) for half in halves] == [2, 2]
    nothing = Windows(made.rows.part(slice(0, 3)), torch.tensor([0]))
    with pytest.raises(ConfigurationError, match="there are no windows"):
        StoredWindows(nothing, options, 7)


def teacher() -> TeacherLearner:
    return TeacherLearner(make_config(), make_ends())


def dspark(window: int = 0) -> DSparkLearner:
    config = BlockConfig.for_target(
        TARGET, "", taps=(0, 1), num_layers=1, intermediate_size=64, rank=8
    )
    return DSparkLearner(config, (0, 1), make_ends(), window=window)


def stirred(learner: Learner) -> Learner:
    """No weight is zero, so that everything that is read shows."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for weight in learner.weights.values():
            weight += 0.1 * torch.randn(weight.shape, generator=generator)
    return learner


def seen_rows(learner: Learner, made: Windows, row: int) -> list[int]:
    """Rows of window 0 whose taps change the logits of the record at a row."""

    @torch.no_grad()
    def logits(rows: Records) -> Tensor:
        return learner.logits(Windows(rows, made.starts).part(0, torch.tensor([row]), 7))

    before, found = logits(made.rows), []
    for other in range(row + 1):
        taps = made.rows.taps.clone()
        taps[other] += 1.0
        if not torch.allclose(logits(replace(made.rows, taps=taps)), before, atol=1e-5):
            found.append(other)
    return found


def test_who_reads_a_history_sees_all_of_it_up_to_its_anchor() -> None:
    made = windows(make_ends())
    row = BEFORE + 1
    everything = list(range(row + 1))
    assert seen_rows(stirred(teacher()), made, row) == everything
    assert seen_rows(stirred(dspark()), made, row) == everything
    assert seen_rows(stirred(dspark(window=3)), made, row) == everything[-3:]
    student = stirred(DLiteLearner(make_config(), make_ends()))
    assert seen_rows(student, made, row) == [row]


def test_anchors_of_a_window_do_not_see_what_is_behind_them() -> None:
    made = windows(make_ends())
    rows = torch.arange(BEFORE, BEFORE + 4)
    for learner in map(stirred, (teacher(), dspark())):
        with torch.no_grad():
            together = learner.logits(made.part(0, rows, 7))
            alone = [learner.logits(made.part(0, row.view(1), 7)) for row in rows]
        torch.testing.assert_close(together, torch.cat(alone), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("make", "enough"), [(teacher, 0.3), (dspark, 0.08)])
def test_windows_are_learned(tmp_path: Path, make: Callable[[], Learner], enough: float) -> None:
    made, learner = windows(make_ends()), make()
    options = replace(FAST, steps=40, batch_size=16, learning_rate=1e-2)
    assert measure(learner, made).per_slot[0] < 0.05
    Trainer(tmp_path, learner, options).run(StoredWindows(made, options, 7, anchors=8))
    assert measure(learner, made).per_slot[0] > enough


def test_teacher_at_a_windows_first_row_is_its_student() -> None:
    learner = stirred(teacher())
    student = DLiteLearner(make_config(), make_ends(), without_history(learner.weights))
    assert set(student.weights) < set(learner.weights)
    made = windows(make_ends())
    cut = Windows(made.rows.part(slice(BEFORE, BEFORE + 9)), torch.tensor([0]))
    part = cut.part(0, torch.tensor([0]), 7)  # nothing is before it
    with torch.no_grad():
        torch.testing.assert_close(student.logits(part), learner.logits(part))
