"""How far the rounds of an engine are from its cost table, measured in place."""

from __future__ import annotations

import math

__all__ = ["RoundClock"]

_STEP = 0.01
_MIN_ROUNDS = 16
_MIN_ROUNDS_OF_PACE = 4
_MAX_FACTOR = 3.0


class RoundClock:
    """What drafted rounds cost beyond what the table says, relative to plain ones.

    The table is measured in a row, with warm caches and nothing but forwards. Rounds also sample,
    meet what else the machine does, and start cold. Both kinds of rounds are compared with the
    table; if drafted ones miss it by more than plain ones, drafted rows are that much dearer.
    Log-ratios are followed in small steps, so that what interrupts a round counts little.
    """

    def __init__(self) -> None:
        self._medians = [0.0, 0.0]
        self._num_rounds = [0, 0]

    @property
    def factor(self) -> float:
        """What to multiply the seconds of a drafted round with; 1.0 until both kinds are known."""
        if min(self._num_rounds) < _MIN_ROUNDS:
            return 1.0
        plain, drafted = self._medians
        return min(max(math.exp(drafted - plain), 1.0 / _MAX_FACTOR), _MAX_FACTOR)

    @property
    def pace(self) -> float | None:
        """Seconds that pass for one of the table's, at least 1.0: others use the machine too.

        None in the first rounds, when nobody knows.
        """
        kind = self._num_rounds[1] > self._num_rounds[0]
        if self._num_rounds[kind] < _MIN_ROUNDS_OF_PACE:
            return None
        return max(1.0, math.exp(self._medians[kind]))

    def note(self, took_s: float, expected_s: float, *, is_drafted: bool) -> None:
        """Compare a round with the table.

        Args:
            took_s: From the proposal to the commit.
            expected_s: What the table says.
            is_drafted: It had drafted rows.
        """
        if took_s <= 0.0:
            return
        num_seen = self._num_rounds[is_drafted]
        ratio = math.log(took_s / expected_s)
        # large steps at first: from the mean of a few to the median of many
        step = max(_STEP, 1.0 / (1 + num_seen))
        error = ratio - self._medians[is_drafted]
        self._medians[is_drafted] += min(max(error, -step), step)
        self._num_rounds[is_drafted] = num_seen + 1
