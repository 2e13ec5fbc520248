"""The journal of one tenant in a file of lines, each with a digest of its own.

Lines are appended, so a crash costs the last one at most. What is damaged is left out: its turn is
rendered as it comes back, which may cost a prefill and is never wrong.
"""

from __future__ import annotations

import base64
import hashlib
import json
import logging
from array import array
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path

from dlite_agent.sessions.atomic_file import make_folder, write_file
from dlite_agent.sessions.disk_writer import DiskWriter
from dlite_agent.sessions.journal import Journal, JournalRecord

__all__ = [
    "JournalFile",
    "forget_turns",
    "journal_line",
    "journal_path",
    "journal_text",
    "load_journal",
]

logger = logging.getLogger(__name__)

_FORMAT = 1
_DIGEST_CHARS = 16


def journal_line(key: bytes, record: JournalRecord) -> bytes:
    """A record as a line."""
    content = {
        "key": key.hex(),
        "reasoning": record.reasoning_digest.hex(),
        "session_id": record.session_id,
        "ids": base64.b64encode(array("i", record.token_ids).tobytes()).decode(),
    }
    return _signed(json.dumps(content, separators=(",", ":")).encode())


def journal_text(journal: Journal, made_by: str) -> bytes:
    """A whole file.

    Args:
        journal: What is in it.
        made_by: Digests of the tokenizer and the template: of other ones the ids mean nothing.
    """
    head = json.dumps({"format": _FORMAT, "made_by": made_by}).encode()
    lines = [journal_line(key, record) for key, record in journal.records()]
    return b"".join([_signed(head), *lines])


def load_journal(path: Path, journal: Journal, made_by: str) -> bool:
    """Read a file into an empty journal.

    Returns:
        The file holds what the journal holds then, and nothing else; False: write it anew.

    Raises:
        OSError: It is there and cannot be read.
    """
    try:
        lines = path.read_bytes().splitlines(keepends=True)
    except FileNotFoundError:
        return False
    head = _verified(lines[0]) if lines else None
    if head is None or json.loads(head) != {"format": _FORMAT, "made_by": made_by}:
        logger.info("journal=%s is of another tokenizer or template, or damaged; not used", path)
        return False
    num_damaged = 0
    for line in lines[1:]:
        content = _verified(line)
        if content is None:
            num_damaged += 1
            continue
        fields = json.loads(content)
        ids: array[int] = array("i")
        ids.frombytes(base64.b64decode(fields["ids"]))
        record = JournalRecord(ids, bytes.fromhex(fields["reasoning"]), fields["session_id"])
        journal.record(bytes.fromhex(fields["key"]), record)
    if num_damaged:
        logger.warning(
            "journal=%s: %d of %d turns are damaged and will be rendered as they come back",
            path,
            num_damaged,
            len(lines) - 1,
        )
    return len(journal) == len(lines) - 1


class JournalFile:
    """Keeps a journal in a file, behind the turns.

    Args:
        path: Of the file.
        journal: Empty; its records are written as they come.
        made_by: See `journal_text`.
        writer: Writes, each record before what is put to it later.
        complain: Told, in the writer's thread, why something could not be written.
    """

    def __init__(
        self,
        path: Path,
        journal: Journal,
        made_by: str,
        writer: DiskWriter,
        complain: Callable[[str], None],
    ) -> None:
        self._path = path
        self._journal = journal
        self._made_by = made_by
        self._writer = writer
        self._complain = complain
        self._size = 0  # of the file, when all is written

    def attach(self) -> None:
        """Fill the journal with what is in the file, and listen to it.

        Raises:
            OSError: The file is there and cannot be read.
        """
        is_same = load_journal(self._path, self._journal, self._made_by)
        self._size = self._path.stat().st_size if is_same else 0
        self._journal.listener = self._listen
        if not is_same:
            self.rewrite()

    def rewrite(self) -> None:
        """Write the whole journal anew."""
        text = journal_text(self._journal, self._made_by)
        self._writer.put(partial(self._write, text, is_whole=True), len(text))
        self._size = len(text)

    def _listen(self, key: bytes, record: JournalRecord) -> None:
        # Most of it has been forgotten since, or somebody deleted it.
        if self._size > 2 * self._journal.max_bytes or not self._path.exists():
            self.rewrite()
            return
        line = journal_line(key, record)
        self._writer.put(partial(self._write, line, is_whole=False), len(line))
        self._size += len(line)

    def _write(self, text: bytes, *, is_whole: bool) -> None:
        """In the writer's thread."""
        try:
            if is_whole:
                make_folder(self._path.parent)
                write_file(self._path, [text])
            elif self._path.exists():  # its first line is there
                with self._path.open("ab") as file:
                    file.write(text)
        except OSError as error:
            self._complain(error.strerror or str(error))


def journal_path(folder: Path, tenant: str) -> Path:
    """Where the journal of a tenant is."""
    return folder / f"journal-{hashlib.sha256(tenant.encode()).hexdigest()[:16]}"


def forget_turns(path: Path, session_ids: Collection[str]) -> None:
    """Take the turns that these sessions generated out of a file.

    Raises:
        OSError: It cannot be read or written.
    """
    if not path.exists():
        return
    lines = path.read_bytes().splitlines(keepends=True)
    contents = [(line, _verified(line)) for line in lines]
    kept = [
        line
        for line, content in contents
        if content is not None and json.loads(content).get("session_id") not in session_ids
    ]
    write_file(path, kept)


def _signed(content: bytes) -> bytes:
    return hashlib.sha256(content).hexdigest()[:_DIGEST_CHARS].encode() + b" " + content + b"\n"


def _verified(line: bytes) -> bytes | None:
    """The content of a line, or None if it is not as it was written."""
    content = line[_DIGEST_CHARS + 1 : -1]
    return content if _signed(content) == line else None
