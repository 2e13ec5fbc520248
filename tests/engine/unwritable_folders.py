"""A process whose folders for sessions cannot be written, as its system says and no test pretends.

Run as a program: a checkpoint, an empty folder, and a folder on a disk with room for nothing much,
or "-". Prints JSON: by kind of folder, what its turns were and which warnings there were. It gives
up root's rights on the way, since root may write anywhere.
"""

from __future__ import annotations

import json
import logging
import os
import resource
import sys
from dataclasses import replace
from pathlib import Path

from dlite_agent.config import EngineConfig
from dlite_agent.engine.engine import Engine
from tests.conversations import Agent

NOBODY = 65534


class Warnings(logging.Handler):
    """Collects them."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def turns(config: EngineConfig, then: Path | None = None) -> dict[str, object]:
    """Three turns; after the first one the folder's files may not be written any more."""
    warnings, agent = Warnings(), Agent("fix it")
    logger = logging.getLogger("dlite_agent")
    logger.addHandler(warnings)
    with Engine(config) as engine:
        for number in range(3):
            agent.take(engine.generate(agent.request()))
            if number == 0 and then is not None:
                lock_up(then)
    logger.removeHandler(warnings)
    origins = [turn.stats.origin for turn in agent.turns]
    answers = [turn.token_ids for turn in agent.turns]
    return {"origins": origins, "answers": answers, "warnings": warnings.texts}


def lock_up(folder: Path) -> None:
    """Take everybody's right to write a folder and what is in it."""
    for path in sorted([folder, *folder.rglob("*")], reverse=True):
        path.chmod(0o555 if path.is_dir() else 0o444)


def main() -> None:
    """Try one kind of folder after the other."""
    checkpoint, root, small = sys.argv[1:]
    config = EngineConfig(checkpoint, dtype="float64", drafter="null", max_kv_bytes=2**25)

    def kept(name: str) -> EngineConfig:
        return replace(config, kv_disk=f"{root}/{name}")

    for path in Path(checkpoint).iterdir():
        path.chmod(0o644)  # for whoever we are later
    told = {"memory": turns(config)}  # and everything is imported
    if small != "-":
        told["full disk"] = turns(replace(config, kv_disk=small))
    turns(kept("used"))
    lock_up(Path(root, "used"))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    told["file limit"] = turns(kept("limited"))
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    Path(root, "later").mkdir()
    if os.getuid() == 0:
        os.chown(Path(root, "later"), NOBODY, NOBODY)
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
    told["later read-only"] = turns(kept("later"), Path(root, "later"))
    told["read-only"] = turns(kept("used"))
    if os.access(root, os.W_OK):
        Path(root).chmod(0o555)
    told["missing"] = turns(kept("missing/deep"))
    print(json.dumps(told))


if __name__ == "__main__":
    main()
