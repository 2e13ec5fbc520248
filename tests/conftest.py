"""What every test shares: no network, no settings of this machine, fixed seeds."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from pathlib import Path

# A shell that runs the suite in the background ignores Ctrl-C for it, and the programs that tests
# start would inherit that: those that test Ctrl-C would wait for ever.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Before any library reads them. Nothing in the tests may ask a hub or a price list on the network.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
os.environ["MSWEA_SILENT_STARTUP"] = "1"
if "PYTEST_XDIST_WORKER" in os.environ:  # one core each: the threads of two workers would spin
    os.environ["OMP_NUM_THREADS"] = "1"
# Cost tables and compiled kernels go here and not into the user's cache: one for each model and
# suite. Workers and the programs that tests start inherit it, so that nothing is compiled twice.
if "dlite-agent-tests-" not in os.environ.get("XDG_CACHE_HOME", ""):
    os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix=f"dlite-agent-tests-{os.getpid()}-")

import pytest
from hypothesis import HealthCheck, settings

from tests.skips import pytest_make_collect_report, pytest_runtest_makereport  # noqa: F401  # hooks

TOKENIZER_VARIABLE = "DLITE_TEST_TOKENIZER"

# Derandomized: the same examples in every run, and no time limit that a busy machine could miss.
settings.register_profile(
    "dlite",
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("dlite")


def pytest_unconfigure() -> None:
    folder = Path(os.environ["XDG_CACHE_HOME"])
    if folder.name.startswith(f"dlite-agent-tests-{os.getpid()}-"):  # a worker's parent made it
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("DLITE_") and name != TOKENIZER_VARIABLE:
            monkeypatch.delenv(name)


@pytest.fixture(scope="session")
def qwen3_tokenizer_dir() -> Path:
    """Folder with a real Qwen3 tokenizer, or a skip: its files are not part of this repository."""
    named = os.environ.get(TOKENIZER_VARIABLE)
    beside = Path(__file__).parents[2] / "shared" / "qwen3"
    if not named and not beside.is_dir():
        pytest.skip(f"{TOKENIZER_VARIABLE} does not name a folder with a Qwen3 tokenizer")
    return Path(named) if named else beside


@pytest.fixture(scope="session")
def smollm2() -> str:
    """Name of the real, small model, or a skip: its package is not required."""
    from dlite_agent.errors import MissingDependencyError
    from dlite_agent.models.weights import resolve_checkpoint

    try:
        resolve_checkpoint("smollm2")
    except MissingDependencyError as error:
        pytest.skip(str(error))
    return "smollm2"
