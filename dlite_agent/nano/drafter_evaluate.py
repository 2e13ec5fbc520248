"""How far nano's DLite drafter is accepted on held-out tasks, alone, in the real loop.

`python -m dlite_agent.nano.drafter_evaluate --drafter DIR --tasks N --json` lets real agents work
with plain decoding, then decodes all of their turns again, plainly and with drafts, and prints τ,
per-slot acceptance, speed-up and c (what a round costs in plain steps), for short and long
histories.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from dlite_agent.config import EngineConfig
from dlite_agent.drafters.dlite import load_dlite
from dlite_agent.drafters.null import NullDrafter
from dlite_agent.engine.engine import Engine
from dlite_agent.kernels.row_kernels import load_row_kernels
from dlite_agent.models.transformer import DenseTransformer
from dlite_agent.models.weights import fingerprint, load_target, resolve_checkpoint
from dlite_agent.nano.agent import run_repair
from dlite_agent.nano.evaluate import SEED_STRIDE
from dlite_agent.nano.mini_agent import run_mini
from dlite_agent.nano.world import Size, make_task
from dlite_agent.training.evaluate import Turn, serve

__all__ = ["collect_turns", "main", "measure"]

LONG = 3_000
"""Tokens of a prompt from which a history is called long."""
_SIZES: tuple[Size, ...] = ("tiny", "small", "medium", "large", "large")


def collect_turns(model: str, num_tasks: int, seed: int) -> list[Turn]:
    """Greedy turns of real agents on held-out tasks, half of each dialect; output is nano's own."""
    turns: list[Turn] = []
    with Engine(EngineConfig(model=model, drafter="null")) as engine:
        for number in range(num_tasks):
            size = _SIZES[number // 2 % len(_SIZES)]
            num_bugs = 3 if size == "large" else 1
            task = make_task(
                seed * SEED_STRIDE + number, split="heldout", size=size, num_bugs=num_bugs
            )
            run = run_mini if number % 2 else run_repair
            with tempfile.TemporaryDirectory() as folder:
                done = run(engine, task, Path(folder))
            turns += [
                Turn(turn.prompt_token_ids, turn.token_ids)
                for turn in done.turns
                if len(turn.token_ids) >= 2
            ]
    return turns


def measure(
    target: DenseTransformer, folder: Path, identity: str, turns: Sequence[Turn], min_chance: float
) -> dict[str, object]:
    """Decode the turns with and without drafts.

    Args:
        target: nano.
        folder: Of the drafter.
        identity: Fingerprint of the target.
        turns: What to decode.
        min_chance: As in `DLiteDrafter`.
    """
    kernels = load_row_kernels(EngineConfig().cache_folder())
    target.use_kernels(kernels)
    drafter = load_dlite(folder, target, identity, min_chance=min_chance, kernels=kernels)
    block_size = drafter.config.block_size
    groups = {
        "short": [turn for turn in turns if len(turn.prompt_ids) < LONG],
        "long": [turn for turn in turns if len(turn.prompt_ids) >= LONG],
    }
    found: dict[str, object] = {}
    for name, group in groups.items():
        if not group:
            continue
        plain = serve(target, NullDrafter(), group, clock=time.thread_time)
        drafted = serve(target, drafter, group, clock=time.thread_time)
        acceptance = drafted.acceptance(block_size)
        state = drafter.start(max((list(turn.prompt_ids) for turn in group), key=len))
        speedup = plain.decode_s / drafted.decode_s
        found[name] = {
            "turns": len(group),
            "prompt_tokens_mean": round(sum(len(turn.prompt_ids) for turn in group) / len(group)),
            **asdict(acceptance),
            "speedup": speedup,
            "c": acceptance.tau / speedup,
            "different_turns": drafted.num_different,
            "state_bytes": 0 if state is None else state.nbytes,
        }
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        prog="python -m dlite_agent.nano.drafter_evaluate", description=__doc__
    )
    parser.add_argument("--drafter", type=Path, required=True)
    parser.add_argument("--model", default="nano", help="nano or a folder")
    parser.add_argument("--tasks", type=int, default=30)
    parser.add_argument("--seed", type=int, default=5)
    parser.add_argument("--turns", type=Path, help="JSON file of turns to read, or else to write")
    parser.add_argument("--min-chance", type=float, default=0.0)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)
    if options.turns is not None and options.turns.is_file():
        saved = json.loads(options.turns.read_text("utf-8"))
        turns = [Turn(turn["prompt_ids"], turn["answer_ids"]) for turn in saved]
    else:
        turns = collect_turns(options.model, options.tasks, options.seed)
        if options.turns is not None:
            kept = [
                {"prompt_ids": list(turn.prompt_ids), "answer_ids": list(turn.answer_ids)}
                for turn in turns
            ]
            options.turns.write_text(json.dumps(kept), "utf-8")
    identity = fingerprint(resolve_checkpoint(options.model))
    with load_target(options.model) as target:
        found = measure(target, options.drafter, identity, turns, options.min_chance)
    if options.json:
        print(json.dumps(found))
    else:
        for name, figures in found.items():
            print(name, figures)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
