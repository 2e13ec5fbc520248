"""A tokenizer without files."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping

from dlite_agent.chat.messages import JSON

__all__ = ["ByteTokenizer"]


class ByteTokenizer:
    """One token a byte, and the control tokens and message format of Qwen3 behind them.

    Ids 0 to 255 are bytes; `control_tokens` follow. Implements `chat.template.Tokenizer`.
    """

    _CONTROL = (
        "<|endoftext|> <|im_start|> <|im_end|> <tool_call> </tool_call> <tool_response> "
        "</tool_response> <think> </think>"
    ).split()

    def __init__(self) -> None:
        self._ids = {spelling: 256 + i for i, spelling in enumerate(self._CONTROL)}
        self._spelled = re.compile("(" + "|".join(map(re.escape, self._CONTROL)) + ")")

    @property
    def control_tokens(self) -> Mapping[str, int]:
        """Spelling and id of every control token."""
        return self._ids

    def encode_template(self, text: str) -> list[int]:
        """Encode text in which spelled control tokens become control ids."""
        ids: list[int] = []
        for part in self._spelled.split(text):
            ids += [self._ids[part]] if part in self._ids else self.encode_untrusted(part)
        return ids

    def encode_untrusted(self, text: str) -> list[int]:
        """Encode text as bytes; a lone surrogate becomes a question mark."""
        return list(text.encode(errors="replace"))

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token: a control token's spelling, nothing for an id without a token."""
        if token_id < 256:
            return bytes([token_id])
        number = token_id - 256
        return self._CONTROL[number].encode() if number < len(self._CONTROL) else b""

    def decode(self, token_ids: Iterable[int]) -> str:
        """Text of some ids; broken UTF-8 becomes replacement characters."""
        return b"".join(map(self.token_bytes, token_ids)).decode(errors="replace")

    def apply_template(
        self,
        messages: list[dict[str, JSON]],
        tools: list[dict[str, JSON]] | None,
        add_generation_prompt: bool,
        /,
        **variables: JSON,
    ) -> str:
        """Render messages in Qwen3's format, with its tool protocol and without its prose.

        As in Qwen3, thoughts before the last user message are dropped, and `enable_thinking=False`
        opens the answer with an empty thought.
        """
        rest = list(messages)
        head = [_content(rest.pop(0))] if rest and rest[0]["role"] == "system" else []
        if tools:
            listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
            head.append(f"# Tools\n\n<tools>\n{listed}\n</tools>")
        text = "<|im_start|>system\n{}<|im_end|>\n".format("\n\n".join(head)) if head else ""
        last_user = max((i for i, m in enumerate(rest) if m["role"] == "user"), default=-1)
        roles = [None, *(message["role"] for message in rest), None]
        for i, message in enumerate(rest):
            if message["role"] == "tool":
                text += "" if roles[i] == "tool" else "<|im_start|>user"
                text += f"\n<tool_response>\n{_content(message)}\n</tool_response>"
                text += "" if roles[i + 2] == "tool" else "<|im_end|>\n"
            else:
                is_answer = message["role"] == "assistant"
                body = _assistant(message, i > last_user) if is_answer else _content(message)
                text += f"<|im_start|>{message['role']}\n{body}<|im_end|>\n"
        if add_generation_prompt:
            text += "<|im_start|>assistant\n"
            text += "<think>\n\n</think>\n\n" if variables.get("enable_thinking") is False else ""
        return text


def _content(message: dict[str, JSON]) -> str:
    return str(message.get("content") or "")


def _assistant(message: dict[str, JSON], keeps_thoughts: bool) -> str:
    text = content = _content(message)
    reasoning = message.get("reasoning_content")
    if reasoning and keeps_thoughts:
        text = f"<think>\n{str(reasoning).strip()}\n</think>\n\n{text}"
    calls = message.get("tool_calls")
    for number, call in enumerate(calls if isinstance(calls, list) else []):
        function = call["function"] if isinstance(call, dict) else None
        assert isinstance(function, dict), "a call has a function"
        arguments = function["arguments"]
        if not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        name = json.dumps(function["name"], ensure_ascii=False)
        text += "\n" if content or number else ""
        text += f'<tool_call>\n{{"name": {name}, "arguments": {arguments}}}\n</tool_call>'
    return text
