"""A turn as steps that whoever runs it may mix with those of other turns.

Operations that compute are generators. They yield `ForwardRows` and are sent the `TargetOutput`, so
that one forward can serve many of them; they yield a `Pause` where nothing is lost by waiting; and
whatever else they yield is a result on the way. `drive` runs one alone. A generator that is closed
at any of these points leaves its session valid, and so does one into which an error is thrown.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Literal, Never, TypeVar

from dlite_agent.decoding.load import Load
from dlite_agent.models.target import ForwardRows, TargetModel, TargetOutput

__all__ = ["Pause", "Steps", "drive", "next_item", "run_alone", "run_together"]

Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Pause:
    """There is nothing to compute before the generator is resumed, with None.

    Attributes:
        reason: `prefill`: the next chunk is made when it is resumed, in the size that is right
            then; `room`: it needs more KV memory than is free; `admission`: the same, before it
            holds any; `prefix`: another turn computes tokens that this one can fork; `restore`:
            saved KV is being read.
    """

    reason: Literal["prefill", "room", "admission", "prefix", "restore"]


Steps = Generator[ForwardRows | Pause | Item, TargetOutput | None, Result]
"""Yields rows, pauses and items; is sent the output of rows, and None otherwise."""


def drive(target: TargetModel, steps: Steps[Item, Result]) -> Generator[Item, None, Result]:
    """Run steps alone: every forward at once, no pause.

    What a forward raises is thrown into the steps. Closing this closes them.

    Args:
        target: Computes the rows.
        steps: Owned from now on.

    Yields:
        The items.

    Returns:
        What the steps return.
    """
    with closing(steps):
        try:
            step = next(steps)
            while True:
                if isinstance(step, ForwardRows):
                    step = _forward(target, step, steps)
                elif isinstance(step, Pause):
                    step = steps.send(None)
                else:
                    yield step
                    step = steps.send(None)
        except StopIteration as done:
            result: Result = done.value
            return result


def next_item(steps: Steps[Item, object]) -> Steps[Never, Item | None]:
    """Run steps up to their next item, inside of other steps; None at their end.

    What is thrown in goes on to them.
    """
    try:
        step = steps.send(None)
        while isinstance(step, ForwardRows | Pause):
            try:
                output = yield step
            except GeneratorExit:
                raise
            except BaseException as error:  # noqa: BLE001  # the steps decide what it means
                step = steps.throw(error)
            else:
                step = steps.send(output)
    except StopIteration:
        return None
    return step


def run_alone(target: TargetModel, steps: Steps[Item, Result]) -> Result:
    """`drive` for steps without items; returns what they return."""
    driven = drive(target, steps)
    while True:
        try:
            next(driven)
        except StopIteration as done:
            result: Result = done.value
            return result


def run_together(
    target: TargetModel, turns: Sequence[Steps[Item, object]], load: Load
) -> list[Item]:
    """Run turns to their ends in shared forwards, as a scheduler does for one batch; no pause.

    Args:
        target: Computes the rows.
        turns: Each has a cache of its own. An error of a forward is raised, not thrown into them.
        load: Set before each step, for whoever drafts.

    Returns:
        The items, in the order in which they came.
    """
    items: list[Item] = []
    wants: dict[int, ForwardRows] = {}
    num_rows: dict[int, int] = {}
    total = 0

    def resume(number: int, output: TargetOutput | None) -> None:
        nonlocal total
        total -= num_rows.pop(number, 0)
        others = len(num_rows)
        load.set(turns=others, rows=total, drafted=total - others)
        try:
            step = turns[number].send(output)
            while not isinstance(step, ForwardRows):
                if not isinstance(step, Pause):
                    items.append(step)
                step = turns[number].send(None)
            wants[number], num_rows[number] = step, len(step.token_ids)
            total += num_rows[number]
        except StopIteration:
            wants.pop(number, None)

    for number in range(len(turns)):
        resume(number, None)
    while wants:
        batch = list(wants)
        outputs = target.forward_batch([wants[number] for number in batch])
        for number, output in zip(batch, outputs, strict=True):
            resume(number, output)
    return items


def _forward(
    target: TargetModel, rows: ForwardRows, steps: Steps[Item, Result]
) -> ForwardRows | Pause | Item:
    """Compute rows, hand the output in, and return the next step."""
    try:
        output = target.forward(rows.token_ids, rows.kv, logits_for=rows.logits_for, taps=rows.taps)
    except BaseException as error:  # noqa: BLE001  # the steps decide what it means
        return steps.throw(error)
    return steps.send(output)
