"""The real Qwen3 tokenizer, read once."""

from __future__ import annotations

from pathlib import Path

import pytest

from dlite_agent.chat.renderer import Renderer
from dlite_agent.testing import ByteTokenizer
from dlite_agent.tokenizer import CheckpointTokenizer, load_tokenizer


@pytest.fixture(scope="session")
def qwen3(qwen3_tokenizer_dir: Path) -> CheckpointTokenizer:
    return load_tokenizer(str(qwen3_tokenizer_dir))


@pytest.fixture(scope="session")
def qwen3_renderer(qwen3: CheckpointTokenizer) -> Renderer:
    return Renderer(qwen3)


@pytest.fixture
def byte_renderer() -> Renderer:
    return Renderer(ByteTokenizer())
