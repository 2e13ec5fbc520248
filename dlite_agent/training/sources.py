"""Which records a step learns from: a function of the seed and the step's number alone."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from dlite_agent.errors import ConfigurationError
from dlite_agent.training.learner import Part
from dlite_agent.training.options import AlignOptions
from dlite_agent.training.records import Records

__all__ = ["Source", "StoredRecords", "common_ids", "drawn"]


class Source(Protocol):
    """Gives the records of every step."""

    def parts(self, step: int, share: tuple[int, int]) -> list[Part]:
        """Those of a step, or one process's share of them.

        Args:
            step: Its number.
            share: Number of the process, and how many there are.
        """
        ...

    def common_ids(self, count: int) -> Tensor:
        """The tokens that its answers use most, ascending, [at most count] int64.

        Raises:
            ConfigurationError: The answers are not there yet.
        """
        ...


class StoredRecords:
    """Records that are all there: every epoch has them in another order, the marked ones more.

    Args:
        records: At least one of them is usable.
        options: Say how many a step takes.
        block_size: Slots of a block.

    Raises:
        ConfigurationError: There are no records.
    """

    def __init__(self, records: Records, options: AlignOptions, block_size: int) -> None:
        usable = records.usable()
        if not len(usable):
            raise ConfigurationError("there are no records; capture answers of two tokens or more")
        self._records, self._options, self._block_size = records, options, block_size
        copies = torch.where(records.is_marked()[usable], options.emphasis, 1)
        self._usable = usable.repeat_interleave(copies)
        self._epoch: tuple[int, Tensor] | None = None

    def parts(self, step: int, share: tuple[int, int]) -> list[Part]:
        """See `Source.parts`."""
        size, (index, count) = self._options.batch_size, share
        chosen, self._epoch = drawn(
            len(self._usable), (step * size, size), self._options.seed, self._epoch
        )
        chosen = self._usable[chosen[index::count]]
        return [
            Part(self._records.batch(part, self._block_size))
            for part in chosen.split(self._options.part_size)
        ]

    def common_ids(self, count: int) -> Tensor:
        """See `Source.common_ids`."""
        return common_ids(self._records.next_ids, count)


def common_ids(token_ids: Tensor, count: int) -> Tensor:
    """Those that occur most, ascending; of equals the lower ones, [at most count] int64."""
    counts = torch.bincount(token_ids.long())
    most = counts.argsort(descending=True, stable=True)[:count]
    return most[counts[most] > 0].sort().values


def drawn(
    total: int, span: tuple[int, int], seed: int, epoch: tuple[int, Tensor] | None = None
) -> tuple[Tensor, tuple[int, Tensor]]:
    """Numbers below `total`, without replacement within an epoch.

    Args:
        total: How many there are.
        span: Number of the first draw of all, and how many are drawn.
        seed: Of the orders.
        epoch: Number and order of the epoch that was drawn from last, if the caller kept it.

    Returns:
        The numbers, [n] int64, and the epoch of the last one.
    """
    start, size = span
    picked: list[Tensor] = []
    while size > 0:
        number, offset = divmod(start, total)
        if epoch is None or epoch[0] != number:
            generator = torch.Generator().manual_seed(seed * 1_000_003 + number)
            epoch = number, torch.randperm(total, generator=generator)
        part = epoch[1][offset : offset + size]
        picked.append(part)
        start, size = start + len(part), size - len(part)
    assert epoch is not None, "something was drawn"
    return torch.cat(picked), epoch
