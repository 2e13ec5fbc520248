"""The sampler: exact where exactness is promised, chi-square where chance is."""

from __future__ import annotations

import math

import pytest
import torch

from dlite_agent.config import SamplingParams
from dlite_agent.sampling import KeyedNoise, Sampler
from tests.sampling.test_noise import reference_exponential


def make_sampler(
    temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, key: int = 7
) -> Sampler:
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p)
    return Sampler(params, KeyedNoise(key))


def reference_candidates(
    logits: list[float], temperature: float, top_k: int, top_p: float
) -> list[int]:
    order = sorted(range(len(logits)), key=lambda t: (-logits[t], t))
    if top_k:
        order = order[:top_k]
    weights = [math.exp((logits[t] - logits[order[0]]) / temperature) for t in order]
    total = math.fsum(weights)
    kept = 0
    while kept < len(order) and math.fsum(weights[:kept]) < top_p * total:
        kept += 1
    return order[:kept] if top_p < 1.0 else order


@pytest.mark.parametrize("temperature", [5e-324, 1e-300, 1e-3])
@pytest.mark.parametrize("top_k", [0, 5])
@pytest.mark.parametrize("top_p", [1e-300, 0.9, 1.0])
def test_however_cold_the_best_token_is_drawn(temperature: float, top_k: int, top_p: float) -> None:
    logits = torch.randn(512, generator=torch.Generator().manual_seed(0)) * 10
    sampler = make_sampler(temperature, top_k, top_p)
    assert sampler.sample(logits, 3) == int(logits.argmax())


def exceeds_chi_square(counts: torch.Tensor, probabilities: torch.Tensor) -> bool:
    """Whether the counts differ from the probabilities at the 1e-5 level (Wilson-Hilferty)."""
    expected = probabilities * counts.sum()
    common = expected >= 5.0
    observed = torch.cat([counts[common], counts[~common].sum()[None]])
    wanted = torch.cat([expected[common], expected[~common].sum()[None]])
    possible = wanted > 0.0
    assert int(observed[~possible].sum()) == 0, "an impossible token was drawn"
    statistic = float(((observed - wanted)[possible] ** 2 / wanted[possible]).sum())
    freedom = int(possible.sum()) - 1
    spread = 2.0 / (9.0 * freedom)
    return ((statistic / freedom) ** (1 / 3) - (1 - spread)) / math.sqrt(spread) > 4.26


class TestGreedy:
    def test_lowest_id_wins_a_tie(self) -> None:
        logits = torch.zeros(2, 100)
        logits[0, [40, 41, 90]] = 3.0
        logits[1, 99] = 1.0
        assert make_sampler(0.0).sample_rows(logits, 10).tolist() == [40, 99]

    def test_lowest_id_wins_a_tie_in_a_large_vocabulary(self) -> None:
        generator = torch.Generator().manual_seed(8)
        for _ in range(20):
            logits = torch.zeros(151_936)
            tied = torch.randint(151_936, (5,), generator=generator)
            logits[tied] = 1.0
            assert make_sampler(0.0).sample(logits, 0) == int(tied.min())

    def test_noise_does_not_matter(self) -> None:
        logits = torch.randn(512, generator=torch.Generator().manual_seed(0))
        assert len({make_sampler(0.0, key=key).sample(logits, 3) for key in range(20)}) == 1

    def test_greedy_is_known(self) -> None:
        assert make_sampler(0.0).is_greedy
        assert not make_sampler(0.1).is_greedy


class TestCandidates:
    @pytest.mark.parametrize("top_k", [0, 1, 5, 40, 1000])
    @pytest.mark.parametrize("top_p", [0.01, 0.5, 0.95, 1.0])
    @pytest.mark.parametrize("is_coarse", [False, True])
    def test_filters_keep_what_their_definition_says(
        self, top_k: int, top_p: float, is_coarse: bool
    ) -> None:
        logits = 3.0 * torch.randn(700, generator=torch.Generator().manual_seed(1))
        if is_coarse:  # many equal logits, as bf16 gives them
            logits = logits.round()
        ids, weights = make_sampler(0.7, top_k, top_p).candidates(logits)
        wanted = reference_candidates(logits.tolist(), 0.7, top_k, top_p)
        assert sorted(ids.tolist()) == sorted(wanted)
        p = torch.softmax(logits.double() / 0.7, dim=0)[ids]
        torch.testing.assert_close(weights / weights.sum(), p / p.sum())

    @pytest.mark.parametrize("scale", [0.01, 1.0, 4.0])
    @pytest.mark.parametrize("size", [8191, 20_001])
    def test_nucleus_of_a_large_vocabulary_is_found_without_a_full_sort(
        self, scale: float, size: int
    ) -> None:
        logits = scale * torch.randn(size, generator=torch.Generator().manual_seed(2))
        ids, _ = make_sampler(1.0, 0, 0.9).candidates(logits)
        p = torch.softmax(logits.double(), dim=0)
        order = p.argsort(descending=True, stable=True)
        kept = int((p[order].cumsum(0) < 0.9).sum()) + 1
        assert set(ids.tolist()) == set(order[:kept].tolist())

    def test_equal_logits_are_kept_from_the_lowest_id(self) -> None:
        ids, _ = make_sampler(1.0, 5).candidates(torch.zeros(10_000))
        assert ids.tolist() == [0, 1, 2, 3, 4]

    def test_excluded_tokens_are_never_drawn(self) -> None:
        logits = torch.full((64,), -float("inf"))
        logits[[5, 6]] = 0.0
        for sampler in (make_sampler(1.0), make_sampler(1.0, 10), make_sampler(1.0, 0, 0.9)):
            drawn = {sampler.sample(logits, position) for position in range(50)}
            assert drawn == {5, 6}


class TestDraw:
    def test_draw_is_the_first_arrival(self) -> None:
        logits = torch.randn(300, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
        sampler = make_sampler(0.8, key=99)
        p = torch.softmax(logits / 0.8, dim=0)
        for position in range(30):
            arrivals = [reference_exponential(99, position, t) / float(p[t]) for t in range(300)]
            assert sampler.sample(logits, position) == arrivals.index(min(arrivals))

    @pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (20, 1.0), (0, 0.8), (30, 0.9)])
    def test_draws_have_the_filtered_distribution(self, top_k: int, top_p: float) -> None:
        logits = 2.0 * torch.randn(512, generator=torch.Generator().manual_seed(4))
        sampler = make_sampler(1.0, top_k, top_p)
        counts = torch.zeros(512, dtype=torch.float64)
        for position in range(3000):
            counts[sampler.sample(logits, position)] += 1
        ids, weights = sampler.candidates(logits)
        p = torch.zeros(512, dtype=torch.float64)
        p[ids] = weights / weights.sum()
        assert not exceeds_chi_square(counts, p)

    def test_rows_are_sampled_at_their_own_positions(self) -> None:
        logits = torch.randn(5, 200, generator=torch.Generator().manual_seed(5))
        for sampler in (make_sampler(0.0), make_sampler(1.0, 50, 0.9)):
            rows = sampler.sample_rows(logits, 17)
            assert rows.tolist() == [sampler.sample(logits[i], 17 + i) for i in range(5)]

    def test_a_row_that_nobody_asks_for_is_not_evaluated(self) -> None:
        logits = torch.zeros(2, 8)
        logits[1] = float("nan")
        rows = make_sampler(1.0).sample_each(logits, 0)
        assert 0 <= next(rows) < 8
        with pytest.raises(FloatingPointError, match="nan"):
            next(rows)

    @pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
    @pytest.mark.parametrize(
        "sampler",
        [make_sampler(0.0), make_sampler(1.0), make_sampler(1.0, 5), make_sampler(1.0, 0, 0.5)],
    )
    def test_logits_that_are_not_finite_are_an_error(self, value: float, sampler: Sampler) -> None:
        logits = torch.full((9001,), value)
        if value > -float("inf") or math.isnan(value):
            logits[:-1] = 0.0  # one bad logit is enough
        with pytest.raises(FloatingPointError, match="float32"):
            sampler.sample(logits, 0)

    def test_unresolved_parameters_are_refused(self) -> None:
        with pytest.raises(ValueError, match="with_defaults"):
            Sampler(SamplingParams(temperature=1.0, top_k=0), KeyedNoise(0))


class TestNearTie:
    def test_a_small_margin_is_a_near_tie(self) -> None:
        logits = torch.tensor([1.0, 1.0 - 5e-5, 0.5])
        assert make_sampler(0.0).is_near_tie(logits, 0, 1)
        assert not make_sampler(0.0).is_near_tie(logits, 0, 2)
        assert logits[1] < 1.0

    def test_an_edge_of_the_filters_is_one_too(self) -> None:
        logits = torch.tensor([1.0, 0.0, 0.0 - 5e-5])
        sampler = make_sampler(1.0, 2)
        position = next(i for i in range(1000) if sampler.sample(logits, i) == 1)
        assert not sampler.is_near_tie(logits, position, 0)
        noisy = [i for i in range(1000) if sampler.is_near_tie(logits, i, 2)]
        assert noisy
        assert all(sampler.sample(logits, i) != 2 for i in noisy)
