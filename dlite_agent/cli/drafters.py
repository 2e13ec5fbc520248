"""`dlite-agent drafters MODEL`: which drafters are known for a model, and whether one fits."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from dlite_agent.cli.console import note, table, write

if TYPE_CHECKING:
    from dlite_agent.drafters.known import KnownDrafter
    from dlite_agent.drafters.self_test import SelfTest

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    parser.add_argument("model", help="nano, a folder, a GGUF file, or a hub name")
    parser.add_argument(
        "--check",
        metavar="DRAFTER",
        help="load MODEL and this drafter, and count how many of its tokens agree",
    )
    parser.add_argument(
        "--dtype",
        default="auto",
        choices=("auto", "float32", "bfloat16", "float64"),
        help="of --check",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """List, or check one; status 1 where a check has a complaint."""
    if arguments.check is not None:
        return _check(arguments)
    found = _known(arguments.model)
    if arguments.json:
        listed = [asdict(drafter) for drafter in found]
        write(json.dumps({"model": arguments.model, "drafters": listed}, indent=2))
        return 0
    if not found:
        note(f"no trained drafter is known for {arguments.model}; suffix drafting needs none")
        return 0
    for drafter in found:
        write(f"{drafter.name}\n    {drafter.family}, {_FITS[drafter.fits]}: {drafter.why}")
    return 0


_FITS = {True: "fits", False: "does not fit"}


def _known(model: str) -> list[KnownDrafter]:
    from dlite_agent.drafters.known import drafters_beside, public_drafters
    from dlite_agent.models.checkpoint_source import HubSource, open_source
    from dlite_agent.models.weights import fingerprint, read_config

    config = read_config(model)
    source = open_source(model, None)
    found: list[KnownDrafter] = []
    if not isinstance(source, HubSource):  # of the hub only its own files are fetched
        checkpoint = source.fetch(None)
        found = drafters_beside(checkpoint, config, fingerprint(checkpoint))
    return found + public_drafters(model, config)


def _check(arguments: argparse.Namespace) -> int:
    from dlite_agent.drafters.block import BlockDrafter
    from dlite_agent.drafters.eagle3 import Eagle3Drafter
    from dlite_agent.drafters.load import load_drafter
    from dlite_agent.drafters.self_test import self_test
    from dlite_agent.engine.drafting import question_ids
    from dlite_agent.models.weights import fingerprint, load_target, resolve_checkpoint

    checkpoint = resolve_checkpoint(arguments.model, None)
    with load_target(arguments.model, dtype=arguments.dtype, max_kv_bytes=_KV_BYTES) as target:
        drafter = load_drafter(arguments.check, target, fingerprint(checkpoint))
        if not isinstance(drafter, BlockDrafter | Eagle3Drafter):
            note(f"{arguments.check} is a DLite drafter for this model; 'train eval' measures it")
            return 0
        result = self_test(drafter, target, question_ids(Path(checkpoint)))
    _tell(arguments, result)
    return 1 if result.warning else 0


_KV_BYTES = 2**30


def _tell(arguments: argparse.Namespace, result: SelfTest) -> None:
    if arguments.json:
        content = asdict(result) | {"warning": result.warning}
        write(
            json.dumps({"model": arguments.model, "drafter": arguments.check} | content, indent=2)
        )
        return
    rows = [[reading, f"{count:.2f}"] for reading, count in result.accepted.items()]
    write(table(["read", "tokens right, of a block"], rows))
    write(f"{result.num_blocks} blocks each; first token right: {result.first_right:.0%}")
    if result.warning:
        note(result.warning)
