"""What a source has earned in a session: how often it was right, and a balance of time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from dlite_agent.decoding.acceptance import AcceptanceCounts

__all__ = ["ASKING_SHARE", "NO_CELL", "STAKE_SHARE", "Purse", "TrackRecord"]

NO_CELL = -1
"""Stands for the evidence of a token that another source proposed."""

STAKE_SHARE = 0.007
ASKING_SHARE = 0.005
"""Shares of a session's time that drafted rows, and the host time of asking, may cost it without
having earned it."""

# In plain rounds: what a new session may stake before a draft was right, and ask for before it has
# earned anything, and the most that earlier success lets it lose when a phase of the text ends.
# With the shares above, 3 % of a turn of 128 tokens.
_GRACE_ROUNDS = 2.0
_GRACE_ASKING_ROUNDS = 0.3
_MAX_BALANCE_ROUNDS = 8.0
_MAX_ASKING_ROUNDS = 1.0
_ROWS_ROUNDS = 1.0
"""What is kept of the balance for rows where it pays for asking, so that an answer can be used."""

_BIAS_STEP = 0.15
_BIAS_KEPT = 0.97
_MAX_CHANCE = 0.999


@dataclass(slots=True)
class Purse:
    """What a session may stake on drafts, whichever source they come from.

    It earns a share of every round, pays for drafted rows, and gets a plain round back for every
    token that was accepted.

    Attributes:
        stake_s: Seconds of the cost table.
        plain_s: This turn's share of a plain forward.
    """

    stake_s: float = 0.0
    plain_s: float = 0.0
    _settled_at: int = -1

    def settle(self, round_number: int, plain_s: float) -> None:
        """Add what the rounds since the last call have earned."""
        self.plain_s = plain_s
        if self._settled_at < 0:
            self.stake_s = _GRACE_ROUNDS * plain_s
        else:
            passed_s = plain_s * (round_number - self._settled_at)
            self.stake_s = min(self.stake_s + STAKE_SHARE * passed_s, _MAX_BALANCE_ROUNDS * plain_s)
        self._settled_at = round_number

    def earn(self) -> None:
        """Book an accepted token."""
        most = max(_MAX_BALANCE_ROUNDS * self.plain_s, self.stake_s)
        self.stake_s = min(self.stake_s + self.plain_s, most)


@dataclass(slots=True)
class TrackRecord:
    """One source in one session.

    The source's last block is *watched*: whatever the session commits next is compared with it,
    whether it was drafted or not. So a source is learnt about in plain rounds too, and no forward
    is spent on finding out.

    Balances bound what drafting can lose, in seconds of the cost table. The session's purse pays
    for drafted rows. The source's own balance pays the host time of asking it, and earns its part
    of a share of every round; while there is more in the purse than rows need, that pays for asking
    too, where asking gains more than it costs. What cannot be paid for is not done.

    Attributes:
        purse: The session's; one for all sources.
        asking_part: Of what all sources may be asked for, this one's.
        counts: By evidence, of this session.
        bias: Recent surprise, in log-odds: when a phase of the text ends, all evidence misjudges.
        asking_s: Balance for host time.
        wakes_at: Round number before which the source is not asked.
    """

    purse: Purse = field(default_factory=Purse)
    asking_part: float = 1.0
    counts: AcceptanceCounts = field(default_factory=AcceptanceCounts)
    bias: float = 0.0
    asking_s: float = 0.0
    wakes_at: int = 0
    _settled_at: int = -1
    _usual_gain_s: float = 0.0
    _paid_s: float | None = None  # of its own balance, for the last asking
    _ids: Sequence[int] = ()
    _cells: Sequence[int] = ()
    _chances: Sequence[float] = ()
    _next: int = 0
    _num_staked: int = 0  # of the watched tokens, how many are in the forward

    def copy(self, purse: Purse) -> TrackRecord:
        """An independent copy in a session with another purse."""
        return replace(self, purse=purse, counts=self.counts.copy())

    def settle(
        self, round_number: int, plain_s: float, asking_s: float, usual_gain_s: float = math.inf
    ) -> bool:
        """Add what the rounds since the last call have earned; whether the source may be asked.

        Args:
            round_number: Of the session, from 0.
            plain_s: This turn's share of a plain forward.
            asking_s: Host time of asking.
            usual_gain_s: What asking gains on average; no success pays for what gains less.
        """
        purse = self.purse
        purse.settle(round_number, plain_s)
        if self._settled_at < 0:
            grace_s = self.asking_part * _GRACE_ASKING_ROUNDS * plain_s
            self.asking_s = min(4.0 * asking_s, grace_s)
        else:
            most = max(_MAX_ASKING_ROUNDS * plain_s, 4.0 * asking_s)
            passed_s = plain_s * (round_number - self._settled_at)
            earned_s = self.asking_part * ASKING_SHARE * passed_s
            self.asking_s = min(self.asking_s + earned_s, most)
        self._settled_at, self._usual_gain_s = round_number, usual_gain_s
        self._paid_s = asking_s if self.asking_s >= asking_s else None
        may_ask = self._can_pay(asking_s)
        if may_ask and self._paid_s is not None:
            self.asking_s -= asking_s
        elif may_ask:
            purse.stake_s -= asking_s
        if not self._can_pay(asking_s):
            self._sleep(asking_s)
        return may_ask

    def book(self, asking_s: float) -> None:
        """Pay for having been asked what it took more than was thought, or take it back.

        The purse does not: it only pays where asking gains more, and what it earns is measured.
        """
        if self._paid_s is None:
            return
        self.asking_s -= asking_s - self._paid_s
        self._paid_s = None
        if not self._can_pay(asking_s):
            self._sleep(asking_s)

    def _can_pay(self, asking_s: float) -> bool:
        """Whether one of the balances pays for being asked."""
        purse = self.purse
        reserve_s = asking_s + _ROWS_ROUNDS * purse.plain_s
        is_helped = self._usual_gain_s > asking_s and purse.stake_s >= reserve_s
        return self.asking_s >= asking_s or is_helped

    def _sleep(self, asking_s: float) -> None:
        """Until the own balance pays; or until the purse earns something."""
        earned_s = self.asking_part * ASKING_SHARE * self.purse.plain_s
        self.wakes_at = self._settled_at + math.ceil((asking_s - self.asking_s) / earned_s)

    def chance(self, cell: int, prior: float) -> float:
        """How probable a token of a cell is to be right, given the engine's estimate."""
        p = min(max(self.counts.estimate(cell, prior), 1.0 - _MAX_CHANCE), _MAX_CHANCE)
        odds = p / (1.0 - p) * math.exp(self.bias)
        return odds / (1.0 + odds)

    def watch(self, ids: Sequence[int], cells: Sequence[int], chances: Sequence[float]) -> None:
        """Compare what is committed from now on with a block.

        A token whose cell is `NO_CELL` is another source's: it has to come first, and counts for
        nothing.
        """
        self._ids, self._cells, self._chances = ids, cells, chances
        self._next = self._num_staked = 0

    def affordable(self, costs_s: Sequence[float]) -> int:
        """How many more rows the balance can pay for.

        Args:
            costs_s: Seconds of the forward with 0, 1, ... of them.
        """
        limit = costs_s[0] + self.purse.stake_s
        if costs_s[-1] <= limit:
            return len(costs_s) - 1
        return max(0, sum(cost <= limit for cost in costs_s) - 1)

    def stake(self, num_tokens: int, cost_s: float) -> None:
        """Pay for the rows of the first tokens of the watched block."""
        self._num_staked = num_tokens
        self.purse.stake_s -= cost_s

    @property
    def is_watching(self) -> bool:
        """What is committed next is compared with a block."""
        return self._next < len(self._ids)

    def see(self, token_ids: Sequence[int], engine: AcceptanceCounts) -> bool:
        """Compare committed tokens with the watched block; whether the purse earned something.

        Args:
            token_ids: What the session committed, in order.
            engine: Counts of all sessions; learns the same.
        """
        is_earning = False
        for token_id in token_ids:
            at = self._next
            if at >= len(self._ids):
                break
            is_hit = token_id == self._ids[at]
            cell = self._cells[at]
            if cell != NO_CELL:
                self.counts.observe(cell, is_hit=is_hit)
                engine.observe(cell, is_hit=is_hit)
                self.bias = _BIAS_KEPT * self.bias + _BIAS_STEP * (is_hit - self._chances[at])
                if is_hit and at < self._num_staked:
                    self.purse.earn()
                    is_earning = True
            self._next = at + 1 if is_hit else len(self._ids)
        return is_earning

    def forget(self) -> None:
        """Watch nothing."""
        self._ids, self._next, self._num_staked = (), 0, 0
