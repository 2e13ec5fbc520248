"""The layers through compiled kernels against torch's operators, and against transformers."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import pytest
import torch

from dlite_agent.config import DType
from dlite_agent.models.kv_pool import KVCache
from dlite_agent.models.layer_weights import weight_shapes
from dlite_agent.models.native_layers import NativeLayers
from dlite_agent.models.target import ForwardRows, TargetConfig, TargetOutput
from dlite_agent.models.transformer import DenseTransformer
from dlite_agent.testing import tiny_config, tiny_qwen3
from tests.kernels.native_library import row_kernels
from tests.models.test_transformer import SHAPES, oracle, ours, random_ids, states_of

ODD = "seven groups"  # 7 heads of 24: 168 inputs are no whole tiles
EVEN_SHAPES = {name: shape for name, shape in SHAPES.items() if name != ODD}
FAMILIES = {
    **EVEN_SHAPES,
    "llama": replace(tiny_config(), has_qk_norm=False),
    "qwen2": replace(tiny_config(), has_qk_norm=False, has_qkv_bias=True),
}


def native(target: DenseTransformer) -> DenseTransformer:
    assert target.use_kernels(row_kernels())
    return target


@pytest.mark.parametrize("name", EVEN_SHAPES)
def test_logits_and_every_tap_equal_transformers(name: str) -> None:
    config = SHAPES[name]
    model = oracle(config, torch.float32)
    ids = random_ids(90)
    logits, states = states_of(model, ids)
    outputs: list[TargetOutput] = []
    with native(ours(config, model, torch.float32)) as target, target.new_cache() as kv:
        for chunk in ids.split([40, 1, 8, 1, 16, 24]):
            rows, taps = range(len(chunk)), range(config.num_layers)
            outputs.append(target.forward(chunk, kv, logits_for=rows, taps=taps))
            kv.commit(len(chunk))
    got = torch.cat([output.logits for output in outputs])
    tapped = torch.cat([output.hidden.states for output in outputs if output.hidden], dim=1)
    torch.testing.assert_close(got, logits, rtol=0.0, atol=1e-5)
    torch.testing.assert_close(tapped, torch.stack(states), rtol=0.0, atol=1e-5)


@pytest.mark.parametrize("name", ["tied", "nano"])
def test_greedy_continuation_of_200_tokens_is_that_of_transformers(name: str) -> None:
    config = SHAPES[name]
    model = oracle(config, torch.float32)
    prompt = random_ids(40)
    wanted = model.generate(
        prompt[None],
        attention_mask=torch.ones(1, 40, dtype=torch.int64),
        max_new_tokens=200,
        min_new_tokens=200,
        do_sample=False,
        pad_token_id=0,
    )[0, 40:]
    with native(ours(config, model, torch.float32)) as target, target.new_cache() as kv:
        ids = prompt
        got: list[int] = []
        while len(got) < 200:
            output = target.forward(ids, kv, logits_for=[len(ids) - 1])
            kv.commit(len(ids))
            ids = output.logits[0].argmax().view(1)
            got.append(int(ids))
    assert got == wanted.tolist()


def test_bfloat16_is_as_close_to_float64_as_transformers_is() -> None:
    config = SHAPES["nano"]
    ids = random_ids(300)
    exact, _ = states_of(oracle(config, torch.float64), ids)
    model = oracle(config, torch.bfloat16)
    theirs, _ = states_of(model, ids)
    with native(ours(config, model, torch.bfloat16)) as target, target.new_cache() as kv:
        parts = []
        for chunk in ids.split([200, 1, 2, 8, 16, 73]):
            parts.append(target.forward(chunk, kv, logits_for=range(len(chunk))).logits)
            kv.commit(len(chunk))
    logits = torch.cat(parts)
    assert (logits - exact).abs().mean() < 1.2 * (theirs - exact).abs().mean()


def batch_of(target: DenseTransformer) -> list[ForwardRows]:
    """A prefill chunk, verifications and steps, of several spans and shared pages."""

    def filled(kv: KVCache, length: int, seed: int) -> KVCache:
        for chunk in random_ids(length, seed).split(256):
            target.forward(chunk, kv, logits_for=())
            kv.commit(len(chunk))
        return kv

    long = filled(target.new_cache(), 600, seed=1)
    caches = [target.new_cache(), long, filled(long.fork(512), 70, seed=2), long.fork(300)]
    caches[3].truncate_to(290)
    assert len(caches[2].span_rows()) > 1
    counts = (40, 1, 8, 3)
    return [
        ForwardRows(random_ids(count, 9 + i), kv, range(count), (0, 1))
        for i, (kv, count) in enumerate(zip(caches, counts, strict=True))
    ]


@pytest.mark.parametrize("config", FAMILIES.values(), ids=FAMILIES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_batch_equals_that_of_torch(config: TargetConfig, dtype: DType) -> None:
    target = tiny_qwen3(config=config, dtype=dtype)
    batch = batch_of(target)
    wanted = target.forward_batch(batch)
    for rows in batch:
        rows.kv.commit(0)
    got = native(target).forward_batch(batch)
    for rows, mine, torchs in zip(batch, got, wanted, strict=True):
        assert rows.kv.num_tentative == len(rows.token_ids)
        assert mine.hidden is not None
        assert torchs.hidden is not None
        for a, b in (
            (mine.logits, torchs.logits),
            (mine.hidden.states.float(), torchs.hidden.states.float()),
        ):
            scale = float(b.abs().max())
            assert float((a - b).abs().max()) < scale * (1e-5 if dtype == "float32" else 0.03)


def tiny_int8(config: TargetConfig) -> DenseTransformer:
    def read(name: str) -> torch.Tensor:
        shape, seed = weight_shapes(config)[name], len(name)
        noise = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
        return 1 + 0.1 * noise if len(shape) == 1 else noise * shape[-1] ** -0.5

    return DenseTransformer(
        config,
        read,
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
        max_kv_bytes=64 * 2**20,
        quantize="int8",
    )


@pytest.mark.parametrize("dtype", ["bfloat16", "int8", "float32"])
def test_logits_do_not_depend_on_the_rows_of_a_forward(
    dtype: Literal["bfloat16", "int8", "float32"],
) -> None:
    """Up to 16 rows of a session, whatever other sessions compute beside it: bit for bit."""
    config = replace(tiny_config(), has_qkv_bias=True, tie_word_embeddings=True)
    target = native(
        tiny_int8(config) if dtype == "int8" else tiny_qwen3(config=config, dtype=dtype)
    )
    ids, other = random_ids(600), random_ids(40, 9)
    taps = tuple(range(config.num_layers))

    def decoded(counts: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        kv, beside = target.new_cache(), target.new_cache()
        target.forward(ids[:540], kv, logits_for=())
        kv.commit(540)
        logits, states = [], []
        for count in counts:
            chunk = ids[kv.length : kv.length + count]
            batch = [ForwardRows(chunk, kv, range(count), taps)]
            if count % 2:
                batch.insert(0, ForwardRows(other[: 3 * count], beside, [0], ()))
            output = target.forward_batch(batch)[-1]
            kv.commit(count)
            beside.commit(0)
            assert output.hidden is not None
            logits.append(output.logits)
            states.append(output.hidden.states)
        return torch.cat(logits), torch.cat(states, dim=1)

    logits, states = decoded([1] * 48)
    for counts in ([16, 16, 16], [2, 8, 11, 5, 1, 7, 13, 1]):
        got, tapped = decoded(counts)
        assert torch.equal(got, logits)
        assert torch.equal(tapped, states)


def test_a_tied_head_gives_the_embeddings() -> None:
    config = replace(tiny_config(), tie_word_embeddings=True)
    for dtype in ("float32", "bfloat16"):
        target = tiny_qwen3(config=config, dtype=dtype)
        ids = torch.tensor([0, 511, 17, 17])
        wanted = target.embed(ids).clone()
        assert torch.equal(native(target).embed(ids), wanted)


def test_inputs_that_are_no_whole_tiles_are_declined() -> None:
    assert not tiny_qwen3(config=SHAPES[ODD]).use_kernels(row_kernels())


def test_taps_do_not_change_with_the_layers_behind_them() -> None:
    target = native(tiny_qwen3(num_layers=3))
    ids = random_ids(5)
    every = target.forward(ids, target.new_cache(), logits_for=(), taps=(0, 1, 2)).hidden
    first = target.forward(ids, target.new_cache(), logits_for=(), taps=(0,)).hidden
    assert every is not None
    assert first is not None
    assert torch.equal(first.states[0], every.states[0])
    assert not torch.equal(every.states[0], every.states[1])


def test_kernels_can_be_switched_off_and_do_not_keep_a_closed_pool() -> None:
    target = native(tiny_qwen3())
    assert isinstance(target._run, NativeLayers)
    assert not target.use_kernels(None)
    assert not tiny_qwen3(dtype="float64").use_kernels(row_kernels())
    target = native(tiny_qwen3())
    target.close()
    assert target.pool.is_closed
