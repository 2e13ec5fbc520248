"""A difference between trained and served gets its name."""

from __future__ import annotations

import pytest
import torch

from dlite_agent.errors import DrafterMismatchError
from dlite_agent.training.records import Records
from dlite_agent.training.served import Beside, likely_cause, require_equal
from dlite_agent.training.simulate import Acceptance, walk_rounds
from tests.training.languages import make_ends, memorable


def right_blocks(records: Records) -> torch.Tensor:
    """What the target says behind every usable position, [N, 7]."""
    at = (records.usable().unsqueeze(1) + 1 + torch.arange(7)).clamp_max(len(records) - 1)
    return records.next_ids[at].long()


def accepted(records: Records, blocks: torch.Tensor) -> Acceptance:
    return Acceptance.of(*walk_rounds(records, blocks), 7)


def test_cause_of_a_difference_is_named() -> None:
    records = memorable(make_ends())
    blocks = right_blocks(records)
    trained = accepted(records, blocks)
    assert min(trained.per_slot) == 1.0
    require_equal(Beside(trained, trained, (), ""))
    half = blocks.clone()
    half[:, 3:] += 1
    causes = {
        "alignment": (accepted(records, blocks.roll(1, 1)), 0),
        "tap": (accepted(records, half), 0),
        "template": (accepted(records, half), 3),
    }
    for name, (served, num_different) in causes.items():
        cause = likely_cause(records, blocks, served, num_different)
        assert cause.startswith(name)
        with pytest.raises(DrafterMismatchError, match=rf"^{name}.*slot \d is accepted in"):
            require_equal(Beside(trained, served, (), cause))
