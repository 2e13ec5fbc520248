"""Our forward against transformers, and against itself in other pieces."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from dlite_agent.errors import CapacityError
from dlite_agent.models.layer_weights import weight_shapes
from dlite_agent.models.target import TargetConfig
from dlite_agent.models.transformer import DenseTransformer
from dlite_agent.testing import tiny_config, tiny_qwen3

BASE = tiny_config()
SHAPES = {
    "tiny": BASE,
    "tied": replace(BASE, tie_word_embeddings=True),
    "no groups": replace(BASE, num_heads=2, num_kv_heads=2, head_dim=32, rope_theta=1e6),
    "four groups": replace(BASE, num_heads=8, num_kv_heads=2, num_layers=4),
    "seven groups": replace(BASE, num_heads=7, num_kv_heads=1, head_dim=24, num_layers=3),
    "nano": replace(
        BASE,
        hidden_size=224,
        num_heads=4,
        num_kv_heads=2,
        head_dim=56,
        intermediate_size=640,
        tie_word_embeddings=True,
    ),
}


def oracle(config: TargetConfig, dtype: torch.dtype, seed: int = 0) -> Qwen3ForCausalLM:
    """A transformers model with random weights that make logits of a few units."""
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            intermediate_size=config.intermediate_size,
            rms_norm_eps=config.rms_norm_eps,
            rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
            max_position_embeddings=config.max_position_embeddings,
            tie_word_embeddings=config.tie_word_embeddings,
        )
    )
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            is_norm = parameter.dim() == 1
            parameter.copy_(1 + 0.2 * noise if is_norm else noise * parameter.shape[-1] ** -0.5)
    return model.to(dtype).eval()


def ours(config: TargetConfig, model: Qwen3ForCausalLM, dtype: torch.dtype) -> DenseTransformer:
    weights = model.state_dict()
    return DenseTransformer(
        config,
        weights.__getitem__,
        dtype=dtype,
        device=torch.device("cpu"),
        max_kv_bytes=2**26,
    )


def random_ids(count: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 512, (count,), generator=torch.Generator().manual_seed(seed))


def states_of(model: Qwen3ForCausalLM, ids: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Logits [Q, V] and the raw residual stream [Q, E] after every layer."""
    states: list[Tensor] = []
    hooks = [
        layer.register_forward_hook(lambda _module, _args, out: states.append(out[0]))
        for layer in model.model.layers
    ]
    with torch.no_grad():
        logits = model(ids[None]).logits[0]
    for hook in hooks:
        hook.remove()
    return logits, states


@pytest.mark.parametrize("name", SHAPES)
def test_logits_and_every_tap_equal_transformers(name: str) -> None:
    config = SHAPES[name]
    model = oracle(config, torch.float32)
    ids = random_ids(70)
    logits, states = states_of(model, ids)
    with ours(config, model, torch.float32) as target, target.new_cache() as kv:
        output = target.forward(ids, kv, logits_for=range(70), taps=range(config.num_layers))
    assert output.hidden is not None
    assert output.hidden.layer_ids == tuple(range(config.num_layers))
    torch.testing.assert_close(output.logits, logits, rtol=0.0, atol=1e-5)
    torch.testing.assert_close(output.hidden.states, torch.stack(states), rtol=0.0, atol=1e-5)


@pytest.mark.parametrize("name", ["tied", "seven groups"])
def test_long_prompt_in_chunks_equals_transformers(name: str) -> None:
    config = SHAPES[name]
    model = oracle(config, torch.float32)
    ids = random_ids(1500)
    logits, _ = states_of(model, ids)
    with ours(config, model, torch.float32) as target, target.new_cache() as kv:
        for chunk in ids.split(256):
            rows = range(len(chunk))
            output = target.forward(chunk, kv, logits_for=rows)
            wanted = logits[kv.length : kv.length + len(chunk)]
            torch.testing.assert_close(output.logits, wanted, rtol=0.0, atol=1e-5)
            kv.commit(len(chunk))


@pytest.mark.parametrize("name", ["tiny", "tied", "nano"])
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
    with ours(config, model, torch.float32) as target, target.new_cache() as kv:
        ids, got = prompt, []
        while len(got) < 200:
            output = target.forward(ids, kv, logits_for=[len(ids) - 1])
            kv.commit(len(ids))
            ids = output.logits[0].argmax().view(1)
            got.append(int(ids))
    assert got == wanted.tolist()
    assert len(set(got)) > 10, "a continuation that repeats itself proves little"


def test_bfloat16_is_as_close_to_float64_as_transformers_is() -> None:
    config = SHAPES["nano"]
    ids = random_ids(300)
    exact, _ = states_of(oracle(config, torch.float64), ids)
    model = oracle(config, torch.bfloat16)
    theirs, _ = states_of(model, ids)
    with ours(config, model, torch.bfloat16) as target, target.new_cache() as kv:
        parts = []
        for chunk in ids.split([200, 1, 2, 8, 33, 56]):
            parts.append(target.forward(chunk, kv, logits_for=range(len(chunk))).logits)
            kv.commit(len(chunk))
    logits = torch.cat(parts)
    assert logits.dtype == torch.float32
    assert (logits - exact).abs().mean() < 1.2 * (theirs - exact).abs().mean()


@pytest.mark.parametrize("sizes", [(1,) * 40, (2, 8, 33, 1, 256), (300,), (33,) * 9])
def test_float64_does_not_depend_on_the_pieces(sizes: tuple[int, ...]) -> None:
    target = tiny_qwen3(dtype="float64")
    ids = random_ids(sum(sizes))
    whole, pieces = target.new_cache(), target.new_cache()
    wanted = target.forward(ids, whole, logits_for=range(len(ids)), taps=(0, 1))
    assert wanted.hidden is not None
    assert wanted.logits.dtype == torch.float64
    for chunk in ids.split(list(sizes)):
        at = pieces.length
        got = target.forward(chunk, pieces, logits_for=range(len(chunk)), taps=(0, 1))
        assert got.hidden is not None
        same = slice(at, at + len(chunk))
        torch.testing.assert_close(got.logits, wanted.logits[same], rtol=0.0, atol=1e-12)
        torch.testing.assert_close(
            got.hidden.states, wanted.hidden.states[:, same], rtol=0.0, atol=1e-12
        )
        pieces.commit(len(chunk))


def test_fork_and_truncation_equal_recomputation() -> None:
    target = tiny_qwen3(dtype="float64")
    ids, other = random_ids(700), random_ids(20, seed=1)
    donor = target.new_cache()
    for chunk in ids.split(256):
        target.forward(chunk, donor, logits_for=())
        donor.commit(len(chunk))
    fork = donor.fork(600)
    branched = target.forward(other, fork, logits_for=[19])
    fork.commit(20)
    donor.truncate_to(300)
    resumed = target.forward(ids[300:310], donor, logits_for=[9])
    donor.commit(10)
    again = target.forward(other[19:], fork.fork(619), logits_for=[0])
    for output, row_ids in (
        (branched, torch.cat([ids[:600], other])),
        (again, torch.cat([ids[:600], other])),
        (resumed, ids[:310]),
    ):
        cold = target.forward(row_ids, target.new_cache(), logits_for=[len(row_ids) - 1])
        torch.testing.assert_close(output.logits, cold.logits, rtol=0.0, atol=1e-12)


def test_rejected_rows_leave_no_trace() -> None:
    target = tiny_qwen3(dtype="float64")
    ids, wrong = random_ids(30), random_ids(8, seed=1)
    kv = target.new_cache()
    target.forward(ids[:20], kv, logits_for=())
    kv.commit(20)
    target.forward(torch.cat([ids[20:22], wrong]), kv, logits_for=())
    kv.commit(2)
    output = target.forward(ids[22:], kv, logits_for=[7])
    cold = target.forward(ids, target.new_cache(), logits_for=[29])
    torch.testing.assert_close(output.logits, cold.logits, rtol=0.0, atol=1e-12)


def test_only_asked_rows_have_logits() -> None:
    target = tiny_qwen3()
    ids = random_ids(10)
    every = target.forward(ids, target.new_cache(), logits_for=range(10)).logits
    for rows in ([9], [0, 1], [3, 7], [7, 3], [5, 5]):
        some = target.forward(ids, target.new_cache(), logits_for=rows).logits
        torch.testing.assert_close(some, every[rows], rtol=0.0, atol=1e-5)
    none = target.forward(ids, target.new_cache(), logits_for=())
    assert (none.logits.shape, none.hidden) == ((0, 512), None)


def test_taps_come_in_the_order_of_the_layers() -> None:
    target = tiny_qwen3(num_layers=4)
    ids = random_ids(5)
    hidden = target.forward(ids, target.new_cache(), logits_for=(), taps=(3, 0)).hidden
    every = target.forward(ids, target.new_cache(), logits_for=(), taps=range(4)).hidden
    assert hidden is not None
    assert every is not None
    assert hidden.layer_ids == (0, 3)
    assert torch.equal(hidden.states, every.states[[0, 3]])
    assert torch.equal(hidden.row(2).states, hidden.states[:, 2:3])


def test_every_computed_row_is_counted() -> None:
    target = tiny_qwen3()
    kv = target.new_cache()
    target.forward(random_ids(10), kv, logits_for=())
    target.forward(random_ids(3), kv, logits_for=[2])
    assert target.rows_computed == 13


def test_full_pool_changes_nothing_and_counts_nothing() -> None:
    target = tiny_qwen3(max_kv_bytes=256 * BASE.kv_bytes_per_token(4))
    kv = target.new_cache()
    target.forward(random_ids(200), kv, logits_for=())
    kv.commit(200)
    with pytest.raises(CapacityError):
        target.forward(random_ids(100), kv, logits_for=())
    assert (kv.length, kv.num_tentative, target.rows_computed) == (200, 0, 200)


def test_results_may_be_changed_in_place_and_need_no_gradient() -> None:
    target = tiny_qwen3()
    output = target.forward(random_ids(4), target.new_cache(), logits_for=[3], taps=(1,))
    output.logits[0, 0] = float("-inf")
    assert output.hidden is not None
    assert not output.logits.requires_grad
    assert not output.hidden.states.requires_grad


def test_closed_model_gives_its_pool_back() -> None:
    target = tiny_qwen3()
    kv = target.new_cache()
    target.close()
    target.close()
    assert target.pool.is_closed
    with pytest.raises(CapacityError, match="closed"):
        target.forward(random_ids(1), kv, logits_for=())


def test_names_and_shapes_are_those_of_transformers() -> None:
    for config in (SHAPES["tiny"], SHAPES["tied"]):
        model = oracle(config, torch.float32)
        theirs = {name: tuple(value.shape) for name, value in model.state_dict().items()}
        if config.tie_word_embeddings:
            del theirs["lm_head.weight"]
        assert weight_shapes(config) == theirs


def test_read_bytes_are_those_of_the_matrices() -> None:
    target = tiny_qwen3()
    shapes = weight_shapes(target.config)
    sizes = [torch.Size(shape).numel() for shape in shapes.values() if len(shape) == 2]
    assert target.weight_bytes == 4 * (sum(sizes) - 512 * 64), "all but the embedding"
