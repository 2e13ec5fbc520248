"""DLite and DSpark on the same windows, with equal parameters, records, steps and options."""

from __future__ import annotations

import json
import logging
import math
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from dlite_agent.errors import ConfigurationError
from dlite_agent.models.block_config import BlockConfig, block_shapes, spread_taps
from dlite_agent.models.block_files import write_block_drafter
from dlite_agent.models.dlite_config import DLiteConfig, dlite_shapes
from dlite_agent.models.dlite_files import write_dlite
from dlite_agent.models.target import TargetConfig
from dlite_agent.training.devices import find_devices
from dlite_agent.training.dspark import DSparkLearner
from dlite_agent.training.files import write_json
from dlite_agent.training.frozen import FrozenEnds
from dlite_agent.training.learner import DLiteLearner, Learner
from dlite_agent.training.measure import measure
from dlite_agent.training.recipe import Recipe
from dlite_agent.training.simulate import Acceptance
from dlite_agent.training.trainer import Trainer
from dlite_agent.training.windows import StoredWindows, Windows

__all__ = ["Contestant", "Result", "compare", "contestants", "equal_dspark"]

logger = logging.getLogger(__name__)

_MEASURED = "measured.json"


@dataclass(frozen=True, slots=True)
class Contestant:
    """What is compared.

    Attributes:
        name: Of it.
        make: The learner of a seed.
        state_bytes: Of its history, a position, in bfloat16.
    """

    name: str
    make: Callable[[int], Learner]
    state_bytes: int


@dataclass(frozen=True, slots=True)
class Result:
    """A contestant's figures.

    Attributes:
        name: Of it.
        num_parameters: Trained ones.
        num_steps: Optimizer steps of a run.
        num_records: Records of a run, most of them seen once.
        state_bytes: Of its history, a position.
        runs: One of each seed.
    """

    name: str
    num_parameters: int
    num_steps: int
    num_records: int
    state_bytes: int
    runs: tuple[Acceptance, ...]

    @property
    def tau(self) -> tuple[float, float]:
        """Mean over the seeds, and standard deviation (0 of one)."""
        taus = [run.tau for run in self.runs]
        return statistics.fmean(taus), statistics.stdev(taus) if len(taus) > 1 else 0.0

    @property
    def per_slot(self) -> tuple[float, ...]:
        """Means over the seeds."""
        slots = zip(*(run.per_slot for run in self.runs), strict=True)
        return tuple(map(statistics.fmean, slots))


def contestants(
    recipe: Recipe, target: TargetConfig, config: DLiteConfig, ends: FrozenEnds
) -> list[Contestant]:
    """DLite as the recipe has it, and a DSpark of its size for each window.

    Raises:
        ConfigurationError: No DSpark is as small as the DLite drafter.
    """
    mask = int(ends.embedding.norm(dim=1).argmin())  # a row that no token uses, where there is one
    spark = replace(equal_dspark(config, target, recipe.compare.num_taps), mask_token_id=mask)
    device = find_devices(recipe.align.device).device
    state_bytes = 2 * 2 * spark.num_layers * spark.num_kv_heads * spark.head_dim

    def dspark(window: int) -> Callable[[int], Learner]:
        return lambda seed: DSparkLearner(
            spark, config.taps, ends, window=window, seed=seed, device=device
        )

    found = [
        Contestant("dlite", lambda seed: DLiteLearner(config, ends, seed=seed, device=device), 0)
    ]
    for window in recipe.compare.windows:
        name = f"dspark-window-{window}" if window else "dspark"
        found.append(Contestant(name, dspark(window), state_bytes))
    return found


def equal_dspark(config: DLiteConfig, target: TargetConfig, num_taps: int) -> BlockConfig:
    """A DSpark with as many parameters as a DLite drafter, but for the width of its SwiGLU.

    Layers, heads, rank and block are the same; its taps are those of DSpark's rule, or the captured
    ones that are nearest.

    Raises:
        ConfigurationError: Its other parts alone are larger.
    """
    wanted = spread_taps(target.num_layers, num_taps)
    taps = tuple(sorted({min(config.taps, key=lambda tap: abs(tap - wish)) for wish in wanted}))
    made = BlockConfig.for_target(
        target,
        config.target_fingerprint,
        taps=taps,
        num_layers=config.num_layers,
        rank=config.rank,
        block_size=config.block_size,
        intermediate_size=1,
    )
    aim = sum(math.prod(shape) for shape in dlite_shapes(config).values())
    unit = 3 * made.num_layers * made.hidden_size
    width = 1 + round((aim - _num_parameters(made)) / unit)
    if width < 1:
        raise ConfigurationError(
            f"a DSpark drafter without its SwiGLU has {_num_parameters(made)} parameters, more "
            f"than the {aim} of this DLite drafter; use more drafter.intermediate_size or fewer "
            "compare.num_taps"
        )
    return replace(made, intermediate_size=width)


def compare(
    recipe: Recipe, entries: list[Contestant], windows: Windows, heldout: Windows
) -> list[Result]:
    """Train every contestant with every seed, or go on, and measure all of them.

    Args:
        recipe: Its `align` and `compare` hold for all; runs are kept in `work/compare`, each with
            its `drafter`.
        entries: Of `contestants`.
        windows: What all of them learn from.
        heldout: What all of them are measured on.

    Raises:
        ConfigurationError: A run in the folder was made with other options.
        NonFiniteLossError: As `Trainer.run`.
    """
    heldout = heldout.first(recipe.compare.max_heldout)
    results = []
    for entry in entries:
        runs, num_parameters = [], 0
        for seed in range(1, recipe.compare.seeds + 1):
            learner = entry.make(seed)
            num_parameters = sum(weight.numel() for weight in learner.weights.values())
            options = replace(recipe.align, seed=seed)
            folder = Path(recipe.work) / "compare" / f"{entry.name}-{seed}"
            trainer = Trainer(folder, learner, options, find_devices(options.device))
            path = folder / _MEASURED
            if not (trainer.is_done and path.is_file()):
                trainer.run(StoredWindows(windows, options, learner.block_size))
                measured = asdict(measure(learner, heldout))
                _write(learner, folder / "drafter", {"heldout": measured} | asdict(recipe))
                write_json(path, measured)
            found = json.loads(path.read_text("utf-8"))
            runs.append(Acceptance(**found | {"per_slot": tuple(found["per_slot"])}))
            logger.info("contestant=%s seed=%d tau=%.3f", entry.name, seed, runs[-1].tau)
        results.append(
            Result(
                entry.name,
                num_parameters,
                recipe.align.steps,
                recipe.align.steps * recipe.align.batch_size,
                entry.state_bytes,
                tuple(runs),
            )
        )
    return results


def _write(learner: Learner, folder: Path, provenance: dict[str, object]) -> None:
    """What was trained, as a drafter that can be served."""
    if isinstance(learner, DLiteLearner):
        write_dlite(folder, learner.config, learner.weights, provenance)
    elif isinstance(learner, DSparkLearner):
        write_block_drafter(folder, learner.config, learner.weights, provenance)


def _num_parameters(config: BlockConfig) -> int:
    return sum(math.prod(shape) for shape in block_shapes(config).values())
