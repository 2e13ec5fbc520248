"""`dlite-agent sessions list|purge|export|import`: what engines keep on disk."""

from __future__ import annotations

import argparse
import json
import re
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from dlite_agent.cli.console import note, size, table, write
from dlite_agent.config import EngineConfig
from dlite_agent.errors import ConfigurationError

if TYPE_CHECKING:
    from dlite_agent.sessions.disk_folder import SavedFolder

__all__ = ["add_arguments", "run"]

_SUMMARIES = {
    "list": "all sessions, the latest used first",
    "purge": "delete sessions that no engine has open",
    "export": "copy a session to a folder of its own",
    "import": "copy an exported session to where engines look",
}
_UNITS_S = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    parser.add_argument(
        "--folder", help="as EngineConfig.kv_disk; default: DLITE_KV_DISK, else the cache folder"
    )
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    parsers = {
        name: actions.add_parser(name, help=what, description=what)
        for name, what in _SUMMARIES.items()
    }
    listing, purge = parsers["list"], parsers["purge"]
    listing.add_argument("--json", action="store_true", help="print one JSON object")
    purge.add_argument(
        "--older-than", metavar="AGE", help="e.g. 30m, 12h, 7d: not used for so long"
    )
    purge.add_argument("--all", action="store_true", help="whatever their age")
    for action in (listing, purge):
        action.add_argument("--tenant", help="only this tenant's")
    export, importing = parsers["export"], parsers["import"]
    export.add_argument("session_id", metavar="ID", help="as `list` shows it")
    export.add_argument("path", type=Path, metavar="PATH", help="the new folder")
    importing.add_argument("path", type=Path, metavar="PATH", help="what `export` wrote")


def run(arguments: argparse.Namespace) -> int:
    """Run the action."""
    root = _root(arguments.folder)
    return _ACTIONS[arguments.action](root, arguments)


def _root(named: str | None) -> Path:
    config = EngineConfig.from_env(kv_disk=named)
    folder = config.kv_folder() or EngineConfig.from_env(kv_disk="auto").kv_folder()
    assert folder is not None, "a folder, 'auto' or an error"
    return folder


def _list(root: Path, arguments: argparse.Namespace) -> int:
    found = sorted(_matching(root, arguments.tenant), key=lambda folder: -folder.kept.used_at)
    now = datetime.now(UTC).timestamp()
    rows: list[dict[str, str | int | float]] = [
        {
            "session_id": folder.kept.session_id,
            "model": folder.path.parent.name,
            "tenant": folder.kept.tenant,
            "hint": folder.kept.hint,
            "tokens": len(folder.kept.trail),
            "bytes": folder.kept.nbytes,
            "idle_s": round(max(0.0, now - folder.kept.used_at), 1),
        }
        for folder in found
    ]
    if arguments.json:
        write(json.dumps({"folder": str(root), "sessions": rows}, indent=2))
        return 0
    if not rows:
        note(f"no session is kept in {root}")
        return 0
    cells = [
        [
            str(row["session_id"]),
            str(row["tokens"]),
            size(float(row["bytes"])),
            _age(float(row["idle_s"])),
            str(row["tenant"]),
            str(row["hint"]),
        ]
        for row in rows
    ]
    write(table(["session", "tokens", "size", "used before", "tenant", "hint"], cells))
    return 0


def _purge(root: Path, arguments: argparse.Namespace) -> int:
    from dlite_agent.sessions.disk_folder import purge_sessions

    if (arguments.older_than is None) is not arguments.all:
        raise ConfigurationError("purge needs either --older-than AGE or --all")
    limit_s = 0.0 if arguments.all else _seconds(arguments.older_than)
    now = datetime.now(UTC).timestamp()
    found = [
        folder
        for folder in _matching(root, arguments.tenant)
        if now - folder.kept.used_at >= limit_s or arguments.all
    ]
    note(f"deleted {purge_sessions(root, found)} sessions in {root}")
    return 0


def _export(root: Path, arguments: argparse.Namespace) -> int:
    from dlite_agent.sessions.disk_folder import export_session

    export_session(root, arguments.session_id, arguments.path)
    note(f"wrote {arguments.path}")
    return 0


def _import(root: Path, arguments: argparse.Namespace) -> int:
    from dlite_agent.sessions.disk_folder import import_session

    write(import_session(root, arguments.path))
    return 0


_ACTIONS = {"list": _list, "purge": _purge, "export": _export, "import": _import}


def _matching(root: Path, tenant: str | None) -> list[SavedFolder]:
    from dlite_agent.sessions.disk_folder import saved_folders

    return [folder for folder in saved_folders(root) if tenant in (None, folder.kept.tenant)]


def _seconds(text: str) -> float:
    parsed = re.fullmatch(r"(\d+)([smhd])", text)
    if parsed is None:
        raise ConfigurationError(f"--older-than is {text!r}; use a number and s, m, h or d: 7d")
    return int(parsed[1]) * _UNITS_S[parsed[2]]


def _age(seconds: float) -> str:
    unit = next((unit for unit in "dhm" if seconds >= _UNITS_S[unit]), "s")
    return f"{seconds / _UNITS_S[unit]:.0f} {unit}"
