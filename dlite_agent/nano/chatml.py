"""Text and tokens of nano: tokenizer, chat template, and conversations as training rows."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import jinja2
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

__all__ = [
    "CONTROL_TOKENS",
    "Conversation",
    "Row",
    "control_id",
    "encode_conversation",
    "render",
    "template_text",
    "train_tokenizer",
]

CONTROL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
)

# Copying is nano's main skill, so a name must be the same tokens wherever it stands: a space
# joins only the words of this list, which holds no name of the world; JSON escapes are tokens of
# their own; digits and newlines stand alone. The boilerplate of schemas, calls and observations
# is kept whole, which makes a turn a third shorter.
_SPACED = """
above action after again agent all an analysis and Any any are arguments as At at bash be before
below better between bug bugs but by Call call can cannot case cases changes codebase Command
command commands content continue Create current dash differs directory divided Do do doing done
double Edit edit else empty ensure environment equals even Every examples execute executed
executes explain explaining fails file filename files finding finish first Fix fix followed
following For for from function get half has Hello help high How how However I If if implement in
include instead is issue it items its know lambda larger largest last least Let letter letters
line lines list look low many minus missing most multiple MUST named necessary need next not
number numbers occurrence occurrences occurs odd of on one only operating or other persistent
Please please plus possible prefix problems Python read reading reasoning relevant remainder
repeated Replace repositories repository reproduce resolve response return reverse robust Run run
running script see SHOULD should smaller smallest so solve spaces specific square starts structure
Submit subshell system task Test test tests text thank that The the this times to tool tools
understand understanding Use use Useful very View want weather well What what where whether which
with without work workflow working write You you Your your
""".split()
_WHOLE = (
    '{"type": "function", "function": {"name": "',
    '", "description": "',
    '", "parameters": {',
    '"properties": {',
    '"type": "object"',
    '{"type": "string"',
    '"required": ["',
    '{"name": "',
    '", "arguments": {',
    '"path": "',
    '", "old": "',
    '", "new": "',
    '"command": "',
    '{\n  "returncode": ',
    ',\n  "output": "',
)
_SPLIT = "|".join(re.escape(text) for text in _WHOLE) + (
    rf"| (?:{'|'.join(_SPACED)})(?![\p{{L}}_])"
    r'|\\[nt"\\]|\\u[0-9a-f]{4}|\p{N}|\p{L}+'
    r"| ?[^\s\p{L}\p{N}\\_]+|_|\\|\n+|[^\S\n]+(?!\S)|\s"
)
_NON_ASSISTANT_WEIGHT = 0.05

Message = dict[str, object]


@dataclass(frozen=True, slots=True)
class Conversation:
    """What the oracle writes: messages and tools in OpenAI form.

    Attributes:
        messages: All messages; assistant turns carry `reasoning_content` where thinking is on.
        tools: Tool schemas.
        thinking: Whether the assistant's turns were made with thinking on.
        unlearned: Indices of assistant messages that must not be imitated (deliberate mistakes).
        forget: Render every assistant turn but the last without its thoughts.
    """

    messages: Sequence[Mapping[str, object]]
    tools: Sequence[Mapping[str, object]] = ()
    thinking: bool = True
    unlearned: frozenset[int] = field(default_factory=frozenset)
    forget: bool = False


@dataclass(frozen=True, slots=True)
class Row:
    """Token ids and the loss weight of predicting each of them."""

    ids: list[int]
    weights: list[float]


def template_text() -> str:
    """Read the chat template from the package."""
    path = Path(__file__).parent / "assets" / "chat_template.jinja"
    return path.read_text(encoding="utf-8").rstrip("\n")


@lru_cache(maxsize=1)
def _template() -> jinja2.Template:
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    return environment.from_string(template_text())


def render(
    messages: Sequence[Mapping[str, object]],
    tools: Sequence[Mapping[str, object]] = (),
    *,
    add_generation_prompt: bool = False,
    enable_thinking: bool = True,
) -> str:
    """Render messages as transformers' `apply_chat_template` does with this template."""
    return _template().render(
        messages=list(messages),
        tools=list(tools) or None,
        add_generation_prompt=add_generation_prompt,
        enable_thinking=enable_thinking,
    )


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train a byte-complete BPE on texts; the control tokens follow its vocabulary.

    Args:
        texts: Training texts without control tokens.
        vocab_size: Size with the control tokens.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(CONTROL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
        min_frequency=3,
    )
    tokenizer.train_from_iterator(texts, trainer)
    control = [AddedToken(t, special=t.startswith("<|"), normalized=False) for t in CONTROL_TOKENS]
    tokenizer.add_tokens(control)
    return tokenizer


def control_id(tokenizer: Tokenizer, token: str) -> int:
    """Look up the id of a control token, which every tokenizer of nano has."""
    found = tokenizer.token_to_id(token)
    assert found is not None, token
    return found


_EMPTY_THOUGHT = "\ue000"


def encode_conversation(tokenizer: Tokenizer, conversation: Conversation) -> Row:
    """Encode a conversation as it stands in a session after its last turn, with weights.

    Every learned turn is written as it is generated: with its thoughts, or with the empty
    thoughts that the generation prompt holds where thinking is off.
    """
    messages: list[Message] = [dict(message) for message in conversation.messages]
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    quiet = [i in conversation.unlearned for i in turns]
    for i in turns:
        if conversation.forget and i != turns[-1]:
            quiet[turns.index(i)] = True
            messages[i].pop("reasoning_content", None)
        elif not conversation.thinking:
            messages[i]["reasoning_content"] = _EMPTY_THOUGHT
    text = render(messages, conversation.tools).removesuffix("\n")
    text = text.replace(f"<think>\n{_EMPTY_THOUGHT}\n</think>", "<think>\n\n</think>")
    ids = tokenizer.encode(text).ids
    return Row(ids, _weights(tokenizer, ids, quiet, thinking=conversation.thinking))


def _weights(
    tokenizer: Tokenizer, ids: list[int], quiet: list[bool], *, thinking: bool
) -> list[float]:
    start, end, thought_end = (
        control_id(tokenizer, token) for token in ("<|im_start|>", "<|im_end|>", "</think>")
    )
    opening, gap = (tokenizer.encode(text).ids for text in ("assistant\n", "\n\n"))
    weights = [_NON_ASSISTANT_WEIGHT] * len(ids)
    turn = 0
    for i, token in enumerate(ids):
        begin = i + 1 + len(opening)
        if token != start or ids[i + 1 : begin] != opening:
            continue
        if turn < len(quiet) and not quiet[turn]:
            stop = ids.index(end, begin) + 1
            if not thinking and thought_end in ids[begin:stop]:
                begin = ids.index(thought_end, begin) + 1 + len(gap)  # the prompt holds the gap too
            elif not thinking:
                begin += 1  # a turn of the history: its first token follows no generation prompt
            weights[begin:stop] = [1.0] * (stop - begin)
        elif turn < len(quiet):
            stop = ids.index(end, begin) + 1
            weights[begin:stop] = [0.0] * (stop - begin)
        turn += 1
    return weights
