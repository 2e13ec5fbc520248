"""The oracle of the mini dialect: mini-swe-agent's templates, `bash` and submit command.

The templates are read from the installed package, which only training and evaluation need.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.resources
import io
import json
import random
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import cast

import jinja2
import yaml

from dlite_agent.nano.chatml import Conversation
from dlite_agent.nano.names import Split
from dlite_agent.nano.oracle import Transcript, draw_num_bugs, first_failure
from dlite_agent.nano.tools import SimulatedTools
from dlite_agent.nano.world import TEST_FILE, Size, Task, make_task
from dlite_agent.training.conversations import BASH_TOOL

__all__ = [
    "BASH_TOOL",
    "SUBMIT",
    "SimulatedShell",
    "import_host",
    "mini_config",
    "mini_conversation",
    "mini_issue",
]

SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"

_ISSUES = (
    "The tests of {p} fail. Run them with `python3 run_tests.py` and fix the bug.",
    "`python3 run_tests.py` fails. Find the bug in {p} and fix it.",
    "One function of {p} is wrong. `python3 run_tests.py` shows which. Fix it.",
    "Fix the bug in {p} so that `python3 run_tests.py` passes.",
)
_MACHINES = (
    ("Linux", "6.8.0-45-generic", "#45-Ubuntu SMP PREEMPT_DYNAMIC", "x86_64"),
    ("Linux", "5.15.0-1034-aws", "#38-Ubuntu SMP", "x86_64"),
    ("Linux", "6.1.0-18-amd64", "#1 SMP PREEMPT_DYNAMIC Debian 6.1.76-1", "x86_64"),
    ("Linux", "6.6.87.2-microsoft-standard-WSL2", "#1 SMP PREEMPT_DYNAMIC", "x86_64"),
    ("Linux", "6.12.9-orbstack", "#1 SMP", "aarch64"),
    ("Darwin", "24.3.0", "Darwin Kernel Version 24.3.0", "arm64"),
)


def import_host() -> None:
    """Import mini-swe-agent without its greeting on standard output."""
    with contextlib.redirect_stdout(io.StringIO()):
        importlib.import_module("minisweagent")


@lru_cache(maxsize=1)
def mini_config() -> Mapping[str, Mapping[str, object]]:
    """Read mini-swe-agent's `mini.yaml` from the installed package."""
    import_host()
    text = (importlib.resources.files("minisweagent") / "config" / "mini.yaml").read_text("utf-8")
    return cast("Mapping[str, Mapping[str, object]]", yaml.safe_load(text))


@lru_cache(maxsize=8)
def _template(section: str, key: str) -> jinja2.Template:
    template: jinja2.Template = jinja2.Template(str(mini_config()[section][key]))
    return template


def mini_issue(rng: random.Random, task: Task) -> str:
    """Write the issue of a task as mini-swe-agent's user would."""
    return rng.choice(_ISSUES).format(p=task.project)


def _instance(rng: random.Random, issue: str, keep: float) -> str:
    """Render the instance template; each of its sections stays with probability `keep`."""
    system, release, version, machine = rng.choice(_MACHINES)
    if rng.random() < 0.3:
        release = f"{rng.randint(4, 7)}.{rng.randint(0, 20)}.{rng.randint(0, 200)}"
        version = f"#{rng.randint(1, 99)} SMP"
    text = _template("agent", "instance_template").render(
        task=issue, system=system, release=release, version=version, machine=machine
    )
    head, *sections = re.split(r"(?=^#+ )", text, flags=re.MULTILINE)
    return head + "".join(section for section in sections if rng.random() < keep)


class SimulatedShell:
    """What the oracle's commands print, without a shell.

    Args:
        task: Whose repository it stands in.
    """

    def __init__(self, task: Task) -> None:
        self._tools = SimulatedTools(task)
        self._task = task

    @property
    def files(self) -> dict[str, str]:
        """The files, by path."""
        return self._tools.files

    def execute(self, command: str) -> tuple[int, str]:
        """Run one of the oracle's commands; returns the exit code and the output."""
        if command == "ls -R":
            inside = sorted(path.split("/")[1] for path in self.files if "/" in path)
            project = self._task.project
            top = "\n".join(sorted([project, TEST_FILE]))
            return 0, f".:\n{top}\n\n./{project}:\n" + "\n".join(inside) + "\n"
        if command.startswith("python3 "):
            output = self._tools.run_tests()
            return int("FAIL " in output), output + "\n"
        if match := re.fullmatch(r"grep -n -A2 '(.*)' (\S+)", command):
            return self._grep(match[1], match[2])
        match = re.fullmatch(r"sed -i '(\d+)c\\(.*)' (\S+)", command)
        assert match is not None, command
        lines = self.files[match[3]].split("\n")
        lines[int(match[1]) - 1] = match[2]
        self.files[match[3]] = "\n".join(lines)
        return 0, ""

    def _grep(self, pattern: str, path: str) -> tuple[int, str]:
        lines = self.files[path].split("\n")
        at = next(i for i, line in enumerate(lines) if pattern in line)
        found = [f"{at + 1}:{lines[at]}"] + [f"{i + 1}-{lines[i]}" for i in (at + 1, at + 2)]
        return 0, "\n".join(found) + "\n"


def mini_conversation(
    rng: random.Random,
    *,
    split: Split,
    size: Size,
    thinking: bool,
    keep: float = 1.0,
    mistakes: float = 0.12,
) -> Conversation:
    """Write a solved task of the mini dialect.

    Args:
        rng: Source of every choice.
        split: Whose names to use.
        size: Size of the repository.
        thinking: Whether thoughts are written.
        keep: Share of the instance template's sections that stay; below 1 it makes rows short.
        mistakes: Probability of a deliberate wrong edit, from which the oracle then recovers.
    """
    task = make_task(rng.getrandbits(40), split=split, size=size, num_bugs=draw_num_bugs(rng))
    shell = SimulatedShell(task)
    transcript = Transcript(thinking)
    transcript.say("system", str(mini_config()["agent"]["system_template"]).strip())
    transcript.say("user", _instance(rng, mini_issue(rng, task), keep))
    _bash(transcript, shell, "I list the files.", "ls -R")
    output = _bash(transcript, shell, "I run the tests.", f"python3 {TEST_FILE}")
    is_mistaken = rng.random() < mistakes
    while "FAIL " in output:
        path, name = first_failure(output)
        broken = task.function(path, name)
        text = f"FAIL {path} {broken.name}. I look at {broken.name}."
        found = _bash(transcript, shell, text, f"grep -n -A2 'def {broken.name}(' {path}")
        line = found.strip("\n").rsplit("\n", 1)[-1].split("-", 1)[0]
        body = broken.right
        if is_mistaken:
            is_mistaken = False
            transcript.unlearned.add(len(transcript.messages))
            body = broken.written if rng.random() < 0.5 else "0"
        text = f"FAIL {path} {broken.name} is {broken.doc}. I change line {line}."
        _bash(transcript, shell, text, f"sed -i '{line}c\\    {broken.line(body)}' {path}")
        output = _bash(transcript, shell, "I run the tests again.", f"python3 {TEST_FILE}")
    transcript.call("All tests pass. I submit.", "bash", {"command": SUBMIT})
    return Conversation(
        transcript.messages,
        [json.loads(json.dumps(BASH_TOOL))],
        thinking,
        frozenset(transcript.unlearned),
        forget=rng.random() < 0.12,
    )


def _bash(transcript: Transcript, shell: SimulatedShell, text: str, command: str) -> str:
    transcript.call(text, "bash", {"command": command})
    code, output = shell.execute(command)
    result = {"output": output, "returncode": code, "exception_info": ""}
    transcript.say("tool", _template("model", "observation_template").render(output=result))
    return output
