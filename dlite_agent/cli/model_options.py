"""Options of every verb that loads a model, beside its name and type."""

from __future__ import annotations

import argparse

__all__ = ["add_model_options"]


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Declare `--quantize` and `--rope-scaling`."""
    parser.add_argument(
        "--quantize", choices=("int8",), help="keep weights in eight bits, quantized at load"
    )
    parser.add_argument(
        "--rope-scaling",
        metavar="JSON",
        help='stretch positions, as in config.json: \'{"rope_type": "yarn", "factor": 4.0}\'',
    )
