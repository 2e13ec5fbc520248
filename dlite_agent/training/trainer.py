"""A training run: optimizer steps over a source of records, saved so that a kill costs little.

Every step is a function of (seed, number), and the whole state is saved, so that a run that was
killed goes on to the same losses. What is not finite stops the run, with the last good state kept.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from dlite_agent.training.checkpoint import check_run, load_state, save_state
from dlite_agent.training.devices import Devices, OneCPU
from dlite_agent.training.frozen import rows_among
from dlite_agent.training.learner import Learner, Part
from dlite_agent.training.losses import block_loss, slot_counts, slot_weights
from dlite_agent.training.options import AlignOptions
from dlite_agent.training.sources import Source

__all__ = ["NonFiniteLossError", "Place", "Trainer"]

logger = logging.getLogger(__name__)

_AVERAGE_STEP = 0.02
_SHARES_EVERY = 8
"""Steps between two looks at the slots: finding best tokens costs a tenth of a step."""


class NonFiniteLossError(ArithmeticError):
    """The loss or a gradient is NaN or infinite; the last saved state is good."""


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


class Trainer:
    """One run in one folder.

    Args:
        work: Folder of the state; made if missing. A state that is there goes on.
        learner: What is trained; its weights lie on the device.
        options: How to train.
        devices: Compute, together.

    Raises:
        ConfigurationError: The state in `work` is of another run.
        UnsupportedCheckpointError: It is damaged.
    """

    def __init__(
        self, work: Path, learner: Learner, options: AlignOptions, devices: Devices | None = None
    ) -> None:
        self.learner, self.options = learner, options
        self._work, self._devices = work, devices or OneCPU()
        self._slots = slot_weights(learner.block_size, options.slot_decay).to(self._devices.device)
        self._optimizer = torch.optim.AdamW(
            list(learner.weights.values()),
            lr=options.learning_rate,
            betas=(0.9, 0.98),
            weight_decay=options.weight_decay,
        )
        self._compute: Callable[[Part], tuple[Tensor, Tensor]] = self._loss
        self._key = {"config": learner.describe(), "options": options.run_key()}
        self._token_ids: Tensor | None = None
        self.place = Place()
        self.steps_per_s = 0.0
        work.mkdir(parents=True, exist_ok=True)
        self._load()

    def compile(self) -> None:
        """Compile the computation of a step; needs a C++ compiler."""
        self._compute = torch.compile(self._loss, dynamic=False)

    @property
    def is_done(self) -> bool:
        """All steps are done."""
        return self.place.step >= self.options.steps

    @property
    def is_main(self) -> bool:
        """This process is the one that writes."""
        return self._devices.share[0] == 0

    def run(
        self,
        source: Source,
        *,
        max_s: float | None = None,
        on_log: Callable[[Trainer], None] | None = None,
        on_state: Callable[[Trainer], None] | None = None,
    ) -> bool:
        """Train until the steps or the seconds are used, then save.

        Args:
            source: What to learn from; the same in every part of a run.
            max_s: Stop after so long.
            on_log: Called with each line that is logged.
            on_state: Called after each state that is saved on the way.

        Returns:
            Whether the run is complete.

        Raises:
            NonFiniteLossError: The loss or a gradient is not finite; the last state is kept.
            CapacityError: A state could not be written; the one before is kept.
        """
        began = logged = saved = time.perf_counter()
        first_step = self.place.step
        is_late = self._agreed(max_s is not None and max_s <= 0)
        while not (self.is_done or is_late):
            self.step_once(source)
            now = time.perf_counter()
            if self.is_main and (now - logged > self.options.log_every_s or self.is_done):
                logged = now
                self.steps_per_s = (self.place.step - first_step) / max(now - began, 1e-9)
                self._log()
                if on_log is not None:
                    on_log(self)
            if self._agreed(now - saved > self.options.save_every_s):
                self.save()
                if on_state is not None and self.is_main:
                    on_state(self)
                saved = time.perf_counter()
            is_late = self._agreed(max_s is not None and now - began > max_s)
        self.save()
        return self.is_done

    def _agreed(self, is_due: bool) -> bool:
        """What the main process's clock says, in all of them."""
        flag = torch.tensor(float(is_due and self.is_main), device=self._devices.device)
        self._devices.add_up([flag])
        return bool(flag)

    def step_once(self, source: Source) -> None:
        """One optimizer step on the records of its number.

        Raises:
            NonFiniteLossError: As `run`; nothing was changed.
        """
        device = self._devices.device
        found = source.parts(self.place.step, self._devices.share)  # none: the share is empty
        parts = [self._narrowed(part.to(device), source) for part in found]
        weighed = ((self._slots * part.records.valid).sum() for part in parts)
        scale = sum(weighed, start=torch.zeros((), device=device))
        self._devices.add_up([scale])
        total = torch.zeros((), device=device)
        looks = self.place.step % _SHARES_EVERY == 0
        counts = torch.zeros(2, self.learner.block_size, device=device)
        for part in parts:
            loss, logits = self._compute(part)
            loss = loss / scale.clamp_min(1e-9)
            loss.backward()
            total += loss.detach()
            if looks:
                counts += slot_counts(logits.detach(), part.records.best_ids, part.records.valid)
        self._devices.add_up([total, *([counts] if looks else [])])
        self._update(float(total))
        self._note(float(total), counts if looks else None)

    def save(self) -> None:
        """Write the state; a kill at any time leaves the old or the new one."""
        self._devices.wait()
        if self.is_main:
            tensors = {"step": torch.tensor(float(self.place.step))}
            for name, tensor in self.learner.weights.items():
                tensors[f"weights.{name}"] = tensor
                moments = self._optimizer.state.get(tensor) or {}
                for key, kind in _MOMENTS.items():
                    value = moments.get(kind)
                    tensors[f"{key}.{name}"] = torch.zeros_like(tensor) if value is None else value
            place = asdict(self.place) | {"run": self._key}
            save_state(self._work, self.place.step, tensors, place)
        self._devices.wait()

    def _load(self) -> None:
        found = load_state(self._work)
        if found is None:
            return
        tensors, place = found
        check_run(self._work, cast(Mapping[str, object], place.pop("run")), self._key)
        self.place = Place(**place)  # type: ignore[arg-type]  # as `save` wrote it
        with torch.no_grad():
            for name, tensor in self.learner.weights.items():
                tensor.copy_(tensors[f"weights.{name}"])
                self._optimizer.state[tensor] = {"step": tensors["step"].clone()} | {
                    kind: tensors[f"{key}.{name}"].to(tensor.device)
                    for key, kind in _MOMENTS.items()
                }
        logger.info("resumed step=%d loss=%.4f", self.place.step, self.place.loss)

    def _update(self, loss: float) -> None:
        """One step of the optimizer with the gradients that there are."""
        weights = list(self.learner.weights.values())
        for weight in weights:
            if weight.grad is None:  # this process had no records
                weight.grad = torch.zeros_like(weight)
        self._devices.add_up([weight.grad for weight in weights if weight.grad is not None])
        norm = float(torch.nn.utils.clip_grad_norm_(weights, self.options.clip))
        if not (math.isfinite(loss) and math.isfinite(norm)):
            self._optimizer.zero_grad()
            raise NonFiniteLossError(
                f"at step {self.place.step} the loss is {loss} and the norm of the gradient "
                f"{norm}; the last good state is in {str(self._work)!r}: lower learning_rate and "
                "go on from a copy of it"
            )
        for group in self._optimizer.param_groups:
            group["lr"] = self.options.rate(self.place.step)
        self._optimizer.step()
        self._optimizer.zero_grad()

    def _note(self, loss: float, counts: Tensor | None) -> None:
        place = self.place
        place.loss += (1.0 if place.step == 0 else _AVERAGE_STEP) * (loss - place.loss)
        if counts is not None:
            shares = (counts[0] / counts[1].clamp_min(1)).tolist()
            share, before = _SHARES_EVERY * _AVERAGE_STEP, place.per_slot or shares
            place.per_slot = [a + share * (b - a) for a, b in zip(before, shares, strict=True)]
        place.step += 1

    def _narrowed(self, part: Part, source: Source) -> Part:
        """A part whose slots choose among the tokens that are learned; others are not valid."""
        if not self.options.max_vocab:
            return part
        records = part.records
        if self._token_ids is None:
            ids = source.common_ids(self.options.max_vocab)
            self._token_ids = ids.to(records.best_ids.device)
        rows, is_there = rows_among(self._token_ids, records.best_ids)
        return part._replace(
            records=replace(records, best_ids=rows, valid=records.valid & is_there)
        )

    def _loss(self, part: Part) -> tuple[Tensor, Tensor]:
        """Weighted sum over all slots, and the logits."""
        records, ends = part.records, self.learner.ends
        kind = self._devices.device.type
        with torch.autocast(kind, torch.bfloat16, enabled=self.options.autocast):
            logits = self.learner.logits(part, self._token_ids)
            with torch.no_grad():
                states = ends.target_states(records.final_taps)
                target_logits = ends.logits(states, self._token_ids)
        loss = block_loss(
            logits,
            target_logits,
            records.best_ids,
            self._slots * records.valid,
            cross_entropy=self.options.cross_entropy,
        )
        return loss, logits

    def _log(self) -> None:
        place, options = self.place, self.options
        left_min = (options.steps - place.step) / max(self.steps_per_s, 1e-9) / 60
        logger.info(
            "step=%d of %d loss=%.4f slots=%s records_per_s=%.0f left_min=%.1f",
            place.step,
            options.steps,
            place.loss,
            " ".join(f"{share:.2f}" for share in place.per_slot),
            self.steps_per_s * options.batch_size,
            left_min,
        )


_MOMENTS = {"first": "exp_avg", "second": "exp_avg_sq"}
