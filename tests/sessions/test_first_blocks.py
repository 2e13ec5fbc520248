"""nano and its drafter: a session that did not compute its history drafts like one that did."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from itertools import islice
from pathlib import Path

import pytest
import torch

from dlite_agent.chat.messages import Message
from dlite_agent.chat.renderer import Renderer
from dlite_agent.config import SamplingParams
from dlite_agent.decoding.controller import Controller, Source
from dlite_agent.decoding.stopping import StopRules
from dlite_agent.drafters.dlite import DLiteDrafter, load_dlite
from dlite_agent.drafters.drafter import Drafter
from dlite_agent.drafters.load import drafter_beside
from dlite_agent.drafters.null import NullDrafter
from dlite_agent.drafters.suffix import SuffixDrafter
from dlite_agent.models.cost_table import CostTable
from dlite_agent.models.transformer import DenseTransformer
from dlite_agent.models.weights import fingerprint, load_target, resolve_checkpoint
from dlite_agent.sampling import KeyedNoise, Sampler
from dlite_agent.sessions.session import Session
from dlite_agent.testing import cold_forward
from dlite_agent.tokenizer import load_tokenizer

Rounds = list[tuple[str, int, tuple[int, ...]]]
NUM_BLOCKS, _MAX = 3, 5
FREE = CostTable((1,), (1.0,))
"""Rows and asking that cost nothing: the controller drafts whatever it is offered."""


@pytest.fixture(scope="module")
def target() -> Iterator[DenseTransformer]:
    with load_target("nano", dtype="float64", max_kv_bytes=2**26) as target:
        yield target


@pytest.fixture(scope="module")
def dlite(target: DenseTransformer) -> DLiteDrafter:
    checkpoint = resolve_checkpoint("nano")
    folder = drafter_beside(checkpoint)
    assert folder is not None
    return load_dlite(folder, target, fingerprint(checkpoint))


@pytest.fixture(scope="module")
def prompt() -> list[int]:
    tokenizer = load_tokenizer(str(resolve_checkpoint("nano")))
    asked = Message("user", "Run the tests of this repository and repair what fails.")
    rendered = Renderer(tokenizer).render([asked], (), add_generation_prompt=True)
    return list(rendered.token_ids)


def decode(session: Session, count: int = 40) -> Rounds:
    """Source, accepted tokens and ids of the first rounds, greedily."""
    sampler = Sampler(SamplingParams(temperature=0.0, top_k=0, top_p=1.0), KeyedNoise(0))
    rounds = session.decode(sampler, StopRules(frozenset(), count))
    with closing(rounds):
        return [(one.source, one.num_accepted, one.token_ids) for one in islice(rounds, _MAX)]


def opened(target: DenseTransformer, drafter: Drafter, prompt: list[int]) -> Session:
    """A session that computed the prompt and sampled the token behind it."""
    session = Session(target, drafter, session_id="one")
    session.sync(prompt)
    assert len(decode(session, 1)) == 1
    return session


@pytest.fixture(scope="module")
def expected(target: DenseTransformer, dlite: DLiteDrafter, prompt: list[int]) -> Rounds:
    """What the uninterrupted run drafts."""
    with closing(opened(target, dlite, prompt)) as session:
        blocks = decode(session)[:NUM_BLOCKS]
    assert all(source == "dlite" for source, _, _ in blocks)
    assert sum(accepted for _, accepted, _ in blocks) > 0, "nothing accepted shows nothing"
    return blocks


def assert_taps_are_fresh(target: DenseTransformer, session: Session) -> None:
    assert session.hidden is not None
    ids, layer_ids = session.token_ids[: session.kv.length], session.hidden.layer_ids
    with cold_forward(target, ids, taps=layer_ids) as (output, _):
        assert output.hidden is not None
        fresh = output.hidden.row(len(ids) - 1).states
    torch.testing.assert_close(session.hidden.states, fresh, rtol=0.0, atol=1e-9)


def test_first_blocks_of_a_fork_are_those_of_the_uninterrupted_run(
    target: DenseTransformer, dlite: DLiteDrafter, prompt: list[int], expected: Rounds
) -> None:
    with closing(opened(target, dlite, prompt)) as session, closing(session.fork()) as fork:
        assert_taps_are_fresh(target, fork)
        assert decode(fork)[:NUM_BLOCKS] == expected
        assert decode(session)[:NUM_BLOCKS] == expected


def test_first_blocks_after_a_restore_from_disk_are_those_of_the_uninterrupted_run(
    target: DenseTransformer,
    dlite: DLiteDrafter,
    prompt: list[int],
    expected: Rounds,
    tmp_path: Path,
) -> None:
    with closing(opened(target, dlite, prompt)) as session:
        session.save(tmp_path)
    with closing(Session.load(tmp_path, target, dlite)) as restored:
        assert_taps_are_fresh(target, restored)
        assert decode(restored)[:NUM_BLOCKS] == expected


def test_first_blocks_after_a_rewind_are_those_of_the_uninterrupted_run(
    target: DenseTransformer, dlite: DLiteDrafter, prompt: list[int], expected: Rounds
) -> None:
    with closing(opened(target, dlite, prompt)) as session:
        decode(session)
        session.sync(prompt)  # as a turn that is asked for again
        assert_taps_are_fresh(target, session)
        decode(session, 1)
        assert decode(session)[:NUM_BLOCKS] == expected
        session.rewind(len(prompt))  # in the middle of nothing: the last row is forwarded again
        first, *others = decode(session)
        assert first[1:] == (0, tuple(session.token_ids[len(prompt) : len(prompt) + 1]))
        assert others[:NUM_BLOCKS] == expected
        assert_taps_are_fresh(target, session)


def test_with_suffix_beside_it_the_output_is_that_of_plain_decoding(
    target: DenseTransformer, dlite: DLiteDrafter, prompt: list[int]
) -> None:
    auto = Controller([Source(SuffixDrafter()), Source(dlite)], FREE, clock=None)
    ids = []
    for drafter in (NullDrafter(), auto):
        with closing(opened(target, drafter, prompt)) as session:
            sources = {source for source, _, _ in decode(session, 9)}
            ids.append(list(session.token_ids))
    assert ids[0][: len(ids[1])] == ids[1][: len(ids[0])]
    assert any("dlite" in source for source in sources)
