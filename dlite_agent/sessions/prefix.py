"""How a prompt relates to the tokens that a session holds."""

from __future__ import annotations

from dataclasses import dataclass

from dlite_agent.errors import RequestError

__all__ = ["SyncReport", "check_prompt", "common_prefix_length"]


@dataclass(frozen=True, slots=True)
class SyncReport:
    """What a sync did, in tokens.

    Attributes:
        cached: Prompt tokens whose KV was there.
        prefilled: Rows that were forwarded; with `cached`, the whole prompt when `is_complete`.
        rewound: Tokens of the session that the prompt does not repeat, and that were dropped.
        origin: `"prefix"` or `"cold"`; whoever chose the session may know better.
        diverged_at: The first token of the session that the prompt does not repeat, or None.
        is_complete: False when `should_stop` ended the prefill; what was prefilled is kept.
    """

    cached: int
    prefilled: int
    rewound: int
    origin: str
    diverged_at: int | None
    is_complete: bool = True


def common_prefix_length(left: list[int], right: list[int]) -> int:
    """How many ids two lists share from the start; compares in C and halves where they differ."""
    limit = min(len(left), len(right))
    if left[:limit] == right[:limit]:
        return limit
    low, high = 0, limit  # left[:low] == right[:low], and a difference lies before high
    while high - low > 1:
        middle = (low + high) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle
    return low


def check_prompt(prompt: list[int], vocab_size: int) -> None:
    """Refuse a prompt that is empty or names an id outside the vocabulary.

    Raises:
        RequestError: It does.
    """
    if not prompt:
        raise RequestError("the prompt has no tokens; send at least one")
    lowest, highest = min(prompt), max(prompt)
    if lowest < 0 or highest >= vocab_size:
        bad = lowest if lowest < 0 else highest
        raise RequestError(
            f"the prompt holds token id {bad!r}, but the vocabulary has {vocab_size}; "
            "use the model's own tokenizer"
        )
