"""The recipe of nano's DLite drafter: capture the world once, then align.

`python -m dlite_agent.nano.drafter_train --out DIR --work DIR` works in `--work` and writes the
drafter's folder to `--out`. Run the same command again to go on where the last one stopped.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer

from dlite_agent.models.dlite_config import DLiteConfig, even_taps
from dlite_agent.models.dlite_files import write_dlite
from dlite_agent.models.transformer import DenseTransformer
from dlite_agent.models.weights import fingerprint, load_target, resolve_checkpoint
from dlite_agent.nano.drafter_data import capture_world, world_transcripts
from dlite_agent.training.capture import capture
from dlite_agent.training.frozen import FrozenEnds
from dlite_agent.training.learner import DLiteLearner
from dlite_agent.training.options import AlignOptions
from dlite_agent.training.records import Records
from dlite_agent.training.simulate import simulate
from dlite_agent.training.sources import StoredRecords
from dlite_agent.training.trainer import Trainer

__all__ = ["DrafterRecipe", "main"]

logger = logging.getLogger(__name__)

_HELDOUT_SEED = 77_001
_KV_BYTES = 256 * 2**20


@dataclass(frozen=True, slots=True)
class DrafterRecipe:
    """What a run is made of.

    Attributes:
        num_records: Captured records.
        steps: Optimizer steps.
        batch_size: Records of a step.
        learning_rate: Peak.
        num_taps: Layers of the target that are read.
        num_layers: Of the backbone.
        intermediate_size: Width of its SwiGLU.
        rank: Of the sequential head.
        head: Its kind.
        seed: Of data, weights and batches.
        num_heldout: Conversations that checkpoints are measured on.
    """

    num_records: int = 960_000
    steps: int = 2_400
    batch_size: int = 512
    learning_rate: float = 2e-3
    num_taps: int = 4
    num_layers: int = 1
    intermediate_size: int = 256
    rank: int = 64
    head: str = "copy"
    seed: int = 1
    num_heldout: int = 30


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m dlite_agent.nano.drafter_train", description=__doc__
    )
    recipe = DrafterRecipe()
    parser.add_argument("--out", type=Path, required=True, help="folder of the drafter")
    parser.add_argument("--work", type=Path, required=True, help="folder of records and state")
    parser.add_argument("--model", default="nano", help="nano or a folder with its tokenizer")
    parser.add_argument("--minutes", type=float, help="stop after so long; run again to go on")
    parser.add_argument("--compile", action="store_true", help="compile a step (C++ compiler)")
    parser.add_argument("--threads", type=int, help="threads of torch (default: torch's own)")
    for name, value in asdict(recipe).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Capture and train, or go on, and write the drafter that there is."""
    options = _parse(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    if options.threads:
        torch.set_num_threads(options.threads)
    recipe = DrafterRecipe(**{name: getattr(options, name) for name in asdict(DrafterRecipe())})
    folder = resolve_checkpoint(options.model)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    # taps are kept in bfloat16 anyway; of 11,000 best tokens none was another than in float32
    with load_target(options.model, dtype="bfloat16", max_kv_bytes=_KV_BYTES) as target:
        taps = even_taps(target.config.num_layers, recipe.num_taps)
        records = capture_world(
            target, tokenizer, options.work, taps, num_records=recipe.num_records, seed=recipe.seed
        )
    with load_target(options.model, dtype="float32", max_kv_bytes=_KV_BYTES) as target:
        config = DLiteConfig.for_target(
            target.config,
            fingerprint(folder),
            taps=taps,
            num_layers=recipe.num_layers,
            intermediate_size=recipe.intermediate_size,
            rank=recipe.rank,
            head=recipe.head,
        )
        heldout = _heldout(target, tokenizer, config.taps, recipe.num_heldout)
        ends = FrozenEnds.of(target)
    learner = DLiteLearner(config, ends, seed=recipe.seed)
    trainer = Trainer(options.work / "align", learner, _align_options(recipe))
    if options.compile:
        trainer.compile()

    def write(now: Trainer) -> None:
        measured = simulate(learner.student, ends, heldout)
        logger.info(
            "step=%d heldout_tau=%.3f slots=%s",
            now.place.step,
            measured.tau,
            " ".join(f"{share:.2f}" for share in measured.per_slot),
        )
        told = {
            "recipe": asdict(recipe),
            "step": now.place.step,
            "loss": now.place.loss,
            "num_records": len(records),
            "heldout": asdict(measured),
            "heldout_is": "the oracle's conversations with held-out names, teacher-forced",
            "torch": torch.__version__,
        }
        write_dlite(options.out, config, learner.weights, told)

    seconds = None if options.minutes is None else options.minutes * 60
    source = StoredRecords(records, trainer.options, config.block_size)
    is_complete = trainer.run(source, max_s=seconds, on_state=write)
    write(trainer)
    logger.info("wrote out=%s complete=%s", options.out, is_complete)
    return 0


def _heldout(
    target: DenseTransformer, tokenizer: Tokenizer, taps: tuple[int, ...], count: int
) -> Records:
    transcripts = world_transcripts(tokenizer, _HELDOUT_SEED, "heldout")
    parts = [capture(target, next(transcripts), taps) for _ in range(count)]
    return Records.join([part for part in parts if part is not None])


def _align_options(recipe: DrafterRecipe) -> AlignOptions:
    return AlignOptions(
        steps=recipe.steps,
        batch_size=recipe.batch_size,
        learning_rate=recipe.learning_rate,
        seed=recipe.seed,
        save_every_s=180.0,
    )


if __name__ == "__main__":
    raise SystemExit(main())
