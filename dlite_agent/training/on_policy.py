"""The target answers the turns of transcripts itself, and what it did is kept in shards.

Each turn's prompt is the recorded history; the answer is the target's own, in the template and the
thinking mode that the drafter is to be served in. The prompt is computed once: the session goes
from turn to turn, and the answer's rows are forwarded again on a fork for their taps.
"""

from __future__ import annotations

import json
import logging
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from dlite_agent.chat.messages import JSON
from dlite_agent.config import SamplingParams
from dlite_agent.decoding.stopping import StopRules
from dlite_agent.drafters.null import NullDrafter
from dlite_agent.errors import CapacityError, ConfigurationError
from dlite_agent.loading import LoadedModel
from dlite_agent.sampling import KeyedNoise, Sampler
from dlite_agent.sessions.session import Session
from dlite_agent.training.capture import Transcript, capture
from dlite_agent.training.conversations import Conversation
from dlite_agent.training.evaluate import Turn
from dlite_agent.training.recipe import CaptureOptions
from dlite_agent.training.records import Records

__all__ = ["CaptureRun", "load_records", "load_turns", "record_bytes"]

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Place:
    """The next turn to capture, and what there is."""

    conversation: int = 0
    turn: int = 0
    num_shards: int = 0
    num_records: int = 0
    num_heldout: int = 0


def record_bytes(model: LoadedModel, taps: Sequence[int]) -> int:
    """Bytes of a record on disk and in memory."""
    return len(taps) * model.target.config.hidden_size * 2 + 4 * 4


def load_records(work: Path, kind: str = "records") -> Records:
    """All shards of a folder, `records` or `heldout`.

    Raises:
        ConfigurationError: There are none.
    """
    paths = sorted(work.glob(f"{kind}-*.safetensors"))
    if not paths:
        raise ConfigurationError(
            f"{str(work)!r} holds no {kind}; capture more first (dlite-agent train capture)"
        )
    return Records.join([Records.load(path) for path in paths])


def load_turns(work: Path) -> list[Turn]:
    """The held-out turns of a folder."""
    paths = sorted(work.glob("heldout-*.json"))
    turns = [turn for path in paths for turn in json.loads(path.read_text("utf-8"))]
    return [Turn(turn["prompt_ids"], turn["answer_ids"]) for turn in turns]


class CaptureRun:
    """One capture in one folder; goes on where the last one was killed.

    Args:
        model: Answers; loaded without a drafter.
        work: Folder of the shards; made if missing.
        options: What is captured.
        taps: Layers to keep.

    Raises:
        CapacityError: The disk has no room for the records.
        ConfigurationError: What is in `work` was captured with other options.
    """

    def __init__(
        self, model: LoadedModel, work: Path, options: CaptureOptions, taps: Sequence[int]
    ) -> None:
        self._model, self._work, self._options = model, work, options
        self._taps = tuple(taps)
        self._place = _Place()
        self._session: Session | None = None
        work.mkdir(parents=True, exist_ok=True)
        self._key = {"model": model.config.model, "taps": list(self._taps), **asdict(options)}
        path = work / "capture.json"
        if path.is_file():
            saved = json.loads(path.read_text("utf-8"))
            if saved["key"] != self._key:
                raise ConfigurationError(
                    f"{str(work)!r} holds records of {saved['key']}, not {self._key}; go on with "
                    "those options, or name another folder"
                )
            self._place = _Place(**saved["place"])
        missing = options.max_records - self._place.num_records
        needed, free = missing * record_bytes(model, taps), shutil.disk_usage(work).free
        if needed > free:
            raise CapacityError(
                f"{missing} records take {needed} bytes, but {str(work)!r} has {free} free; lower "
                "capture.max_records or drafter.num_taps, or name another work folder"
            )

    def run(self, conversations: Sequence[Conversation], *, max_shards: int | None = None) -> int:
        """Capture until `max_records`, the end of the conversations, or so many new shards.

        Returns:
            Records in the folder, held-out ones left out.
        """
        began, first = time.perf_counter(), self._place.num_records
        parts: dict[str, list[Records]] = {"records": [], "heldout": []}
        turns: list[dict[str, list[int]]] = []
        new_shards = 0
        steps = self._turns(conversations)
        while self._place.num_records < self._options.max_records:
            step = next(steps, None)
            if step is not None:
                kind, turn, records = step
                parts[kind].append(records)
                if kind == "heldout":
                    turns.append(
                        {"prompt_ids": list(turn.prompt_ids), "answer_ids": list(turn.answer_ids)}
                    )
            num_new = sum(map(len, parts["records"]))
            is_full = (
                num_new >= self._options.shard_records
                or self._place.num_records + num_new >= self._options.max_records
            )
            if is_full or step is None:
                self._write(parts, turns)
                parts, turns = {"records": [], "heldout": []}, []
                new_shards += 1
                self._log((self._place.num_records - first) / (time.perf_counter() - began))
                if step is None or new_shards == max_shards:
                    break
        if self._session is not None:
            self._session.close()
            self._session = None
        return self._place.num_records

    def _turns(self, conversations: Sequence[Conversation]) -> Iterator[tuple[str, Turn, Records]]:
        """Answer turn after turn; the place is behind the turn that is yielded."""
        place = self._place
        kwargs: dict[str, JSON] = {}
        if self._options.enable_thinking is not None:
            kwargs["enable_thinking"] = self._options.enable_thinking
        while place.conversation < len(conversations):
            conversation = conversations[place.conversation]
            is_heldout = place.conversation % self._options.heldout == self._options.heldout - 1
            while place.turn < len(conversation.turns):
                index = conversation.turns[place.turn]
                place.turn += 1
                prompt = self._model.renderer.render(
                    conversation.messages[:index], conversation.tools, template_kwargs=kwargs
                ).token_ids
                if len(prompt) > self._options.max_context:
                    continue
                turn, records = self._answer(list(prompt))
                if records is not None:
                    yield ("heldout" if is_heldout else "records"), turn, records
            place.conversation, place.turn = place.conversation + 1, 0

    def _answer(self, prompt: list[int]) -> tuple[Turn, Records | None]:
        model, options = self._model, self._options
        if self._session is None:
            self._session = Session(model.target, NullDrafter(), session_id="capture")
        session = self._session
        session.sync(prompt)
        params = SamplingParams(temperature=options.temperature, top_k=0, top_p=1.0)
        sampler = Sampler(params, KeyedNoise.derive(options.seed, 0, prompt))
        for _ in session.decode(sampler, StopRules(model.stop_token_ids, options.max_answer)):
            pass
        answer = session.token_ids[len(prompt) :]
        with session.kv.fork(len(prompt) - 1) as kv:
            records = capture(model.target, Transcript.of_turn(prompt, answer), self._taps, kv=kv)
        return Turn(prompt, answer), records

    def _write(self, parts: dict[str, list[Records]], turns: list[dict[str, list[int]]]) -> None:
        """Write a shard, then the place: a kill between them repeats the shard."""
        place = self._place
        for kind, records in parts.items():
            if records:
                Records.join(records).save(
                    self._work / f"{kind}-{place.num_shards:05d}.safetensors"
                )
        if turns:
            _write_json(self._work / f"heldout-{place.num_shards:05d}.json", turns)
        place.num_shards += 1
        place.num_records += sum(map(len, parts["records"]))
        place.num_heldout += sum(map(len, parts["heldout"]))
        _write_json(self._work / "capture.json", {"key": self._key, "place": asdict(place)})

    def _log(self, per_s: float) -> None:
        left = self._options.max_records - self._place.num_records
        logger.info(
            "records=%d of %d heldout=%d per_s=%.0f left_min=%.1f",
            self._place.num_records,
            self._options.max_records,
            self._place.num_heldout,
            per_s,
            left / max(per_s, 1e-9) / 60,
        )


def _write_json(path: Path, content: object) -> None:
    part = path.with_suffix(".part")
    part.write_text(json.dumps(content), "utf-8")
    part.replace(path)
