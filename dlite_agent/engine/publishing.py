"""Public prefixes: what the operator declares to be everybody's, so that it is computed once.

Between tenants nothing is shared. A fleet whose tenants all begin with the operator's own system
prompt and tools would compute and keep that once a tenant. What is declared public is computed
before anybody asks, pinned, and forked by whoever's prompt begins with it: whether it is cached
tells nobody anything, since it always is. It ends where the declared messages end, so nothing that
a tenant says is ever a part of it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

from dlite_agent.backend import ChatRequest
from dlite_agent.chat.messages import Message
from dlite_agent.chat.openai_format import (
    messages_from_openai,
    template_kwargs_from_openai,
    tools_from_openai,
)
from dlite_agent.chat.renderer import RenderedPrompt, Segment
from dlite_agent.engine.admission import AdmittedRequest
from dlite_agent.engine.loading import LoadedModel
from dlite_agent.engine.sure_prefix import sure_prefix
from dlite_agent.errors import ConfigurationError, DLiteError
from dlite_agent.sessions.kept import ANSWER_START, HINT, TENANT
from dlite_agent.sessions.public import PUBLIC
from dlite_agent.sessions.session import Session

__all__ = ["keep_public", "public_prefix", "publish_files", "read_public_file"]


def public_prefix(admitted: AdmittedRequest) -> RenderedPrompt:
    """The prompt up to the end of the last message, as it is in any prompt that goes on."""
    messages = admitted.request.messages
    prompt, length = sure_prefix(admitted, lambda text: (*messages, Message("user", text)))
    last = len(messages) - 1
    ends = (s.stop for s in prompt.segments if s.message_index == last)
    length = min(next(ends, length), length)
    return RenderedPrompt(tuple(prompt.token_ids[:length]), (Segment(None, length, length),))


def keep_public(model: LoadedModel, admitted: AdmittedRequest, session: Session) -> None:
    """Pin a session that holds a public prefix, and know its tokens; saves it to the disk tier.

    Args:
        model: The parts.
        admitted: What was published.
        session: Holds all of it, and is still claimed.
    """
    ids = session.token_ids
    session.is_pinned = True
    admitted.memory.known.add(ids, (), ())
    model.tiers.save(session, {TENANT: PUBLIC, HINT: "", ANSWER_START: str(len(ids))})


def publish_files(
    paths: tuple[str, ...],
    run: Callable[[ChatRequest], Iterator[object]],
    report: Callable[[str, float], None],
) -> None:
    """Publish what an engine's `public_prefixes` name, before its first request.

    Args:
        paths: See `read_public_file`.
        run: Runs a request alone.
        report: Hears how far it is.

    Raises:
        ConfigurationError: A file cannot be used, or its messages cannot.
    """
    for number, path in enumerate(paths):
        report("public prefixes", number / len(paths))
        request = read_public_file(Path(path).expanduser())
        try:
            for _ in run(request):
                pass
        except DLiteError as error:
            raise ConfigurationError(f"public_prefixes: {path!r}: {error}") from error


def read_public_file(path: Path) -> ChatRequest:
    """A file of `messages`, `tools` and `chat_template_kwargs`, as in a request of OpenAI's form.

    Raises:
        ConfigurationError: It cannot be read, or has another form.
    """
    try:
        body = json.loads(path.read_text(encoding="utf-8"))
        return ChatRequest(
            messages_from_openai(body["messages"]),
            tools_from_openai(body.get("tools")),
            template_kwargs=template_kwargs_from_openai(body),
            is_partial=True,
            is_public=True,
        )
    except (OSError, ValueError, TypeError, KeyError, AttributeError, DLiteError) as error:
        raise ConfigurationError(
            f"public_prefixes has {str(path)!r}, which cannot be used ({error!r}); write a JSON "
            'object with "messages" and, if there are any, "tools", as in a request'
        ) from error
