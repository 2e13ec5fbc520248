"""Several sessions in one forward, against each of them alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from dlite_agent.errors import CapacityError
from dlite_agent.models.kv_pool import PAGE_ROWS, KVCache
from dlite_agent.models.target import ForwardRows, TargetOutput
from dlite_agent.models.transformer import DenseTransformer
from dlite_agent.testing import FaultyTarget, tiny_config, tiny_qwen3

PAGE_BYTES = PAGE_ROWS * tiny_config().kv_bytes_per_token(4)


def random_ids(count: int, seed: int) -> Tensor:
    return torch.randint(0, 512, (count,), generator=torch.Generator().manual_seed(seed))


def prefill(target: DenseTransformer, kv: KVCache, ids: Tensor) -> KVCache:
    for chunk in ids.split(256):
        target.forward(chunk, kv, logits_for=())
        kv.commit(len(chunk))
    return kv


def mixed_caches(target: DenseTransformer) -> list[KVCache]:
    """Eight sessions: empty, short, of several spans, forked ones that share pages, truncated."""
    long = prefill(target, target.new_cache(), random_ids(600, seed=1))
    fork = prefill(target, long.fork(512), random_ids(70, seed=2))
    cut = long.fork()
    cut.truncate_to(300)  # in the middle of a page that others hold
    caches = [target.new_cache(), long, fork, cut]
    for seed, length in enumerate((1, 255, 256, 777), start=3):
        caches.append(prefill(target, target.new_cache(), random_ids(length, seed)))
    assert any(len(kv.span_rows()) > 1 for kv in caches)
    assert {*long.pages} & {*fork.pages} & {*cut.pages}
    return caches


def rows_of(caches: list[KVCache]) -> list[ForwardRows]:
    """Prefill chunks, verifications and single steps side by side, with and without logits."""
    plans: list[tuple[int, tuple[int, ...], tuple[int, ...]]] = [
        (40, (), ()),
        (1, (0,), (1,)),
        (8, tuple(range(8)), (0, 1)),
        (3, (2, 0), ()),
        (1, (0,), ()),
        (2, (0, 1), (1,)),
        (64, (63,), (0,)),
        (1, (0,), ()),
    ]
    return [
        ForwardRows(random_ids(count, seed=20 + i), kv, logits_for, taps)
        for i, (kv, (count, logits_for, taps)) in enumerate(zip(caches, plans, strict=True))
    ]


def kv_of(kv: KVCache) -> list[Tensor]:
    """Every key and value, tentative rows included."""
    return [
        torch.cat([span[half] for span in kv.spans(layer)], dim=1)
        for layer in range(tiny_config().num_layers)
        for half in (0, 1)
    ]


def assert_same(got: TargetOutput, wanted: TargetOutput) -> None:
    torch.testing.assert_close(got.logits, wanted.logits, rtol=0.0, atol=1e-12)
    assert torch.equal(got.logits.argmax(-1), wanted.logits.argmax(-1))
    assert (got.hidden is None) == (wanted.hidden is None)
    if got.hidden is not None and wanted.hidden is not None:
        assert got.hidden.layer_ids == wanted.hidden.layer_ids
        torch.testing.assert_close(got.hidden.states, wanted.hidden.states, rtol=0.0, atol=1e-12)


def test_batch_equals_each_session_alone_in_float64() -> None:
    target = tiny_qwen3(dtype="float64")
    batch = rows_of(mixed_caches(target))
    alone = [
        target.forward(rows.token_ids, rows.kv, logits_for=rows.logits_for, taps=rows.taps)
        for rows in batch
    ]
    written = [[half.clone() for half in kv_of(rows.kv)] for rows in batch]
    for rows in batch:
        for half in kv_of(rows.kv):
            half[:, rows.kv.length :].fill_(float("nan"))
        rows.kv.commit(0)
    before = target.rows_computed
    together = target.forward_batch(batch)
    assert target.rows_computed - before == sum(len(rows.token_ids) for rows in batch)
    for got, wanted in zip(together, alone, strict=True):
        assert_same(got, wanted)
    for rows, halves in zip(batch, written, strict=True):
        assert rows.kv.num_tentative == len(rows.token_ids)
        for got_half, wanted_half in zip(kv_of(rows.kv), halves, strict=True):
            torch.testing.assert_close(got_half, wanted_half, rtol=0.0, atol=1e-12)


def test_sessions_that_decode_together_write_what_each_writes_alone() -> None:
    target = tiny_qwen3(dtype="float64")

    def greedy(seeds: list[int], step: Callable[[list[ForwardRows]], list[TargetOutput]]) -> None:
        caches = [target.new_cache() for _ in seeds]
        pending = [random_ids(5 + 40 * seed, seed) for seed in seeds]
        for _ in range(40):
            batch = [
                ForwardRows(ids, kv, [len(ids) - 1])
                for ids, kv in zip(pending, caches, strict=True)
            ]
            for i, (rows, output) in enumerate(zip(batch, step(batch), strict=True)):
                rows.kv.commit(len(rows.token_ids))
                pending[i] = output.logits[0].argmax().view(1)
                tokens[seeds[i]].append(int(pending[i]))

    tokens: dict[int, list[int]] = {seed: [] for seed in range(8)}
    greedy(list(range(8)), target.forward_batch)
    together, tokens = tokens, {seed: [] for seed in range(8)}
    for seed in range(8):
        greedy([seed], target.forward_batch)
    assert tokens == together
    assert len({tuple(found) for found in tokens.values()}) == 8


def test_forward_is_a_batch_of_one() -> None:
    target = tiny_qwen3()
    ids = random_ids(9, seed=0)
    one = target.forward(ids, target.new_cache(), logits_for=[3, 8], taps=(0,))
    (other,) = target.forward_batch([ForwardRows(ids, target.new_cache(), [3, 8], (0,))])
    assert torch.equal(one.logits, other.logits)
    assert one.hidden is not None
    assert other.hidden is not None
    assert torch.equal(one.hidden.states, other.hidden.states)


def test_full_pool_writes_for_nobody() -> None:
    target = tiny_qwen3(max_kv_bytes=3 * PAGE_BYTES)
    first = prefill(target, target.new_cache(), random_ids(200, seed=0))
    second = prefill(target, target.new_cache(), random_ids(256, seed=1))
    before = (target.rows_computed, target.pool.used_bytes, kv_of(first), kv_of(second))
    batch = [
        ForwardRows(random_ids(100, seed=2), first, [99]),
        ForwardRows(random_ids(1, seed=3), second, [0]),
    ]
    with pytest.raises(CapacityError):
        target.forward_batch(batch)
    assert (first.length, first.num_tentative) == (200, 0)
    assert (second.length, second.num_tentative) == (256, 0)
    assert (target.rows_computed, target.pool.used_bytes) == before[:2]
    for kv, halves in ((first, before[2]), (second, before[3])):
        assert all(torch.equal(a, b) for a, b in zip(kv_of(kv), halves, strict=True))
    target.forward_batch(batch[:1])  # each alone has room
    first.commit(0)
    target.forward_batch(batch[1:])


def test_rows_that_a_session_reserved_before_are_used() -> None:
    target = tiny_qwen3(dtype="float64")
    ids = random_ids(3, seed=0)
    kv = prefill(target, target.new_cache(), random_ids(255, seed=1))
    kv.reserve(3)
    pages = kv.pages
    (output,) = target.forward_batch([ForwardRows(ids, kv, [2])])
    assert kv.pages == pages
    kv.commit(3)
    cold = target.forward(
        torch.cat([random_ids(255, seed=1), ids]), target.new_cache(), logits_for=[257]
    )
    torch.testing.assert_close(output.logits, cold.logits, rtol=0.0, atol=1e-12)


def test_one_cache_cannot_be_in_a_forward_twice() -> None:
    target = tiny_qwen3()
    kv = target.new_cache()
    rows = ForwardRows(random_ids(1, seed=0), kv, [0])
    with pytest.raises(AssertionError, match="distinct"):
        target.forward_batch([rows, rows])


def test_faulty_target_fails_a_whole_batch_after_it_wrote() -> None:
    faulty = FaultyTarget(tiny_qwen3(), lambda number: number == 1)
    caches = [faulty.new_cache(), faulty.new_cache()]
    batch = [ForwardRows(random_ids(2, seed=i), kv, [1]) for i, kv in enumerate(caches)]
    assert len(faulty.forward_batch(batch)) == 2
    with pytest.raises(RuntimeError, match="forward 1 was told to fail"):
        faulty.forward_batch(batch)
    assert [kv.num_tentative for kv in caches] == [2, 2]
