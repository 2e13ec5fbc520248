"""The load of a forward: what other turns bring."""

from __future__ import annotations

import pytest

from dlite_agent.decoding.load import Load


def test_a_turn_is_alone_until_somebody_says_otherwise() -> None:
    load = Load()
    assert (load.turns, load.rows, load.drafted) == (0, 0, 0)
    load.set(turns=2, rows=9, drafted=7)
    assert (load.turns, load.rows, load.drafted) == (2, 9, 7)
    load.set(turns=0, rows=0)
    assert load == Load()


@pytest.mark.parametrize(("turns", "rows", "drafted"), [(3, 2, 0), (1, 4, 4), (-1, 0, 0)])
def test_rows_that_do_not_add_up_are_refused(turns: int, rows: int, drafted: int) -> None:
    with pytest.raises(ValueError, match="each turn has a row"):
        Load().set(turns=turns, rows=rows, drafted=drafted)
