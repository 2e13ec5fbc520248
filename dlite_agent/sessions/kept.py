"""Sessions that a tier below the KV pool keeps, as a request looks for them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal

from dlite_agent.sessions.manifest import Manifest
from dlite_agent.sessions.token_trail import TokenTrail

__all__ = [
    "ANSWER_START",
    "BRANCH_OF",
    "BRANCH_UNTIL",
    "HINT",
    "LAST_TURN",
    "TENANT",
    "KeptSession",
    "Tier",
    "longest_kept",
    "now_s",
]

TENANT, HINT, ANSWER_START = "tenant", "hint", "answer_start"
"""Labels of a session that tiers read."""

LAST_TURN = "last_turn"
"""Label of what the last turn cost and why, as its owner writes it."""

BRANCH_OF, BRANCH_UNTIL = "branch_of", "branch_until"
"""Labels of what a turn dropped: of which session, and until when it is kept for a retry."""

Tier = Literal["device", "host", "disk", "folder"]


@dataclass(slots=True, eq=False)
class KeptSession:
    """A session in a tier.

    Attributes:
        session_id: Its id.
        tenant: Whose it is.
        hint: What the client called it.
        trail: All its ids.
        num_rows: KV rows that it had.
        answer_start: Where its last answer begins.
        nbytes: What it takes there.
        used_at: When it was last saved or restored, in seconds of the wall clock.
        branch_of: The session that dropped this branch, or empty.
        last_turn: What is noted of its last turn.
        until: When a branch is not kept any more, in seconds of the wall clock.
    """

    session_id: str
    tenant: str
    hint: str
    trail: TokenTrail
    num_rows: int
    answer_start: int
    nbytes: int
    used_at: float
    branch_of: str = ""
    last_turn: str = ""
    until: float = math.inf

    @classmethod
    def of(cls, manifest: Manifest, nbytes: int, used_at: float) -> KeptSession:
        """As a manifest tells it."""
        return cls(
            session_id=manifest.session_id,
            tenant=manifest.labels.get(TENANT, ""),
            hint=manifest.labels.get(HINT, ""),
            trail=TokenTrail(manifest.token_ids),
            num_rows=manifest.num_rows,
            answer_start=int(manifest.labels.get(ANSWER_START, manifest.turn_start)),
            nbytes=nbytes,
            used_at=used_at,
            last_turn=manifest.labels.get(LAST_TURN, ""),
            branch_of=manifest.labels.get(BRANCH_OF, ""),
            until=float(manifest.labels.get(BRANCH_UNTIL, math.inf)),
        )

    def is_over(self, now: float) -> bool:
        """Whether it is a branch that nobody went back to for a while."""
        return now >= self.until


def longest_kept(
    sessions: Iterable[KeptSession], prompt: TokenTrail, tenant: str, more_than: int
) -> tuple[KeptSession | None, int]:
    """The one with the longest common prefix that has KV, and how long; None if none has more."""
    best, common = None, more_than
    for kept in sessions:
        if kept.tenant != tenant or min(kept.num_rows, len(prompt)) <= common:
            continue
        shared = min(kept.trail.common_prefix(prompt, more_than=common), kept.num_rows)
        if shared > common:
            best, common = kept, shared
    return best, common


def now_s() -> float:
    """Seconds of the wall clock: ages have to outlast the process."""
    return datetime.now(UTC).timestamp()
