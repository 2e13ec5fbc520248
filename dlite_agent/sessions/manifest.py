"""The manifest of a saved session: its token ids, whose KV it is, and which segments hold it.

The token ids are the source of truth, and the KV is a cache of what they cost: a session whose
segments are gone is computed again. So the ids stand in the manifest itself, which is replaced
atomically, and which has a digest of its own.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from array import array
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from dlite_agent.errors import CheckpointError
from dlite_agent.models.target import TargetModel
from dlite_agent.sessions.segments import Segment

__all__ = ["MANIFEST", "Manifest", "ModelKey", "read_manifest"]

MANIFEST = "manifest.json"
_FORMAT = 1
_MAX_BYTES = 256 * 2**20
_SEGMENT_FILE = re.compile(r"kv-\d+-\d+-[0-9a-f]+\.safetensors")


@dataclass(frozen=True, slots=True)
class ModelKey:
    """Everything that KV depends on beside the token ids.

    Attributes:
        fingerprint: Of the checkpoint and the options that change what it computes
            (`TargetModel.fingerprint`).
        config: Digest of the target's shape.
        dtype: Of keys and values.
        device: Its type: another one rounds differently.
    """

    fingerprint: str
    config: str
    dtype: str
    device: str

    @classmethod
    def of(cls, target: TargetModel) -> ModelKey:
        """The key of a loaded target."""
        config = hashlib.sha256(repr(target.config).encode()).hexdigest()[:16]
        dtype = str(target.dtype).removeprefix("torch.")
        return cls(target.fingerprint, config, dtype, target.device.type)

    @property
    def name(self) -> str:
        """16 hexadecimal digits, for a folder."""
        return hashlib.sha256(json.dumps(asdict(self)).encode()).hexdigest()[:16]

    def differences(self, other: ModelKey) -> str:
        """What differs, as text; empty where nothing does."""
        ours, theirs = asdict(self), asdict(other)
        return ", ".join(
            f"{name} {theirs[name]!r} instead of {ours[name]!r}"
            for name in ours
            if ours[name] != theirs[name]
        )


@dataclass(frozen=True, slots=True)
class Manifest:
    """A saved session without its KV.

    Attributes:
        session_id: Its id.
        model: Whose KV it is.
        token_ids: All ids, the pending one included.
        num_rows: KV rows that the session had, one less or as many as ids.
        turn_start: Where the answer of the last turn begins.
        segments: The KV, from row 0 on; may end before `num_rows`.
        labels: What the saver notes beside.
    """

    session_id: str
    model: ModelKey
    token_ids: array[int]
    num_rows: int
    turn_start: int
    segments: tuple[Segment, ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict)

    @property
    def num_stored(self) -> int:
        """Rows that the segments hold."""
        return self.segments[-1].end if self.segments else 0

    def to_bytes(self) -> bytes:
        """JSON, with a digest of everything else in it."""
        content = {
            "format": _FORMAT,
            "session_id": self.session_id,
            "model": asdict(self.model),
            "token_ids": base64.b64encode(self.token_ids.tobytes()).decode(),
            "num_rows": self.num_rows,
            "turn_start": self.turn_start,
            "segments": [asdict(segment) for segment in self.segments],
            "labels": dict(self.labels),
        }
        digest = hashlib.sha256(_canonical(content)).hexdigest()
        return _canonical(content | {"digest": digest})


def read_manifest(folder: Path) -> Manifest:
    """Read and verify the manifest of a folder.

    Raises:
        CheckpointError: There is none, it is damaged, or of another version.
        OSError: It cannot be read.
    """
    path = folder / MANIFEST
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise _damaged(path, "it is too large")
        written = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(
            f"{str(folder)!r} holds no saved session ({MANIFEST} is missing); name the folder that "
            "was given to save"
        ) from None
    try:
        content = json.loads(written)
        if content["format"] != _FORMAT and _is_whole(written, content):
            raise CheckpointError(
                f"{str(path)!r} has format {content['format']!r}, but this version reads "
                f"{_FORMAT}; read it with the version that wrote it, or save the session again"
            )
        if not _is_whole(written, content):
            raise _damaged(path, "its digest differs")
        return _parse(content)
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise _damaged(path, f"{type(error).__name__}") from error


def _parse(content: Mapping[str, object]) -> Manifest:
    values = dict(content)
    token_ids: array[int] = array("i")
    token_ids.frombytes(base64.b64decode(str(values["token_ids"]), validate=True))
    segments = values["segments"]
    model, labels = values["model"], values["labels"]
    assert isinstance(segments, list)
    assert isinstance(model, dict)
    assert isinstance(labels, dict)
    manifest = Manifest(
        str(values["session_id"]),
        ModelKey(**model),
        token_ids,
        int(str(values["num_rows"])),
        int(str(values["turn_start"])),
        tuple(Segment(**segment) for segment in segments),
        labels,
    )
    _check(manifest)
    return manifest


def _check(manifest: Manifest) -> None:
    """Refuse what we never write: a folder may come from somebody else."""
    row = 0
    for segment in manifest.segments:
        if not _SEGMENT_FILE.fullmatch(segment.file) or segment.start != row:
            raise ValueError(f"segment {segment!r} is none of ours")
        row = segment.end
    num_tokens = len(manifest.token_ids)
    if not row <= manifest.num_rows <= num_tokens or manifest.num_rows < num_tokens - 1:
        raise ValueError(f"{manifest.num_rows} rows for {num_tokens} tokens")
    if not 0 <= manifest.turn_start <= num_tokens:
        raise ValueError(f"a turn that starts at {manifest.turn_start}")


def _is_whole(written: bytes, content: Mapping[str, object]) -> bool:
    """Whether every byte is as it was written: the same JSON may be spelled in many ways."""
    rest = {name: value for name, value in content.items() if name != "digest"}
    digest = hashlib.sha256(_canonical(rest)).hexdigest()
    return written == _canonical(rest | {"digest": digest})


def _canonical(content: Mapping[str, object]) -> bytes:
    return json.dumps(content, sort_keys=True, indent=1).encode() + b"\n"


def _damaged(path: Path, why: str) -> CheckpointError:
    return CheckpointError(
        f"{str(path)!r} is damaged ({why}); delete its folder and send the whole history once, "
        "which saves it again"
    )
