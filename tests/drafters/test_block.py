"""Block drafters in the loop: lossless, and with a history that follows the session."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from dlite_agent.config import SamplingParams
from dlite_agent.decoding.controller import Controller, ControllerState, Source
from dlite_agent.decoding.stopping import StopRules
from dlite_agent.drafters.block import BlockDrafter, BlockState, check_block_fits
from dlite_agent.drafters.block_cells import make_block_head
from dlite_agent.drafters.drafter import Drafter, DraftState
from dlite_agent.drafters.eagle3 import Eagle3Drafter
from dlite_agent.drafters.null import NullDrafter
from dlite_agent.drafters.suffix import SuffixDrafter
from dlite_agent.errors import DrafterMismatchError
from dlite_agent.models.block_network import BlockNetwork
from dlite_agent.models.block_sequential import head_states
from dlite_agent.models.drafter_ends import DrafterEnds
from dlite_agent.models.eagle3_network import Eagle3Config, eagle3_shapes
from dlite_agent.models.transformer import DenseTransformer
from dlite_agent.sampling import KeyedNoise, Sampler
from dlite_agent.sessions.session import Session
from dlite_agent.testing import FaultyTarget, tiny_config, tiny_qwen3
from tests.block_models import block_config, block_weights, random_tensors
from tests.decoding.simulated import FLAT

PROMPT = [3, 14, 15, 9, 26, 5, 35, 8, 97, 93]
NOISE = KeyedNoise(1)
GREEDY = SamplingParams(temperature=0.0, top_k=0, top_p=1.0)
SAMPLED = SamplingParams(temperature=0.9, top_k=20, top_p=0.9)
CHOICES: dict[str, dict[str, object]] = {
    "dspark": {"confidence": "token"},
    "dspark-gated": {"head": "gated"},
    "dspark-rnn": {"head": "rnn", "confidence": "hidden"},
    "dflash-anchor": {"head": "none", "family": "dflash"},
    "dflash": {"head": "none", "family": "dflash", "is_anchor_drafted": False},
    "dflash2": {
        "head": "selector",
        "family": "dflash2",
        "is_anchor_drafted": False,
        "conv_size": 2,
        "output_multiplier": 0.5,
        "softcap": 30.0,
    },
}


def make(target: DenseTransformer, kind: str, window: int = 0) -> BlockDrafter | Eagle3Drafter:
    ends = DrafterEnds.of(target)
    if kind == "eagle3":
        config = Eagle3Config(512, 64, (0, 1), 4, 2, 16, 96)
        weights = random_tensors(eagle3_shapes(config))
        return Eagle3Drafter(config, weights.__getitem__, ends, window=window)
    block = block_config(target.config, **CHOICES[kind])
    return BlockDrafter(block, block_weights(block).__getitem__, ends, window=window)


KINDS = [*CHOICES, "eagle3"]


@pytest.fixture(scope="module")
def target() -> DenseTransformer:
    return tiny_qwen3(dtype="float64")


def decode(session: Session, params: SamplingParams, count: int) -> list[tuple[int, ...]]:
    sampler = Sampler(params, KeyedNoise.derive(1, 0, PROMPT))
    return [round_.token_ids for round_ in session.decode(sampler, StopRules(frozenset(), count))]


def next_block(
    session: Session, drafter: Drafter, history: DraftState | None = None
) -> tuple[int, ...]:
    """What would be drafted now, from the session's history or another one."""
    state = session._state
    assert state.pending is not None
    drafts = history or state.draft_state
    block = drafter.propose(drafts, state.pending, None, state.position, NOISE, 7)
    return block.token_ids


@pytest.fixture(scope="module")
def plain(target: DenseTransformer) -> dict[str, list[int]]:
    """What is decoded without drafts."""
    found = {}
    for name, params in (("greedy", GREEDY), ("sampled", SAMPLED)):
        session = Session(target, NullDrafter(), session_id=name)
        session.sync(PROMPT)
        decode(session, params, 20)
        found[name] = session.token_ids
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_output_is_that_of_plain_decoding(
    kind: str, target: DenseTransformer, plain: dict[str, list[int]]
) -> None:
    drafter = make(target, kind)
    for name, params in (("greedy", GREEDY), ("sampled", SAMPLED)):
        drafted = Session(target, drafter, session_id=name, prefill_chunk=4)
        drafted.sync(PROMPT)
        decode(drafted, params, 7)
        assert drafted.token_ids == plain[name][:17]
        num_drafts = 6 if kind in ("dflash", "dflash2") else 7
        assert len(next_block(drafted, drafter)) == num_drafts
        drafted.check_invariants()


@pytest.mark.parametrize("kind", ["dspark", "dflash2", "eagle3"])
def test_controller_keeps_a_history_as_the_drafter_alone_does(
    kind: str, target: DenseTransformer, plain: dict[str, list[int]]
) -> None:
    drafter = make(target, kind)
    controller = Controller([Source(SuffixDrafter()), Source(drafter)], FLAT, clock=None)

    def history(session: Session) -> DraftState | None:
        state = session._state.draft_state
        assert isinstance(state, ControllerState)
        return state.parts[1].drafts

    for name, params in (("greedy", GREEDY), ("sampled", SAMPLED)):
        alone = Session(target, drafter, session_id="alone", prefill_chunk=4)
        joined = Session(target, controller, session_id="joined", prefill_chunk=4)
        for session in (alone, joined):
            session.sync(PROMPT)
            decode(session, params, 7)
            session.rewind(14)
            decode(session, params, 3)
        assert joined.token_ids == alone.token_ids == plain[name][:17]
        expected = next_block(alone, drafter)
        assert expected
        assert next_block(joined, drafter, history(joined)) == expected
        assert next_block(joined, drafter, history(joined.fork(len(joined.token_ids)))) == expected
        joined.check_invariants()


@pytest.mark.parametrize("kind", ["dspark", "dflash2", "eagle3"])
def test_history_follows_rewind_fork_and_sync(kind: str, target: DenseTransformer) -> None:
    drafter = make(target, kind)
    session = Session(target, drafter, session_id="one")
    session.sync(PROMPT)
    decode(session, GREEDY, 9)
    ids = list(session.token_ids)

    def fresh(token_ids: list[int]) -> tuple[int, ...]:
        """What a session drafts that computed these ids and no others."""
        other = Session(target, drafter, session_id="other")
        other.sync(token_ids[:-1])
        other._state.commit(token_ids[-1:], num_rows=0, hidden=None)
        drafter.commit(other._state.draft_state, token_ids[-1:])
        return next_block(other, drafter)

    expected = next_block(session, drafter)
    assert expected == fresh(ids)
    fork = session.fork(14)
    fork.sync([*ids[:14], 77, 78])
    decode(fork, GREEDY, 1)
    assert next_block(fork, drafter) == fresh(fork.token_ids)
    assert next_block(session, drafter) == expected
    session.rewind(15)
    decode(session, GREEDY, 4)
    assert next_block(session, drafter) == fresh(session.token_ids)
    session.sync([*PROMPT[:5], 1, 2, 3])
    decode(session, GREEDY, 1)
    assert next_block(session, drafter) == fresh(session.token_ids)


@pytest.mark.parametrize("kind", ["dspark", "eagle3"])
def test_window_drafts_as_full_history_while_it_covers_all_and_is_smaller_after(
    kind: str, target: DenseTransformer
) -> None:
    drafts: dict[int, list[tuple[int, ...]]] = {}
    sizes = {}
    for window in (0, 8, 4096):
        drafter = make(target, kind, window)
        session = Session(target, drafter, session_id="one", prefill_chunk=5)
        session.sync(PROMPT[:6])
        decode(session, GREEDY, 1)
        drafts[window] = [next_block(session, drafter)]
        decode(session, GREEDY, 12)
        drafts[window].append(next_block(session, drafter))
        assert session._state.draft_state is not None
        sizes[window] = session._state.draft_state.nbytes
    assert drafts[4096] == drafts[0]
    assert drafts[8][0] == drafts[0][0]
    assert drafts[8][1] != drafts[0][1]
    assert sizes[8] < sizes[0] / 2
    assert sizes[4096] == sizes[0]


@pytest.mark.parametrize("kind", ["dspark", "eagle3"])
def test_history_that_was_saved_drafts_as_before(kind: str, target: DenseTransformer) -> None:
    drafter = make(target, kind)
    session = Session(target, drafter, session_id="one")
    session.sync(PROMPT)
    decode(session, GREEDY, 5)
    expected = next_block(session, drafter)
    state = session._state
    saved = drafter.saved(state.draft_state)
    state.draft_state = drafter.restored(session.token_ids, saved)
    assert next_block(session, drafter) == expected
    assert drafter.saved(drafter.start([])) == {}


@pytest.mark.parametrize("kind", ["dspark", "eagle3"])
def test_history_that_was_lost_begins_anew_and_stays_lossless(
    kind: str, target: DenseTransformer, plain: dict[str, list[int]]
) -> None:
    faulty = FaultyTarget(target, lambda number: number == 3)
    drafter = make(target, kind)
    session = Session(faulty, drafter, session_id="one")
    session.sync(PROMPT)
    with pytest.raises(RuntimeError):
        decode(session, GREEDY, 20)
    kept = len(session.token_ids)
    assert 10 < kept < 18
    decode(session, GREEDY, 20 - kept)
    assert session.token_ids == plain["greedy"][:20]
    assert next_block(session, drafter)


def test_no_budget_or_no_history_drafts_nothing() -> None:
    target = tiny_qwen3()
    for kind in ("dspark", "eagle3"):
        drafter = make(target, kind)
        state = drafter.start([1, 2])
        assert drafter.propose(state, 2, None, 1, NOISE, 7).token_ids == ()
        assert state is not None
        assert drafter.weight_bytes > 0
        assert drafter.requires.positions == "all"


@pytest.mark.parametrize("kind", ["dspark", "dspark-gated", "dspark-rnn", "dflash2"])
def test_folded_head_is_that_which_learns(kind: str) -> None:
    config = block_config(tiny_config(), **CHOICES[kind])
    weights = block_weights(config)
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(7, 64, generator=generator)
    base = torch.randn(7, 512, generator=generator)
    previous_ids = torch.randint(0, 512, (7,), generator=generator)

    def read(name: str) -> torch.Tensor:
        return weights[name].float()

    factor = next(
        v for k, v in weights.items() if k.endswith(("markov_w2.weight", "successor_codebook"))
    )
    states = head_states(config, read, previous_ids.unsqueeze(0), hidden.unsqueeze(0))[0]
    naive = base + states @ factor.float().t()
    made: dict[str, object] = {"dtype": torch.float32, "device": torch.device("cpu")}
    exact = make_block_head(config, read, shortlist=None, target_ids=None, **made)  # type: ignore[arg-type]
    folded = exact.logits(base, hidden, previous_ids.tolist())
    torch.testing.assert_close(folded, naive, atol=1e-5, rtol=0)
    if kind == "dflash2":
        return  # its shortlist is part of what it is
    chosen, _ = exact.draft(base, hidden, int(previous_ids[0]))
    short = make_block_head(config, read, shortlist=512, target_ids=None, **made)  # type: ignore[arg-type]
    assert short.draft(base, hidden, int(previous_ids[0]))[0] == chosen


def test_confidence_of_dspark_cuts_the_block() -> None:
    target = tiny_qwen3()
    config = block_config(target.config, confidence="token")
    weights = block_weights(config)
    session = Session(target, make(target, "dspark"), session_id="one")
    session.sync(PROMPT)
    decode(session, GREEDY, 2)
    state = session._state
    assert state.pending is not None
    blocks = []
    for least in (0.0, 1.1, None):
        if least is None:
            assert blocks[0].confidence
            least = min(blocks[0].confidence) + 1e-6
        drafter = BlockDrafter(
            config, weights.__getitem__, DrafterEnds.of(target), min_confidence=least
        )
        blocks.append(
            drafter.propose(state.draft_state, state.pending, None, state.position, NOISE, 7)
        )
    assert len(blocks[0].token_ids) == len(blocks[0].confidence) == 7
    assert blocks[1].token_ids == ()
    cut = blocks[0].confidence.index(min(blocks[0].confidence))
    assert blocks[2].token_ids == blocks[0].token_ids[:cut]
    assert math.prod(blocks[0].confidence) > 0.0


def test_drafter_of_another_target_is_refused() -> None:
    config = block_config(tiny_config())
    check_block_fits(config, tiny_config(), "any")
    deep = tiny_config(num_layers=3)
    cases: list[tuple[Callable[[], None], str]] = [
        (lambda: check_block_fits(config, deep, ""), "num_layers=2"),
        (lambda: check_block_fits(block_config(deep), tiny_config(vocab_size=300), ""), "vocab"),
        (
            lambda: check_block_fits(
                block_config(tiny_config(), num_target_layers=0, taps=(0, 9)), tiny_config(), ""
            ),
            "reads layers",
        ),
        (
            lambda: check_block_fits(
                block_config(tiny_config(), target_fingerprint="a"), tiny_config(), "b"
            ),
            "fingerprint=a",
        ),
    ]
    for check, message in cases:
        with pytest.raises(DrafterMismatchError, match=message):
            check()


def test_variant_reads_other_taps_with_the_same_weights() -> None:
    target = tiny_qwen3(num_layers=4)
    config = block_config(target.config, taps=(1, 3))
    drafter = BlockDrafter(config, block_weights(config).__getitem__, DrafterEnds.of(target))
    other = drafter.variant((0, 2), is_anchor_drafted=False)
    assert (drafter.requires.layer_ids, other.requires.layer_ids) == ((1, 3), (0, 2))
    assert other.config.num_drafts == 6
    state = drafter.start([])
    assert isinstance(state, BlockState)
    assert isinstance(drafter._network, BlockNetwork)
    assert other._network is drafter._network
