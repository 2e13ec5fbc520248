"""Many turns, one forward: which rows are computed next, and who waits for what.

Every forward takes the decode rows of all turns that decode, and at most one prefill chunk of one
turn, in rotation; the chunk is smaller while others decode. What a turn does on the host (render,
sample, parse) is done between forwards. An error of a turn is its own; when the shared forward
fails, its turns are computed one by one, and only the culprit fails.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from dlite_agent.decoding.load import Load
from dlite_agent.decoding.steps import Pause, Steps
from dlite_agent.engine.batch_share import BatchShare
from dlite_agent.engine.tasks import Event, Failure, Finished, Ticket
from dlite_agent.models.target import ForwardRows, TargetModel, TargetOutput
from dlite_agent.outputs import GenerationChunk

__all__ = ["Scheduler", "TurnSteps", "mixed_chunk_rows"]

logger = logging.getLogger(__name__)

TurnSteps = Steps[GenerationChunk, None]

# Rows of a prefill chunk beside one turn that decodes, and for each further one, so that a forward
# takes less than three times what it takes without the chunk. Measured with one thread, over the
# same forward without a chunk, beside 1 / 4 / 16 turns that decode (nano, float32):
#   16 rows 1.5 / 1.4 / 1.2 · 32 rows 3.4 / 2.8 / 1.8 · 96 rows 6.4 / 4.9 / 2.8
# CUDA's are not measured: a chunk there should fill the device.
_MIXED_ROWS = {"cpu": (16, 5), "cuda": (256, 16)}


def mixed_chunk_rows(device_type: str, num_decoding: int) -> int:
    """Most rows of a prefill chunk beside so many turns that decode, at least one."""
    rows, more = _MIXED_ROWS.get(device_type, _MIXED_ROWS["cpu"])
    return rows + more * (num_decoding - 1)


@dataclass(slots=True, eq=False)
class _Turn:
    """A turn that runs.

    Attributes:
        steps: What it does.
        share: Its part in the batch.
        ticket: Who asked for it.
        wants: What it waits for; None before its first step.
        served_at: Number of the forward that computed its last chunk.
        seen_ended: How many turns had ended when it was resumed last.
        is_pressed: Everybody waits: it must not, until it computes something.
    """

    steps: TurnSteps
    share: BatchShare
    ticket: Ticket
    wants: ForwardRows | Pause | None = None
    served_at: int = 0
    seen_ended: int = -1
    is_pressed: bool = False

    @property
    def rows(self) -> tuple[int, int]:
        """Its rows in the next forward, and how many of them are drafted."""
        wants = self.wants
        if not isinstance(wants, ForwardRows):
            return 0, 0
        return len(wants.token_ids), max(0, len(wants.logits_for) - 1)  # a chunk has one at most

    def is_paused(self, *reasons: str) -> bool:
        return isinstance(self.wants, Pause) and self.wants.reason in reasons


class Scheduler:
    """Runs turns together on one target. Used by one thread.

    Args:
        target: Computes the rows.
        max_batch: Most turns at once.
        prefill_chunk: Most rows of a prefill chunk while nobody decodes.
        load: Told before each step what else is in the forward.
    """

    def __init__(
        self, target: TargetModel, *, max_batch: int, prefill_chunk: int, load: Load | None = None
    ) -> None:
        self._target = target
        self._max_batch = max_batch
        self._prefill_chunk = prefill_chunk
        self._load = load if load is not None else Load()
        self._turns: list[_Turn] = []  # in the order in which they came
        self._num_ended = 0
        self._wanted = (0, 0, 0)  # turns, rows and drafted rows of the next forward, so far
        self.num_forwards = 0
        """Shared forwards so far."""

    @property
    def num_turns(self) -> int:
        """Turns that run."""
        return len(self._turns)

    @property
    def num_free(self) -> int:
        """Turns that may be added now: none while one waits for memory before it begins."""
        if any(turn.is_paused("admission") for turn in self._turns):
            return 0
        return max(0, self._max_batch - len(self._turns))

    def add(self, begin: Callable[[BatchShare], TurnSteps], ticket: Ticket) -> None:
        """Add a turn; nothing of it is done before the next `step`.

        Args:
            begin: Makes its steps, which poll `ticket.is_cancelled` before each chunk and round.
            ticket: Gets its chunks, then `Finished` or `Failure`.
        """
        share = BatchShare(self._prefill_chunk)
        self._turns.append(_Turn(begin(share), share, ticket))

    def step(self) -> None:
        """Run one forward of everything that can run, and what follows it on the host."""
        self._resume_waiting()
        batch = [turn for turn in self._turns if isinstance(turn.wants, ForwardRows)]
        batch += self._next_chunk(len(batch))
        if batch:
            self.num_forwards += 1
            self._forward(batch)
        elif self._turns:
            self._end_stall()

    def close(self, error: BaseException) -> None:
        """End all turns; their sessions stay valid, and their readers get the error."""
        turns, self._turns = self._turns, []
        for turn in turns:
            try:
                turn.steps.close()
            except Exception:
                logger.warning("a turn failed while it was closed", exc_info=True)
            turn.ticket.put(Failure(error))

    def _resume_waiting(self) -> None:
        """Begin new turns, and look again whether others got what they wait for.

        Turns begin in order: none while an earlier one waits for memory to begin.
        """
        is_blocked = False
        for turn in list(self._turns):
            is_unbegun = turn.wants is None or turn.is_paused("admission")
            if is_blocked and is_unbegun and not turn.ticket.is_cancelled:
                continue
            is_news = turn.seen_ended != self._num_ended
            is_due = (
                turn.wants is None
                or turn.is_paused("prefix", "restore")
                or (is_news and turn.is_paused("room", "admission"))
                or (turn.ticket.is_cancelled and isinstance(turn.wants, Pause))
            )
            if is_due:
                self._resume(turn)
            is_blocked |= turn.is_paused("admission")

    def _next_chunk(self, num_decoding: int) -> list[_Turn]:
        """The turn whose chunk is next: the one that had none for longest; or nobody."""
        chunk_rows = self._prefill_chunk
        if num_decoding:
            mixed_rows = mixed_chunk_rows(self._target.device.type, num_decoding)
            chunk_rows = min(chunk_rows, mixed_rows)
        waiting = [turn for turn in self._turns if turn.is_paused("prefill")]
        for turn in sorted(waiting, key=lambda turn: turn.served_at):
            turn.share.chunk_rows = chunk_rows
            self._resume(turn)
            if isinstance(turn.wants, ForwardRows):
                turn.served_at = self.num_forwards + 1
                return [turn]
        return []

    def _forward(self, batch: list[_Turn]) -> None:
        try:
            outputs = self._target.forward_batch(
                [turn.wants for turn in batch if isinstance(turn.wants, ForwardRows)]
            )
        except Exception as error:
            if len(batch) == 1:
                cause = error
                self._advance(batch[0], lambda steps: steps.throw(cause))
                return
            logger.warning(
                "a forward of %d turns failed; they are computed one by one",
                len(batch),
                exc_info=True,
            )
            for turn in batch:
                self._forward([turn])
            return
        outputs.reverse()
        for turn in batch:
            turn.share.count(len(batch))
            self._resume(turn, outputs.pop())

    def _end_stall(self) -> None:
        """All turns wait for memory. One has to do without: it goes on, or fails.

        That is the youngest of those that hold some; if none does, the oldest.
        """
        holders = [turn for turn in self._turns if turn.is_paused("room")]
        outside = [turn for turn in self._turns if turn.is_paused("admission")]
        turn = (holders[-1:] or outside or self._turns)[0]
        turn.is_pressed = True
        self._resume(turn)

    def _resume(self, turn: _Turn, output: TargetOutput | None = None) -> None:
        turn.share.is_parked = turn.ticket.is_parked
        turn.share.may_wait = len(self._turns) > 1 and not turn.is_pressed
        turn.seen_ended = self._num_ended
        self._advance(turn, lambda steps: steps.send(output))

    def _advance(
        self, turn: _Turn, begin: Callable[[TurnSteps], ForwardRows | Pause | GenerationChunk]
    ) -> None:
        """Run a turn to where it wants something, or to its end."""
        self._count(turn, -1)
        turns, rows, drafted = self._wanted
        self._load.set(turns=turns, rows=rows, drafted=drafted)
        turn.wants = None
        try:
            step = begin(turn.steps)
            while isinstance(step, GenerationChunk):
                turn.ticket.put(step)
                step = turn.steps.send(None)
            turn.wants = step
            self._count(turn, 1)
            turn.is_pressed &= not isinstance(step, ForwardRows)
        except StopIteration:
            self._end(turn, Finished())
        except Exception as error:  # noqa: BLE001  # it belongs to the caller; the others go on
            self._end(turn, Failure(error))
        except BaseException as panic:  # noqa: BLE001  # of a Rust extension; the same, but readable
            self._end(turn, Failure(RuntimeError(f"{type(panic).__name__}: {panic}")))

    def _end(self, turn: _Turn, event: Event) -> None:
        self._turns.remove(turn)
        self._num_ended += 1
        turn.ticket.put(event)

    def _count(self, turn: _Turn, sign: int) -> None:
        """Take a turn's rows into what the next forward has, or out of it."""
        num_rows, num_drafted = turn.rows
        if num_rows:
            turns, rows, drafted = self._wanted
            self._wanted = turns + sign, rows + sign * num_rows, drafted + sign * num_drafted
