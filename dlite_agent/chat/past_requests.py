"""What conversations looked like at their last turn, to say what changed when one comes back."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from dlite_agent.chat.message_keys import lone_keys
from dlite_agent.chat.messages import JSON, Message, ToolSpec

__all__ = ["PastRequest", "PastRequests"]

_MESSAGE_BYTES = 400  # of a message and its key, beside its text


@dataclass(frozen=True, slots=True)
class PastRequest:
    """A request, and the answer to it where there was one.

    Attributes:
        messages: The request's, and the answer.
        tools: As they were sent.
        template_kwargs: Variables of the template.
        keys: Of each message by itself (`message_keys.lone_keys`).
    """

    messages: tuple[Message, ...]
    tools: tuple[ToolSpec, ...] = ()
    template_kwargs: Mapping[str, JSON] = field(default_factory=dict)
    keys: tuple[bytes, ...] = ()

    @classmethod
    def of(
        cls,
        messages: Sequence[Message],
        tools: Sequence[ToolSpec] = (),
        template_kwargs: Mapping[str, JSON] | None = None,
    ) -> PastRequest:
        """A request with its keys."""
        kwargs = dict(template_kwargs or {})
        return cls(tuple(messages), tuple(tools), kwargs, lone_keys(messages))

    def with_answer(self, answer: Message) -> PastRequest:
        """The same, and what was answered."""
        keys = (*self.keys, *lone_keys([answer]))
        return PastRequest((*self.messages, answer), self.tools, self.template_kwargs, keys)

    @property
    def nbytes(self) -> int:
        """About the bytes that keeping it costs."""
        texts = (len(m.content) + len(m.reasoning or "") for m in self.messages)
        return sum(texts) + _MESSAGE_BYTES * len(self.messages)


class PastRequests:
    """The last request of each session, of one tenant. Owned by one thread.

    Args:
        max_bytes: Budget; the least recently used are forgotten.
    """

    def __init__(self, max_bytes: int = 16 * 2**20) -> None:
        self._max_bytes = max_bytes
        self._nbytes = 0
        self._requests: OrderedDict[str, PastRequest] = OrderedDict()

    def __len__(self) -> int:
        """How many there are."""
        return len(self._requests)

    def __contains__(self, session_id: str) -> bool:
        """Whether a session's last request is known."""
        return session_id in self._requests

    def remember(self, session_id: str, request: PastRequest) -> None:
        """Keep a session's last request in place of the one before."""
        before = self._requests.pop(session_id, None)
        self._nbytes += request.nbytes - (before.nbytes if before is not None else 0)
        self._requests[session_id] = request
        while self._nbytes > self._max_bytes:
            self._nbytes -= self._requests.popitem(last=False)[1].nbytes

    def closest(self, request: PastRequest) -> PastRequest | None:
        """The one that shares most messages, wherever they stand; None where none shares any."""
        wanted = set(request.keys)
        best, most = None, 0
        for past in reversed(self._requests.values()):
            shared = len(wanted.intersection(past.keys))
            if shared > most:
                best, most = past, shared
        return best
