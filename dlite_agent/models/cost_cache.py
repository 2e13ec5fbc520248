"""Cost tables on disk, so that a model is measured once on a machine and not at every start."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import logging
import os
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import torch

from dlite_agent.kernels.native import source_digest
from dlite_agent.models.cost_table import CostTable
from dlite_agent.models.device import device_name
from dlite_agent.models.target import TargetModel

__all__ = ["cost_key", "read_cost_table", "write_cost_table"]

logger = logging.getLogger(__name__)

_FORMAT = 1
_MAX_FILE_BYTES = 64 * 1024
_FIGURES = ("rows", "seconds", "context_turn_s", "context_row_s", "turn_s")


def cost_key(target: TargetModel) -> dict[str, str | int]:
    """Everything that the seconds of a forward depend on, and another machine's name for it.

    Args:
        target: The model as it is loaded; its fingerprint tells quantised weights from others.
    """
    return {
        "fingerprint": target.fingerprint,
        "device": device_name(target.device),
        "dtype": str(target.dtype).removeprefix("torch."),
        "layers": source_digest() if target.uses_kernels else "torch",
        "threads": torch.get_num_threads(),
        "torch": str(torch.__version__),
        "dlite-agent": _own_version(),
    }


def read_cost_table(folder: Path, key: Mapping[str, str | int]) -> CostTable | None:
    """The table that was kept for a key, or None.

    A file that is missing, unreadable, too large, damaged, of another format or of another key is
    none.
    """
    path = _path(folder, key)
    try:
        if path.stat().st_size > _MAX_FILE_BYTES:
            return None
        kept = json.loads(path.read_text(encoding="utf-8"))
        if kept["format"] != _FORMAT or kept["key"] != dict(key):
            return None
        figures = kept["table"]
        return CostTable(
            rows=tuple(int(rows) for rows in figures["rows"]),
            seconds=tuple(float(seconds) for seconds in figures["seconds"]),
            context_turn_s=float(figures["context_turn_s"]),
            context_row_s=float(figures["context_row_s"]),
            turn_s=float(figures["turn_s"]),
            origin="cached",
        )
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        logger.debug("cost table path=%s is ignored: %r", path, error)
        return None


def write_cost_table(folder: Path, key: Mapping[str, str | int], table: CostTable) -> bool:
    """Keep a table; atomic, and False where the folder cannot be written to."""
    path = _path(folder, key)
    figures = {name: getattr(table, name) for name in _FIGURES}
    text = json.dumps({"format": _FORMAT, "key": dict(key), "table": figures}, indent=1)
    temporary = None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(prefix=path.name, dir=folder)
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text + "\n")
        Path(temporary).replace(path)
    except OSError as error:
        logger.info("cost table is not kept: folder=%s error=%r", folder, error)
        if temporary is not None:
            with suppress(OSError):
                Path(temporary).unlink()
        return False
    return True


def _own_version() -> str:
    try:
        return importlib.metadata.version("dlite-agent")
    except importlib.metadata.PackageNotFoundError:  # run from a folder
        return "unknown"


def _path(folder: Path, key: Mapping[str, str | int]) -> Path:
    named = json.dumps(dict(key), sort_keys=True)
    return folder / f"cost-{hashlib.sha256(named.encode()).hexdigest()[:16]}.json"
