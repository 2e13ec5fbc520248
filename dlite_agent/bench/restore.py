"""A session that comes back from disk against one that is prefilled again, in one run."""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from pydoc_data.topics import topics

from dlite_agent.bench.report import BenchResult, conditions
from dlite_agent.config import EngineConfig, SamplingParams
from dlite_agent.decoding.stopping import StopRules
from dlite_agent.drafters.suffix import SuffixDrafter
from dlite_agent.engine.loading import load_engine_target
from dlite_agent.engine.tasks import Progress, unheard
from dlite_agent.errors import ConfigurationError
from dlite_agent.models.weights import resolve_checkpoint
from dlite_agent.sampling import KeyedNoise, Sampler
from dlite_agent.sessions.session import Session
from dlite_agent.tokenizer import load_tokenizer

__all__ = ["bench_restore"]

_NUM_ANSWER = 48
_GREEDY = SamplingParams(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, repetition_penalty=1.0)
_ABOUT = (
    "seconds until the session can decode, median; speedup = over the prefill of this run; MB_s = "
    "KV bytes a second; tau = tokens a round of the answer that follows; same_answer = it is the "
    "one that follows the prefill. Restores read, verify and copy all KV and compute one row. "
    "'disk' asks the system to drop the files from memory first; 'memory' does not"
)


@dataclass(frozen=True, slots=True)
class _Figures:
    """One way to get the session."""

    source: str
    seconds: float
    tau: float
    is_same: bool

    def row(
        self, num_tokens: int, prefill_s: float, num_bytes: int
    ) -> dict[str, str | int | float | None]:
        return {
            "source": self.source,
            "tokens": num_tokens,
            "seconds": round(self.seconds, 4),
            "speedup": round(prefill_s / self.seconds, 2),
            "MB_s": round(num_bytes / self.seconds / 1e6, 1),
            "tau": round(self.tau, 3),
            "same_answer": str(self.is_same).lower(),
        }


def bench_restore(
    config: EngineConfig, num_tokens: int, repeats: int = 5, *, report: Progress = unheard
) -> BenchResult:
    """Prefill a session of prose, save it, and restore it from files in memory and on disk.

    Args:
        config: The model; its KV budget has to hold the session twice.
        num_tokens: Tokens of the session.
        repeats: Restores of each kind; there is one prefill, which takes longest.
        report: Hears the stage.

    Raises:
        ConfigurationError: There are too few tokens.
    """
    if num_tokens < 2:
        raise ConfigurationError(f"--tokens is {num_tokens}; use at least 2")
    with load_engine_target(config, report) as target, tempfile.TemporaryDirectory() as root:
        ids = _prose(config, num_tokens)
        folder = Path(root) / "session"
        session = Session(target, SuffixDrafter(), session_id="bench")
        report("prefill", 0.0)
        began_s = time.perf_counter()
        session.sync(ids)
        prefill_s = time.perf_counter() - began_s
        session.save(folder)
        save_s = time.perf_counter() - began_s - prefill_s
        answer, tau = _answer(session)
        session.close()
        num_bytes = sum(path.stat().st_size for path in folder.glob("kv-*"))
        figures = [_Figures("prefill", prefill_s, tau, is_same=True)]
        for place in ("memory", "disk"):
            report(f"restore from {place}", 0.0)
            times_s = []
            for _ in range(repeats):
                if place == "disk":
                    _drop_from_memory(folder)
                began_s = time.perf_counter()
                restored = Session.load(folder, target, SuffixDrafter())
                times_s.append(time.perf_counter() - began_s)
                later, tau = _answer(restored)
                restored.close()
            seconds = statistics.median(times_s)
            figures.append(_Figures(place, seconds, tau, is_same=later == answer))
        told = conditions(
            model=config.model,
            fingerprint=target.fingerprint,
            dtype=str(target.dtype).removeprefix("torch."),
            session_bytes=num_bytes,
            save_s=round(save_s, 3),
            repeats=repeats,
        )
    rows = [figure.row(num_tokens, prefill_s, num_bytes) for figure in figures]
    return BenchResult("restore", _ABOUT, told | {"clock": "wall"}, rows)


def _prose(config: EngineConfig, num_tokens: int) -> list[int]:
    tokenizer = load_tokenizer(str(resolve_checkpoint(config.model, config.revision)))
    ids = tokenizer.encode_untrusted("\n".join(topics[name] for name in sorted(topics)))
    return list(islice(cycle(ids), num_tokens))


def _answer(session: Session) -> tuple[list[int], float]:
    """What the session decodes, greedily, and tokens a round."""
    sampler = Sampler(_GREEDY, KeyedNoise(0))
    rounds = list(session.decode(sampler, StopRules(frozenset(), _NUM_ANSWER)))
    ids = [token for round_ in rounds for token in round_.token_ids]
    # The first token is the prefill's and no round's.
    return ids, (len(ids) - 1) / max(1, len(rounds) - 1)


def _drop_from_memory(folder: Path) -> None:
    """Ask the system to forget what it keeps of the files; it may not."""
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
