"""In CI a test that is skipped for a package which CI has fails."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
MODULES = {
    "test_module.py": "import pytest\npytest.importorskip('no_such_host')\n",
    "test_one.py": "import pytest\ndef test_one():\n    pytest.importorskip('no_such_host')\n",
    "test_allowed.py": "import pytest\ndef test_it():\n    pytest.skip('no wandb')\n",
    "test_known.py": (
        "import pytest\n@pytest.mark.xfail(reason='known')\ndef test_it():\n    assert not 1\n"
    ),
}


def test_a_skip_fails_in_ci_unless_it_is_listed(tmp_path: Path) -> None:
    for name, source in MODULES.items():
        (tmp_path / name).write_text(source, encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-p", "tests.skips", "-q", "--tb=short"]
    variables = {"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    run = subprocess.run(
        [*command, "-c", os.devnull, "--continue-on-collection-errors", str(tmp_path)],
        env={**os.environ, **variables, "CI": "true"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "1 failed, 1 skipped, 1 xfailed, 1 error" in run.stdout, run.stdout
    assert run.stdout.count("could not import 'no_such_host'") >= 2
