"""Qwen3 inside an agent's own process, with sessions that outlast the call.

Names are loaded when they are first used (PEP 562): `import dlite_agent` loads neither torch, nor
transformers, nor a host library.
"""

from __future__ import annotations

import importlib
import logging
from typing import TYPE_CHECKING

from dlite_agent.errors import (
    CapacityError,
    CheckpointError,
    ConfigurationError,
    ContextLengthExceededError,
    DLiteError,
    DrafterMismatchError,
    MissingDependencyError,
    ModelNotFoundError,
    RequestError,
    SessionBusyError,
    SessionError,
    SessionNotFoundError,
    UnsupportedCheckpointError,
    UnsupportedParameterError,
)

if TYPE_CHECKING:
    from dlite_agent.backend import ChatBackend, ChatRequest
    from dlite_agent.chat.messages import (
        Message,
        ReasoningDelta,
        TextDelta,
        ToolCall,
        ToolCallDelta,
        ToolSpec,
        UnparsedToolCall,
    )
    from dlite_agent.chat.miss import Miss
    from dlite_agent.client.remote_engine import RemoteEngine
    from dlite_agent.config import EngineConfig, SamplingParams
    from dlite_agent.engine.agent_session import AgentSession
    from dlite_agent.engine.engine import Engine
    from dlite_agent.integrations.langchain import ChatDLite
    from dlite_agent.outputs import Generation, GenerationChunk, TurnStats
    from dlite_agent.rope_scaling import RopeScaling

__version__ = "0.1.0.dev0"

__all__ = [
    "AgentSession",
    "CapacityError",
    "ChatBackend",
    "ChatDLite",
    "ChatRequest",
    "CheckpointError",
    "ConfigurationError",
    "ContextLengthExceededError",
    "DLiteError",
    "DrafterMismatchError",
    "Engine",
    "EngineConfig",
    "Generation",
    "GenerationChunk",
    "Message",
    "Miss",
    "MissingDependencyError",
    "ModelNotFoundError",
    "ReasoningDelta",
    "RemoteEngine",
    "RequestError",
    "RopeScaling",
    "SamplingParams",
    "SessionBusyError",
    "SessionError",
    "SessionNotFoundError",
    "TextDelta",
    "ToolCall",
    "ToolCallDelta",
    "ToolSpec",
    "TurnStats",
    "UnparsedToolCall",
    "UnsupportedCheckpointError",
    "UnsupportedParameterError",
    "__version__",
]

_LAZY = {
    "AgentSession": "dlite_agent.engine.agent_session",
    "ChatBackend": "dlite_agent.backend",
    "ChatDLite": "dlite_agent.integrations.langchain",
    "ChatRequest": "dlite_agent.backend",
    "Engine": "dlite_agent.engine.engine",
    "EngineConfig": "dlite_agent.config",
    "Generation": "dlite_agent.outputs",
    "GenerationChunk": "dlite_agent.outputs",
    "Message": "dlite_agent.chat.messages",
    "Miss": "dlite_agent.chat.miss",
    "ReasoningDelta": "dlite_agent.chat.messages",
    "RemoteEngine": "dlite_agent.client.remote_engine",
    "RopeScaling": "dlite_agent.rope_scaling",
    "SamplingParams": "dlite_agent.config",
    "TextDelta": "dlite_agent.chat.messages",
    "ToolCall": "dlite_agent.chat.messages",
    "ToolCallDelta": "dlite_agent.chat.messages",
    "ToolSpec": "dlite_agent.chat.messages",
    "TurnStats": "dlite_agent.outputs",
    "UnparsedToolCall": "dlite_agent.chat.messages",
}

# A library stays silent unless the host configures logging.
logging.getLogger(__name__).addHandler(logging.NullHandler())


def __getattr__(name: str) -> object:
    """Load a public name at its first use."""
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        module = importlib.import_module(_LAZY[name])
    except ModuleNotFoundError as error:
        raise _missing(name, error) from error
    value: object = getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)


def _missing(name: str, error: ModuleNotFoundError) -> Exception:
    package = (error.name or __name__).partition(".")[0]
    if package == __name__:
        return error
    return MissingDependencyError(
        f"dlite_agent.{name} needs the package {package!r}, which is not installed; "
        'repair the installation with: pip install "dlite-agent"'
    )
