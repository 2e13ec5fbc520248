"""What an engine remembers of each tenant beside KV. Nothing of one is ever seen by another."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field

from dlite_agent.chat.past_requests import PastRequests
from dlite_agent.chat.renderer import RenderedPrompt, Renderer
from dlite_agent.chat.tool_forms import ToolForms
from dlite_agent.chat.turn_handles import HandleSigner, TurnHandles
from dlite_agent.engine.known_tokens import KnownTokens
from dlite_agent.sessions.journal import Journal
from dlite_agent.sessions.public import PUBLIC

__all__ = ["TenantMemories", "TenantMemory"]

_MAX_HINTS = 4096


@dataclass(slots=True)
class TenantMemory:
    """One tenant's part. Owned by the engine's thread.

    Attributes:
        renderer: Messages to ids; remembers this tenant's segments.
        journal: Sampled ids of earlier turns.
        handles: Ids and handles of earlier turns.
        known: What earlier turns rendered or sampled.
        tools: Lists of tools as they came first.
        past: What its conversations looked like at their last turn.
        fed: Session → [start, stop) of tokens that it computed of a message that is growing.
        hints: Client's hint → session that answered it last.
    """

    renderer: Renderer
    journal: Journal = field(default_factory=Journal)
    handles: TurnHandles = field(default_factory=TurnHandles)
    known: KnownTokens = field(default_factory=KnownTokens)
    tools: ToolForms = field(default_factory=ToolForms)
    past: PastRequests = field(default_factory=PastRequests)
    fed: OrderedDict[str, tuple[int, int]] = field(default_factory=OrderedDict)
    hints: OrderedDict[str, str] = field(default_factory=OrderedDict)

    def note_fed(self, session_id: str, start: int, stop: int) -> None:
        """Note what a session computed of a growing message; the oldest notes are forgotten."""
        first, _ = self.fed.pop(session_id, (start, stop))
        self.fed[session_id] = (min(first, start), stop)
        if len(self.fed) > _MAX_HINTS:
            self.fed.popitem(last=False)

    def take_fed(self, session_id: str, cached: int) -> int:
        """How many tokens that were fed to a session its turn has found; they are forgotten."""
        start, stop = self.fed.pop(session_id, (0, 0))
        return max(0, min(cached, stop) - start)

    def session_of_hint(self, hint: str | None) -> str | None:
        """The session that answered the last turn with this hint."""
        return self.hints.get(hint) if hint is not None else None

    def remember_hint(self, hint: str | None, session_id: str) -> None:
        """Note which session answered; the oldest hints are forgotten."""
        if hint is None:
            return
        self.hints[hint] = session_id
        self.hints.move_to_end(hint)
        if len(self.hints) > _MAX_HINTS:
            self.hints.popitem(last=False)


class TenantMemories:
    """The memories of all tenants, made as they come. Owned by one thread.

    Args:
        renderer: Of the tenant without a name, and the pattern of the others'.
        secret: Signs the handles of turns.
        max_tenants: Most of them, at least 1; the least recently seen is forgotten.
        prepare: Is given each new memory with its tenant, to fill it with what is kept elsewhere.
    """

    def __init__(
        self,
        renderer: Renderer,
        secret: bytes,
        *,
        max_tenants: int = 256,
        prepare: Callable[[str, TenantMemory], None] | None = None,
    ) -> None:
        self._renderer = renderer
        self._secret = secret
        self._max_tenants = max_tenants
        self._prepare = prepare
        self._memories: OrderedDict[str, TenantMemory] = OrderedDict()

    def tenants(self) -> list[str]:
        """Whose memories there are."""
        return list(self._memories)

    def count_new(
        self, tenant: str, prompt: RenderedPrompt, keys: Sequence[bytes], control_ids: Set[int]
    ) -> int:
        """Tokens of a tenant's prompt that are new to it and not public; see `KnownTokens`."""
        num_new = self.of(tenant).known.count_new(prompt, keys, control_ids)
        public = self._memories.get(PUBLIC)
        if public is None:
            return num_new
        return min(num_new, public.known.count_new(prompt, (), control_ids))

    def of(self, tenant: str = "") -> TenantMemory:
        """A tenant's memory; it becomes the one that was seen last."""
        memory = self._memories.get(tenant)
        if memory is None:
            public = self._memories.get(PUBLIC)
            memory = self._memories[tenant] = TenantMemory(
                renderer=self._renderer.sibling() if tenant else self._renderer,
                handles=TurnHandles(signer=HandleSigner(self._secret, tenant)),
            )
            if public is not None:
                memory.tools.learn(public.tools)
            if self._prepare is not None:
                self._prepare(tenant, memory)
        self._memories.move_to_end(tenant)
        if PUBLIC in self._memories:  # it is not forgotten for its tenants
            self._memories.move_to_end(PUBLIC)
        if len(self._memories) > self._max_tenants:
            self._memories.popitem(last=False)
        return memory
