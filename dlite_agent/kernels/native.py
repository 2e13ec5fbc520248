"""Compile the C sources of this folder for this machine's processor, once.

GCC on Linux only: its OpenMP runtime is the one that torch brings, so that both share one pool of
threads. Without a compiler, or where something fails, the forward runs on torch's operators alone.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

__all__ = ["build_library", "source_digest"]

logger = logging.getLogger(__name__)

_SOURCES = tuple(sorted(Path(__file__).parent.glob("*.[ch]")))
_FLAGS = ("-O3", "-march=native", "-fopenmp", "-shared", "-fPIC")
_COMPILE_TIMEOUT_S = 120.0


def build_library(folder: Path | None) -> ctypes.CDLL | None:
    """Load the kernels; compile them first (about 4 s) where `folder` has none for this machine.

    Args:
        folder: Where the library is kept; None: not at all.

    Returns:
        The library, or None where it cannot be had; why is logged.
    """
    compiler = shutil.which("gcc")
    if folder is None or compiler is None or sys.platform != "linux":
        logger.info("native_kernels=off compiler=%s folder=%s", compiler, folder)
        return None
    import fcntl  # POSIX only

    try:
        library = folder / f"row-kernels-{_key(compiler)}.so"
        if not library.exists():
            folder.mkdir(parents=True, exist_ok=True)
            with (folder / "row-kernels.lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)  # another process may be at it
                if not library.exists():
                    _compile(compiler, library)
        return ctypes.CDLL(str(library))
    except (OSError, subprocess.SubprocessError) as error:
        logger.warning("native_kernels=off reason=%r", error)
        return None


@cache
def source_digest() -> str:
    """Names the C sources: what was measured with others says nothing of these."""
    return hashlib.sha256(b"\0".join(source.read_bytes() for source in _SOURCES)).hexdigest()[:24]


@cache  # two runs of the compiler, which every load of a model would wait for
def _key(compiler: str) -> str:
    """Names the source, the compiler, and the processor that `-march=native` means."""
    command = [compiler, *_FLAGS[:2], "-Q", "--help=target"]
    target = subprocess.run(command, capture_output=True, check=True, timeout=_COMPILE_TIMEOUT_S)
    version = subprocess.run(
        [compiler, "--version"], capture_output=True, check=True, timeout=_COMPILE_TIMEOUT_S
    )
    parts = (source_digest().encode(), " ".join(_FLAGS).encode(), version.stdout, target.stdout)
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:24]


def _compile(compiler: str, library: Path) -> None:
    """Compile beside the final place and move there: what has the name is whole."""
    with tempfile.TemporaryDirectory(dir=library.parent) as scratch:
        built = Path(scratch) / library.name
        units = [str(source) for source in _SOURCES if source.suffix == ".c"]
        command = [compiler, *_FLAGS, "-o", str(built), *units, *_openmp(), "-lm"]
        subprocess.run(command, capture_output=True, check=True, timeout=_COMPILE_TIMEOUT_S)
        built.replace(library)
    logger.info("native_kernels=compiled library=%s", library)


def _openmp() -> list[str]:
    """The OpenMP runtime that torch has loaded, so that no second one comes in."""
    maps = Path("/proc/self/maps").read_text()
    loaded = {line.split()[-1] for line in maps.splitlines() if "/libgomp" in line}
    return ["-Wl,--as-needed", *sorted(loaded)]
