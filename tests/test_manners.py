"""What a library owes its host and its readers: light imports, honest `__all__`, small files."""

from __future__ import annotations

import ast
import dataclasses
import re
import statistics
import subprocess
import sys
import tomllib
from itertools import chain
from pathlib import Path

import pytest

import dlite_agent

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "dlite_agent"
MODULES = sorted(PACKAGE.rglob("*.py"))
HEAVY = ("torch", "transformers", "langchain_core", "litellm", "numpy", "pydantic", "asyncio")
MAX_MODULE_LINES = 350
MAX_FUNCTION_LINES = 60
BANNED_NAMES = {"utils", "util", "common", "helpers", "misc"}
IMPORT_BUDGET_S = 0.05
DISTRIBUTIONS = {"llguidance": "llguidance", "minisweagent": "mini-swe-agent", "yaml": "pyyaml"}


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


def python(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_importing_the_package_loads_nothing_heavy() -> None:
    loaded = python(f"import sys, dlite_agent; print([m for m in {HEAVY!r} if m in sys.modules])")
    assert loaded == "[]"


def test_the_guide_explains_every_figure_of_a_turn() -> None:
    guide = (ROOT / "docs" / "guides" / "turn-stats.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`(\w+)`", guide))
    figures = {field.name for field in dataclasses.fields(dlite_agent.TurnStats)}
    assert figures - named == set()


def test_the_text_column_loads_no_tensor_library() -> None:
    loaded = python(
        "import sys, dlite_agent.backend, dlite_agent.outputs, dlite_agent.chat.messages\n"
        "print([m for m in ('torch', 'transformers') if m in sys.modules])"
    )
    assert loaded == "[]"


def test_importing_the_package_is_quick() -> None:
    code = (
        "import time\n"
        "wall, cpu = time.perf_counter(), time.process_time()\n"
        "import dlite_agent\n"
        "print(time.perf_counter() - wall, time.process_time() - cpu)"
    )
    runs = [[float(seconds) for seconds in python(code).split()] for _ in range(7)]
    wall, cpu = (statistics.median(column) for column in zip(*runs, strict=True))
    print(f"import dlite_agent: {wall * 1e3:.0f} ms, {cpu * 1e3:.0f} ms of them computing (median)")
    # Of the processor, since other work on the machine would be counted in the time on the clock.
    assert cpu < IMPORT_BUDGET_S


def test_importing_the_package_changes_nothing_in_the_host() -> None:
    code = (
        "import logging, os, signal, sys, warnings\n"
        "root = logging.root\n"
        "state = lambda: (dict(os.environ), signal.getsignal(signal.SIGINT), root.handlers[:],"
        " root.level, warnings.filters[:], sys.stdout)\n"
        "before = state(); import dlite_agent; print(state() == before)"
    )
    assert python(code) == "True"


def test_every_public_name_can_be_loaded_and_listed() -> None:
    assert sorted(dlite_agent.__all__) == dir(dlite_agent)
    for name in dlite_agent.__all__:
        assert getattr(dlite_agent, name) is not None, name


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'dlite_agent' has no attribute 'Nonsense'"):
        _ = dlite_agent.Nonsense


def test_a_missing_package_is_named_with_the_pip_line() -> None:
    code = (
        "import sys\n"
        "sys.modules['langchain_core'] = None\n"
        "import dlite_agent\n"
        "try:\n"
        "    dlite_agent.ChatDLite\n"
        "except dlite_agent.MissingDependencyError as error:\n"
        "    print(error)\n"
    )
    assert python(code) == (
        "dlite_agent.ChatDLite needs the package 'langchain_core', which is not installed; "
        'repair the installation with: pip install "dlite-agent"'
    )


def test_there_is_one_version_and_it_is_the_installed_one() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["project"]["dynamic"] == ["version"]
    assert re.fullmatch(r"\d+\.\d+\.\d+(\.dev\d+|rc\d+)?", dlite_agent.__version__)
    assert dlite_agent.__version__.split(".dev")[0] in (ROOT / "CHANGELOG.md").read_text()


def test_a_release_shows_what_the_demo_really_prints() -> None:
    is_release = ".dev" not in dlite_agent.__version__
    assert not (is_release and "PLACEHOLDER" in (ROOT / "README.md").read_text())


@pytest.mark.parametrize("path", MODULES, ids=relative)
def test_modules_and_functions_stay_small(path: Path) -> None:
    source = path.read_text()
    assert len(source.splitlines()) <= MAX_MODULE_LINES, "name the missing concept and split"
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or 0) - node.lineno + 1
            assert length <= MAX_FUNCTION_LINES, f"{node.name} has {length} lines"


def test_no_module_is_a_drawer() -> None:
    assert [relative(path) for path in MODULES if path.stem in BANNED_NAMES] == []


@pytest.mark.parametrize("path", MODULES, ids=relative)
def test_all_lists_exactly_the_public_names(path: Path) -> None:
    tree = ast.parse(path.read_text())
    exported = _exported(tree)
    if exported is None:
        assert not _defined(tree), "a module with public names has an __all__"
        return
    assert set(exported) <= _defined(tree) | _imported(tree) | {"__version__"}
    classes_and_functions = {
        node.name
        for node in tree.body
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and not node.name.startswith("_")
    }
    assert classes_and_functions <= set(exported)


def test_every_imported_package_is_declared() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = list(chain(project["dependencies"], *project["optional-dependencies"].values()))
    declared = {re.split(r"[\[<>=!~ ]", line)[0].lower().replace("_", "-") for line in lines}
    used = {name for path in MODULES for name in _third_party(ast.parse(path.read_text()))}
    missing = {
        name for name in used if DISTRIBUTIONS.get(name, name.replace("_", "-")) not in declared
    }
    assert missing == set()


def test_sources_name_no_machine_of_ours() -> None:
    pattern = re.compile(r"(?<![\w./])/(?:work|opt|root|home)/\w")
    texts = [*MODULES, *sorted((ROOT / "docs").rglob("*.md")), ROOT / "README.md"]
    assert [relative(path) for path in texts if pattern.search(path.read_text())] == []


def _exported(tree: ast.Module) -> list[str] | None:
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return list(ast.literal_eval(node.value))
    return None


def _defined(tree: ast.Module) -> set[str]:
    names: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                names |= {name.id for name in ast.walk(target) if isinstance(name, ast.Name)}
    return {name for name in names if not name.startswith("_")} - {"logger"}


def _imported(tree: ast.Module) -> set[str]:
    return {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }


def _third_party(tree: ast.Module) -> set[str]:
    roots: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            roots |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            roots.add(node.module.partition(".")[0])
    return {root for root in roots if root not in sys.stdlib_module_names} - {"dlite_agent"}
