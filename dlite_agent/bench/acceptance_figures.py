"""Tables of `bench acceptance` from its rows, and from nothing else; intervals by bootstrap."""

from __future__ import annotations

import csv
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dlite_agent.bench.report import BenchResult, Value
from dlite_agent.errors import ConfigurationError

__all__ = ["ABOUT", "LONG_TOKENS", "acceptance_json", "figures_of", "read_result"]

LONG_TOKENS = 3_000
"""Tokens of a prompt from which a history is called long."""
_RESAMPLES = 1000
_SESSIONS = ("fresh", "fork", "restored", "restored+state")
_PARTS = ("draft_ms", "verify_ms", "sample_ms", "host_ms")
_TEXTS = frozenset({"conversation", "drafter", "session", "thinking"})
_LISTS = frozenset({"slots_accepted", "slots_left"})

ABOUT = (
    f"history: long from {LONG_TOKENS:,} tokens; session: fresh computed its history, fork and "
    "restored (saved to disk, loaded) did not, +state: the drafter's own history was saved too; "
    "tau = committed tokens a round, the prefill's left out; micro over all rounds, macro the mean "
    "over requests; low, high: 95 % interval of the micro figure and of the speed-up, "
    "conversations resampled; per_slot: share of rounds that accepted at least so many tokens, of "
    "those whose answer went on so long; speedup = decode time without drafts over that with, of "
    "the same requests; c = tau / speedup, what a round costs in plain steps; *_ms: of a round; "
    "same_answers: requests answered as without drafts"
)

Row = Mapping[str, Any]


def read_result(path: Path) -> BenchResult:
    """The bench that wrote a CSV (`bench acceptance --csv`), with its conditions and figures.

    Raises:
        ConfigurationError: It cannot be read, or has other columns.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        told: dict[str, Value] = {}
        for line in lines:
            if line.startswith("# "):
                name, _, value = line.removeprefix("# ").partition(": ")
                told[name] = value
        rows = [
            {name: _value(name, text) for name, text in row.items()}
            for row in csv.DictReader(line for line in lines if not line.startswith("# "))
        ]
        return BenchResult("acceptance", ABOUT, told, figures_of(rows), rows)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ConfigurationError(
            f"{str(path)!r} is no table of requests ({error}); name an acceptance.csv that "
            "`dlite-agent bench acceptance --csv FOLDER` wrote"
        ) from error


def figures_of(rows: Iterable[Row]) -> list[dict[str, Value]]:
    """One row for each drafter, length of history and kind of session.

    Args:
        rows: Of requests; those without drafts are what speed is compared with.
    """
    rows = list(rows)
    plain_ms = {_key(row): _decode_ms(row) for row in rows if row["drafter"] == "null"}
    groups: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        is_long = row["context_tokens"] >= LONG_TOKENS
        group = (row["drafter"], "long" if is_long else "short", row["session"])
        groups.setdefault(group, []).append(row)
    names = list(dict.fromkeys(row["drafter"] for row in rows))

    def place(group: tuple[str, str, str]) -> tuple[int, bool, int]:
        drafter, history, session = group
        return names.index(drafter), history == "long", _SESSIONS.index(session)

    return [
        {
            "drafter": group[0],
            "history": group[1],
            "session": group[2],
            **_group_figures(groups[group], plain_ms),
        }
        for group in sorted(groups, key=place)
    ]


def acceptance_json(result: BenchResult) -> dict[str, object]:
    """What `bench acceptance --json` prints."""
    drafters = [
        {
            "name": row["drafter"],
            "restored": str(row["session"]).startswith("restored"),
            **{name: value for name, value in row.items() if name != "drafter"},
            "per_slot": [float(share) for share in str(row["per_slot"]).split()],
        }
        for row in result.rows
    ]
    told = dict(result.conditions)
    return {
        "model": told.get("model"),
        "drafters": drafters,
        "about": result.about,
        "conditions": told,
    }


@dataclass(slots=True)
class _Sums:
    """Of the requests of one conversation, or of several."""

    tokens: float = 0.0
    rounds: float = 0.0
    macro: float = 0.0
    requests: int = 0
    plain_ms: float = 0.0
    decode_ms: float = 0.0
    slots_accepted: list[int] = field(default_factory=list)
    slots_left: list[int] = field(default_factory=list)

    @property
    def tau(self) -> float:
        return self.tokens / self.rounds if self.rounds else 0.0

    @property
    def speedup(self) -> float:
        return self.plain_ms / self.decode_ms if self.decode_ms else 0.0

    def add(self, row: Row, plain_ms: float) -> None:
        self.tokens += row["tokens"]
        self.rounds += row["rounds"]
        self.macro += row["tokens"] / row["rounds"] if row["rounds"] else 0.0
        self.requests += row["rounds"] > 0
        self.plain_ms += plain_ms
        self.decode_ms += _decode_ms(row)
        for name in ("slots_accepted", "slots_left"):
            total, counts = getattr(self, name), _counts(row[name])
            total.extend([0] * (len(counts) - len(total)))
            for slot, count in enumerate(counts):
                total[slot] += count


def _group_figures(
    rows: Sequence[Row], plain_ms: Mapping[tuple[object, object], float]
) -> dict[str, Value]:
    by_conversation: dict[str, _Sums] = {}
    total = _Sums()
    for row in rows:
        for sums in (total, by_conversation.setdefault(row["conversation"], _Sums())):
            sums.add(row, plain_ms[_key(row)])
    taus, speedups = _resampled(list(by_conversation.values()))
    slots = zip(total.slots_accepted, total.slots_left, strict=True)
    shares = [f"{count / max(1, left):.2f}" for count, left in slots if count]
    num_rounds = max(1.0, total.rounds)
    return {
        "requests": len(rows),
        "context_tokens": round(sum(row["context_tokens"] for row in rows) / len(rows)),
        "tau_micro": round(total.tau, 3),
        "tau_low": round(taus[0], 3),
        "tau_high": round(taus[1], 3),
        "tau_macro": round(total.macro / max(1, total.requests), 3),
        "per_slot": " ".join(shares),
        "speedup": round(total.speedup, 3),
        "speedup_low": round(speedups[0], 3),
        "speedup_high": round(speedups[1], 3),
        "c": round(total.tau / total.speedup, 3) if total.speedup else None,
        "state_bytes": max(row["state_bytes"] for row in rows),
        **{part: round(sum(row[part] for row in rows) / num_rounds, 3) for part in _PARTS},
        "same_answers": sum(row["is_plain_answer"] for row in rows),
    }


def _resampled(parts: Sequence[_Sums]) -> tuple[tuple[float, float], tuple[float, float]]:
    """The middle 95 % of τ and of the speed-up when conversations are drawn again.

    Source: Efron 1979, "Bootstrap methods: another look at the jackknife"; turns of a conversation
        depend on each other, so it is conversations that are drawn.
    """
    rng = random.Random(0)
    taus, speedups = [], []
    for _ in range(_RESAMPLES):
        drawn = rng.choices(parts, k=len(parts))
        taus.append(sum(p.tokens for p in drawn) / max(1.0, sum(p.rounds for p in drawn)))
        speedups.append(sum(p.plain_ms for p in drawn) / max(1e-9, sum(p.decode_ms for p in drawn)))
    return _middle(taus), _middle(speedups)


def _middle(values: list[float]) -> tuple[float, float]:
    values.sort()
    return values[int(0.025 * len(values))], values[int(0.975 * len(values)) - 1]


def _key(row: Row) -> tuple[object, object]:
    return row["conversation"], row["turn"]


def _decode_ms(row: Row) -> float:
    return float(sum(row[part] for part in _PARTS))


def _counts(text: str) -> list[int]:
    return [int(count) for count in str(text).split()]


def _value(name: str, text: str) -> Value:
    if name in _TEXTS or name in _LISTS:
        return text
    return float(text) if "." in text or "e" in text else int(text)
