"""What stands below the help of each verb: lines to try."""

from __future__ import annotations

__all__ = ["EXAMPLES", "STATUSES"]

STATUSES = """\
exit status:
  0    done
  1    the verb's own "no": a task not solved, a model not supported
  2    a wrong option or request
  3    another error that is told in one line
  130  Ctrl-C
  141  nobody reads the output any more, as behind "| head -1"
  run ends with the status of its command."""

_LINES = {
    "demo": ("dlite-agent demo", "dlite-agent demo --size medium --bugs 2 --seed 4"),
    "serve": (
        "dlite-agent serve Qwen/Qwen3-8B --max-model-len 32768 --kv-disk auto",
        "dlite-agent serve nano --port 0 --api-key secret",
    ),
    "run": (
        "dlite-agent run --model Qwen/Qwen3-8B -- aider",
        "dlite-agent run -- python my_agent.py",
    ),
    "chat": (
        "dlite-agent chat Qwen/Qwen3-4B --no-think",
        "dlite-agent chat nano --root . --tools repair",
        "dlite-agent chat ./checkpoint --root . --tools files,tests,shell --tools mine.py:lookup",
        "echo 'Fix the bug.' | dlite-agent chat nano --root . --tools repair --yes --json",
    ),
    "doctor": (
        "dlite-agent doctor",
        "dlite-agent doctor Qwen/Qwen3-8B --vram 24 --quantize int8",
        "dlite-agent doctor nano requests.jsonl",
    ),
    "bench": ("dlite-agent bench --quick", "dlite-agent bench decode turns --model nano --json"),
    "train": (
        "dlite-agent train capture nano --dry-run",
        "dlite-agent train align nano --minutes 60",
    ),
    "sessions": (
        "dlite-agent sessions list --json",
        "dlite-agent sessions purge --older-than 7d",
    ),
    "drafters": ("dlite-agent drafters Qwen/Qwen3-8B", "dlite-agent drafters nano --check suffix"),
    "completion": (
        'eval "$(dlite-agent completion bash)"   # in ~/.bashrc',
        'eval "$(dlite-agent completion zsh)"    # in ~/.zshrc, behind compinit',
        "dlite-agent completion fish > ~/.config/fish/completions/dlite-agent.fish",
    ),
}

EXAMPLES = {
    verb: "\n".join(["examples:", *(f"  {line}" for line in lines)])
    for verb, lines in _LINES.items()
}
"""Verb → text."""
