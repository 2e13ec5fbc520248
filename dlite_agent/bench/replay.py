"""How many drafted tokens transcripts would have accepted; no model computes.

Every turn of a transcript is forced to its tokens: a drafter proposes, and is told what the
transcript says instead of what a target would choose. So the figures are those of a target that
writes exactly this transcript, and depend on the transcript, its tokens and the drafter alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from dlite_agent.bench.report import BenchResult, Value, conditions
from dlite_agent.bench.transcripts import Transcript, built_in_transcripts, load_transcripts
from dlite_agent.drafters.drafter import DraftBlock, Drafter
from dlite_agent.drafters.lookup import LookupDrafter
from dlite_agent.drafters.null import NullDrafter
from dlite_agent.drafters.suffix import SuffixDrafter
from dlite_agent.drafters.workspace import Workspace
from dlite_agent.models.weights import resolve_checkpoint
from dlite_agent.sampling import KeyedNoise
from dlite_agent.tokenizer import load_tokenizer

__all__ = ["Replay", "bench_replay", "replay"]

_BUDGET = 1 << 20
_TENTHS = 10
_ABOUT = (
    "the transcripts' answers forced, no model: tau = committed tokens a round, the prefill's left "
    "out; rows_per_token = rows verified for each; hit = accepted of drafted; confidence_error = "
    "mean distance of stated and observed acceptance over the tenths of stated confidence; "
    "suffix-whole: blocks are not cut; suffix+read, suffix+read+written: the transcripts one after "
    "the other as sessions of one tenant, each with what the ones before it have read (and written)"
)


@dataclass(slots=True)
class Replay:
    """Counts of one or more transcripts.

    Attributes:
        num_tokens: Committed in rounds, as τ counts them.
        num_rounds: Rounds.
        num_rows: Rows that would have been verified.
        num_drafted: Drafted tokens.
        num_accepted: Accepted ones.
        stated: Sum of stated confidence of the tokens whose place was decided, by its tenth.
        observed: How many of them were right.
        decided: How many there were.
    """

    num_tokens: int = 0
    num_rounds: int = 0
    num_rows: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    stated: list[float] = field(default_factory=lambda: [0.0] * _TENTHS)
    observed: list[int] = field(default_factory=lambda: [0] * _TENTHS)
    decided: list[int] = field(default_factory=lambda: [0] * _TENTHS)

    @property
    def tau(self) -> float:
        """Committed tokens per round."""
        return self.num_tokens / self.num_rounds if self.num_rounds else 0.0

    @property
    def confidence_error(self) -> float | None:
        """Mean distance of stated and observed acceptance, weighted by tokens; None without any."""
        total = sum(self.decided)
        gaps = (abs(s - o) for s, o in zip(self.stated, self.observed, strict=True))
        return sum(gaps) / total if total else None

    def add(self, other: Replay) -> None:
        """Count another transcript too."""
        for name in ("num_tokens", "num_rounds", "num_rows", "num_drafted", "num_accepted"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for tenth in range(_TENTHS):
            self.stated[tenth] += other.stated[tenth]
            self.observed[tenth] += other.observed[tenth]
            self.decided[tenth] += other.decided[tenth]

    def see(self, block: DraftBlock, truth: Sequence[int]) -> int:
        """Count a round, and return how many tokens it commits.

        Args:
            block: As proposed.
            truth: The rest of the answer; its last id ends the turn.
        """
        drafted = block.token_ids
        if truth[-1] in drafted:  # a round drafts nothing behind a stop id
            drafted = drafted[: drafted.index(truth[-1]) + 1]
        accepted = 0
        for slot, token_id in enumerate(drafted[: len(truth)]):
            is_right = token_id == truth[slot]
            if block.confidence:
                tenth = min(int(block.confidence[slot] * _TENTHS), _TENTHS - 1)
                self.stated[tenth] += block.confidence[slot]
                self.observed[tenth] += is_right
                self.decided[tenth] += 1
            if not is_right:
                break
            accepted += 1
        committed = min(accepted + 1, len(truth))
        # a stop token that no draft named is not counted
        ends_by_bonus = committed == len(truth) and accepted < len(truth)
        self.num_tokens += committed - ends_by_bonus
        self.num_rounds += 1
        self.num_rows += len(drafted) + 1
        self.num_drafted += len(drafted)
        self.num_accepted += accepted
        return committed


def replay(drafter: Drafter, transcript: Transcript) -> Replay:
    """Force a transcript's answers.

    Args:
        drafter: Needs no taps.
        transcript: What is written.

    Raises:
        ValueError: The drafter needs taps, which only a target has.
    """
    if drafter.requires.layer_ids:
        raise ValueError(
            f"drafter {drafter.name!r} needs a target's hidden states; use bench decode"
        )
    ids, counts = transcript.token_ids, Replay()
    state, noise, held = drafter.start([]), KeyedNoise(0), 0
    for start, stop in transcript.answers:
        drafter.commit(state, list(ids[held : start + 1]))
        held = start + 1
        while held < stop:
            block = drafter.propose(state, ids[held - 1], None, held - 1, noise, _BUDGET)
            committed = counts.see(block, ids[held:stop])
            drafter.commit(state, list(ids[held : held + committed]))
            held += committed
    return counts


def bench_replay(
    tokenizer: str = "nano", *, transcripts: Sequence[Path] = (), is_quick: bool = False
) -> BenchResult:
    """Replay transcripts with every drafter that needs no model.

    Args:
        tokenizer: A checkpoint, or a folder with its tokenizer and chat template alone.
        transcripts: Files in OpenAI's form, and folders of `*.json`; none: the built-in one.
        is_quick: The first transcript only.
    """
    folder = tokenizer if Path(tokenizer).is_dir() else str(resolve_checkpoint(tokenizer))
    loaded = load_tokenizer(folder)
    found = load_transcripts(transcripts, loaded) or built_in_transcripts(loaded)
    found = found[:1] if is_quick else found
    rows: list[dict[str, Value]] = []
    for name, make, feed in _VARIANTS:
        workspace = Workspace()
        drafter, total = make(workspace), Replay()
        for transcript in found:
            counts = replay(drafter, transcript)
            total.add(counts)
            rows.append(_row(transcript.name, name, counts))
            feed(workspace, transcript)
        if len(found) > 1:
            rows.append(_row("all", name, total))
    told = conditions(
        tokenizer=Path(tokenizer).name if transcripts else tokenizer,
        transcripts=", ".join(transcript.name for transcript in found),
        answer_tokens=sum(stop - start for one in found for start, stop in one.answers),
        context_tokens=sum(len(one.token_ids) for one in found),
        model="none: answers are forced",
    )
    return BenchResult("replay", _ABOUT, told, rows)


def _nothing(workspace: Workspace, transcript: Transcript) -> None:
    """Sessions that know nothing of each other."""


def _read(workspace: Workspace, transcript: Transcript) -> None:
    for start, stop in transcript.tool_results:
        workspace.add(transcript.token_ids[start:stop])


def _read_and_written(workspace: Workspace, transcript: Transcript) -> None:
    _read(workspace, transcript)
    for start, stop in transcript.answers:
        workspace.add(transcript.token_ids[start:stop])


_VARIANTS: tuple[
    tuple[str, Callable[[Workspace], Drafter], Callable[[Workspace, Transcript], None]], ...
] = (
    ("null", lambda _: NullDrafter(), _nothing),
    ("lookup", lambda _: LookupDrafter(), _nothing),
    ("suffix", lambda _: SuffixDrafter(), _nothing),
    ("suffix-whole", lambda _: SuffixDrafter(min_reached=0.0), _nothing),
    ("suffix+read", lambda workspace: SuffixDrafter(workspace=lambda: workspace), _read),
    (
        "suffix+read+written",
        lambda workspace: SuffixDrafter(workspace=lambda: workspace),
        _read_and_written,
    ),
)


def _row(transcript: str, drafter: str, counts: Replay) -> dict[str, Value]:
    error = counts.confidence_error
    return {
        "transcript": transcript,
        "drafter": drafter,
        "tokens": counts.num_tokens,
        "rounds": counts.num_rounds,
        "tau": round(counts.tau, 3),
        "rows_per_token": round(counts.num_rows / max(1, counts.num_tokens), 2),
        "hit": round(counts.num_accepted / max(1, counts.num_drafted), 3),
        "confidence_error": None if error is None else round(error, 3),
    }
