from __future__ import annotations

from pathlib import Path

import pytest

from dlite_agent.bench.replay import Replay, bench_replay, replay
from dlite_agent.bench.transcripts import Transcript
from dlite_agent.drafters.drafter import DraftBlock, Requires
from dlite_agent.drafters.null import NullDrafter
from dlite_agent.testing import OracleDrafter
from tests.tiny_checkpoint import write_checkpoint

STOP = 9
TEXT = Transcript("text", (1, 2, 3, 4, 5, 6, 7, STOP, 1, 2, 3, STOP), ((2, 8), (9, 12)), ())


class TapsDrafter(NullDrafter):
    requires = Requires((0,), "last")


def test_plain_decoding_commits_one_token_a_round_and_no_bonus_stop() -> None:
    counts = replay(NullDrafter(), TEXT)
    assert counts.num_rounds == counts.num_rows == 5 + 2
    assert counts.num_tokens == 4 + 1


def test_a_drafter_that_is_always_right_needs_one_round_for_a_block() -> None:
    counts = replay(OracleDrafter(TEXT.token_ids, max_block=3), TEXT)
    # 4 5 6 7 | 9 drafted, and in the second answer 3 9
    assert counts.num_rounds == 3
    assert counts.num_tokens == counts.num_accepted + 1 == 5 + 2
    assert counts.tau == pytest.approx(7 / 3)


def test_a_round_counts_up_to_the_first_miss_and_nothing_behind_a_stop_id() -> None:
    counts = Replay()
    block = DraftBlock((4, 5, 8, 7), (0.9, 0.8, 0.7, 0.6), "x")
    assert counts.see(block, (4, 5, 6, 7, STOP)) == 3
    assert (counts.num_accepted, counts.num_drafted, counts.num_rows) == (2, 4, 5)
    assert sum(counts.decided) == 3
    assert counts.confidence_error == pytest.approx((0.1 + 0.2 + 0.7) / 3)
    assert counts.see(DraftBlock((7, STOP, 1, 1)), (7, STOP)) == 2
    assert counts.num_drafted == 4 + 2
    assert counts.num_tokens == 3 + 2


def test_drafter_with_taps_has_nothing_to_read() -> None:
    with pytest.raises(ValueError, match="hidden states"):
        replay(TapsDrafter(), TEXT)


def test_bench_compares_drafters_on_the_built_in_transcript(tmp_path: Path) -> None:
    result = bench_replay(str(write_checkpoint(tmp_path / "model")))
    taus = {str(row["drafter"]): float(row["tau"] or 0) for row in result.rows}
    assert taus["null"] < 1.0 < taus["lookup"] < taus["suffix"] <= taus["suffix-whole"]
    assert taus["suffix"] >= 2.0
    errors = [row["confidence_error"] for row in result.rows if row["drafter"] == "suffix"]
    assert float(errors[0] or 0) < 0.1


def test_sessions_of_a_tenant_learn_from_each_other(tmp_path: Path) -> None:
    from dlite_agent.bench import transcripts

    folder = tmp_path / "texts"
    folder.mkdir()
    text = (transcripts._ASSETS / "repair.json").read_text()
    (folder / "a.json").write_text(text)
    (folder / "b.json").write_text(text)
    result = bench_replay(str(write_checkpoint(tmp_path / "model")), transcripts=[folder])
    taus = {(row["transcript"], row["drafter"]): float(row["tau"] or 0) for row in result.rows}
    assert taus["b", "suffix"] == taus["a", "suffix"]
    assert taus["b", "suffix+read+written"] > 1.5 * taus["b", "suffix"]
    assert ("all", "suffix") in taus
