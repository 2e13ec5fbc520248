"""An answer that fits a schema, and a tool that must be called, from a model of any size.

python examples/04_structured_output.py
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel

from dlite_agent import ChatDLite


class Finding(BaseModel):
    """What is wrong with a file."""

    kind: Literal["bug", "style", "nothing"]
    line: int


def run_tests() -> str:
    """Run the tests."""
    return "1 failed"


def main() -> tuple[Any, list[Any]]:
    """The answer, and the calls."""
    model = ChatDLite("nano", temperature=0, max_tokens=200)
    finding = model.with_structured_output(Finding).invoke("Line 2 of calc.py subtracts.")
    forced = model.bind_tools([run_tests], tool_choice="run_tests")
    calls = forced.invoke("What is wrong with calc.py?").tool_calls
    print(finding, [call["args"] for call in calls])
    return finding, calls


if __name__ == "__main__":
    main()
