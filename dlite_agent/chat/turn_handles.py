"""What a client carries from one turn to the next without looking at it.

An answer's tool-call ids are random, and a handle in its metadata is signed, so neither can be
guessed: a request that brings one has seen that answer. Both only say where to look. A handle is
believed after a restart too, since its signature needs nothing but the machine's secret.
"""

from __future__ import annotations

import hmac
import secrets
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

from dlite_agent.chat.message_keys import TurnForm
from dlite_agent.chat.messages import Message

__all__ = ["HandleSigner", "TurnHandle", "TurnHandles"]

_PREFIX = "turn"
_DIGEST_BYTES = 12


@dataclass(frozen=True, slots=True)
class TurnHandle:
    """What a turn's ids and its signed handle stand for.

    Attributes:
        session_id: The session that generated the turn.
        forms: Forms that the turn's message may have.
        previous_key: Chained key of the message before it.
    """

    session_id: str
    forms: tuple[TurnForm, ...]
    previous_key: bytes


class HandleSigner:
    """Makes and checks the handles of one tenant.

    Args:
        secret: Of this machine.
        tenant: Signed into every handle: one of another tenant is worth nothing.
    """

    def __init__(self, secret: bytes, tenant: str = "") -> None:
        self._secret = secret
        self._tenant = tenant

    def sign(self, session_id: str) -> str:
        """A new handle of a session."""
        nonce = secrets.token_hex(4)
        return f"{_PREFIX}_{session_id}_{nonce}_{self._digest(session_id, nonce)}"

    def session_of(self, handle: str) -> str | None:
        """The session of a handle that we signed for this tenant; None for any other text."""
        prefix, _, rest = handle.partition("_")
        fields = rest.rsplit("_", 2)
        if prefix != _PREFIX or len(fields) != len(("session", "nonce", "digest")):
            return None
        session_id, nonce, digest = fields
        expected = self._digest(session_id, nonce)
        is_ours = hmac.compare_digest(digest.encode(errors="replace"), expected.encode())
        return session_id if is_ours else None

    def _digest(self, session_id: str, nonce: str) -> str:
        text = "\0".join((self._tenant, session_id, nonce)).encode("utf-8", "surrogatepass")
        return hmac.new(self._secret, text, "sha256").digest()[:_DIGEST_BYTES].hex()


class TurnHandles:
    """Ids of earlier turns of one tenant, and what they stand for. Owned by one thread.

    Args:
        max_handles: Most ids to remember, at least 1; the least recently used are forgotten.
        signer: Believes handles that are not remembered; None believes none of them.
    """

    def __init__(self, max_handles: int = 16_384, signer: HandleSigner | None = None) -> None:
        self._max_handles = max_handles
        self._signer = signer
        self._handles: OrderedDict[str, TurnHandle] = OrderedDict()

    def __len__(self) -> int:
        """How many ids are known."""
        return len(self._handles)

    def sign(self, session_id: str) -> str:
        """A new handle for the metadata of a turn; empty without a signer."""
        return self._signer.sign(session_id) if self._signer is not None else ""

    def remember(self, ids: Iterable[str], handle: TurnHandle) -> None:
        """Note which turn the ids come from."""
        for turn_id in ids:
            self._handles[turn_id] = handle
            self._handles.move_to_end(turn_id)
        while len(self._handles) > self._max_handles:
            self._handles.popitem(last=False)

    def find(self, turn_id: str | None) -> TurnHandle | None:
        """The turn of an id, or None for an id that is unknown or missing."""
        if not turn_id or turn_id not in self._handles:
            return None
        self._handles.move_to_end(turn_id)
        return self._handles[turn_id]

    def of_answer(self, message: Message) -> TurnHandle | None:
        """The turn of an assistant's message, by its handle, or else by an id of its calls."""
        ids = (message.turn, *(call.id for call in message.tool_calls))
        return next(filter(None, map(self.find, ids)), None)

    def session_of(self, message: Message) -> str | None:
        """The session of the turn that a message is, or that it answers as a tool's result."""
        handle = self.of_answer(message) or self.find(message.tool_call_id)
        if handle is not None:
            return handle.session_id
        if message.turn is None or self._signer is None:
            return None
        return self._signer.session_of(message.turn)
