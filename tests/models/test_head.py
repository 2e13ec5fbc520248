"""Logits of bfloat16: the best are as exact as float32, whoever stands beside them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dlite_agent.kernels.large_pages import LargePageMemory
from dlite_agent.models.head import NUM_RESCORED, VocabularyHead, best_candidates
from tests.kernels.native_library import row_kernels


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("size", [5, 64, 500, 4096, 4097, 9000])
def test_best_candidates_are_those_of_a_full_sort(size: int) -> None:
    logits = random(3, size)
    count = min(NUM_RESCORED, size)
    found = best_candidates(logits, count)
    assert found.shape == (3, count)
    for row, ids in zip(logits, found, strict=True):
        assert len(set(ids.tolist())) == count
        assert set(ids.tolist()) == set(row.argsort(descending=True)[:count].tolist())


@pytest.mark.parametrize("quantize", [None, "int8"])
def test_best_64_have_float32_accuracy_and_the_others_are_rounded(quantize: str | None) -> None:
    rows = (8 * random(9000, 64) / 8).to(torch.bfloat16)  # logits of up to 32
    hidden = random(4, 64, seed=1).to(torch.bfloat16)
    logits = VocabularyHead(rows, quantize)(hidden)  # type: ignore[arg-type]  # of a parameter
    exact = hidden.double() @ rows.double().t()
    error = (logits.double() - exact).abs()
    best = best_candidates(logits, 32)
    assert float(error.gather(1, best).max()) < 1e-5
    assert float(error.max()) > 1e-3
    if quantize is None:
        assert torch.equal(logits.argmax(-1), exact.argmax(-1))


@pytest.mark.parametrize("quantize", [None, "int8"])
def test_kernels_compute_every_logit_in_float32(quantize: str | None) -> None:
    rows = (8 * random(9000, 64) / 8).to(torch.bfloat16)
    hidden = random(4, 64, seed=1).to(torch.bfloat16)
    head = VocabularyHead(rows, quantize)  # type: ignore[arg-type]  # of a parameter
    packed = head.use_kernels(row_kernels(), LargePageMemory())
    logits, exact = head(hidden), hidden.double() @ rows.double().t()
    error = (logits.double() - exact).abs()
    if packed is None:  # int8: only the best, from the rows as they were
        assert quantize == "int8"
        error = error.gather(1, best_candidates(logits, 32))
    assert float(error.max()) < 2e-5
    assert torch.equal(head(hidden[1:3]), logits[1:3])


def test_close_candidates_keep_their_order() -> None:
    """Two logits near 24 that bfloat16 cannot tell apart."""
    rows = torch.zeros(8192, 64, dtype=torch.bfloat16)
    rows[:, 0] = random(8192).to(torch.bfloat16)
    rows[100, 0], rows[7000, 0] = 24.0, 24.0
    rows[7000, 1] = 0.015625
    hidden = torch.zeros(1, 64, dtype=torch.bfloat16)
    hidden[0, :2] = 1.0
    logits = VocabularyHead(rows)(hidden)
    assert float(logits[0, 7000] - logits[0, 100]) == 0.015625
    assert int(logits.argmax()) == 7000


def test_a_row_does_not_depend_on_the_others() -> None:
    head = VocabularyHead(random(5000, 96).to(torch.bfloat16))
    hidden = random(8, 96, seed=1).to(torch.bfloat16)
    together = head(hidden)
    ids = best_candidates(together, 32)
    for i in range(8):
        alone = head(hidden[i : i + 1])
        assert torch.equal(
            alone.gather(1, ids[i : i + 1]), together[i : i + 1].gather(1, ids[i : i + 1])
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_wider_types_are_left_alone(dtype: torch.dtype) -> None:
    rows, hidden = random(500, 32).to(dtype), random(2, 32, seed=1).to(dtype)
    logits = VocabularyHead(rows)(hidden)
    assert logits.dtype == dtype
    torch.testing.assert_close(logits, hidden @ rows.t())


def test_not_a_number_stays_visible() -> None:
    rows = random(500, 32).to(torch.bfloat16)
    rows[17, 3] = float("nan")
    logits = VocabularyHead(rows)(random(1, 32).to(torch.bfloat16))
    assert logits.isnan().nonzero().tolist() == [[0, 17]]
