"""A seeded world of small Python repositories, each with one bug (or a few) and tests that find it.

A repository is a package of modules with short functions. Each docstring states what its function
returns, one function (or a few) disagrees with its docstring, and `run_tests.py` (standard library
only) names that function and its file.
"""

from __future__ import annotations

import hashlib
import random
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dlite_agent.nano.bugs import TEMPLATES, Template, draw_arguments
from dlite_agent.nano.names import Split, pick_words

__all__ = [
    "SIZES",
    "Check",
    "Function",
    "Size",
    "Task",
    "make_function",
    "make_task",
    "module_source",
]

Size = Literal["tiny", "small", "medium", "large"]

SIZES: dict[Size, tuple[tuple[int, int], tuple[int, int]]] = {
    "tiny": ((1, 1), (2, 3)),
    "small": ((1, 2), (2, 5)),
    "medium": ((2, 3), (5, 9)),
    "large": ((4, 4), (13, 18)),
}
"""For each size the range of modules and the range of functions in a module."""

TEST_FILE = "run_tests.py"
TEST_TIMEOUT_S = 20.0

_TEST_HEAD = '''"""Checks of {project}."""

import sys

sys.dont_write_bytecode = True

from {project} import {modules}

CHECKS = [
'''
_TEST_TAIL = """\
]

failed = 0
clean = dict.fromkeys(path for path, *_ in CHECKS)
for path, function, arguments, expected in CHECKS:
    try:
        got = function(*arguments)
    except Exception as error:
        got = error
    if repr(got) != repr(expected):
        failed += 1
        clean.pop(path, None)
        print(f"FAIL {path} {function.__name__}: expected {expected!r}, got {got!r}")
for path in clean:
    print("ok", path)
print(f"{len(CHECKS) - failed} passed, {failed} failed")
sys.exit(1 if failed else 0)
"""

_PROMPTS = (
    "The tests of {p} fail. Fix the bug.",
    "Fix the failing test in {p}.",
    "A test of {p} fails. Find the bug and fix it.",
    "Please fix the bug in {p} so that all tests pass.",
    "Something is wrong in {p}: its tests fail. Repair it.",
    "There is one bug in {p}. Find and fix it.",
    "Fix the bug.",
    "Make the tests pass.",
)
_OPEN_PROMPTS = tuple(text for text in _PROMPTS if "tests" in text and "bug" not in text)
"""Those that promise no number of bugs."""


@dataclass(frozen=True, slots=True)
class Function:
    """One function of a repository: its words, its right body and what stands in the file."""

    name: str
    template: Template
    parameters: tuple[str, ...]
    doc: str
    right: str
    written: str

    def line(self, body: str) -> str:
        """Render the line that decides, with a body.

        It starts with the function's name, as a result variable does in some languages: a small
        model finds it by the name, and an edit of this line alone is unique in the file.
        """
        return f"{self.name} = {body}"

    def source(self) -> str:
        """Render the function as it stands in the file."""
        return (
            f"def {self.name}({', '.join(self.parameters)}):\n"
            f'    """{self.name} is {self.doc}."""\n'
            f"    {self.line(self.written)}\n"
            f"    return {self.name}"
        )


def module_source(path: str, functions: Sequence[Function]) -> str:
    """Render a module as it stands in the repository."""
    body = "\n\n\n".join(function.source() for function in functions)
    return f'"""Functions of {Path(path).stem}."""\n\n\n{body}\n'


@dataclass(frozen=True, slots=True)
class Check:
    """One call in the tests, with the value that the right body returns."""

    path: str
    function: str
    arguments: tuple[object, ...]
    expected: object


@dataclass(frozen=True, slots=True)
class Task:
    """One repository with one bug.

    Attributes:
        seed: What it was made from, together with `split` and `size`.
        split: Whose names it uses.
        size: How large it is.
        project: Name of the package.
        prompt: What the user asks.
        modules: Path of each module with its functions.
        checks: What `run_tests.py` calls, in order.
        broken_path: Module with the bug; with several bugs, the first that the tests name.
        broken: The function with that bug.
        bug: Kind of that bug.
    """

    seed: int
    split: Split
    size: Size
    project: str
    prompt: str
    modules: tuple[tuple[str, tuple[Function, ...]], ...]
    checks: tuple[Check, ...]
    broken_path: str
    broken: Function
    bug: str

    @property
    def key(self) -> str:
        """Template, bug and names of this task; no two splits share one."""
        return f"{self.broken.template.name}/{self.bug}/{self.broken.name}/{self.broken_path}"

    @property
    def num_bugs(self) -> int:
        """How many functions disagree with their docstrings."""
        return sum(f.right != f.written for _, functions in self.modules for f in functions)

    def function(self, path: str, name: str) -> Function:
        """Find a function by its module's path and its name."""
        return next(f for f in dict(self.modules)[path] if f.name == name)

    def files(self) -> dict[str, str]:
        """Render every file of the repository, by path."""
        files = {f"{self.project}/__init__.py": f'"""The {self.project} package."""\n'}
        for path, functions in self.modules:
            files[path] = module_source(path, functions)
        files[TEST_FILE] = self.test_source()
        return files

    def test_source(self) -> str:
        """Render the pristine `run_tests.py`."""
        modules = ", ".join(sorted(Path(path).stem for path, _ in self.modules))
        lines = [
            f'    ("{check.path}", {Path(check.path).stem}.{check.function}, '
            f"{check.arguments!r}, {check.expected!r}),\n"
            for check in self.checks
        ]
        head = _TEST_HEAD.format(project=self.project, modules=modules)
        return head + "".join(lines) + _TEST_TAIL

    def materialise(self, into: Path) -> Path:
        """Write the repository into a folder (made if missing) and return that folder."""
        for path, text in self.files().items():
            target = into / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text, encoding="utf-8")
        return into

    def solved(self, path: Path) -> bool:
        """Run the pristine tests on a folder, whatever its own `run_tests.py` says."""
        try:
            result = subprocess.run(
                [sys.executable, "-c", self.test_source()],
                cwd=path,
                capture_output=True,
                timeout=TEST_TIMEOUT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return False
        return result.returncode == 0


def _evaluate(expression: str, parameters: tuple[str, ...], arguments: tuple[object, ...]) -> str:
    try:
        value = eval(f"lambda {', '.join(parameters)}: {expression}")(*arguments)
    except Exception as error:  # noqa: BLE001 - a wrong body may raise anything; the test prints it
        value = error
    return repr(value)


def make_function(
    rng: random.Random, split: Split, name: str, *, broken: bool
) -> tuple[Function, str]:
    """Make a function of a name; broken or not, the kind of a bug is drawn and returned."""
    template = rng.choice(TEMPLATES)
    names = pick_words(rng, "variable", split, len(template.kinds), 0.3 if split == "train" else 0)
    constant = rng.randint(3, 9)
    words = dict(zip("abc", names, strict=False)) | {"k": str(constant)}
    words["l"] = str(constant + rng.choice([-1, 1]))
    kind, wrong = rng.choice(template.bugs)
    right = template.body.format(**words)
    written = wrong.format(**words) if broken else right
    doc = template.doc.format(**words)
    return Function(name, template, tuple(names), doc, right, written), kind


def _checks_of(rng: random.Random, path: str, function: Function) -> list[Check] | None:
    """Draw one or two calls; for the broken function the first one must tell right from written."""
    checks: list[Check] = []
    for index in range(1 if rng.random() < 0.8 else 2):
        for _ in range(60):
            arguments = draw_arguments(rng, function.template)
            right = _evaluate(function.right, function.parameters, arguments)
            written = _evaluate(function.written, function.parameters, arguments)
            tells = function.right == function.written or index > 0 or right != written
            if tells and "Error" not in right:
                break
        else:
            return None
        expected = eval(right)
        checks.append(Check(path, function.name, arguments, expected))
    return checks


def _draw_broken(rng: random.Random, counts: list[int], num_bugs: int) -> set[int]:
    """Draw the numbers of the functions to break: one a module, and more where modules are few."""
    starts = [sum(counts[:i]) for i in range(len(counts))]
    if num_bugs == 1:
        return {rng.randrange(sum(counts))}
    modules = rng.sample(range(len(counts)), min(num_bugs, len(counts)))
    chosen = {starts[module] + rng.randrange(counts[module]) for module in modules}
    while len(chosen) < min(num_bugs, sum(counts)):
        chosen.add(rng.randrange(sum(counts)))
    return chosen


def make_task(
    seed: int, *, split: Split = "heldout", size: Size = "small", num_bugs: int = 1
) -> Task:
    """Make the task of a seed; equal arguments give an equal task on every machine.

    Args:
        seed: Which task.
        split: Whose names it uses.
        size: How large the repository is.
        num_bugs: Bugs in it, in different modules where there are enough; at most its functions.
    """
    digest = hashlib.sha256(f"{seed}/{split}/{size}/{num_bugs}".encode()).digest()
    rng = random.Random(digest)
    invented = 0.5 if split == "train" else 0.0
    module_range, function_range = SIZES[size]
    num_modules = rng.randint(*module_range)
    counts = [rng.randint(*function_range) for _ in range(num_modules)]
    project, *stems = pick_words(rng, "word", split, num_modules + 1, invented)

    taken = {project, *stems}
    count = sum(counts) + len(taken)
    names = [word for word in pick_words(rng, "word", split, count, invented) if word not in taken]
    broken_indices = _draw_broken(rng, counts, num_bugs)
    modules: list[tuple[str, tuple[Function, ...]]] = []
    checks: list[Check] = []
    broken: tuple[str, Function, str] | None = None
    index = 0
    for stem, count in sorted(zip(stems, counts, strict=True)):
        path = f"{project}/{stem}.py"
        functions: list[Function] = []
        while len(functions) < count:
            function, kind = make_function(rng, split, names[index], broken=index in broken_indices)
            if any(
                function.doc == other.doc or function.right == other.right for other in functions
            ):
                continue
            found = _checks_of(rng, path, function)
            if found is None:
                continue
            if index in broken_indices and broken is None:
                broken = path, function, kind
            functions.append(function)
            checks += found
            index += 1
        modules.append((path, tuple(functions)))
    assert broken is not None
    prompt = rng.choice(_PROMPTS if num_bugs == 1 else _OPEN_PROMPTS).format(p=project)
    path, function, kind = broken
    return Task(
        seed, split, size, project, prompt, tuple(modules), tuple(checks), path, function, kind
    )
