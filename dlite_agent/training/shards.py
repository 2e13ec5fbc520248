"""A capture in a folder of shards: it says what it takes, and goes on where it was killed."""

from __future__ import annotations

import json
import logging
import math
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from dlite_agent.engine.loading import LoadedModel
from dlite_agent.errors import CapacityError, ConfigurationError
from dlite_agent.training.conversations import Conversation
from dlite_agent.training.evaluate import Turn
from dlite_agent.training.files import write_json
from dlite_agent.training.on_policy import Answered, AnsweredTurns, CapturePlace, Wanted
from dlite_agent.training.recipe import CaptureOptions
from dlite_agent.training.records import Records
from dlite_agent.training.served import template_digest
from dlite_agent.training.windows import Windows

__all__ = ["CaptureRun", "captured_with", "load_ids", "load_records", "load_turns", "load_windows"]

logger = logging.getLogger(__name__)


_PLACE = "capture.json"
_LOG_EVERY_S = 20.0


@dataclass(slots=True)
class _Shard:
    """What is not written yet."""

    records: list[Records] = field(default_factory=list)
    windows: list[Records] = field(default_factory=list)
    heldout: list[Records] = field(default_factory=list)
    heldout_windows: list[Records] = field(default_factory=list)
    turns: list[dict[str, list[int]]] = field(default_factory=list)

    def add(self, answered: Answered) -> None:
        turn, window = answered.turn, answered.window
        if answered.is_heldout:
            self.heldout.append(answered.records)
            ids = {"prompt_ids": list(turn.prompt_ids), "answer_ids": list(turn.answer_ids)}
            self.turns.append(ids)
        else:
            self.records.append(answered.records)
        if window is not None:
            (self.heldout_windows if answered.is_heldout else self.windows).append(window)


def load_records(work: Path, kind: str = "records") -> Records:
    """All shards of a folder, `records` or `heldout`.

    Raises:
        ConfigurationError: There are none.
        UnsupportedCheckpointError: One is damaged.
    """
    return Records.join([Records.load(path) for path in _paths(work, kind)])


def load_windows(work: Path, kind: str = "windows") -> Windows:
    """All windows of a folder, `windows` or `heldout_windows`; errors as of `load_records`."""
    return Windows.join([Windows.load(path) for path in _paths(work, kind)])


def load_ids(work: Path) -> tuple[Tensor, Tensor]:
    """`next_ids` and `left` of all records of a folder, without their taps; none: empty."""
    ids, left = [torch.zeros(0, dtype=torch.int32)], [torch.zeros(0, dtype=torch.int32)]
    for path in sorted(work.glob("records-*.safetensors")):
        with safe_open(path, framework="pt") as shard:
            ids.append(shard.get_tensor("next_ids"))
            left.append(shard.get_tensor("left"))
    return torch.cat(ids), torch.cat(left)


def load_turns(work: Path) -> list[Turn]:
    """The held-out turns of a folder."""
    paths = sorted(work.glob("turns-*.json"))
    turns = [turn for path in paths for turn in json.loads(path.read_text("utf-8"))]
    return [Turn(turn["prompt_ids"], turn["answer_ids"]) for turn in turns]


def captured_with(work: Path) -> Mapping[str, object]:
    """With what a folder was captured: options, taps and template.

    Raises:
        ConfigurationError: Nothing was.
    """
    path = work / _PLACE
    if not path.is_file():
        raise ConfigurationError(
            f"{str(work)!r} holds no capture; run dlite-agent train capture first"
        )
    key: Mapping[str, object] = json.loads(path.read_text("utf-8"))["key"]
    return key


def _paths(work: Path, kind: str) -> list[Path]:
    paths = sorted(work.glob(f"{kind}-*.safetensors"))
    if not paths:
        wanted = " with capture.max_windows above 0" if "windows" in kind else ""
        raise ConfigurationError(
            f"{str(work)!r} holds no {kind}; capture more first (dlite-agent train capture){wanted}"
        )
    return paths


class CaptureRun:
    """One capture in one folder; goes on where the last one was killed.

    With `store: memory` or `none` only what is kept for measuring is captured into the folder.

    Args:
        model: Answers; loaded without a drafter.
        work: Folder of the shards; made if missing.
        options: What is captured.
        taps: Layers to keep.
        row_bytes: Bytes of a position, to see that there is room.

    Raises:
        CapacityError: The disk has no room for the records.
        ConfigurationError: What is in `work` was captured with other options.
    """

    def __init__(
        self,
        model: LoadedModel,
        work: Path,
        options: CaptureOptions,
        taps: Sequence[int],
        row_bytes: int,
    ) -> None:
        self._work, self._options = work, options
        place = CapturePlace()
        work.mkdir(parents=True, exist_ok=True)
        digest = template_digest(model, options.enable_thinking)
        told = {"model": model.config.model, "taps": list(taps), "template": digest}
        self._key = told | asdict(options)
        path = work / _PLACE
        if path.is_file():
            saved = json.loads(path.read_text("utf-8"))
            if saved["key"] != self._key:
                raise ConfigurationError(
                    f"{str(work)!r} holds records of {saved['key']}, not {self._key}; go on with "
                    "those options, or name another folder"
                )
            place = CapturePlace(**saved["place"])
        is_whole = options.store == "disk"
        self._wanted: Wanted = "all" if is_whole else "heldout"
        self._limit = options.max_records // (1 if is_whole else options.heldout - 1)
        missing = options.num_rows(place.num_records, place.num_windows)
        missing //= 1 if is_whole else options.heldout
        needed, free = missing * row_bytes, shutil.disk_usage(work).free
        if needed > free:
            raise CapacityError(
                f"{missing} positions take {needed} bytes, but {str(work)!r} has {free} free; "
                "lower capture.max_records, capture.max_windows or drafter.num_taps, use "
                "capture.dtype=int8 or capture.store=none, or name another work folder"
            )
        self._turns = AnsweredTurns(model, options, taps, place)

    def run(self, conversations: Sequence[Conversation], *, max_s: float | None = None) -> int:
        """Capture until `max_records`, the end of the conversations, or so many seconds.

        Returns:
            Records in the folder, held-out ones left out.

        Raises:
            CapacityError: A shard could not be written; run again to go on.
        """
        shard = _Shard()
        first, began = self._count(shard), time.perf_counter()
        logged = began
        steps = self._turns.answer(conversations, self._wanted)
        while self._count(shard) < self._limit:
            answered = next(steps, None)
            if answered is not None:
                shard.add(answered)
            now = time.perf_counter()
            is_last = answered is None or (max_s is not None and now - began > max_s)
            num_new = sum(map(len, shard.records)) + sum(map(len, shard.heldout))
            is_full = num_new >= self._options.shard_records or self._count(shard) >= self._limit
            if is_last or is_full:
                self._write(shard)
                shard = _Shard()
            if is_last or is_full or now - logged > _LOG_EVERY_S:
                logged = now
                self._log(shard, (self._count(shard) - first) / (now - began))
            if is_last:
                break
        self._turns.close()
        return self._turns.place.num_records

    def _count(self, shard: _Shard) -> int:
        """Records of the wanted kind, those of a shard that is not written yet among them."""
        place = self._turns.place
        if self._wanted == "heldout":
            return place.num_heldout + sum(map(len, shard.heldout))
        return place.num_records + sum(map(len, shard.records))

    def _write(self, shard: _Shard) -> None:
        """Write a shard's files, then the place: a kill between them repeats the shard."""
        place = self._turns.place
        number = f"{place.num_shards:05d}"
        for kind in ("records", "heldout"):
            rows = getattr(shard, kind)
            if rows:
                Records.join(rows).save(self._work / f"{kind}-{number}.safetensors")
        for kind in ("windows", "heldout_windows"):
            rows = getattr(shard, kind)
            if rows:
                Windows.of(rows).save(self._work / f"{kind}-{number}.safetensors")
        if shard.turns:
            write_json(self._work / f"turns-{number}.json", shard.turns)
        place.num_shards += 1
        place.num_records += sum(map(len, shard.records))
        place.num_windows += len(shard.windows)
        place.num_heldout += sum(map(len, shard.heldout))
        write_json(self._work / _PLACE, {"key": self._key, "place": asdict(place)})

    def _log(self, shard: _Shard, per_s: float) -> None:
        num_records, place = self._count(shard), self._turns.place
        logger.info(
            "records=%d of %d shards=%d conversation=%d per_s=%.0f left_min=%.1f",
            num_records,
            self._limit,
            place.num_shards,
            place.conversation,
            per_s,
            math.inf if per_s <= 0 else (self._limit - num_records) / per_s / 60,
        )
