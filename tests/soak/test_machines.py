"""The state machines and random streams of the other folders, for much longer.

What they check, and a small sample of it that runs always, stands where the names come from.
"""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import run_state_machine_as_test

from tests.chat import test_stream_parser as parser
from tests.sessions import test_session_machine, test_store

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1800)]

NUM_STREAMS = 100_000
PIECES = [
    *parser.MARKERS,
    *("<|im_end|>", "\n", '{"name": "f", "arguments": {"a": "b', '"}}', '{"name": "g"}'),
    *('"', "\\", "{", "}", "<", "text", "é", "👋", '"arguments": ', "</tool", "_call>", "null"),
]


def test_sessions_for_long() -> None:
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        test_session_machine.SessionMachine,
        settings=settings(max_examples=400, stateful_step_count=40),
    )


@settings(max_examples=1000)
@given(st.lists(test_store.steps, min_size=10, max_size=60))
def test_store_for_long(traffic: test_store.Traffic) -> None:
    target, store = test_store.open_store(num_pages=5)
    test_store.run_traffic(store, traffic)
    store.close()
    assert target.new_cache().pool.used_bytes == 0


def test_a_hundred_thousand_streams_split_anyhow() -> None:
    rng = random.Random(20)
    vocabularies = [parser.WITH_IDS, parser.SPELLED]
    for _ in range(NUM_STREAMS):
        vocabulary = rng.choice(vocabularies)
        ids: list[int] = []
        for _ in range(rng.randrange(20)):
            text = rng.choice(PIECES)
            is_marker = text in parser.MARKERS
            ids += vocabulary.encode(text) if is_marker else rng.randbytes(1) + text.encode()
        reason = rng.choice(["stop", "length", "cancelled"])
        starts_in = rng.choice(["text", "reasoning"])
        whole = parser.run(vocabulary, [ids], reason, starts_in)
        parser.check_consistent(*whole)
        cuts = sorted(rng.randrange(len(ids) + 1) for _ in range(rng.randrange(6)))
        pieces = [ids[a:b] for a, b in itertools.pairwise([0, *cuts, len(ids)])]
        deltas, turn = parser.run(vocabulary, pieces, reason, starts_in)
        assert deltas == whole[0], ids
        assert (turn.message, turn.unparsed) == (whole[1].message, whole[1].unparsed), ids
