"""The checkpoint's chat template: what it is given, and what was found out about it at load."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Literal, Protocol

from dlite_agent.chat.markers import FUNCTION, THINK, THINK_END
from dlite_agent.chat.messages import JSON, Message, ToolCall, ToolSpec
from dlite_agent.errors import RequestError

__all__ = [
    "CallForm",
    "TemplateTraits",
    "Tokenizer",
    "number_messages",
    "probe_template",
    "template_message",
    "template_messages",
    "template_tools",
    "thought_closing",
]

CallForm = Literal["json", "xml"]
"""How calls are written: hermes JSON (Qwen3), or tags around each parameter (Qwen3-Coder)."""

_PROBE = "\U000f0000"  # private use: in no template


class Tokenizer(Protocol):
    """A vocabulary and the chat template that belongs to it."""

    @property
    def control_tokens(self) -> Mapping[str, int]:
        """Spelling (two characters or more) and id of every token that only a template makes."""
        ...

    def encode_template(self, text: str) -> list[int]:
        """Encode text in which spelled control tokens become control ids."""
        ...

    def encode_untrusted(self, text: str) -> list[int]:
        """Encode text in which they stay text: the result holds no control id."""
        ...

    def apply_template(
        self,
        messages: list[dict[str, JSON]],
        tools: list[dict[str, JSON]] | None,
        add_generation_prompt: bool,
        /,
        **variables: JSON,
    ) -> str:
        """Render messages to text.

        Raises:
            RequestError: The template refuses them.
        """
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token: a control token's spelling, nothing for an id without a token."""
        ...


@dataclass(frozen=True, slots=True)
class TemplateTraits:
    """What a template does, found by rendering small conversations.

    Attributes:
        header: What opens an assistant turn both in the history and in the generation prompt, e.g.
            `<|im_start|>assistant` and a newline. Empty where the two share nothing: no turn can be
            spliced then.
        opener: The first control token of the header, or empty.
        closer: The control token that ends an assistant turn, or empty.
        strips_thoughts: Whether thoughts of turns before the last user message are dropped.
        arguments_as_text: Whether calls must carry their arguments as JSON text.
        arguments_as_mapping: Whether they must be a mapping.
        single_system: Whether a system message may stand at the start only.
        calls: How it writes calls.
    """

    header: str = ""
    opener: str = ""
    closer: str = ""
    strips_thoughts: bool = False
    arguments_as_text: bool = False
    arguments_as_mapping: bool = False
    single_system: bool = False
    calls: CallForm = "json"


def number_messages(
    messages: Sequence[Message], traits: TemplateTraits
) -> list[tuple[int, Message]]:
    """Pair every message with its index, changed to what the template accepts.

    An assistant turn without a thought whose content mentions `</think>` gets an empty thought, so
    that no template looks for one in the content. Where system messages may stand at the start
    only, leading ones are joined into the first and later ones become user messages.
    """
    numbered = [
        (i, replace(m, reasoning="") if _seems_to_think(m) else m) for i, m in enumerate(messages)
    ]
    if not traits.single_system:
        return numbered
    leading = [m.content for _, m in takewhile(lambda pair: pair[1].role == "system", numbered)]
    if len(leading) > 1:
        first = replace(messages[0], content="\n\n".join(leading))
        numbered = [(0, first), *numbered[len(leading) :]]
    return [(i, replace(m, role="user") if i and m.role == "system" else m) for i, m in numbered]


def template_messages(
    messages: Sequence[Message], traits: TemplateTraits | None = None
) -> list[dict[str, JSON]]:
    """Turn normalised messages into what a chat template reads.

    Args:
        messages: Normalised messages.
        traits: Of the template; None: a template that accepts everything that Qwen3's accepts.
    """
    traits = traits or TemplateTraits()
    return [template_message(message, traits) for _, message in number_messages(messages, traits)]


def template_message(message: Message, traits: TemplateTraits) -> dict[str, JSON]:
    """Turn one message into a dict without the keys that have no value."""
    rendered: dict[str, JSON] = {"role": message.role, "content": message.content}
    if message.reasoning is not None:
        rendered["reasoning_content"] = message.reasoning
    if message.tool_calls:
        rendered["tool_calls"] = [_template_call(call, traits) for call in message.tool_calls]
    if message.tool_call_id is not None:
        rendered["tool_call_id"] = message.tool_call_id
    if message.name is not None:
        rendered["name"] = message.name
    return rendered


def template_tools(tools: Sequence[ToolSpec]) -> list[dict[str, JSON]] | None:
    """Turn tools into what a chat template reads; None without any."""
    if not tools:
        return None
    rendered: list[dict[str, JSON]] = []
    for tool in tools:
        function: dict[str, JSON] = {"name": tool.name}
        if tool.description:
            function["description"] = tool.description
        if tool.parameters:
            function["parameters"] = tool.parameters
        rendered.append({"type": "function", "function": function})
    return rendered


def probe_template(tokenizer: Tokenizer) -> TemplateTraits:
    """Render a few small conversations and note what the template does with them."""
    header, closer = _probe_turn(tokenizer)
    as_mapping = _probe_call(tokenizer, {"k": "v"})
    as_text = _probe_call(tokenizer, '{"k": "v"}')
    is_misread = as_mapping is None or str({"k": "v"}) in as_mapping
    two_systems = [Message("system", "a"), Message("user", "b"), Message("system", "c")]
    return TemplateTraits(
        header=header,
        opener=_first_control(header, tokenizer),
        closer=closer,
        strips_thoughts=_probe_thoughts(tokenizer),
        arguments_as_text=is_misread and as_text is not None,
        arguments_as_mapping=as_text is None,
        single_system=_try_render(tokenizer, [*two_systems, Message("user", "d")]) is None
        and _try_render(tokenizer, [*two_systems[:2]]) is not None,
        calls="xml" if FUNCTION + "f>" in (as_mapping or as_text or "") else "json",
    )


def thought_closing(tokenizer: Tokenizer) -> tuple[int, ...] | None:
    """Ids with which an answer's thought ends: `</think>` and the line breaks behind it.

    None where the vocabulary has no such token. Renders a small conversation.
    """
    if THINK_END not in tokenizer.control_tokens:
        return None
    turn = [Message("user", "a"), Message("assistant", _PROBE, reasoning="b")]
    _, _, rest = (_try_render(tokenizer, turn) or "").partition(THINK_END)
    gap, found, _ = rest.partition(_PROBE)
    closing = THINK_END + (gap if found and not gap.strip() else "")
    return tuple(tokenizer.encode_template(closing))


def _seems_to_think(message: Message) -> bool:
    return (
        message.role == "assistant" and message.reasoning is None and THINK_END in message.content
    )


def _template_call(call: ToolCall, traits: TemplateTraits) -> dict[str, JSON]:
    arguments = call.arguments
    if traits.arguments_as_mapping and not isinstance(arguments, dict):
        arguments = {"arguments": arguments}
    if traits.arguments_as_text and not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    function: dict[str, JSON] = {"name": call.name, "arguments": arguments}
    rendered: dict[str, JSON] = {"type": "function", "function": function}
    if call.id is not None:
        rendered["id"] = call.id
    return rendered


def _probe_turn(tokenizer: Tokenizer) -> tuple[str, str]:
    """Find what opens and what closes an assistant turn; empty where no opening is common."""
    question, answer = Message("user", "a"), Message("assistant", _PROBE)
    before = _try_render(tokenizer, [question]) or ""
    prompt = _try_render(tokenizer, [question], add_generation_prompt=True) or ""
    after = _try_render(tokenizer, [question, answer, question]) or ""
    if not (before and prompt.startswith(before) and after.startswith(before) and _PROBE in after):
        return "", ""
    opening, _, rest = after[len(before) :].partition(_PROBE)
    pairs = zip(opening, prompt[len(before) :], strict=False)
    header = "".join(a for a, _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    header = header.split(THINK)[0]
    closer = _first_control(rest, tokenizer)
    return (header, closer) if _first_control(header, tokenizer) and closer else ("", "")


def _probe_call(tokenizer: Tokenizer, arguments: JSON) -> str | None:
    call = Message("assistant", tool_calls=(ToolCall("f", arguments, id="a"),))
    result = Message("tool", "c", tool_call_id="a")
    return _try_render(tokenizer, [Message("user", "b"), call, result])


def _probe_thoughts(tokenizer: Tokenizer) -> bool:
    answer = Message("assistant", "b", reasoning=_PROBE)
    rendered = _try_render(tokenizer, [Message("user", "a"), answer, Message("user", "c")])
    return rendered is not None and _PROBE not in rendered


def _try_render(
    tokenizer: Tokenizer, messages: Sequence[Message], *, add_generation_prompt: bool = False
) -> str | None:
    try:
        return tokenizer.apply_template(template_messages(messages), None, add_generation_prompt)
    except RequestError:
        return None


def _first_control(text: str, tokenizer: Tokenizer) -> str:
    found = [(text.find(token), -len(token), token) for token in tokenizer.control_tokens]
    return min((hit for hit in found if hit[0] >= 0), default=(0, 0, ""))[2]
