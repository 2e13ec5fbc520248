"""The recipe of nano: tokenizer, copy warm-up, then the world from short to long.

`python -m dlite_agent.nano.train --out DIR --work DIR` trains in `--work` and exports a Hugging
Face folder to `--out`. Run the same command again to go on where the last one stopped.
"""

from __future__ import annotations

import argparse
import json
import logging
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional

from dlite_agent.nano import network as network_module
from dlite_agent.nano.corpus import Batch, build_tokenizer, copy_batches, world_batches
from dlite_agent.nano.export import export
from dlite_agent.nano.network import Network
from dlite_agent.nano.optimizer import Optimizer
from dlite_agent.nano.shape import NanoConfig

__all__ = ["Place", "Recipe", "Trainer", "main"]

logger = logging.getLogger(__name__)

_USUAL_WEIGHT = 1500.0
_QUIET_SHARE = (
    4  # one in so many of the tokens outside assistant turns is predicted, with as much more weight
)


@dataclass(frozen=True, slots=True)
class Recipe:
    """What a run is made of.

    Attributes:
        seed: Of weights and data.
        copy_tokens: Tokens of the copy warm-up.
        world_tokens: Tokens of the world, padding included.
        matrix_lr: Peak rate of the matrices.
        other_lr: Peak rate of the embedding and the norms.
        rate: Factor on both rates; below 1 for a short run from trained weights.
        decay: Share of the world, at its end, over which the rates fall to zero.
        save_every_s: Seconds between checkpoints.
        log_every_s: Seconds between progress lines.
        compiled: Compile the layers (a third faster; needs a C++ compiler).
    """

    seed: int = 1
    copy_tokens: int = 600_000
    world_tokens: int = 27_000_000
    matrix_lr: float = 0.02
    other_lr: float = 0.005
    rate: float = 1.0
    decay: float = 0.7
    save_every_s: float = 180.0
    log_every_s: float = 20.0
    compiled: bool = True


@dataclass(slots=True)
class Place:
    """Where a run stands; the whole state besides tensors."""

    step: int = 0
    copy_tokens: int = 0
    world_tokens: int = 0
    copy_batch: int = 0
    pool: int = 0
    skip: int = 0
    loss: float = 0.0


class Trainer:
    """One run in one folder.

    Args:
        work: Folder of the checkpoint; made if missing.
        recipe: What to do.
        config: Shape of the network.
        tokenizer: Used for rows; its size must be the network's vocabulary.
    """

    def __init__(
        self, work: Path, recipe: Recipe, config: NanoConfig, tokenizer: Tokenizer
    ) -> None:
        self._work, self._recipe, self._config = work, recipe, config
        self.tokenizer = tokenizer
        self.network = Network(config, torch.Generator().manual_seed(recipe.seed))
        self._optimizer = Optimizer(self.network)
        self.place = Place()
        work.mkdir(parents=True, exist_ok=True)
        if (work / "place.json").exists():
            self._load()

    def _load(self) -> None:
        saved = json.loads((self._work / "place.json").read_text("utf-8"))
        self.place = Place(**{f.name: saved[f.name] for f in fields(Place)})
        tensors = load_file(self._work / f"state-{self.place.step}.safetensors")
        prefix = "network."
        weights = {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}
        self.network.load_state_dict(weights)
        self._optimizer.load_state({k: v for k, v in tensors.items() if not k.startswith(prefix)})
        logger.info("resumed step=%d world_tokens=%d", self.place.step, self.place.world_tokens)

    def start_from(self, folder: Path) -> None:
        """Take the weights of an exported folder, unless this run has begun already."""
        if self.place.step == 0:
            tensors = load_file(folder / "model.safetensors")
            self.network.load_state_dict({k: v.float() for k, v in tensors.items()})

    def save(self) -> None:
        """Write the checkpoint; a kill at any time leaves the old or the new one."""
        tensors = {f"network.{k}": v for k, v in self.network.state_dict().items()}
        name = f"state-{self.place.step}.safetensors"
        save_file(tensors | self._optimizer.state(), self._work / f"{name}.part")
        (self._work / f"{name}.part").replace(self._work / name)
        part = self._work / "place.json.part"
        part.write_text(json.dumps(asdict(self.place)), "utf-8")
        part.replace(self._work / "place.json")
        for old in self._work.glob("state-*.safetensors"):
            if old.name != name:
                old.unlink()

    @property
    def progress(self) -> float:
        """Share of the world that is done."""
        total = self._recipe.world_tokens
        return self.place.world_tokens / total if total else 1.0

    def _batches(self) -> Iterator[Batch]:
        """Yield what is left of the run and move the place; ends when the tokens are used."""
        place, recipe = self.place, self._recipe
        for batch in copy_batches(self.tokenizer, recipe.seed, place.copy_batch):
            if place.copy_tokens >= recipe.copy_tokens:
                break
            yield batch
            place.copy_batch += 1
            place.copy_tokens += batch.num_tokens
        for pool, number, batch in world_batches(
            self.tokenizer, recipe.seed, lambda: self.progress, place.pool, place.skip
        ):
            if self.progress >= 1.0:
                break
            yield batch
            place.pool, place.skip = pool, number + 1
            place.world_tokens += batch.num_tokens

    def _rate(self) -> float:
        """Factor on the peak rates: a short rise, a plateau, a linear fall to zero."""
        rise = min(1.0, (self.place.step + 1) / 60)
        fall = (1.0 - self.progress) / max(self._recipe.decay, 1e-9)
        return self._recipe.rate * rise * min(1.0, fall)

    def run(self, max_s: float | None = None, max_steps: int | None = None) -> bool:
        """Train until the tokens, the seconds or the steps are used, then save.

        Returns:
            Whether the run is complete.
        """
        start = logged = saved = time.perf_counter()
        first_tokens = self.place.copy_tokens + self.place.world_tokens
        first_step = self.place.step
        total = self._recipe.copy_tokens + self._recipe.world_tokens
        for batch in self._batches():
            now = time.perf_counter()
            if (max_s is not None and now - start > max_s) or (
                max_steps is not None and self.place.step - first_step >= max_steps
            ):
                self.save()
                return False
            if now - saved > self._recipe.save_every_s:
                self.save()
                saved = now
            loss = self._step(batch)
            self.place.loss += (loss - self.place.loss) * (1 if self.place.step == 0 else 0.03)
            self.place.step += 1
            now = time.perf_counter()
            if now - logged > self._recipe.log_every_s:
                logged = now
                done = self.place.copy_tokens + self.place.world_tokens
                speed = (done - first_tokens) / (now - start)
                left_s = (total - done) / max(speed, 1e-9)
                logger.info(
                    "step=%d copy=%.2fM world=%.2fM loss=%.4f tokens_per_s=%.0f left_min=%.1f",
                    self.place.step,
                    self.place.copy_tokens / 1e6,
                    self.place.world_tokens / 1e6,
                    self.place.loss,
                    speed,
                    left_s / 60,
                )
        self.save()
        return True

    def _step(self, batch: Batch) -> float:
        ids, positions = torch.tensor(batch.ids), torch.tensor(batch.positions)
        weights = torch.tensor(batch.weights)[:, 1:]
        kept = self._kept(weights)
        with torch.autocast("cpu", torch.bfloat16):
            hidden = self.network.hidden(ids, positions)[:, :-1][kept]  # [N, E]
            logits = self.network.logits(hidden)
        losses = functional.cross_entropy(logits.float(), ids[:, 1:][kept], reduction="none")
        chosen = weights[kept]
        chosen = torch.where(chosen < 1.0, chosen * _QUIET_SHARE, chosen)
        weight = chosen.sum().clamp_min(1.0)
        loss = (losses * chosen).sum()
        # Between a mean and a sum: long rows have few learned tokens, and should count neither as
        # one nor as none.
        (loss / (weight * _USUAL_WEIGHT).sqrt()).backward()
        rate = self._rate()
        self._optimizer.step(self._recipe.matrix_lr * rate, self._recipe.other_lr * rate)
        losses, is_learned = losses.detach(), chosen == 1.0
        return float(losses[is_learned].mean()) if bool(is_learned.any()) else self.place.loss

    def _kept(self, weights: Tensor) -> Tensor:
        """Choose the predicted tokens: every learned one and a part of the others."""
        grid = torch.arange(weights.numel()).view(weights.shape)
        return (weights == 1.0) | ((weights > 0) & ((grid + self.place.step) % _QUIET_SHARE == 0))


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m dlite_agent.nano.train", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder of the exported model")
    parser.add_argument("--work", type=Path, required=True, help="folder of the checkpoint")
    parser.add_argument("--minutes", type=float, help="stop after so long; run again to go on")
    parser.add_argument("--seed", type=int, default=Recipe().seed)
    parser.add_argument("--world-tokens", type=int, default=Recipe().world_tokens)
    parser.add_argument("--copy-tokens", type=int, default=Recipe().copy_tokens)
    parser.add_argument(
        "--start", type=Path, help="exported folder to go on from, for a new --work"
    )
    parser.add_argument(
        "--rate", type=float, default=Recipe().rate, help="factor on the learning rates"
    )
    parser.add_argument("--no-compile", action="store_true", help="do not compile the layers")
    parser.add_argument("--threads", type=int, help="threads of torch (default: torch's own)")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Train, or go on training, and export what there is."""
    options = _parse(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    if options.threads:
        torch.set_num_threads(options.threads)
    recipe = replace(
        Recipe(),
        seed=options.seed,
        world_tokens=options.world_tokens,
        copy_tokens=options.copy_tokens,
        rate=options.rate,
        compiled=not options.no_compile,
    )
    config = NanoConfig()
    options.work.mkdir(parents=True, exist_ok=True)
    path = options.work / "tokenizer.json"
    if not path.exists() and options.start is not None:
        path.write_bytes((options.start / "tokenizer.json").read_bytes())
    if not path.exists():
        logger.info("training the tokenizer")
        build_tokenizer(recipe.seed, config.vocab_size).save(str(path))
    if recipe.compiled:
        network_module.compile_layers()
    trainer = Trainer(options.work, recipe, config, Tokenizer.from_file(str(path)))
    if options.start is not None:
        trainer.start_from(options.start)
    is_complete = trainer.run(None if options.minutes is None else options.minutes * 60)
    export(trainer.network, config, trainer.tokenizer, options.out)
    logger.info("exported out=%s complete=%s", options.out, is_complete)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
