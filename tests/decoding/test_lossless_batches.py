"""Whoever drafts, alone or with seven other turns in each forward: the target's own tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace

import pytest
import torch

from dlite_agent.config import SamplingParams
from dlite_agent.decoding.controller import Controller, Source
from dlite_agent.decoding.load import Load
from dlite_agent.decoding.loop import Round
from dlite_agent.decoding.steps import run_together
from dlite_agent.decoding.stopping import StopRules
from dlite_agent.drafters.dlite import DLiteDrafter
from dlite_agent.drafters.drafter import Drafter
from dlite_agent.drafters.lookup import LookupDrafter
from dlite_agent.drafters.null import NullDrafter
from dlite_agent.drafters.suffix import SuffixDrafter
from dlite_agent.models.cost_table import CostTable
from dlite_agent.models.kv_rows import rows_to_host
from dlite_agent.models.transformer import DenseTransformer
from dlite_agent.sampling import KeyedNoise, Sampler
from dlite_agent.sessions.session import Session
from dlite_agent.testing import (
    AdversarialDrafter,
    NoisyDrafter,
    OracleDrafter,
    assert_kv_is_of,
    cold_decode,
    cold_forward,
    tiny_config,
    tiny_qwen3,
)
from tests.dlite_models import dlite_config, random_weights
from tests.kernels.native_library import row_kernels
from tests.models.test_native_layers import tiny_int8

NUM_TOKENS = 28
LIMITS = StopRules(frozenset(), NUM_TOKENS)
SAMPLINGS = {
    "greedy": SamplingParams(temperature=0.0, top_k=0, top_p=1.0),
    "sampled": SamplingParams(temperature=0.7, top_k=6, top_p=0.95),
}
PHRASE = [3, 14, 15, 9, 26, 5, 35]
PROMPTS = [[*PHRASE, 40 + name, *PHRASE, 60 + name, *PHRASE[:4]] for name in range(8)]
FREE = CostTable((1,), (1.0,))
"""Rows and asking that cost nothing: a controller drafts whatever it is offered."""

CASES = pytest.mark.parametrize(
    ("sampling", "num_sessions"),
    [
        ("greedy", 1),
        ("sampled", 8),
        pytest.param("sampled", 1, marks=pytest.mark.soak),
        pytest.param("greedy", 8, marks=pytest.mark.soak),
    ],
)

MakeDrafter = Callable[[Sequence[int], Load, DenseTransformer], Drafter]


def controlled(*drafters: Drafter, load: Load) -> Controller:
    return Controller([Source(drafter) for drafter in drafters], FREE, load=load, clock=None)


def dlite(target: DenseTransformer) -> Drafter:
    """Random weights: it is hardly ever right, and asks for taps."""
    config = dlite_config(target.config)
    return DLiteDrafter(config, random_weights(config), target)


# Each is told the whole text of one session; those that read it serve that session alone.
SHARED: dict[str, MakeDrafter] = {
    "null": lambda ids, load, target: NullDrafter(),
    "lookup": lambda ids, load, target: LookupDrafter(),
    "suffix": lambda ids, load, target: SuffixDrafter(),
    "auto": lambda ids, load, target: controlled(
        SuffixDrafter(max_block=32, min_reached=0.02), load=load
    ),
    "auto-two": lambda ids, load, target: controlled(SuffixDrafter(), LookupDrafter(), load=load),
    "dlite": lambda ids, load, target: dlite(target),
    "auto-dlite": lambda ids, load, target: controlled(SuffixDrafter(), dlite(target), load=load),
    "auto-clock": lambda ids, load, target: Controller([Source(SuffixDrafter())], FREE, load=load),
}
OWN: dict[str, MakeDrafter] = {
    "oracle": lambda ids, load, target: OracleDrafter(ids),
    "noisy": lambda ids, load, target: NoisyDrafter(ids, vocab_size=512),
    "adversarial": lambda ids, load, target: AdversarialDrafter(
        vocab_size=512, favourites=ids[-3:]
    ),
    "auto-oracle": lambda ids, load, target: controlled(OracleDrafter(ids, max_block=3), load=load),
    "auto-noisy": lambda ids, load, target: controlled(
        NoisyDrafter(ids, vocab_size=512), SuffixDrafter(), load=load
    ),
    "auto-adversarial": lambda ids, load, target: controlled(
        AdversarialDrafter(vocab_size=512, favourites=ids[-3:]), LookupDrafter(), load=load
    ),
}
DRAFTERS = SHARED | OWN


def make_sampler(sampling: str, name: int) -> Sampler:
    return Sampler(SAMPLINGS[sampling], KeyedNoise.derive(1, 0, PROMPTS[name]))


def run(
    target: DenseTransformer, drafter: str, sampling: str, texts: Sequence[Sequence[int]]
) -> tuple[list[Session], list[Round]]:
    """Decode the first prompts, one for each text; drafters may know the texts."""
    load = Load()
    shared = DRAFTERS[drafter](texts[0], load, target)
    sessions = []
    for name, text in enumerate(texts):
        own = DRAFTERS[drafter](text, load, target) if drafter in OWN else shared
        session = Session(target, own, session_id=str(name), prefill_chunk=16)
        session.sync(PROMPTS[name])
        sessions.append(session)
    turns = [
        session.decode_steps(make_sampler(sampling, name), LIMITS)
        for name, session in enumerate(sessions)
    ]
    return sessions, run_together(target, turns, load)


@pytest.fixture(scope="module")
def target() -> DenseTransformer:
    return tiny_qwen3(dtype="float64")


@pytest.fixture(scope="module")
def texts(target: DenseTransformer) -> dict[str, list[list[int]]]:
    """Prompts and their cold, cacheless answers."""
    return {
        sampling: [
            prompt + cold_decode(target, prompt, make_sampler(sampling, name), LIMITS)
            for name, prompt in enumerate(PROMPTS)
        ]
        for sampling in SAMPLINGS
    }


@CASES
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_float64_tokens_are_those_of_cold_runs(
    target: DenseTransformer,
    texts: dict[str, list[list[int]]],
    drafter: str,
    sampling: str,
    num_sessions: int,
) -> None:
    expected = texts[sampling][:num_sessions]
    sessions, rounds = run(target, drafter, sampling, expected)
    with ExitStack() as stack:
        for session in sessions:
            stack.callback(session.close)
            session.check_invariants()
        assert [session.token_ids for session in sessions] == expected
        assert_kv_is_of(target, sessions[-1].kv, sessions[-1].token_ids, tolerance=1e-10)
        assert drafter == "null" or any(round_.num_drafted for round_ in rounds)


@pytest.mark.parametrize(
    ("sampling", "num_sessions"),
    [
        ("greedy", 1),
        ("sampled", 1),
        ("sampled", 3),
        *(pytest.param(name, 8, marks=pytest.mark.soak) for name in SAMPLINGS),
    ],
)
def test_float32_tokens_differ_from_plain_ones_at_near_ties_only(
    sampling: str, num_sessions: int
) -> None:
    small = tiny_qwen3(dtype="float32")
    plain = []
    for name in range(num_sessions):
        session = Session(small, NullDrafter(), session_id="plain")
        session.sync(PROMPTS[name])
        list(session.decode(make_sampler(sampling, name), LIMITS))
        plain.append(list(session.token_ids))
        session.close()
    num_ties = 0
    for drafter in DRAFTERS:
        sessions, _ = run(small, drafter, sampling, plain)
        for name, session in enumerate(sessions):
            pairs = zip(plain[name], session.token_ids, strict=True)
            place = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
            if place is not None:
                with cold_forward(small, plain[name][:place]) as (output, _):
                    logits = output.logits[0]
                sampler = make_sampler(sampling, name)
                others = {plain[name][place], session.token_ids[place]}
                assert any(sampler.is_near_tie(logits, place, other) for other in others)
                num_ties += 1
            session.close()
    print(f"{sampling}, {num_sessions} at once: {num_ties} differences, each at a near-tie")
    assert num_ties <= 2 * num_sessions


@pytest.mark.parametrize(
    ("sampling", "num_sessions"),
    [
        ("greedy", 1),
        ("sampled", 1),
        ("sampled", 8),
        pytest.param("greedy", 8, marks=pytest.mark.soak),
    ],
)
def test_int8_computes_the_same_bits_whoever_drafts(sampling: str, num_sessions: int) -> None:
    """Tokens, and every key and value: what each logit was computed from.

    Without the drafter whose blocks have more than the 15 tokens that this is promised for.
    """
    small = tiny_int8(replace(tiny_config(), head_dim=64))
    assert small.use_kernels(row_kernels())
    prompts = PROMPTS[:num_sessions]
    plain, _ = run(small, "null", sampling, prompts)
    texts = [list(session.token_ids) for session in plain]
    history = [rows_to_host(session.kv, 0, len(texts[0]) - 1) for session in plain]
    num_drafted = 0
    for drafter in DRAFTERS:
        if drafter == "adversarial":
            continue
        sessions, rounds = run(small, drafter, sampling, texts)
        assert [session.token_ids for session in sessions] == texts
        for session, rows in zip(sessions, history, strict=True):
            assert torch.equal(rows_to_host(session.kv, 0, rows.shape[3]), rows)
            session.close()
        num_drafted += sum(round_.num_drafted for round_ in rounds)
    assert num_drafted > 3 * NUM_TOKENS
