"""In CI a test may be skipped only for what no package of the `dev` extra brings.

The hooks of a pytest plugin; tests/conftest.py takes them over.
"""

from __future__ import annotations

import os
import re
from collections.abc import Generator

import pytest

# What a machine may lack, by the words of the skip's reason.
_MAY_BE_MISSING = re.compile(
    "|".join(
        [
            "tensorboard|wandb",  # the extra `report`, which has no place in `dev`
            "DLITE_SWE_AGENT_SRC",  # on no package index
            "^no program ",  # clients of the server, each a program of its own
            "DLITE_TEST_TOKENIZER",  # files that are not part of this repository
            "compiler|gcc",
            "IPv6",
            "no right to mount",
            "langgraph-cli|bfcl",  # want other versions of what we have
        ]
    )
)
_OTHERS_SUITE = "langchain_tests"  # it skips what a model class has no use for


def _judged(report: pytest.CollectReport | pytest.TestReport) -> None:
    if os.environ.get("CI") != "true" or not report.skipped or hasattr(report, "wasxfail"):
        return
    path, _, reason = report.longrepr if isinstance(report.longrepr, tuple) else ("", 0, "")
    if _OTHERS_SUITE in path or _MAY_BE_MISSING.search(reason):
        return
    report.outcome = "failed"
    report.longrepr = f"{path}: {reason}\nCI has what this test needs; else say so in {__file__}"


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    _judged(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    _judged(report)
    return report
