"""Random agent loops, with eviction to disk and restarts: every answer is that of a fresh engine.

Agents append, edit, take an answer again, branch off, go back, interleave, and send results in the
order in which their tools ended. Sessions go to disk when memory is short, and the engine ends and
comes back. A loop that its client replays faithfully computes what is new, and nothing else.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from dlite_agent.backend import ChatRequest
from dlite_agent.chat.messages import Message
from dlite_agent.config import EngineConfig
from dlite_agent.engine.service import ModelService, load_service
from dlite_agent.outputs import Generation
from tests.conversations import READ_FILE, respaced, sampled
from tests.tiny_checkpoint import write_checkpoint

MAX_PROMPT = 900  # tokens; then the agent begins anew
ROOMY, TIGHT = 2**25, 3 * 2**20  # bytes of KV; 2**20 are 1,024 rows of the tiny model


@dataclass
class Loop:
    """One agent.

    Attributes:
        messages: Its transcript, as its client keeps it.
        hint: Its thread, or None.
        last: Its last turn, if its client did nothing but answer it since.
        seed: Of its next answer.
        answers: Where its answers are.
        is_branched: Another agent began as its copy, or it did. What one of them drops the other
            may have wanted: less than 32 tokens are not kept for it, and nothing over a restart.
    """

    messages: list[Message]
    hint: str | None
    last: Generation | None = None
    seed: int = 0
    answers: list[int] = field(default_factory=list)
    is_branched: bool = False

    def request(self, max_tokens: int) -> ChatRequest:
        self.seed += 1
        return ChatRequest(
            tuple(self.messages),
            tools=(READ_FILE,),
            sampling=sampled(self.seed, max_tokens),
            session_hint=self.hint,
            history="as_generated",
        )


class Agents:
    """What their clients do, from a seed."""

    def __init__(self, rng: random.Random, count: int) -> None:
        self.rng = rng
        self.done: Counter[str] = Counter()
        self.loops = [self._new(number) for number in range(count)]

    def next(self) -> Loop:
        """An agent that is ready for its turn, after something was done to its transcript."""
        number = self.rng.randrange(len(self.loops))
        loop = self.loops[number]
        if loop.last is not None and loop.last.stats.prompt_tokens > MAX_PROMPT:
            loop = self.loops[number] = self._new(number)
        kinds = ["append"] * 6 + ["edit", "regenerate", "fork", "rewind"]
        kind = self.rng.choice(kinds) if loop.last is not None else "append"
        self.done[kind] += 1
        match kind:
            case "edit":
                self._edit(loop)
            case "regenerate":
                while loop.messages[-1].role != "assistant":
                    loop.messages.pop()
                loop.messages.pop()
                loop.last = None
            case "fork":
                other, loop.is_branched = self.rng.randrange(len(self.loops)), True
                loop = replace(loop, messages=list(loop.messages), answers=list(loop.answers))
                loop.hint, loop.seed = None, self.rng.randrange(10**6)
                self.loops[other] = loop
            case "rewind":
                if loop.answers:
                    del loop.messages[self.rng.choice(loop.answers) :]
                    loop.answers = [i for i in loop.answers if i < len(loop.messages)]
                    loop.last = None
        return loop

    def take(self, loop: Loop, turn: Generation) -> None:
        """Append the answer as a client sends it back, and results as its tools end."""
        loop.answers.append(len(loop.messages))
        message = turn.message
        results = [
            Message("tool", f"result {n} of {call.arguments}", tool_call_id=call.id)
            for n, call in enumerate(message.tool_calls)
        ]
        self.rng.shuffle(results)
        said = results or [Message("user", f"and then {self.rng.randrange(10)}")]
        if not results and self.rng.random() < 0.5:
            message = respaced(message)
        loop.messages += [message, *said]
        loop.last = turn

    def _new(self, number: int) -> Loop:
        task = f"agent {number}: mend part {self.rng.randrange(10)}"
        hint = f"thread-{number}" if self.rng.random() < 0.5 else None
        messages = [Message("system", "You repair programs."), Message("user", task)]
        return Loop(messages, hint, seed=self.rng.randrange(10**6))

    def _edit(self, loop: Loop) -> None:
        place = self.rng.randrange(1, len(loop.messages))
        message = loop.messages[place]
        loop.messages[place] = replace(message, content=message.content + " edited")
        loop.last = None


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "model", max_positions=4096)


def load(folder: Path, **options: object) -> ModelService:
    config = EngineConfig(model=str(folder), dtype="float64", **options)  # type: ignore[arg-type]
    return load_service(config, lambda stage, fraction: None)


@pytest.fixture
def cold(folder: Path) -> Iterator[ModelService]:
    with closing(load(folder, max_kv_bytes=2**22, drafter="null", reuse="none")) as service:
        yield service


def run(service: ModelService, request: ChatRequest) -> Generation:
    *_, last = service.run(request, time.perf_counter(), lambda: False)
    assert last.generation is not None
    for info in service.model.sessions.sessions():
        assert not info.is_busy
        service.model.sessions.get(info.session_id).check_invariants()
    return last.generation


def rows_beyond_what_is_new(loop: Loop, turn: Generation) -> int | None:
    """None where that cannot be told: an edit, an answer that was cut, a branch."""
    last = loop.last
    if last is None or last.finish_reason == "length":
        return None
    known = (*last.prompt_token_ids, *last.token_ids)
    assert turn.prompt_token_ids[: len(known)] == known, "what was sampled is what comes back"
    if loop.is_branched:
        return None
    # The pending token has no row yet; a restored session computes one row to compare it.
    needed = len(turn.prompt_token_ids) - len(known) + 1 + (turn.stats.origin == "restored")
    return turn.stats.prefilled_tokens - needed


@pytest.mark.parametrize(
    ("num_turns", "kv_bytes"),
    [
        pytest.param(16, TIGHT, id="sample"),
        pytest.param(1500, TIGHT, id="tight", marks=[pytest.mark.soak, pytest.mark.timeout(1800)]),
        pytest.param(1500, ROOMY, id="roomy", marks=[pytest.mark.soak, pytest.mark.timeout(1800)]),
    ],
)
def test_random_loops_equal_fresh_engines_and_compute_what_is_new(
    folder: Path, tmp_path: Path, cold: ModelService, num_turns: int, kv_bytes: int
) -> None:
    rng = random.Random(f"{num_turns} {kv_bytes}")
    agents = Agents(rng, 8)
    # Reproducible: no clock decides whether a session is fetched from disk or computed.
    options = {"kv_disk": str(tmp_path / "kept"), "reproducible": True, "prefill_chunk": 64}
    warm = load(folder, max_kv_bytes=kv_bytes, **options)
    num_faithful, num_exact, origins = 0, 0, Counter[str]()
    for _ in range(num_turns):
        if rng.random() < 0.1:
            warm.close()
            assert warm.model.target.pool.used_bytes == 0
            warm = load(folder, max_kv_bytes=kv_bytes, **options)
        loop = agents.next()
        request = loop.request(rng.choice([30, 60, 60]))
        ours, theirs = run(warm, request), run(cold, request)
        assert ours.prompt_token_ids == theirs.prompt_token_ids
        assert ours.token_ids == theirs.token_ids
        beyond = rows_beyond_what_is_new(loop, ours)
        num_faithful += beyond is not None
        num_exact += beyond is not None and beyond <= 0
        # Fewer than 32 tokens beyond what is in memory are computed rather than read from disk.
        assert beyond is None or beyond < 32
        origins[ours.stats.origin] += 1
        agents.take(loop, ours)
    warm.close()
    assert num_faithful >= num_turns // 8
    assert num_exact > 0.9 * num_faithful
    assert len(agents.done) > 2
    print(
        f"{num_turns} turns, {num_faithful} faithful, {num_exact} of them exact; "
        f"{dict(agents.done)}; {dict(origins)}"
    )
