"""How many tokens of a block are worth a forward."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["best_length"]


def best_length(
    probabilities: Sequence[float], costs_s: Sequence[float], num_certain: float = 1.0
) -> tuple[int, float]:
    """The k that brings the most tokens a second, and 0 where nothing beats plain decoding.

    With E(k) the expected number of accepted tokens of the first k, the rate of a forward is
    (`num_certain` + E(k)) / `costs_s[k]`. Of equal rates the shorter draft wins.
    Returns k and E(k).

    Args:
        probabilities: Chance of each drafted token to be right, given that those before it are.
        costs_s: Seconds of the whole forward with 0, 1, ... drafted tokens of this turn; as many as
            `probabilities` and one more.
        num_certain: Tokens that the forward brings without this draft: one of this turn, and what
            the others in it expect. A draft that only pays for its own turn is refused this way.

    Source: the scheduler of DSpark maximises accepted tokens over measured step time; the tokens of
        the other turns in the numerator are ours.
    """
    best, best_expected, best_rate = 0, 0.0, num_certain / costs_s[0]
    reached, expected = 1.0, 0.0
    for slot, probability in enumerate(probabilities, 1):
        reached *= probability
        expected += reached
        rate = (num_certain + expected) / costs_s[slot]
        if rate > best_rate:
            best, best_expected, best_rate = slot, expected, rate
    return best, best_expected
