"""What is sure to come of a prompt whose end is not known yet."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dlite_agent.chat.messages import Message
from dlite_agent.chat.renderer import RenderedPrompt
from dlite_agent.engine.admission import AdmittedRequest
from dlite_agent.sessions.prefix import common_prefix_length

__all__ = ["sure_prefix"]

# What is unknown may begin with either, and no token before it merges with both.
_BEGINNINGS = ("a", "\n")


def sure_prefix(
    admitted: AdmittedRequest, going_on: Callable[[str], Sequence[Message]]
) -> tuple[RenderedPrompt, int]:
    """Render a conversation with two ends of what is unknown, and compare.

    Args:
        admitted: Its tools, template variables and splices are used.
        going_on: The messages, with a text where nothing is known.

    Returns:
        One of the prompts, without what asks for an answer, and how many of its ids both have.
    """
    request = admitted.request
    one, other = (
        admitted.memory.renderer.render(
            going_on(text),
            request.tools,
            template_kwargs=request.template_kwargs,
            splices=admitted.plan.splices,
            add_generation_prompt=False,
        )
        for text in _BEGINNINGS
    )
    return one, common_prefix_length(list(one.token_ids), list(other.token_ids))
