from __future__ import annotations

from dlite_agent.chat.messages import ToolSpec
from dlite_agent.chat.tool_forms import ToolForms

READ = ToolSpec("read", "Read.", {"type": "object", "properties": {}})
WRITE = ToolSpec("write", "Write.")


def test_tools_keep_the_order_and_the_spelling_in_which_they_came_first() -> None:
    forms = ToolForms()
    assert forms.first_seen((READ, WRITE)) == (READ, WRITE)
    turned = ToolSpec("read", "Read.", {"properties": {}, "type": "object"})
    again = forms.first_seen((WRITE, turned))
    assert again == (READ, WRITE)
    assert list(again[0].parameters) == ["type", "properties"]


def test_a_list_with_another_tool_is_taken_as_it_is() -> None:
    forms = ToolForms()
    forms.first_seen((READ, WRITE))
    assert forms.first_seen((WRITE,)) == (WRITE,)
    other = ToolSpec("read", "Read a file.", READ.parameters)
    assert forms.first_seen((WRITE, other)) == (WRITE, other)


def test_the_list_that_was_not_seen_for_longest_is_forgotten() -> None:
    forms = ToolForms(max_lists=1)
    forms.first_seen((READ, WRITE))
    forms.first_seen((READ,))
    assert forms.first_seen((WRITE, READ)) == (WRITE, READ)
