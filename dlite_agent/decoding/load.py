"""What else is in the forward that a turn's draft will be verified in."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Load"]


@dataclass(slots=True)
class Load:
    """The other turns of the next forward. A scheduler sets it before it resumes a turn.

    Whoever drafts reads it: each drafted row makes the forward longer for all of its turns. One
    object is shared; used by one thread at a time. All zero means that the turn is alone.

    Attributes:
        turns: Other turns that have rows in the forward, a prefilling one included.
        rows: Rows of all of them.
        drafted: Those of them that hold drafted tokens.
    """

    turns: int = 0
    rows: int = 0
    drafted: int = 0

    def set(self, *, turns: int, rows: int, drafted: int = 0) -> None:
        """Say what the other turns bring.

        Raises:
            ValueError: There are fewer rows than turns and drafted tokens.
        """
        if not 0 <= turns + drafted <= rows:
            raise ValueError(
                f"turns is {turns!r}, rows {rows!r} and drafted {drafted!r}; each turn has a row "
                "of its own and one for each drafted token"
            )
        self.turns, self.rows, self.drafted = turns, rows, drafted
