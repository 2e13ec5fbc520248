"""What was sampled in each assistant turn, found again by key; outlives the KV that it describes.

The journal knows no message: keys and digests are opaque bytes, computed by whoever knows the
messages. Two turns can look the same to a client and differ in their hidden thought, so a key has
several records, told apart by the digest of that thought.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from dlite_agent.errors import ConfigurationError

__all__ = ["Journal", "JournalRecord"]

# Key, digest, id, record, array and entries of two dicts, by tracemalloc on CPython 3.11.
_OVERHEAD_BYTES = 640
_TOKEN_BYTES = 4


@dataclass(frozen=True, slots=True)
class JournalRecord:
    """One assistant turn as it was generated.

    Attributes:
        token_ids: What followed the role header: whatever the generation prompt put there (an empty
            thought), then every sampled id, the stop token included. Read-only; `Journal.find`
            gives a compact array.
        reasoning_digest: Digest of the turn's thought; empty when it had none.
        session_id: The session that generated it.
    """

    token_ids: Sequence[int]
    reasoning_digest: bytes = b""
    session_id: str = ""

    @property
    def nbytes(self) -> int:
        """Bytes that a journal charges for this record."""
        return _OVERHEAD_BYTES + _TOKEN_BYTES * len(self.token_ids)


class Journal:
    """Records of assistant turns under a byte budget; the least recently used go first.

    Costs 4 bytes a token and about 600 bytes a turn. Owned by one thread.

    Args:
        max_bytes: Most bytes of all records together.

    Raises:
        ConfigurationError: `max_bytes` is below 1.
    """

    def __init__(self, max_bytes: int = 64 * 2**20) -> None:
        if max_bytes < 1:
            raise ConfigurationError(
                f"the journal's max_bytes is {max_bytes!r}, but must be at least 1; "
                "leave it out for the default"
            )
        self.max_bytes = max_bytes
        self._records: OrderedDict[tuple[bytes, bytes], JournalRecord] = OrderedDict()
        self._digests: dict[bytes, list[bytes]] = {}  # per key, the newest last
        self._nbytes = 0
        self.listener: Callable[[bytes, JournalRecord], None] | None = None
        """Is told each record that is kept."""

    def __len__(self) -> int:
        """How many turns are remembered."""
        return len(self._records)

    @property
    def nbytes(self) -> int:
        """Bytes of all records, overhead included."""
        return self._nbytes

    def record(self, key: bytes, record: JournalRecord) -> None:
        """Remember a turn, in place of one with the same key and thought; others may be evicted.

        A record larger than the whole budget is not kept, and evicts nothing.
        """
        self._forget((key, record.reasoning_digest))
        if record.nbytes > self.max_bytes:
            return
        compact = replace(record, token_ids=array("i", record.token_ids))
        self._records[key, record.reasoning_digest] = compact
        self._digests.setdefault(key, []).append(record.reasoning_digest)
        self._nbytes += compact.nbytes
        if self.listener is not None:
            self.listener(key, compact)
        while self._nbytes > self.max_bytes:
            self._forget(next(iter(self._records)))

    def find(self, key: bytes) -> tuple[JournalRecord, ...]:
        """All records of a key, the newest first; empty when there are none. Marks them as used."""
        records = []
        for digest in self._digests.get(key, ()):
            self._records.move_to_end((key, digest))
            records.append(self._records[key, digest])
        records.reverse()
        return tuple(records)

    def records(self) -> Iterator[tuple[bytes, JournalRecord]]:
        """All records with their keys, the least recently used first."""
        for (key, _), record in self._records.items():
            yield key, record

    def forget(self, session_ids: Collection[str]) -> None:
        """Forget the turns that these sessions generated."""
        places = [
            place for place, record in self._records.items() if record.session_id in session_ids
        ]
        for place in places:
            self._forget(place)

    def clear(self) -> None:
        """Forget everything."""
        self._records.clear()
        self._digests.clear()
        self._nbytes = 0

    def _forget(self, place: tuple[bytes, bytes]) -> None:
        record = self._records.pop(place, None)
        if record is None:
            return
        self._nbytes -= record.nbytes
        key, digest = place
        digests = self._digests[key]
        digests.remove(digest)
        if not digests:
            del self._digests[key]
