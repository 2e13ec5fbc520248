"""Windows: consecutive positions of a transcript, its prompt's too, for those who read a history.

A window's rows are records' rows, with nothing left where they are no answer's. What needs no
history learns from the same rows (`Windows.rows`), so that a comparison is on the same data.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from dlite_agent.errors import ConfigurationError, UnsupportedCheckpointError
from dlite_agent.training.files import write_tensors
from dlite_agent.training.learner import HistoryRows, Part
from dlite_agent.training.options import AlignOptions
from dlite_agent.training.records import Records
from dlite_agent.training.sources import common_ids, drawn

__all__ = ["StoredWindows", "Windows"]

_SPREAD = 1_000_003


@dataclass(frozen=True, slots=True)
class Windows:
    """Several windows.

    Attributes:
        rows: Of all windows, one after another.
        starts: [W] int64: the first row of each.
    """

    rows: Records
    starts: Tensor

    def __len__(self) -> int:
        return int(self.starts.shape[0])

    @classmethod
    def join(cls, parts: Sequence[Windows]) -> Windows:
        """All windows of several; copies."""
        starts, first = [], 0
        for part in parts:
            starts.append(part.starts + first)
            first += len(part.rows)
        return cls(Records.join([part.rows for part in parts]), torch.cat(starts))

    @classmethod
    def of(cls, rows: Sequence[Records]) -> Windows:
        """One window of each."""
        lengths = torch.tensor([len(part) for part in rows])
        return cls(Records.join(rows), lengths.cumsum(0) - lengths)

    def first(self, count: int) -> Windows:
        """The first of them; views."""
        if count >= len(self):
            return self
        end = int(self.starts[count])
        return Windows(self.rows.part(slice(0, end)), self.starts[:count])

    def bounds(self, number: int) -> tuple[int, int]:
        """First row of a window, and the one behind its last."""
        is_last = number + 1 == len(self)
        end = len(self.rows) if is_last else int(self.starts[number + 1])
        return int(self.starts[number]), end

    def usable(self, number: int) -> Tensor:
        """Rows of a window that are records, [N] int64."""
        start, end = self.bounds(number)
        return (self.rows.left[start:end] >= 2).nonzero().view(-1) + start

    def part(self, number: int, chosen: Tensor, block_size: int) -> Part:
        """Some records of one window, and the window's rows up to the last of them."""
        start = self.bounds(number)[0]
        seen = self.rows.states(slice(start, int(chosen.max()) + 1))
        return Part(self.rows.batch(chosen, block_size), HistoryRows(seen, chosen - start))

    def all_parts(self, block_size: int, size: int) -> Iterator[Part]:
        """All records in order, at most `size` at once."""
        for number in range(len(self)):
            for chosen in self.usable(number).split(size):
                if len(chosen):
                    yield self.part(number, chosen, block_size)

    def save(self, path: Path) -> None:
        """Write a shard; a kill leaves none or a whole one.

        Raises:
            CapacityError: There was no room.
        """
        tensors = {item.name: getattr(self.rows, item.name) for item in fields(Records)}
        write_tensors(path, tensors | {"starts": self.starts})

    @classmethod
    def load(cls, path: Path) -> Windows:
        """Read a shard.

        Raises:
            UnsupportedCheckpointError: It is damaged.
        """
        try:
            tensors = load_file(path)
            starts = tensors.pop("starts")
            return cls(Records(**tensors), starts)
        except (SafetensorError, TypeError, KeyError) as error:
            raise UnsupportedCheckpointError(
                f"the windows {str(path)!r} cannot be read ({error}); delete the folder's files "
                "from their number on, or the folder, and capture again"
            ) from error


class StoredWindows:
    """Windows that are all there: every step has other ones, and anchors in each of them.

    Args:
        windows: Of answers with two tokens or more.
        options: Say how many anchors a step takes in all.
        block_size: Slots of a block.
        anchors: Most of one window.

    Raises:
        ConfigurationError: There are no records.
    """

    def __init__(
        self, windows: Windows, options: AlignOptions, block_size: int, *, anchors: int = 64
    ) -> None:
        kept = [number for number in range(len(windows)) if len(windows.usable(number))]
        if not kept:
            raise ConfigurationError(
                "there are no windows; capture with capture.max_windows above 0"
            )
        self._windows, self._options, self._block_size = windows, options, block_size
        self._kept, self._anchors = torch.tensor(kept), anchors
        self._marked = windows.rows.is_marked()

    def parts(self, step: int, share: tuple[int, int]) -> list[Part]:
        """See `Source.parts`: one for each window."""
        options, (index, count) = self._options, share
        size = max(1, options.batch_size // self._anchors)
        numbers, _ = drawn(len(self._kept), (step * size, size), options.seed)
        found = []
        for place in range(index, size, count):
            number = int(self._kept[numbers[place]])
            usable = self._windows.usable(number)
            generator = torch.Generator().manual_seed(
                (options.seed * _SPREAD + step) * _SPREAD + place
            )
            weights = torch.where(self._marked[usable], options.emphasis, 1).float()
            taken = min(self._anchors, len(usable))
            chosen = usable[torch.multinomial(weights, taken, generator=generator)].sort().values
            found.append(self._windows.part(number, chosen, self._block_size))
        return found

    def common_ids(self, count: int) -> Tensor:
        """See `Source.common_ids`."""
        rows = self._windows.rows
        return common_ids(rows.next_ids[rows.left > 0], count)
