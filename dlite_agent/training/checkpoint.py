"""The state of a training run on disk: one file a state, the last two of them are kept."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from dlite_agent.errors import ConfigurationError, UnsupportedCheckpointError
from dlite_agent.training.files import write_tensors

__all__ = ["check_run", "load_state", "save_state"]

_KEPT = 2


def save_state(
    work: Path, step: int, tensors: Mapping[str, Tensor], place: Mapping[str, object]
) -> None:
    """Write the state of a step, and drop all but the last two.

    Raises:
        CapacityError: There was no room; the states before are whole.
    """
    name = f"state-{step:08d}.safetensors"
    write_tensors(work / name, tensors, {"place": json.dumps(place)})
    for old in _states(work)[:-_KEPT]:
        old.unlink()


def load_state(work: Path) -> tuple[dict[str, Tensor], dict[str, object]] | None:
    """The newest state and its place; None where there is none.

    Raises:
        UnsupportedCheckpointError: It is damaged; the message says how to go on from the one
            before.
    """
    states = _states(work)
    if not states:
        return None
    path = states[-1]
    try:
        with safe_open(path, framework="pt") as file:
            place = json.loads((file.metadata() or {})["place"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, KeyError, json.JSONDecodeError) as error:
        before = f"to go on from {states[-2].name}, " if len(states) > 1 else "to begin again, "
        raise UnsupportedCheckpointError(
            f"the state {str(path)!r} cannot be read ({error}); {before}delete it"
        ) from error
    return tensors, place


def check_run(
    work: Path, saved: Mapping[str, object], own: Mapping[str, Mapping[str, object]]
) -> None:
    """See that a state is of this run.

    Args:
        work: Its folder.
        saved: Sections of the run that the state belongs to.
        own: Of this run.

    Raises:
        ConfigurationError: It is not; the message names the first value that differs.
    """
    for section, values in json.loads(json.dumps(own)).items():
        theirs = saved.get(section)
        for name, value in values.items():
            other = theirs.get(name) if isinstance(theirs, dict) else None
            if other != value:
                raise ConfigurationError(
                    f"{str(work)!r} holds a run with {name}={other!r}, not {value!r}; go on with "
                    "what it was begun with, or name another folder"
                )


def _states(work: Path) -> list[Path]:
    return sorted(work.glob("state-*.safetensors"))
