"""Drafters by name."""

from __future__ import annotations

import pytest

from dlite_agent.drafters.load import copying_drafter, explain_drafter
from dlite_agent.drafters.null import NullDrafter
from dlite_agent.errors import DrafterMismatchError
from dlite_agent.sampling import KeyedNoise
from dlite_agent.testing import tiny_config


@pytest.mark.parametrize(
    ("name", "made"),
    [("auto", "suffix"), ("null", "null"), ("lookup", "lookup"), ("suffix", "suffix")],
)
def test_option_names_a_drafter_and_says_why(name: str, made: str) -> None:
    assert copying_drafter(name, tiny_config()).name == made
    assert explain_drafter(name, tiny_config()).startswith(f"{made}: ")


def test_unknown_name_lists_what_exists() -> None:
    with pytest.raises(DrafterMismatchError, match=r"'eagle3'.*'auto', 'null', 'lookup', 'suffix'"):
        copying_drafter("eagle3", tiny_config())


def test_null_drafter_proposes_and_remembers_nothing() -> None:
    drafter = NullDrafter()
    state = drafter.start([1, 2, 3])
    drafter.commit(state, [4])
    drafter.truncate_to(state, 1)
    assert state is None
    assert drafter.fork(state) is None
    assert drafter.propose(state, 3, None, 2, KeyedNoise(0), 7).token_ids == ()
    assert drafter.requires.positions == "none"
