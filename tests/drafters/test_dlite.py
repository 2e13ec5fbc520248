"""DLite in the loop: no state, whatever the session went through, and only for its own target."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from dlite_agent.config import SamplingParams
from dlite_agent.decoding.stopping import StopRules
from dlite_agent.drafters.block_head import BlockHead, TokenCell, token_rows
from dlite_agent.drafters.dlite import DLiteDrafter, load_dlite
from dlite_agent.drafters.null import NullDrafter
from dlite_agent.errors import ConfigurationError, DrafterMismatchError
from dlite_agent.models.dlite_config import DLiteConfig
from dlite_agent.models.dlite_files import write_dlite
from dlite_agent.models.target import TargetHidden
from dlite_agent.models.transformer import DenseTransformer
from dlite_agent.sampling import KeyedNoise, Sampler
from dlite_agent.sessions.session import Session
from dlite_agent.testing import tiny_config, tiny_qwen3
from tests.dlite_models import dlite_config, random_weights

PROMPT = [3, 14, 15, 9, 26, 5, 35, 8, 97, 93]
NOISE = KeyedNoise(1)
CHOICES: dict[str, dict[str, object]] = {
    "default": {},
    "feature": {"composition": "feature"},
    "no-head": {"head": "none"},
    "token-head": {"head": "token"},
    "copying-head": {"head": "copy"},
    "log-absolute": {"position_feature": "log-absolute"},
    "one-tap": {"taps": (1,), "num_layers": 1},
    "block-3": {"block_size": 3},
}
SAMPLINGS = {
    "greedy": SamplingParams(temperature=0.0, top_k=0, top_p=1.0),
    "sampled": SamplingParams(temperature=0.9, top_k=20, top_p=0.9),
}


def make_drafter(
    target: DenseTransformer, *, shortlist: int | None = 32, **choices: object
) -> DLiteDrafter:
    config = dlite_config(target.config, **choices)
    return DLiteDrafter(config, random_weights(config), target, shortlist=shortlist)


def decode(session: Session, params: SamplingParams, count: int) -> list[tuple[int, ...]]:
    sampler = Sampler(params, KeyedNoise.derive(1, 0, PROMPT))
    return [round_.token_ids for round_ in session.decode(sampler, StopRules(frozenset(), count))]


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("choices", CHOICES)
def test_output_is_that_of_plain_decoding(choices: str, sampling: str) -> None:
    target = tiny_qwen3(dtype="float64")
    plain = Session(target, NullDrafter(), session_id="plain")
    plain.sync(PROMPT)
    decode(plain, SAMPLINGS[sampling], 40)
    drafted = Session(target, make_drafter(target, **CHOICES[choices]), session_id="drafted")
    drafted.sync(PROMPT)
    decode(drafted, SAMPLINGS[sampling], 40)
    assert drafted.token_ids == plain.token_ids
    drafted.check_invariants()


def taps_of(target: DenseTransformer, config: DLiteConfig, seed: int = 1) -> TargetHidden:
    generator = torch.Generator().manual_seed(seed)
    states = torch.randn(
        len(config.taps), 1, config.hidden_size, generator=generator, dtype=torch.float64
    )
    return TargetHidden(states.to(target.dtype), config.taps)


def test_block_is_cut_to_the_budget_and_empty_without_taps() -> None:
    target = tiny_qwen3()
    drafter = make_drafter(target)
    hidden = taps_of(target, drafter.config)
    whole = drafter.propose(None, 5, hidden, 10, NOISE, 100)
    assert len(whole.token_ids) == len(whole.confidence) == 7
    assert all(0.0 < share <= 1.0 for share in whole.confidence)
    cut = drafter.propose(None, 5, hidden, 10, NOISE, 3)
    assert cut.token_ids == whole.token_ids[:3]
    assert drafter.propose(None, 5, hidden, 10, NOISE, 0).token_ids == ()
    assert drafter.propose(None, 5, None, 10, NOISE, 7).token_ids == ()


def test_block_ends_where_its_chance_falls_too_low() -> None:
    target = tiny_qwen3()
    config = dlite_config(target.config)
    weights = random_weights(config)
    hidden = taps_of(target, config)
    whole = DLiteDrafter(config, weights, target).propose(None, 5, hidden, 3, NOISE, 7)
    chances = [math.prod(whole.confidence[: count + 1]) for count in range(7)]
    cut = DLiteDrafter(config, weights, target, min_chance=chances[2] * 0.999)
    block = cut.propose(None, 5, hidden, 3, NOISE, 7)
    assert block.token_ids == whole.token_ids[:3]
    never = DLiteDrafter(config, weights, target, min_chance=1.1)
    assert never.propose(None, 5, hidden, 3, NOISE, 7).token_ids == ()


def test_drafter_that_reads_several_positions_is_refused() -> None:
    target = tiny_qwen3()
    with pytest.raises(ConfigurationError, match="context_positions=4"):
        make_drafter(target, context_positions=4)


def test_block_depends_on_taps_and_anchor_alone() -> None:
    target = tiny_qwen3()
    drafter = make_drafter(target)
    hidden = taps_of(target, drafter.config)
    block = drafter.propose(drafter.start([1, 2, 3]), 5, hidden, 3, NOISE, 7)
    assert drafter.start([7] * 30) is None
    assert drafter.fork(None) is None
    assert drafter.propose(None, 5, hidden, 30_000, NOISE, 7) == block
    assert drafter.propose(None, 6, hidden, 3, NOISE, 7) != block
    other = taps_of(target, drafter.config, seed=2)
    assert drafter.propose(None, 5, other, 3, NOISE, 7) != block


def test_copying_head_reads_the_sessions_ids_and_keeps_nothing_else() -> None:
    target = tiny_qwen3()
    drafter = make_drafter(target, head="copy")
    hidden = taps_of(target, drafter.config)
    state = drafter.start([1, 2, 5, 9, 4, 5])
    assert state is not None
    assert state.nbytes == 24
    block = drafter.propose(state, 5, hidden, 5, NOISE, 7)
    assert drafter.propose(state, 5, hidden, 5, NOISE, 7) == block
    other = drafter.start([1, 2, 5, 8, 4, 5])
    assert drafter.propose(other, 5, hidden, 5, NOISE, 7).confidence != block.confidence
    fork = drafter.fork(state)
    drafter.truncate_to(fork, 3)
    drafter.commit(fork, [9, 4, 5])
    assert drafter.propose(fork, 5, hidden, 5, NOISE, 7) == block


def test_position_is_told_where_the_config_says_so() -> None:
    target = tiny_qwen3()
    drafter = make_drafter(target, position_feature="log-absolute")
    hidden = taps_of(target, drafter.config)
    near, far = (drafter.propose(None, 5, hidden, at, NOISE, 7) for at in (3, 30_000))
    assert near.confidence != far.confidence


def test_first_rounds_after_fork_and_rewind_accept_what_an_uninterrupted_run_accepts() -> None:
    target = tiny_qwen3(dtype="float64")
    greedy = SAMPLINGS["greedy"]
    whole = Session(target, make_drafter(target), session_id="whole")
    whole.sync(PROMPT)
    assert decode(whole, greedy, 1)
    expected = decode(whole, greedy, 12)
    forked = Session(target, make_drafter(target), session_id="forked")
    forked.sync(PROMPT)
    assert decode(forked, greedy, 1)
    fork = forked.fork()
    assert fork.hidden is not None
    assert decode(fork, greedy, 12) == expected
    assert fork.nbytes - fork.kv.nbytes - 8 * len(fork.token_ids) == fork.hidden.states.nbytes
    # back to the prompt, whose last row is forwarded again: the same taps, the same blocks
    whole.sync(PROMPT)
    assert decode(whole, greedy, 1)
    assert decode(whole, greedy, 12) == expected


@pytest.mark.parametrize("kind", ["recurrent", "token"])
@pytest.mark.parametrize("tied", [False, True])
def test_folded_head_is_the_naive_head(kind: str, tied: bool) -> None:
    target = tiny_qwen3(config=tiny_config(tie_word_embeddings=tied))
    drafter = make_drafter(target, head=kind)
    weights = {name: value.float() for name, value in random_weights(drafter.config).items()}
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(7, 64, generator=generator)
    previous_ids = torch.randint(0, 512, (7,), generator=generator).tolist()
    state = torch.zeros(8)
    corrected = []
    for slot, previous_id in enumerate(previous_ids):
        of_token = weights["head.token_proj.weight"] @ target.embed(torch.tensor([previous_id]))[0]
        if kind == "token":
            state = of_token
        else:
            total = of_token + weights["head.hidden_proj.weight"] @ hidden[slot]
            total += weights["head.state_proj.weight"] @ state + weights["head.bias"]
            gate, candidate = total[:8].sigmoid(), total[8:].tanh()
            state = gate * state + (1 - gate) * candidate
        corrected.append(hidden[slot] + weights["head.out_proj.weight"] @ state)
    naive = target.project(torch.stack(corrected))
    folded = drafter.head.logits(target.project(hidden), hidden, previous_ids)
    torch.testing.assert_close(folded, naive, atol=1e-5, rtol=0)


@pytest.mark.parametrize("kind", ["recurrent", "token", "none"])
def test_shortlist_of_the_whole_vocabulary_and_the_exact_head_choose_alike(kind: str) -> None:
    target = tiny_qwen3()
    hidden = taps_of(target, dlite_config(target.config))
    blocks = [
        make_drafter(target, head=kind, shortlist=size).propose(None, 5, hidden, 3, NOISE, 7)
        for size in (None, 512, 100_000)
    ]
    assert blocks[0].token_ids == blocks[1].token_ids == blocks[2].token_ids
    assert blocks[0].confidence == pytest.approx(blocks[1].confidence, rel=1e-5)


def test_cell_without_a_table_reads_the_embedding(monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_qwen3()
    weight = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
    with_table = token_rows(weight, target.embed, 512)
    monkeypatch.setattr("dlite_agent.drafters.block_head._MAX_TABLE_BYTES", 0)
    without = token_rows(weight, target.embed, 512)
    for token_id in (0, 5, 511):
        torch.testing.assert_close(
            torch.from_numpy(with_table(token_id)), torch.from_numpy(without(token_id))
        )


def test_free_factor_serves_a_markov_head() -> None:
    # DSpark's: bias = W2·W1[previous token]; here W2 says that after 5 comes 9
    w1, w2 = torch.zeros(16, 2), torch.zeros(16, 2)
    w1[5, 0], w2[9, 0] = 1.0, 4.0
    head = BlockHead(w2, TokenCell(lambda token_id: w1[token_id].numpy()), shortlist=None)
    base = torch.zeros(2, 16)
    base[:, 3] = 1.0
    assert head.draft(base, torch.zeros(2, 4), 5)[0] == (9, 3)
    short = BlockHead(w2, TokenCell(lambda token_id: w1[token_id].numpy()), shortlist=1)
    assert short.draft(base, torch.zeros(2, 4), 5)[0] == (3, 3)


def test_drafter_of_another_target_is_refused_with_the_reason(tmp_path: Path) -> None:
    target = tiny_qwen3()
    config = DLiteConfig.for_target(target.config, "0123456789abcdef", num_taps=2, rank=8)
    write_dlite(tmp_path, config, random_weights(config), {})
    drafter = load_dlite(tmp_path, target, "0123456789abcdef")
    assert drafter.requires.layer_ids == (0, 1)
    assert drafter.requires.positions == "last"
    assert drafter.block_bytes > 4 * 512 * 64
    with pytest.raises(DrafterMismatchError, match="trained for the checkpoint '0123456789abcdef'"):
        load_dlite(tmp_path, target, "f" * 16)
    deeper = tiny_qwen3(num_layers=3)
    with pytest.raises(DrafterMismatchError, match=r"num_layers=2, and this one .* has 3"):
        load_dlite(tmp_path, deeper, "0123456789abcdef")
    wider = tiny_qwen3(vocab_size=300)
    with pytest.raises(DrafterMismatchError, match="vocab_size=512"):
        load_dlite(tmp_path, wider, "0123456789abcdef")
