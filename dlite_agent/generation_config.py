"""What a `generation_config.json` says: how to sample, and which ids end a turn."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from dlite_agent.config import SamplingParams
from dlite_agent.errors import ConfigurationError, UnsupportedCheckpointError

__all__ = ["FILE_NAME", "read_generation_config", "sampling_of"]

FILE_NAME = "generation_config.json"


def read_generation_config(folder: Path) -> SamplingParams:
    """The sampling of a folder's file, with its `eos_token_id` as further ids that end a turn.

    Raises:
        ConfigurationError: There is no file, or it is not as `sampling_of` wants it.
    """
    file = folder.expanduser() / FILE_NAME
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigurationError(
            f"{str(file)!r} cannot be read: {error.strerror}; name a folder that holds {FILE_NAME}"
        ) from error
    except ValueError as error:
        raise ConfigurationError(f"{str(file)!r} is no JSON: {error}; repair the file") from error
    if not isinstance(content, dict):
        raise ConfigurationError(f"{str(file)!r} holds no JSON object; repair the file")
    ends = content.get("eos_token_id")
    ids = ends if isinstance(ends, list) else [] if ends is None else [ends]
    if not all(type(token_id) is int for token_id in ids):
        raise ConfigurationError(
            f"{str(file)!r}: eos_token_id={ends!r} is neither a token id nor a list of them; "
            "repair the file"
        )
    return replace(sampling_of(content, str(file)), stop_token_ids=tuple(ids))


def sampling_of(content: Mapping[str, object], where: str) -> SamplingParams:
    """The sampling that a file's content asks for; without a None.

    `do_sample` absent or false is greedy. When sampling, a missing field has transformers' default
    (temperature 1, top_k 50, top_p 1, min_p 0). A repetition penalty counts in both.

    Args:
        content: The file's JSON object.
        where: Names the file in messages.

    Raises:
        UnsupportedCheckpointError: A field is no number or out of range.
    """

    def number(field: str, default: float) -> float:
        value = content.get(field)
        if value is None:
            return default
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise UnsupportedCheckpointError(
                f"{where}: {field}={value!r} is not a number; repair the file"
            )
        return float(value)

    is_sampled = content.get("do_sample", False) is True
    try:
        return SamplingParams(
            temperature=number("temperature", 1.0) if is_sampled else 0.0,
            top_k=int(number("top_k", 50)) if is_sampled else 0,
            top_p=number("top_p", 1.0) if is_sampled else 1.0,
            min_p=number("min_p", 0.0) if is_sampled else 0.0,
            repetition_penalty=number("repetition_penalty", 1.0),
        )
    except ConfigurationError as error:
        if isinstance(error, UnsupportedCheckpointError):
            raise
        raise UnsupportedCheckpointError(f"{where}: {error}; repair the file") from error
