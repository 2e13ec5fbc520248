"""Small, seeded stand-ins for tests: ours and those of programs built on dlite-agent.

Nothing here needs the network or a checkpoint. Names are lazy: torch is imported only with the
doubles that hold tensors.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dlite_agent.testing.drafters import (
        AdversarialDrafter,
        NoisyDrafter,
        OracleDrafter,
        ScriptedDrafter,
    )
    from dlite_agent.testing.reference import assert_kv_is_of, cold_decode, cold_forward
    from dlite_agent.testing.scripted_engine import ScriptedEngine
    from dlite_agent.testing.targets import FaultyTarget, tiny_config, tiny_qwen3
    from dlite_agent.testing.tokenizers import ByteTokenizer

__all__ = [
    "AdversarialDrafter",
    "ByteTokenizer",
    "FaultyTarget",
    "NoisyDrafter",
    "OracleDrafter",
    "ScriptedDrafter",
    "ScriptedEngine",
    "assert_kv_is_of",
    "cold_decode",
    "cold_forward",
    "tiny_config",
    "tiny_qwen3",
]

_MODULES = {
    "AdversarialDrafter": "drafters",
    "ByteTokenizer": "tokenizers",
    "FaultyTarget": "targets",
    "NoisyDrafter": "drafters",
    "OracleDrafter": "drafters",
    "ScriptedDrafter": "drafters",
    "ScriptedEngine": "scripted_engine",
    "assert_kv_is_of": "reference",
    "cold_decode": "reference",
    "cold_forward": "reference",
    "tiny_config": "targets",
    "tiny_qwen3": "targets",
}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
