"""Where the time of a turn goes: drafting, the forward, the choice of tokens, and what is left."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field

from torch import Tensor

from dlite_agent.config import SamplingParams
from dlite_agent.decoding.loop import Round
from dlite_agent.decoding.stopping import StopRules
from dlite_agent.models.target import ForwardRows, TargetModel, TargetOutput
from dlite_agent.sampling import KeyedNoise, RowMasks, Sampler, TokenHistory
from dlite_agent.sessions.session import Session

__all__ = ["TimedSampler", "TimedTurn", "decode_timed"]


class TimedSampler(Sampler):
    """Notes the seconds that its choices take.

    Args:
        params: As for `Sampler`.
        noise: As for `Sampler`.
        clock: Seconds.
    """

    def __init__(
        self, params: SamplingParams, noise: KeyedNoise, clock: Callable[[], float]
    ) -> None:
        super().__init__(params, noise)
        self.seconds = 0.0
        self._clock = clock

    def sample_each(
        self,
        logits: Tensor,
        first_position: int,
        history: TokenHistory | None = None,
        drafted: Sequence[int] = (),
        first_row: int = 0,
        masks: RowMasks | None = None,
    ) -> Iterator[int]:
        """As `Sampler`."""
        chosen = super().sample_each(logits, first_position, history, drafted, first_row, masks)
        while True:
            began_s = self._clock()
            token_id = next(chosen, None)
            self.seconds += self._clock() - began_s
            if token_id is None:
                return
            yield token_id


@dataclass(slots=True)
class TimedTurn:
    """A turn, and its seconds.

    Attributes:
        rounds: All of them, the prefill's token first.
        draft_s: From the begin of each round until its rows are there.
        verify_s: The target's forwards.
        sample_s: Choosing tokens from their logits.
        host_s: The rest: comparing, committing, the loop itself.
    """

    rounds: list[Round] = field(default_factory=list)
    draft_s: float = 0.0
    verify_s: float = 0.0
    sample_s: float = 0.0
    host_s: float = 0.0

    @property
    def decode_s(self) -> float:
        """All rounds."""
        return self.draft_s + self.verify_s + self.sample_s + self.host_s

    @property
    def token_ids(self) -> list[int]:
        """The answer."""
        return [token_id for round_ in self.rounds for token_id in round_.token_ids]


def decode_timed(
    target: TargetModel,
    session: Session,
    sampler: TimedSampler,
    limits: StopRules,
    clock: Callable[[], float],
) -> TimedTurn:
    """Decode a turn alone.

    Args:
        target: Computes.
        session: Holds the prompt.
        sampler: Chooses; new.
        limits: Where the turn ends.
        clock: Seconds; the sampler's.
    """
    turn, output = TimedTurn(), None
    with closing(session.decode_steps(sampler, limits)) as steps:
        while True:
            began_s = clock()
            try:
                step = steps.send(output)
            except StopIteration:
                break
            took_s, output = clock() - began_s, None
            if isinstance(step, ForwardRows):
                turn.draft_s += took_s
                output, forward_s = _forward(target, step, clock)
                turn.verify_s += forward_s
            elif isinstance(step, Round):
                turn.host_s += took_s
                turn.rounds.append(step)
    turn.sample_s = sampler.seconds
    turn.host_s -= sampler.seconds
    return turn


def _forward(
    target: TargetModel, rows: ForwardRows, clock: Callable[[], float]
) -> tuple[TargetOutput, float]:
    began_s = clock()
    output = target.forward_batch([rows])[0]
    return output, clock() - began_s
