"""Transcripts in the shape of agents' work, from a seed: how long, how many, how far apart.

Figures after published traces of coding agents: steps a session lognormal with median 33 and 90th
percentile 100, outputs lognormal with median 220 tokens, appended results a mixture of many short
and few long ones. Smaller presets keep the shape and divide the sizes. The text is that of real
tool results, cut and joined by lines, since tokenizers and copying drafters see text.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dlite_agent.chat.messages import JSON, Message, ToolCall, ToolSpec

__all__ = ["PRESETS", "Preset", "generate_transcript"]

_CHARS = 4  # of a token of code, about
_P90 = 1.2816  # standard deviations from the median to the 90th percentile


@dataclass(frozen=True, slots=True)
class Preset:
    """Sizes, in tokens, about.

    Attributes:
        head: System prompt.
        steps: Median of the tool steps.
        steps_p90: Their 90th percentile.
        output: Median of a thought before a call, and of an answer without one.
        result: Median of a short tool result.
        long_result: Most of a long one; one in eight is long.
        steps_a_query: A person speaks again after so many, on average.
    """

    head: int
    steps: int
    steps_p90: int
    output: int
    result: int
    long_result: int
    steps_a_query: int = 8


PRESETS: Mapping[str, Preset] = {
    "ci": Preset(
        head=132, steps=6, steps_p90=7, output=24, result=60, long_result=240, steps_a_query=3
    ),
    "swe": Preset(head=1_500, steps=13, steps_p90=20, output=60, result=300, long_result=3_000),
    "long": Preset(head=5_000, steps=33, steps_p90=100, output=220, result=700, long_result=10_000),
}
"""`ci` takes seconds on two cores; `swe` has the size of SWE-agent's; `long` of whole sessions."""

_TOOL = ToolSpec(
    "bash",
    "Run a command.",
    {
        "type": "object",
        "properties": {"command": {"type": "string"}, "timeout": {"type": "number"}},
    },
)


def generate_transcript(
    preset: str, seed: int, texts: Sequence[str]
) -> tuple[tuple[Message, ...], tuple[ToolSpec, ...]]:
    """A transcript; the same for the same arguments.

    Args:
        preset: Of `PRESETS`.
        seed: Of everything that is drawn.
        texts: Whose lines it is made of.
    """
    sizes, chance = PRESETS[preset], random.Random(f"{preset} {seed}")
    lines = [line for text in texts for line in text.splitlines() if line.strip()]

    def text(num_tokens: float) -> str:
        chosen: list[str] = []
        left = num_tokens * _CHARS
        while left > 0:
            chosen.append(chance.choice(lines))
            left -= len(chosen[-1]) + 1
        return "\n".join(chosen)

    def around(median: float, p90: float) -> float:
        return median * math.exp(chance.gauss(0.0, math.log(p90 / median) / _P90))

    messages = [Message("system", text(sizes.head)), Message("user", text(sizes.result / 2))]
    num_steps = max(2, round(around(sizes.steps, sizes.steps_p90)))
    for number in range(num_steps):
        call_id = f"call_{seed}_{number}"
        command: JSON = {"command": text(10), "timeout": chance.randrange(10, 600)}
        call = ToolCall("bash", command, id=call_id)
        thought = text(around(sizes.output, 7 * sizes.output))
        messages.append(Message("assistant", text(sizes.output / 4), thought, (call,)))
        is_long = chance.random() < 1 / 8
        size = (
            chance.uniform(sizes.result, sizes.long_result)
            if is_long
            else around(sizes.result, 3 * sizes.result)
        )
        messages.append(Message("tool", text(size), tool_call_id=call_id))
        if chance.random() < 1 / sizes.steps_a_query:
            messages.append(Message("assistant", text(sizes.output)))
            messages.append(Message("user", text(sizes.result / 4)))
    messages.append(Message("assistant", text(sizes.output)))
    return tuple(messages), (_TOOL,)
