"""History drafters after a restore, with their history and without it."""

from __future__ import annotations

from pathlib import Path

import pytest

from dlite_agent.bench.persisted_state import HistoryKeeper, keeping_history
from dlite_agent.config import SamplingParams
from dlite_agent.decoding.stopping import StopRules
from dlite_agent.drafters.block import BlockDrafter
from dlite_agent.drafters.drafter import Drafter
from dlite_agent.drafters.eagle3 import Eagle3Drafter
from dlite_agent.drafters.null import NullDrafter
from dlite_agent.models.drafter_ends import DrafterEnds
from dlite_agent.models.eagle3_network import Eagle3Config, eagle3_shapes
from dlite_agent.models.transformer import DenseTransformer
from dlite_agent.sampling import KeyedNoise, Sampler
from dlite_agent.sessions.session import Session
from dlite_agent.testing import tiny_qwen3
from tests.block_models import block_config, block_weights, random_tensors

PROMPT = [i * 7 % 512 for i in range(40)]


def make(target: DenseTransformer, kind: str) -> BlockDrafter | Eagle3Drafter:
    ends = DrafterEnds.of(target)
    if kind == "eagle3":
        config = Eagle3Config(512, 64, (0, 1), 4, 2, 16, 96)
        return Eagle3Drafter(config, random_tensors(eagle3_shapes(config)).__getitem__, ends)
    block = block_config(target.config)
    return BlockDrafter(block, block_weights(block).__getitem__, ends)


def decode(session: Session, count: int) -> list[tuple[int, int]]:
    """Drafted and accepted tokens of each round."""
    sampler = Sampler(SamplingParams(temperature=0.0, top_k=0, top_p=1.0), KeyedNoise(0))
    rounds = session.decode(sampler, StopRules(frozenset(), count))
    return [(round_.num_drafted, round_.num_accepted) for round_ in rounds]


@pytest.mark.parametrize("kind", ["dspark", "eagle3"])
def test_a_state_that_was_saved_is_the_one_that_goes_on(kind: str, tmp_path: Path) -> None:
    target = tiny_qwen3(dtype="float64")
    drafter = make(target, kind)
    keeper = keeping_history(drafter)
    assert isinstance(keeper, HistoryKeeper)
    session = Session(target, keeper, session_id="one")
    session.sync(PROMPT)
    decode(session, 3)
    session.save(tmp_path)
    keeper.save(tmp_path)
    blocks: dict[str, tuple[int, ...]] = {}
    for name, other in (("lost", keeper.anew()), ("saved", keeper.anew(tmp_path))):
        restored = Session.load(tmp_path, target, other)
        blocks[name] = next_block(restored, other)
        restored.close()
    assert blocks["saved"] == next_block(session, keeper)
    assert blocks["lost"] != blocks["saved"]
    assert decode(session, 5)
    session.close()


def next_block(session: Session, drafter: Drafter) -> tuple[int, ...]:
    """What would be drafted now."""
    state = session._state
    assert state.pending is not None
    noise = KeyedNoise(1)
    drafted = drafter.propose(
        state.draft_state, state.pending, state.hidden, state.position, noise, 7
    )
    return drafted.token_ids


def test_a_drafter_without_a_history_is_left_alone() -> None:
    drafter = NullDrafter()
    assert keeping_history(drafter) is drafter
