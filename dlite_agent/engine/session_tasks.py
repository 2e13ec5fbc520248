"""Questions about prompts and sessions that servers and `AgentSession` ask, and their answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from dlite_agent.backend import ChatRequest

__all__ = [
    "Decoded",
    "Detokenize",
    "FreeSessions",
    "LoadConversation",
    "SaveConversation",
    "SessionAction",
    "SessionCommand",
    "SessionReply",
    "TokenIds",
    "Tokenize",
]

SessionAction = Literal["find", "pin", "unpin", "fork", "save", "delete"]


@dataclass(frozen=True, slots=True)
class Tokenize:
    """Ask for the ids of a request's prompt. Answer: `TokenIds`."""

    request: ChatRequest
    add_generation_prompt: bool = True


@dataclass(frozen=True, slots=True)
class Detokenize:
    """Ask for the text of ids, control tokens spelled. Answer: `Decoded`."""

    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SessionCommand:
    """Do something with one session of a tenant. Answer: `SessionReply`.

    Attributes:
        action: What. A pinned session is never evicted. `save` needs a folder for sessions. `find`
            only looks.
        name: The session's id, or what the client called it.
        tenant: Whose it is; another tenant's does not exist.
        new_name: What the client calls a fork.
    """

    action: SessionAction
    name: str
    tenant: str = ""
    new_name: str = ""


@dataclass(frozen=True, slots=True)
class FreeSessions:
    """Free the memory of a conversation that ended; what is on disk stays. Answer: `Purged`.

    Attributes:
        hint: What the conversation was called; forgotten.
        session_ids: What its turns ran on. One that another hint, a pin or a running turn needs
            stays.
        tenant: Whose they are.
    """

    hint: str
    session_ids: tuple[str, ...]
    tenant: str = ""


@dataclass(frozen=True, slots=True)
class SaveConversation:
    """Write a conversation's KV and the tokens of its answers to a folder. Answer: `Count`.

    Turns go on while it is written, as it was when it was asked for. The count is of KV rows; 0
    where none are in the pool.

    Attributes:
        request: Its messages, tools, template variables, hint and tenant.
        session_id: What its last turn ran on.
        folder: Where; made if it is missing.
    """

    request: ChatRequest
    session_id: str
    folder: str


@dataclass(frozen=True, slots=True)
class LoadConversation:
    """Let a tenant's requests go on from what `SaveConversation` wrote. Answer: `Count` of KV rows.

    Attributes:
        folder: Read by the request that needs it; stays where it is.
        tenant: Whose it is from now on.
    """

    folder: str
    tenant: str = ""


@dataclass(frozen=True, slots=True)
class TokenIds:
    """Ids of a prompt."""

    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Decoded:
    """Text of ids."""

    text: str


@dataclass(frozen=True, slots=True)
class SessionReply:
    """The session that a command was about, or the new one.

    Attributes:
        session_id: Its id.
        token_ids: What it holds; of `find` only.
        last_turn: The figures of its last turn as JSON (`outputs.turn_figures`), of `find` and only
            of a session that is kept on disk; else empty.
    """

    session_id: str
    token_ids: tuple[int, ...] = ()
    last_turn: str = ""
