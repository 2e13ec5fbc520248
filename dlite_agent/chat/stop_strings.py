"""Stop strings: found in a text that comes in pieces, the same for every way to cut it.

The first match to be *complete* ends the text; of several that are complete at the same character
the longest counts. What might still become one is held back, and nothing else is. A character costs
a dictionary look-up or two, however many strings there are (Aho and Corasick 1975).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from dlite_agent.errors import UnsupportedParameterError

__all__ = ["StopMatcher", "StopStrings", "Stretch"]

_MAX_CHARS = 32_768


class StopStrings:
    """A set of stop strings, compiled. Immutable.

    Args:
        strings: None of them empty; 32,768 characters together at most, which take 10 MB.

    Raises:
        UnsupportedParameterError: One is empty or no text, or there are too many.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        _check(strings)
        self.strings = tuple(strings)
        self._next: list[dict[str, int]] = [{}]
        self._depth = [0]
        self._fallback = [0]
        self._match_length = [0]
        for string in strings:
            self._match_length[self._insert(string)] = len(string)
        self._link()

    def step(self, state: int, char: str) -> int:
        """The state after one more character; 0 is the start."""
        while state and char not in self._next[state]:
            state = self._fallback[state]
        return self._next[state].get(char, 0)

    def num_held(self, state: int) -> int:
        """Characters at the end of the text that may be the beginning of a stop string."""
        return self._depth[state]

    def match_length(self, state: int) -> int:
        """Length of the longest string that ends here, or 0."""
        return self._match_length[state]

    def _insert(self, string: str) -> int:
        state = 0
        for char in string:
            following = self._next[state].get(char)
            if following is None:
                following = self._next[state][char] = len(self._next)
                self._next.append({})
                self._depth.append(self._depth[state] + 1)
                self._fallback.append(0)
                self._match_length.append(0)
            state = following
        return state

    def _link(self) -> None:
        """For every state, the longest proper suffix that is a state too; breadth first."""
        waiting = deque(self._next[0].values())
        while waiting:
            state = waiting.popleft()
            for char, following in self._next[state].items():
                fallback = self.step(self._fallback[state], char)
                self._fallback[following] = fallback
                if not self._match_length[following]:
                    self._match_length[following] = self._match_length[fallback]
                waiting.append(following)


class StopMatcher:
    """Reads one text.

    Attributes:
        matched: The string that was found, or None. Nothing may be read after it.
        num_read: Characters read, the match included.
    """

    def __init__(self, stops: StopStrings) -> None:
        self._stops = stops
        self._state = 0
        self._held = ""
        self.matched: str | None = None
        self.num_read = 0

    @property
    def is_holding(self) -> bool:
        """Whether text is held back."""
        return bool(self._held)

    def feed(self, text: str) -> str:
        """Read a piece; returns what is certainly not part of a stop string, in order."""
        stops, state = self._stops, self._state
        for place, char in enumerate(text):
            state = stops.step(state, char)
            length = stops.match_length(state)
            if length:
                seen = self._held + text[: place + 1]
                self.matched = seen[-length:]
                self.num_read += place + 1
                self._held = ""
                return seen[:-length]
        self._state = state
        self.num_read += len(text)
        seen = self._held + text
        keep = len(seen) - stops.num_held(state)
        self._held = seen[keep:]
        return seen[:keep]

    def flush(self) -> str:
        """Forget what was read; returns what was held back."""
        held, self._held, self._state = self._held, "", 0
        return held


class Stretch:
    """Content between two markers, and where in it sampled tokens end.

    Attributes:
        matcher: Reads the content.
    """

    def __init__(self, stops: StopStrings) -> None:
        self.matcher = StopMatcher(stops)
        self._pieces: list[str] = []
        self._num_chars = 0
        self._num_skipped = 0
        self._marks: list[tuple[int, int]] = []

    def read(self, text: str, *, skips_newlines: bool) -> str:
        """Read a piece; returns what the matcher shows of it.

        Args:
            text: Decoded text.
            skips_newlines: Line breaks at the start of the stretch are layout.
        """
        self._pieces.append(text)
        self._num_chars += len(text)
        if skips_newlines and not self.matcher.num_read:
            content = text.lstrip("\n")
            self._num_skipped += len(text) - len(content)
            text = content
        return self.matcher.feed(text)

    def mark(self, num_tokens: int) -> None:
        """Note that so many tokens of the turn end where the text ends now."""
        self._marks.append((num_tokens, self._num_chars))

    def cut(self) -> tuple[int, str | None]:
        """How many tokens end before the match, and the text from there to the match.

        The text is None where no mark lies before the match.
        """
        matcher = self.matcher
        assert matcher.matched is not None, "nothing was matched"
        stop = self._num_skipped + matcher.num_read - len(matcher.matched)
        for num_tokens, start in reversed(self._marks):
            if start <= stop:
                return num_tokens, "".join(self._pieces)[start:stop]
        return 0, None


def _check(strings: Sequence[str]) -> None:
    for string in strings:
        if not isinstance(string, str) or not string:
            raise UnsupportedParameterError(
                f"stop has {string!r}; use texts of at least one character, or leave it out"
            )
    num_chars = sum(map(len, strings))
    if num_chars > _MAX_CHARS:
        raise UnsupportedParameterError(
            f"stop has {len(strings)} strings of {num_chars} characters together, but the limit is "
            f"{_MAX_CHARS}; send fewer or shorter ones, or cut the answer yourself"
        )
