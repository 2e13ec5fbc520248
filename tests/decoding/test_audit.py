"""An audit in bfloat16: the same tokens, bit for bit, whoever drafts."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from dlite_agent.config import SamplingParams
from dlite_agent.decoding.stopping import StopRules
from dlite_agent.drafters.drafter import Drafter
from dlite_agent.drafters.lookup import LookupDrafter
from dlite_agent.drafters.null import NullDrafter
from dlite_agent.drafters.suffix import SuffixDrafter
from dlite_agent.models.transformer import DenseTransformer
from dlite_agent.sampling import KeyedNoise, Sampler
from dlite_agent.sessions.session import Session
from dlite_agent.testing import NoisyDrafter, OracleDrafter, tiny_config, tiny_qwen3
from tests.kernels.native_library import row_kernels

VOCAB_SIZE = 1024


@pytest.fixture(scope="module")
def target() -> DenseTransformer:
    config = replace(tiny_config(vocab_size=VOCAB_SIZE), hidden_size=256, intermediate_size=640)
    model = tiny_qwen3(dtype="bfloat16", config=config)
    model.audit()
    return model


def answer(
    target: DenseTransformer, drafter: Drafter, prompt: list[int], fixed_rows: int | None
) -> tuple[list[int], list[float]]:
    params = SamplingParams(temperature=1.0, top_k=0, top_p=1.0, logprobs=True)
    session = Session(target, drafter, session_id="test", prefill_chunk=64)
    session.sync(prompt)
    sampler = Sampler(params, KeyedNoise.derive(0, 0, prompt))
    rounds = list(session.decode(sampler, StopRules(frozenset(), 40, fixed_rows=fixed_rows)))
    token_ids = session.token_ids[len(prompt) :]
    session.close()
    return token_ids, [entry.logprob for round_ in rounds for entry in round_.logprobs]


def test_every_bit_is_the_same_whoever_drafts(target: DenseTransformer) -> None:
    rng = random.Random(0)
    for length in (5, 250, 520):
        prompt = [rng.randrange(VOCAB_SIZE) for _ in range(length)]
        expected = answer(target, NullDrafter(), prompt, 8)
        ids = prompt + expected[0]
        makers: list[Callable[[], Drafter]] = [
            lambda: LookupDrafter(sizes=(1,)),
            lambda ids=ids: OracleDrafter(ids),
            lambda ids=ids: OracleDrafter(ids, max_block=3),
            lambda ids=ids: NoisyDrafter(ids, vocab_size=VOCAB_SIZE),
        ]
        for make in makers:
            assert answer(target, make(), prompt, 8) == expected


def test_with_compiled_kernels_no_audit_is_needed() -> None:
    """bfloat16, drafts of up to 15 tokens, forwards of as many rows as there are tokens."""
    model = tiny_qwen3(dtype="bfloat16", vocab_size=VOCAB_SIZE)
    assert model.use_kernels(row_kernels())
    rng = random.Random(2)
    for length in (5, 520):
        prompt = [rng.randrange(VOCAB_SIZE) for _ in range(length)]
        expected = answer(model, NullDrafter(), prompt, None)
        ids = prompt + expected[0]
        assert answer(model, LookupDrafter(sizes=(1,)), prompt, None) == expected
        assert answer(model, SuffixDrafter(), prompt, None) == expected
        for max_block in (2, 5, 15):
            assert answer(model, OracleDrafter(ids, max_block=max_block), prompt, None) == expected
        assert answer(model, NoisyDrafter(ids, vocab_size=VOCAB_SIZE), prompt, None) == expected


def test_without_an_audit_the_last_bits_depend_on_the_draft() -> None:
    """Else the test above would show nothing."""
    target = tiny_qwen3(dtype="bfloat16")
    prompt = [random.Random(1).randrange(512) for _ in range(300)]
    plain = answer(target, NullDrafter(), prompt, None)
    drafted = answer(target, OracleDrafter(prompt + plain[0]), prompt, None)
    assert plain[1] != drafted[1]
