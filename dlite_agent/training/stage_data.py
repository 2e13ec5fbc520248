"""What a stage learns from and is measured on, wherever it is kept."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from dlite_agent.engine.loading import LoadedModel
from dlite_agent.models.dlite_config import DLiteConfig
from dlite_agent.training.conversations import Conversation
from dlite_agent.training.live import LiveSource
from dlite_agent.training.recipe import Recipe
from dlite_agent.training.records import Records
from dlite_agent.training.shards import load_records, load_windows
from dlite_agent.training.sizes import row_bytes
from dlite_agent.training.sources import Source, StoredRecords
from dlite_agent.training.stages import StageName, stage_options
from dlite_agent.training.windows import StoredWindows, Windows

__all__ = ["stage_data"]


def stage_data(
    model: LoadedModel,
    recipe: Recipe,
    stage: StageName,
    config: DLiteConfig,
    conversations: Sequence[Conversation],
) -> tuple[Source, Records | Windows]:
    """A stage's source of records and the held-out answers, which are always on disk.

    Args:
        model: Answers, where nothing of what is learned is on disk.
        recipe: All options.
        stage: `teacher` learns from windows.
        config: Of the drafter.
        conversations: The transcripts; read with `store: memory` and `none` only.

    Raises:
        ConfigurationError: Nothing was captured, or the recipe has no such stage.
        CapacityError: The memory has no room.
    """
    options, capture, work = stage_options(recipe, stage), recipe.capture, Path(recipe.work)
    is_teacher = stage == "teacher"
    heldout = load_windows(work, "heldout_windows") if is_teacher else load_records(work, "heldout")
    if capture.store != "disk":
        source = LiveSource(
            model,
            conversations,
            (capture, options),
            (config.taps, config.block_size, row_bytes(config, capture.dtype)),
            work / stage,
            kind="windows" if is_teacher else "records",
        )
        return source, heldout
    if is_teacher:
        return StoredWindows(load_windows(work), options, config.block_size), heldout
    return StoredRecords(load_records(work), options, config.block_size), heldout
