"""The saved drafter in the real loop, beside what training says of it.

Both figures are of the same answers, greedily. They differ only where something is wrong between
training and serving: another tap, another row, another template or mode than the drafter was
trained for, or files that do not hold what was trained.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass

import torch

from dlite_agent.config import SamplingParams
from dlite_agent.decoding.stopping import StopRules
from dlite_agent.drafters.drafter import Drafter
from dlite_agent.errors import DrafterMismatchError
from dlite_agent.models.target import TargetModel
from dlite_agent.sampling import KeyedNoise, Sampler
from dlite_agent.sessions.session import Session
from dlite_agent.training.simulate import Acceptance

__all__ = ["ServedRounds", "Turn", "check_served", "serve"]

_ROOM = 64
MAX_DIFFERENCE = 0.02
"""Most that a slot may differ: design.md §9 of the project asks for 2 points."""


@dataclass(frozen=True, slots=True)
class Turn:
    """A prompt, and how its target answers it greedily.

    Attributes:
        prompt_ids: As the target saw them.
        answer_ids: Sampled ids, the stop token included.
    """

    prompt_ids: Sequence[int]
    answer_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class ServedRounds:
    """Rounds of the loop.

    Attributes:
        accepted: Drafted tokens that each round committed, [R] int64.
        left: Tokens of the answer behind the round's anchor, [R] int64.
        prompt_tokens: Length of the prompt of each round's turn, [R] int64.
        num_different: Turns whose answer was not the recorded one.
        decode_s: Seconds of all rounds behind the prefill, by the clock that was given.
    """

    accepted: torch.Tensor
    left: torch.Tensor
    prompt_tokens: torch.Tensor
    num_different: int
    decode_s: float

    def acceptance(
        self, block_size: int, *, min_prompt: int = 0, max_prompt: int = 2**40
    ) -> Acceptance:
        """Figures of the turns whose prompt has `min_prompt` to `max_prompt` tokens."""
        chosen = (self.prompt_tokens >= min_prompt) & (self.prompt_tokens <= max_prompt)
        return Acceptance.of(self.accepted[chosen], self.left[chosen], block_size)


def serve(
    target: TargetModel,
    drafter: Drafter,
    turns: Iterable[Turn],
    *,
    clock: Callable[[], float] = time.perf_counter,
) -> ServedRounds:
    """Answer every turn in a session, greedily; the session goes from one turn's prompt on.

    Args:
        target: Answers.
        drafter: Drafts.
        turns: Best in the order in which they came, so that a session is reused.
        clock: Seconds; `time.thread_time` on a machine that others use too.
    """
    greedy = SamplingParams(temperature=0.0, top_k=0, top_p=1.0)
    accepted: list[int] = []
    left: list[int] = []
    prompt_tokens: list[int] = []
    num_different, decode_s = 0, 0.0
    session = Session(target, drafter, session_id="served")
    for turn in turns:
        session.sync(turn.prompt_ids)
        sampler = Sampler(greedy, KeyedNoise.derive(0, 0, turn.prompt_ids))
        # room for a whole block behind the last token, as where a turn ends by itself
        limits = StopRules(frozenset(target.config.eos_token_ids), len(turn.answer_ids) + _ROOM)
        answer: list[int] = []
        with closing(session.decode(sampler, limits)) as rounds:
            while (num_left := len(turn.answer_ids) - len(answer)) > 0:
                began_s = clock()
                round_ = next(rounds, None)
                if round_ is None:
                    break
                if round_.source != "prefill":
                    decode_s += clock() - began_s
                    accepted.append(min(round_.num_accepted, num_left))
                    left.append(num_left)
                    prompt_tokens.append(len(turn.prompt_ids))
                answer.extend(round_.token_ids)
        num_different += answer[: len(turn.answer_ids)] != list(turn.answer_ids)
    session.close()
    return ServedRounds(
        torch.tensor(accepted, dtype=torch.int64),
        torch.tensor(left, dtype=torch.int64),
        torch.tensor(prompt_tokens, dtype=torch.int64),
        num_different,
        decode_s,
    )


def check_served(trained: Acceptance, served: Acceptance) -> None:
    """See that every slot is served as it was trained.

    Raises:
        DrafterMismatchError: One differs by more than 2 points, and by more than two rounds.
    """
    allowed = max(MAX_DIFFERENCE, 2 / max(1, min(trained.num_rounds, served.num_rounds)))
    for slot, (expected, found) in enumerate(zip(trained.per_slot, served.per_slot, strict=True)):
        if abs(expected - found) > allowed:
            raise DrafterMismatchError(
                f"slot {slot} is accepted in {found:.3f} of the rounds that are served and in "
                f"{expected:.3f} of those that training computes; see that the layers of `taps`, "
                "the alignment (slot 0 follows the anchor), the chat template and the thinking "
                "mode are those of training"
            )
