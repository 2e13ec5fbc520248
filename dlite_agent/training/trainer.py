"""Stage 2: align a student with its target on records.

Every batch is a function of (seed, step), and the whole state is saved, so that a run that was
killed goes on to the same losses. What is not finite stops the run, with the last good state kept.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from dlite_agent.errors import ConfigurationError
from dlite_agent.models.dlite_config import DLiteConfig
from dlite_agent.training.frozen import FrozenEnds
from dlite_agent.training.losses import block_loss, slot_shares, slot_weights
from dlite_agent.training.records import RecordBatch, Records
from dlite_agent.training.student import Student, StudentInput, new_weights

__all__ = ["AlignOptions", "Aligner", "NonFiniteLossError", "Place"]

logger = logging.getLogger(__name__)

_AVERAGE_STEP = 0.02
_SHARES_EVERY = 8
"""Steps between two looks at the slots: finding best tokens costs a tenth of a step."""


class NonFiniteLossError(ArithmeticError):
    """The loss or a gradient is NaN or infinite; the last saved state is good."""


@dataclass(frozen=True, slots=True)
class AlignOptions:
    """How a student is trained.

    Attributes:
        steps: Optimizer steps in all.
        batch_size: Records of a step.
        learning_rate: Peak.
        warmup: Share of the steps over which the rate rises.
        final_rate: Share of the peak where the cosine ends.
        weight_decay: AdamW's.
        clip: Largest norm of the gradient.
        cross_entropy: α of the loss.
        slot_decay: γ of the slot weights exp(-k / γ).
        autocast: Products in bfloat16.
        seed: Of weights and batches.
        save_every_s: Seconds between two states.
        log_every_s: Seconds between two lines.
    """

    steps: int = 3000
    batch_size: int = 512
    learning_rate: float = 1.5e-3
    warmup: float = 0.04
    final_rate: float = 0.02
    weight_decay: float = 0.0
    clip: float = 1.0
    cross_entropy: float = 0.1
    slot_decay: float = 4.0
    autocast: bool = True
    seed: int = 1
    save_every_s: float = 120.0
    log_every_s: float = 20.0

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "learning_rate", "clip", "slot_decay"):
            if getattr(self, name) <= 0:
                raise ConfigurationError(f"{name} is {getattr(self, name)!r}; use more than 0")
        for name in ("warmup", "final_rate", "weight_decay", "cross_entropy"):
            if getattr(self, name) < 0:
                raise ConfigurationError(f"{name} is {getattr(self, name)!r}; use at least 0")

    def rate(self, step: int) -> float:
        """Learning rate of a step: a linear rise, then a cosine."""
        rise = max(1, round(self.warmup * self.steps))
        if step < rise:
            return self.learning_rate * (step + 1) / rise
        share = min(1.0, (step - rise) / max(1, self.steps - rise))
        cosine = 0.5 * (1.0 + math.cos(math.pi * share))
        return self.learning_rate * (self.final_rate + (1.0 - self.final_rate) * cosine)


@dataclass(slots=True)
class Place:
    """Where a run stands, besides tensors.

    Attributes:
        step: Steps done.
        loss: Running mean.
        per_slot: Running shares of slots whose best token is the target's.
    """

    step: int = 0
    loss: float = 0.0
    per_slot: list[float] = field(default_factory=list)


class Aligner:
    """One run in one folder.

    Args:
        work: Folder of the state; made if missing. A state that is there goes on.
        config: Shape of the student.
        options: How to train.
        ends: Of the target.
        weights: Where to start from; None: new ones.

    Raises:
        ConfigurationError: The state in `work` is of another run.
    """

    def __init__(
        self,
        work: Path,
        config: DLiteConfig,
        options: AlignOptions,
        ends: FrozenEnds,
        weights: Mapping[str, Tensor] | None = None,
    ) -> None:
        self.config, self.options = config, options
        self._work, self._ends = work, ends
        generator = torch.Generator().manual_seed(options.seed)
        start = new_weights(config, generator, ends.gain) if weights is None else weights
        self.weights = {
            name: tensor.detach().to(torch.float32).clone().requires_grad_()
            for name, tensor in start.items()
        }
        self.student = Student(config, self.weights, ends.embed)
        self._slots = slot_weights(config.block_size, options.slot_decay)
        self._optimizer = torch.optim.AdamW(
            list(self.weights.values()),
            lr=options.learning_rate,
            betas=(0.9, 0.98),
            weight_decay=options.weight_decay,
        )
        self._compute: Callable[[RecordBatch], tuple[Tensor, Tensor]] = self._loss
        self.place = Place()
        work.mkdir(parents=True, exist_ok=True)
        if (work / "place.json").exists():
            self._load()

    def compile(self) -> None:
        """Compile the computation of a step; needs a C++ compiler."""
        self._compute = torch.compile(self._loss, dynamic=False)

    @property
    def is_done(self) -> bool:
        """All steps are done."""
        return self.place.step >= self.options.steps

    def run(
        self,
        records: Records,
        *,
        max_s: float | None = None,
        on_state: Callable[[Aligner], None] | None = None,
    ) -> bool:
        """Train until the steps or the seconds are used, then save.

        Args:
            records: What to learn from; the same ones in every part of a run.
            max_s: Stop after so long.
            on_state: Called after each state that is saved on the way.

        Returns:
            Whether the run is complete.

        Raises:
            ConfigurationError: There are no records.
            NonFiniteLossError: The loss or a gradient is not finite; the last state is kept.
        """
        usable = records.usable()
        if not len(usable):
            raise ConfigurationError("there are no records; capture answers of two tokens or more")
        began = logged = saved = time.perf_counter()
        first_step = self.place.step
        while not self.is_done:
            now = time.perf_counter()
            if max_s is not None and now - began > max_s:
                break
            self.step_once(records, usable)
            now = time.perf_counter()
            if now - logged > self.options.log_every_s or self.is_done:
                logged = now
                self._log((self.place.step - first_step) / (now - began))
            if now - saved > self.options.save_every_s:
                self.save()
                if on_state is not None:
                    on_state(self)
                saved = time.perf_counter()
        self.save()
        return self.is_done

    def step_once(self, records: Records, usable: Tensor | None = None) -> None:
        """One optimizer step on the batch of its number.

        Args:
            records: As for `run`.
            usable: `records.usable()`, where the caller has it.

        Raises:
            NonFiniteLossError: As `run`; nothing was changed.
        """
        usable = records.usable() if usable is None else usable
        self._step(records.batch(self._chosen(usable), self.config.block_size))

    def save(self) -> None:
        """Write the state; a kill at any time leaves the old or the new one."""
        name = f"state-{self.place.step}.safetensors"
        part = self._work / f"{name}.part"
        save_file(self._state(), part)
        part.replace(self._work / name)
        part = self._work / "place.json.part"
        part.write_text(json.dumps(asdict(self.place) | {"run": self._run_key()}), "utf-8")
        part.replace(self._work / "place.json")
        for old in self._work.glob("state-*.safetensors"):
            if old.name != name:
                old.unlink()

    def _run_key(self) -> dict[str, object]:
        """What a state belongs to; how often it is saved and told is not part of it."""
        options = {
            name: value
            for name, value in asdict(self.options).items()
            if not name.endswith("every_s")
        }
        return {"config": self.config.to_json(), "options": options}

    def _load(self) -> None:
        saved = json.loads((self._work / "place.json").read_text("utf-8"))
        own = json.loads(json.dumps(self._run_key()))
        for part in ("config", "options"):
            for name, value in own[part].items():
                if saved["run"][part].get(name) != value:
                    raise ConfigurationError(
                        f"{str(self._work)!r} holds a run with {name}="
                        f"{saved['run'][part].get(name)!r}, not {value!r}; go on with what it was "
                        "begun with, or name another folder"
                    )
        self.place = Place(saved["step"], saved["loss"], saved["per_slot"])
        tensors = load_file(self._work / f"state-{self.place.step}.safetensors")
        with torch.no_grad():
            for name, tensor in self.weights.items():
                tensor.copy_(tensors[f"weights.{name}"])
                self._optimizer.state[tensor] = {
                    "step": tensors["step"].clone(),
                    "exp_avg": tensors[f"first.{name}"],
                    "exp_avg_sq": tensors[f"second.{name}"],
                }
        logger.info("resumed step=%d loss=%.4f", self.place.step, self.place.loss)

    def _state(self) -> dict[str, Tensor]:
        state = {"step": torch.tensor(float(self.place.step))}
        for name, tensor in self.weights.items():
            state[f"weights.{name}"] = tensor.detach().contiguous()
            moments = self._optimizer.state.get(tensor) or {}
            for key, kind in (("first", "exp_avg"), ("second", "exp_avg_sq")):
                value = moments.get(kind)
                state[f"{key}.{name}"] = torch.zeros_like(tensor) if value is None else value
        return state

    def _chosen(self, usable: Tensor) -> Tensor:
        """The records of this step: without replacement within an epoch."""
        size, total = self.options.batch_size, len(usable)
        start = self.place.step * size
        picked: list[Tensor] = []
        while size > 0:
            epoch, offset = divmod(start, total)
            generator = torch.Generator().manual_seed(self.options.seed * 1_000_003 + epoch)
            part = torch.randperm(total, generator=generator)[offset : offset + size]
            picked.append(part)
            start, size = start + len(part), size - len(part)
        return usable[torch.cat(picked)]

    def _step(self, batch: RecordBatch) -> None:
        loss, logits = self._compute(batch)
        loss.backward()
        parameters = list(self.weights.values())
        norm = torch.nn.utils.clip_grad_norm_(parameters, self.options.clip)
        if not (torch.isfinite(loss.detach()) and torch.isfinite(norm)):
            self._optimizer.zero_grad()
            raise NonFiniteLossError(
                f"at step {self.place.step} the loss is {float(loss.detach())} and the norm of the "
                f"gradient {float(norm)}; the last good state is in {str(self._work)!r}: lower "
                "learning_rate and go on from a copy of it"
            )
        for group in self._optimizer.param_groups:
            group["lr"] = self.options.rate(self.place.step)
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._note(float(loss.detach()), batch, logits)

    def _note(self, loss: float, batch: RecordBatch, logits: Tensor) -> None:
        place = self.place
        place.loss += (1.0 if place.step == 0 else _AVERAGE_STEP) * (loss - place.loss)
        if place.step % _SHARES_EVERY == 0:
            shares = slot_shares(logits.detach(), batch.best_ids, batch.valid)
            share, before = _SHARES_EVERY * _AVERAGE_STEP, place.per_slot or shares
            place.per_slot = [a + share * (b - a) for a, b in zip(before, shares, strict=True)]
        place.step += 1

    def _loss(self, batch: RecordBatch) -> tuple[Tensor, Tensor]:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.options.autocast):
            given = StudentInput(
                batch.taps.float(), batch.anchor_ids, batch.previous_ids, batch.positions
            )
            logits = self._ends.logits(self.student.states(given))
            with torch.no_grad():
                target_logits = self._ends.logits(self._ends.target_states(batch.final_taps))
        loss = block_loss(
            logits,
            target_logits,
            batch.best_ids,
            self._slots * batch.valid,
            cross_entropy=self.options.cross_entropy,
        )
        return loss, logits

    def _log(self, steps_per_s: float) -> None:
        place, options = self.place, self.options
        left_min = (options.steps - place.step) / max(steps_per_s, 1e-9) / 60
        logger.info(
            "step=%d of %d loss=%.4f slots=%s records_per_s=%.0f left_min=%.1f",
            place.step,
            options.steps,
            place.loss,
            " ".join(f"{share:.2f}" for share in place.per_slot),
            steps_per_s * options.batch_size,
            left_min,
        )
