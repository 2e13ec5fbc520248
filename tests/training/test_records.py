"""Records: what is kept of an answer, and which slots of a block count."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dlite_agent.errors import ConfigurationError
from dlite_agent.testing import tiny_qwen3
from dlite_agent.training.capture import Transcript, capture
from dlite_agent.training.records import Records

IDS = [3, 14, 15, 9, 26, 5, 35, 8, 97, 93, 2, 38, 46]


def made(next_ids: list[int], best_ids: list[int], left: list[int]) -> Records:
    count = len(next_ids)
    return Records(
        taps=torch.arange(count * 2 * 4, dtype=torch.float32).view(count, 2, 4),
        next_ids=torch.tensor(next_ids, dtype=torch.int32),
        best_ids=torch.tensor(best_ids, dtype=torch.int32),
        left=torch.tensor(left, dtype=torch.int32),
        positions=torch.arange(count, dtype=torch.int32) + 10,
    )


def test_captured_positions_hold_the_taps_and_choices_of_a_cold_forward() -> None:
    target = tiny_qwen3(dtype="float64")
    with target.new_cache() as kv:
        whole = target.forward(torch.tensor(IDS), kv, logits_for=range(len(IDS)), taps=(0, 1))
    for chunk in (3, 64):
        records = capture(target, Transcript(IDS, [(2, 5), (8, 13)]), (0, 1), chunk=chunk)
        assert records is not None
        rows = [1, 2, 3, 7, 8, 9, 10, 11]
        assert records.positions.tolist() == [row + 1 for row in rows]
        assert records.next_ids.tolist() == [IDS[row + 1] for row in rows]
        assert records.best_ids.tolist() == whole.logits.argmax(dim=-1)[rows].tolist()
        assert records.left.tolist() == [3, 2, 1, 5, 4, 3, 2, 1]
        assert whole.hidden is not None
        expected = whole.hidden.states.transpose(0, 1)[rows]
        torch.testing.assert_close(records.taps, expected, atol=1e-9, rtol=1e-9)
    assert target.pool.used_bytes == 0


def test_answers_of_one_token_leave_nothing() -> None:
    assert capture(tiny_qwen3(), Transcript(IDS, [(2, 3)]), (0, 1)) is None
    one = Transcript.of_turn(IDS[:4], IDS[4:7])
    assert one.token_ids == IDS[:7]
    assert one.answers == [(4, 7)]


def test_taps_without_the_last_layer_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="needs the last one, 1"):
        capture(tiny_qwen3(), Transcript(IDS, [(2, 5)]), (0,))


def test_slots_count_inside_the_answer_and_behind_what_the_target_chose() -> None:
    # two answers of 5 and 3 kept positions; at number 2 the target would have said 9, not 12
    said, best = [10, 11, 12, 13, 14, 20, 21, 22], [10, 11, 9, 13, 14, 20, 21, 22]
    records = made(said, best, [5, 4, 3, 2, 1, 3, 2, 1])
    assert records.usable().tolist() == [0, 1, 2, 3, 5, 6]
    assert records.span_starts().tolist() == [0, 5]
    batch = records.batch(torch.tensor([0, 2, 6]), block_size=4)
    assert batch.anchor_ids.tolist() == [10, 12, 21]
    assert batch.previous_ids[0].tolist() == [10, 11, 12, 13]
    assert batch.best_ids[0].tolist() == [11, 9, 13, 14]
    assert batch.valid[0].tolist() == [True, True, False, False]
    assert batch.valid[1].tolist() == [True, True, False, False]
    assert batch.valid[2].tolist() == [True, False, False, False]
    assert torch.equal(batch.taps[1], records.taps[2].unsqueeze(1))
    assert torch.equal(batch.final_taps[1, 0], records.taps[3, 1])
    assert batch.positions.tolist() == [10, 12, 16]


def test_shard_is_read_as_it_was_written(tmp_path: Path) -> None:
    records = made([1, 2, 3], [1, 2, 4], [3, 2, 1])
    records.save(tmp_path / "a.safetensors")
    read = Records.load(tmp_path / "a.safetensors")
    joined = Records.join([read, read])
    assert len(joined) == 6
    assert joined.nbytes == 2 * records.nbytes + 6 * 9  # a mark and a hint for each
    assert joined.span_starts().tolist() == [0, 3]
    assert torch.equal(joined.taps[3:], records.taps)
    assert [path.name for path in tmp_path.iterdir()] == ["a.safetensors"]
