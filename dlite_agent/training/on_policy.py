"""The target answers the turns of transcripts itself; what it did is captured.

Each turn's prompt is the recorded history; the answer is the target's own, in the template and the
thinking mode that the drafter is to be served in. The prompt is computed once: the session goes
from turn to turn, copies are drafted, and the answer's rows are forwarded again on a fork for their
taps.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Literal

from torch.nn import functional

from dlite_agent.chat.messages import JSON
from dlite_agent.config import SamplingParams
from dlite_agent.decoding.loop import Round
from dlite_agent.decoding.stopping import StopRules
from dlite_agent.drafters.suffix import SuffixDrafter
from dlite_agent.engine.loading import LoadedModel
from dlite_agent.sampling import KeyedNoise, Sampler
from dlite_agent.sessions.session import Session
from dlite_agent.training.capture import Transcript, capture
from dlite_agent.training.conversations import Conversation
from dlite_agent.training.evaluate import Turn
from dlite_agent.training.marks import turn_marks
from dlite_agent.training.recipe import CaptureOptions
from dlite_agent.training.records import Records

__all__ = ["Answered", "AnsweredTurns", "CapturePlace", "Wanted"]

Wanted = Literal["all", "heldout", "learned"]
_CALL = ("<tool_call>", "</tool_call>")


@dataclass(slots=True)
class CapturePlace:
    """The next turn to answer, and what there is so far.

    Attributes:
        conversation: Number of the turn's conversation.
        turn: Number of the turn in it.
        num_shards: Written.
        num_records: Held-out ones left out.
        num_windows: As `num_records`.
        num_heldout: Records that are kept for measuring.
    """

    conversation: int = 0
    turn: int = 0
    num_shards: int = 0
    num_records: int = 0
    num_windows: int = 0
    num_heldout: int = 0


@dataclass(frozen=True, slots=True)
class Answered:
    """What the target did in one turn.

    Attributes:
        is_heldout: Kept for measuring.
        turn: Prompt and answer.
        records: Of the answer.
        window: Of the answer and what was before it; None where no window was wanted.
    """

    is_heldout: bool
    turn: Turn
    records: Records
    window: Records | None


class AnsweredTurns:
    """Answers turn after turn, from a place on.

    Args:
        model: Answers; loaded without a drafter.
        options: What is captured.
        taps: Layers to keep.
        place: Where to begin; moved behind each turn that is given out.
    """

    def __init__(
        self,
        model: LoadedModel,
        options: CaptureOptions,
        taps: Sequence[int],
        place: CapturePlace,
    ) -> None:
        self._model, self._options, self._taps = model, options, tuple(taps)
        self.place = place
        self._windows_left = options.max_windows - place.num_windows
        self._session: Session | None = None
        control = model.tokenizer.control_tokens
        pair = [control[name] for name in _CALL if name in control]
        self._call_ids = (pair[0], pair[1]) if len(pair) == 2 else None

    def close(self) -> None:
        """Give the session's memory back."""
        if self._session is not None:
            self._session.close()
            self._session = None

    def answer(
        self, conversations: Sequence[Conversation], wanted: Wanted = "all"
    ) -> Iterator[Answered]:
        """Answer all turns that are left, short enough and wanted."""
        place, options = self.place, self._options
        kwargs: dict[str, JSON] = {}
        if options.enable_thinking is not None:
            kwargs["enable_thinking"] = options.enable_thinking
        while place.conversation < len(conversations):
            conversation = conversations[place.conversation]
            is_heldout = place.conversation % options.heldout == options.heldout - 1
            is_wanted = wanted == "all" or is_heldout == (wanted == "heldout")
            while is_wanted and place.turn < len(conversation.turns):
                index = conversation.turns[place.turn]
                place.turn += 1
                messages = conversation.messages[:index]
                prompt = self._model.renderer.render(
                    messages, conversation.tools, template_kwargs=kwargs
                ).token_ids
                if len(prompt) <= options.max_context:
                    follows_tool = messages[-1].role == "tool"
                    answered = self._answer(list(prompt), follows_tool, is_heldout)
                    if answered is not None:
                        yield answered
            place.conversation, place.turn = place.conversation + 1, 0

    def _answer(self, prompt: list[int], follows_tool: bool, is_heldout: bool) -> Answered | None:
        model, options = self._model, self._options
        if self._session is None:
            self._session = Session(model.target, SuffixDrafter(), session_id="capture")
        session = self._session
        session.sync(prompt)
        params = SamplingParams(temperature=options.temperature, top_k=0, top_p=1.0)
        sampler = Sampler(params, KeyedNoise.derive(options.seed, 0, prompt))
        limits = StopRules(model.stop_token_ids, options.max_answer)
        with closing(session.decode(sampler, limits)) as rounds:
            answer = _until_loop(rounds, options.loop_size)
        if len(answer) < 2:
            return None
        wants_window = options.max_windows > 0 and (is_heldout or self._windows_left > 0)
        first = max(0, len(prompt) - 1 - options.window) if wants_window else len(prompt) - 1
        with session.kv.fork(first) as kv:
            rows = capture(
                model.target, Transcript.of_turn(prompt, answer), self._taps, kv=kv, first_row=first
            )
        assert rows is not None, "the answer has two tokens"
        num_before = len(prompt) - 1 - first
        marks = turn_marks(answer, follows_tool=follows_tool, call_ids=self._call_ids)
        rows = replace(rows, marks=functional.pad(marks, (num_before, 0)))
        if options.dtype == "int8":
            rows = rows.pack()
        if wants_window and not is_heldout:
            self._windows_left -= 1
        turn = Turn(prompt, answer)
        window = rows if wants_window else None
        return Answered(is_heldout, turn, rows.part(slice(num_before, None)), window)


def _until_loop(rounds: Iterable[Round], size: int) -> list[int]:
    """The ids of an answer, up to where `size` of them are there a second time; 0: all."""
    answer: list[int] = []
    seen: set[tuple[int, ...]] = set()
    for round_ in rounds:
        for token_id in round_.token_ids:
            answer.append(token_id)
            if not size or len(answer) < size:
                continue
            last = tuple(answer[-size:])
            if last in seen:
                return answer[:-size]
            seen.add(last)
    return answer
