"""What a session must be equal to: the same work without any cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from dlite_agent.decoding.stopping import StopRules
from dlite_agent.decoding.thoughts import ThoughtCounter
from dlite_agent.models.kv_pool import KVCache
from dlite_agent.models.target import TargetModel, TargetOutput
from dlite_agent.sampling import Sampler

__all__ = ["assert_kv_is_of", "cold_decode", "cold_forward"]


@contextmanager
def cold_forward(
    target: TargetModel, token_ids: Sequence[int], *, taps: Sequence[int] = ()
) -> Iterator[tuple[TargetOutput, KVCache]]:
    """Compute all rows of some ids in an empty cache, which is released afterwards.

    Args:
        target: Computes.
        token_ids: At least one id.
        taps: Layers to tap.

    Yields:
        Logits [1, V] of the last row with the taps of all, and the cache that holds the rows.
    """
    with target.new_cache() as kv:
        ids = torch.tensor(list(token_ids), dtype=torch.int64, device=target.device)
        output = target.forward(ids, kv, logits_for=[len(token_ids) - 1], taps=taps)
        kv.commit(len(token_ids))
        yield output, kv


def cold_decode(
    target: TargetModel, prompt_ids: Sequence[int], sampler: Sampler, limits: StopRules
) -> list[int]:
    """Sample an answer without any cache: every token from a forward of all ids before it.

    Args:
        target: Computes; quadratic in the length.
        prompt_ids: At least one id.
        sampler: The turn's sampling and noise.
        limits: Stop ids and the most tokens.
    """
    ids = list(prompt_ids)
    answer: list[int] = []
    thoughts = None if limits.thoughts is None else ThoughtCounter(limits.thoughts)
    while not answer or limits.finish(answer[-1], len(answer)) is None:
        if thoughts is not None and thoughts.forced:
            answer.append(thoughts.forced[0])
        else:
            history = sampler.new_history(prompt_ids)
            if history is not None:
                history.extend(answer)
            with cold_forward(target, ids) as (output, _):
                answer.append(sampler.sample(output.logits[0], len(ids), history))
        ids.append(answer[-1])
        if thoughts is not None:
            thoughts.advance(answer[-1:])
    return answer


def assert_kv_is_of(
    target: TargetModel, kv: KVCache, token_ids: Sequence[int], *, tolerance: float
) -> None:
    """Assert that row i of a cache was computed from `token_ids[: i + 1]` and nothing else.

    Args:
        target: The model that computed `kv`.
        kv: Without tentative rows.
        token_ids: At least as many as the cache has rows.
        tolerance: Largest difference to a cold forward.
    """
    if kv.length == 0:
        return
    with cold_forward(target, token_ids[: kv.length]) as (_, cold):
        for layer in range(target.config.num_layers):
            for kept, wanted in zip(_rows(kv, layer), _rows(cold, layer), strict=True):
                torch.testing.assert_close(kept, wanted, rtol=0.0, atol=tolerance)


def _rows(kv: KVCache, layer: int) -> tuple[Tensor, Tensor]:
    spans = kv.spans(layer)
    keys = torch.cat([span.keys for span in spans], dim=1)  # [K, S, D]
    return keys, torch.cat([span.values for span in spans], dim=1)
