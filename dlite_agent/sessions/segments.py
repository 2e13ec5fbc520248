"""Segments: KV rows of consecutive tokens in a safetensors file that is written once.

A segment holds one tensor `kv` [L, 2, K, n, D], and beside it the digest of all token ids that its
rows were computed from. Its name has its rows and its own digest, so a changed segment is another
file, and a manifest that names the old one stays right until it is replaced. The reader compares
the digest of the whole file with the manifest's, so that a flipped bit anywhere in it is found, and
the ids', so that no row is ever taken for that of another text.
"""

from __future__ import annotations

import hashlib
import json
import os
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from dlite_agent.models.kv_pool import PAGE_ROWS
from dlite_agent.models.spans import RunViews
from dlite_agent.sessions.atomic_file import write_file

__all__ = [
    "SEGMENT_ROWS",
    "Segment",
    "SegmentShape",
    "held_bytes",
    "plan_segments",
    "read_segment",
    "write_segment",
]

SEGMENT_ROWS = 8 * PAGE_ROWS
"""Most rows of a segment."""

# A session that grows by small turns has the end of its KV in so many small segments at most; then
# they are written again as one. Each row is so written about twice, whatever the turns are.
_MAX_PIECES = 8
BytesT = TypeVar("BytesT", bytearray, memoryview)

_DTYPES = {torch.float32: "F32", torch.float64: "F64", torch.bfloat16: "BF16"}


@dataclass(frozen=True, slots=True)
class Segment:
    """A segment as the manifest knows it.

    Attributes:
        file: Its name in the session's folder.
        start: First row.
        num_rows: Rows.
        digest: SHA-256 of the file, hexadecimal.
    """

    file: str
    start: int
    num_rows: int
    digest: str

    @property
    def end(self) -> int:
        """The row after its last one."""
        return self.start + self.num_rows


@dataclass(frozen=True, slots=True)
class SegmentShape:
    """What KV rows of a target look like.

    Attributes:
        num_layers: L.
        num_kv_heads: K.
        head_dim: D.
        dtype: Of keys and values.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.dtype.itemsize

    def sizes(self, num_rows: int) -> tuple[int, int, int, int, int]:
        """[L, 2, K, n, D]."""
        return self.num_layers, 2, self.num_kv_heads, num_rows, self.head_dim

    def header(self, num_rows: int, prefix: str) -> bytes:
        """What stands before the numbers in a safetensors file; its length is a multiple of 8.

        Args:
            num_rows: n.
            prefix: Digest of the ids up to the last row.

        Source: https://github.com/huggingface/safetensors#format.
        """
        tensor = {
            "dtype": _DTYPES[self.dtype],
            "shape": self.sizes(num_rows),
            "data_offsets": [0, num_rows * self.row_bytes],
        }
        content = {"__metadata__": {"prefix": prefix}, "kv": tensor}
        text = json.dumps(content, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text


def plan_segments(
    stored: Sequence[Segment], num_valid: int, num_rows: int
) -> tuple[tuple[Segment, ...], list[tuple[int, int]]]:
    """Which stored segments stay, and which rows are written as new ones.

    Args:
        stored: Consecutive segments from row 0.
        num_valid: Rows at the start that are still the same.
        num_rows: Rows that the session has now.

    Returns:
        Segments to keep, and [start, end) of new ones behind them, up to `num_rows`.
    """
    kept = [segment for segment in stored if segment.end <= min(num_valid, num_rows)]
    end = kept[-1].end if kept else 0
    sealed = end - end % SEGMENT_ROWS
    pieces = [segment for segment in kept if segment.start >= sealed]
    is_full = num_rows - sealed >= SEGMENT_ROWS
    if num_rows > end and (is_full or len(pieces) >= _MAX_PIECES):
        del kept[len(kept) - len(pieces) :]
        end = kept[-1].end if kept else 0
    starts = range(end, num_rows, SEGMENT_ROWS)
    return tuple(kept), [(start, min(start + SEGMENT_ROWS, num_rows)) for start in starts]


def write_segment(
    folder: Path,
    start: int,
    rows: Tensor,
    token_ids: array[int],
    twins: Mapping[Segment, Path] | None = None,
) -> Segment:
    """Write rows to a new file; its bytes are durable on return.

    Args:
        folder: Exists.
        start: The first row's number.
        rows: [L, 2, K, n, D], contiguous and on the host.
        token_ids: The session's, at least up to the last row.
        twins: Segments of other sessions and their files: an equal one is linked, not written.

    Raises:
        OSError: It cannot be written.
    """
    num_layers, _, num_heads, num_rows, head_dim = rows.shape
    shape = SegmentShape(num_layers, num_heads, head_dim, rows.dtype)
    header = shape.header(num_rows, _prefix_digest(token_ids, start + num_rows))
    content = memoryview(rows.view(-1).view(torch.uint8).numpy().data)
    hashed = hashlib.sha256(header)
    hashed.update(content)
    digest = hashed.hexdigest()
    file = f"kv-{start:08d}-{num_rows}-{digest[:16]}.safetensors"
    segment = Segment(file, start, num_rows, digest)
    twin = (twins or {}).get(segment)
    if twin is None or not _is_linked(twin, folder / file):
        write_file(folder / file, [header, content])
    return segment


def held_bytes(sessions: Iterable[tuple[str, int, Sequence[Segment]]], row_bytes: int) -> int:
    """Bytes of sessions; a segment that several of a tenant have counts once.

    Args:
        sessions: Tenant, bytes and segments of each; segments without a digest are not written yet.
        row_bytes: Of one row.
    """
    total, seen = 0, set[tuple[str, Segment]]()
    for tenant, nbytes, segments in sessions:
        shared = [segment for segment in segments if (tenant, segment) in seen]
        total += nbytes - sum(segment.num_rows for segment in shared) * row_bytes
        seen.update((tenant, segment) for segment in segments if segment.digest)
    return total


def _is_linked(twin: Path, path: Path) -> bool:
    """Give a file a second name; False where that cannot be: it is gone, or there are no links."""
    try:
        path.unlink(missing_ok=True)
        path.hardlink_to(twin)
    except OSError:
        return False
    return True


def read_segment(
    folder: Path,
    segment: Segment,
    shape: SegmentShape,
    token_ids: array[int],
    places: Sequence[RunViews],
    should_stop: Callable[[], bool],
) -> bool:
    """Read a segment's rows to where they belong, and verify it. A damaged file is removed.

    The rows count when it returns True, and not before.

    Args:
        folder: Where it is.
        segment: Which.
        shape: Of the model's KV.
        token_ids: The session's.
        places: Where its rows go, in order; the file may have more of them.
        should_stop: Asked now and then.

    Returns:
        Whether it came to the end.

    Raises:
        OSError: It cannot be read.
        ValueError: It is not what was written.
    """
    path = folder / segment.file
    header = shape.header(segment.num_rows, _prefix_digest(token_ids, segment.end))
    try:
        with path.open("rb", buffering=0) as file:
            _check_size(file, segment, len(header) + segment.num_rows * shape.row_bytes)
            found = _fill(file, bytearray(len(header)))
            hashed = hashlib.sha256(found)
            for rows in _in_file_order(places, shape, segment.num_rows):
                if should_stop():
                    return False
                _read_rows(file, rows, hashed)
        if hashed.hexdigest() != segment.digest:
            raise ValueError(f"{segment.file} has changed since it was written")
        if found != header:
            raise ValueError(f"{segment.file} has KV of other tokens or of another shape")
    except ValueError:
        with suppress(OSError):  # so that the next save writes it again
            path.unlink()
        raise
    return True


def _check_size(file: FileIO, segment: Segment, size: int) -> None:
    found = os.fstat(file.fileno()).st_size
    if found != size:
        raise ValueError(f"{segment.file} has {found} bytes instead of {size}")


def _in_file_order(
    places: Sequence[RunViews], shape: SegmentShape, num_rows: int
) -> Iterator[Tensor]:
    """[n, D] views that the bytes of a segment go to, one after the other."""
    rest = num_rows - sum(run.keys[0].shape[1] for run in places)
    unwanted = [torch.empty(rest, shape.head_dim, dtype=shape.dtype)] if rest else []
    for layer in range(shape.num_layers):
        for half in (0, 1):  # keys, values
            for head in range(shape.num_kv_heads):
                yield from (run[half][layer][head] for run in places)
                yield from unwanted


def _read_rows(file: FileIO, rows: Tensor, hashed: hashlib._Hash) -> None:
    """Read as many bytes as a tensor has, without a copy where it is in host memory."""
    here = rows if rows.device.type == "cpu" else torch.empty_like(rows, device="cpu")
    hashed.update(_fill(file, memoryview(here.view(torch.uint8).numpy().data).cast("B")))
    if here is not rows:
        rows.copy_(here)


def _fill(file: FileIO, content: BytesT) -> BytesT:
    """Read as many bytes as there is room for; those of a file that ends early stay as they are."""
    rest = memoryview(content)
    while rest and (count := file.readinto(rest)):
        rest = rest[count:]
    return content


def _prefix_digest(token_ids: array[int], end: int) -> str:
    return hashlib.sha256(memoryview(token_ids)[:end]).hexdigest()
