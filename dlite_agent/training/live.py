"""The target at work beside the student: records are captured when a step wants them.

A pool of records is captured, serves its steps, and makes room for the next one. `store: memory` is
one pool for all steps. Where each pool began in the transcripts is kept in a file, so that a run
that was killed captures the same pool again and goes on to the same losses.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from dlite_agent.engine.loading import LoadedModel
from dlite_agent.errors import CapacityError, ConfigurationError
from dlite_agent.models.device import free_memory_bytes
from dlite_agent.training.conversations import Conversation
from dlite_agent.training.files import write_json
from dlite_agent.training.learner import Part
from dlite_agent.training.on_policy import AnsweredTurns, CapturePlace
from dlite_agent.training.options import AlignOptions
from dlite_agent.training.recipe import CaptureOptions
from dlite_agent.training.records import Records
from dlite_agent.training.sources import Source, StoredRecords
from dlite_agent.training.windows import StoredWindows, Windows

__all__ = ["LiveSource"]

_NO_LIMIT = 2**31


class LiveSource:
    """Records, or windows, of answers that the target gives when they are wanted.

    Args:
        model: Answers; loaded without a drafter.
        conversations: Whose turns it answers, again and again.
        capture: What is captured; its `store` is not `disk`.
        options: Say how many records a step takes.
        shape: Taps, slots of a block, and bytes of a position.
        folder: Of the run; the places of its pools are kept there.
        kind: `windows` for those who read a history.

    Raises:
        CapacityError: A pool does not fit the memory.
    """

    def __init__(
        self,
        model: LoadedModel,
        conversations: Sequence[Conversation],
        options: tuple[CaptureOptions, AlignOptions],
        shape: tuple[tuple[int, ...], int, int],
        folder: Path,
        *,
        kind: Literal["records", "windows"] = "records",
    ) -> None:
        capture, self._options = options
        self._taps, self._block_size, row_bytes = shape
        self._model, self._conversations, self._kind = model, conversations, kind
        is_windows = kind == "windows"
        self._capture = replace(capture, max_windows=_NO_LIMIT if is_windows else 0)
        is_kept = capture.store == "memory"
        self._pool_records = capture.max_records if is_kept else capture.shard_records
        self._steps = max(1, self._pool_records // self._options.batch_size)
        if is_kept:
            self._steps = self._options.steps
        num_rows = self._pool_records * (1 + (capture.window // 64 if is_windows else 0))
        needed, free = 2 * num_rows * row_bytes, free_memory_bytes(torch.device("cpu"))
        if needed > free:
            raise CapacityError(
                f"{self._pool_records} records take up to {needed} bytes of memory, and {free} are "
                "free; lower capture.max_records (store: memory) or capture.shard_records (none), "
                "or use capture.dtype=int8"
            )
        self._path = folder / "pools.json"
        self._places: list[dict[str, int]] = [asdict(CapturePlace()) | {"round": 0}]
        if self._path.is_file():
            self._places = json.loads(self._path.read_text("utf-8"))
        self._pool: tuple[int, Source] | None = None

    def parts(self, step: int, share: tuple[int, int]) -> list[Part]:
        """See `Source.parts`; every process captures the whole pool, and the first notes where."""
        number = step // self._steps
        if self._pool is None or self._pool[0] != number:
            self._pool = None  # makes room first
            self._pool = number, self._fill(number, is_main=share[0] == 0)
        return self._pool[1].parts(step - number * self._steps, share)

    def common_ids(self, count: int) -> Tensor:
        """See `Source.common_ids`."""
        raise ConfigurationError(
            f"max_vocab is {count!r}, but with capture.store={self._capture.store!r} nothing is "
            "known of the answers before they are there; use capture.store=disk or max_vocab=0"
        )

    def _fill(self, number: int, *, is_main: bool) -> Source:
        """Capture a pool, and note where the next one begins."""
        saved = dict(self._places[number])
        num_round, place = saved.pop("round"), CapturePlace(**saved)
        kept: list[Records] = []
        num_records, num_passes = 0, 0
        while num_records < self._pool_records and not (self._is_kept and num_passes):
            options = replace(self._capture, seed=self._capture.seed + num_round)
            turns = AnsweredTurns(self._model, options, self._taps, place)
            is_whole_pass, num_before = place == CapturePlace(), len(kept)
            for answered in turns.answer(self._conversations, "learned"):
                kept.append(answered.window if answered.window is not None else answered.records)
                num_records += len(answered.records)
                if num_records >= self._pool_records:
                    break
            else:
                num_round, num_passes, place = num_round + 1, num_passes + 1, CapturePlace()
            turns.close()
            if is_whole_pass and len(kept) == num_before:
                raise ConfigurationError(
                    "the target answers no turn of the transcripts with two tokens or more"
                )
        if number + 1 == len(self._places):
            self._places.append(asdict(place) | {"round": num_round})
            if is_main:
                write_json(self._path, self._places)
        if self._kind == "windows":
            return StoredWindows(Windows.of(kept), self._options, self._block_size)
        return StoredRecords(Records.join(kept), self._options, self._block_size)

    @property
    def _is_kept(self) -> bool:
        return self._capture.store == "memory"
