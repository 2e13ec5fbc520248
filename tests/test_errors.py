"""Every error is exported, documented, picklable, mapped, and drawn in the tree."""

from __future__ import annotations

import ast
import copy
import inspect
import pickle
import re
from pathlib import Path

import pytest

import dlite_agent
from dlite_agent import errors
from dlite_agent.errors import ContextLengthExceededError, DLiteError

ROOT = Path(__file__).parents[1]

SAMPLES: dict[type[DLiteError], tuple[object, ...]] = {
    ContextLengthExceededError: (41_203, 1_024, 40_960)
}


def subclasses(root: type[DLiteError]) -> list[type[DLiteError]]:
    found = [root]
    for child in root.__subclasses__():
        found += subclasses(child)
    return sorted(set(found), key=lambda error: error.__name__)


ALL = [error for error in subclasses(DLiteError) if error.__module__ == errors.__name__]


def example(error: type[DLiteError]) -> DLiteError:
    return error(*SAMPLES.get(error, ("model is 'x'; use 'nano'",)))


def tree() -> list[tuple[int, str, int | None]]:
    """The docstring's drawing: depth, name and status of each line."""
    drawing = (errors.__doc__ or "").split("```")[1]
    rows = []
    for line in drawing.strip().splitlines():
        match = re.match(r"(?P<indent>[│├└─ ]*)(?P<name>\w+)(?P<rest>.*)", line)
        assert match is not None, line
        status = re.search(r"(\d{3})$", match["rest"])
        rows.append((len(match["indent"]) // 3, match["name"], int(status[1]) if status else None))
    return rows


def constructed(folder: str) -> set[str]:
    """Names called anywhere below a folder, and what `pytest.raises` names."""
    names: set[str] = set()
    for path in (ROOT / folder).rglob("*.py"):
        if path.name in ("errors.py", "langchain_errors.py"):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                names.add(node.func.id)
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.raises":
                names |= {part.split(".")[-1] for part in re.findall(r"[\w.]+", ast.unparse(node))}
    return names


def test_each_error_is_raised_somewhere_and_expected_by_a_test() -> None:
    raised, expected = constructed("dlite_agent"), constructed("tests")
    for error in ALL:
        is_reserved = "Reserved:" in (error.__doc__ or "")
        is_root = error is DLiteError
        assert is_root or (error.__name__ in raised) != is_reserved, error
        assert is_root or is_reserved or error.__name__ in expected, error
    assert not [error for error in ALL if "Reserved:" in (error.__doc__ or "")]


def test_public_errors_are_defined_here_only() -> None:
    # A host's adapter may have classes that are ours and the host's, under the name users know.
    elsewhere = set(subclasses(DLiteError)) - set(ALL)
    ours = set(ALL)
    assert [
        error
        for error in elsewhere
        if not any(base in ours and base.__name__ == error.__name__ for base in error.__bases__)
    ] == []


@pytest.mark.parametrize("error", ALL, ids=lambda error: error.__name__)
def test_each_error_is_exported_and_documented(error: type[DLiteError]) -> None:
    assert error.__name__ in errors.__all__
    assert getattr(dlite_agent, error.__name__) is error
    assert error.__name__ in dlite_agent.__all__
    assert inspect.cleandoc(error.__doc__ or "").endswith(".") or "Args:" in (error.__doc__ or "")


@pytest.mark.parametrize("error", ALL, ids=lambda error: error.__name__)
@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_each_error_keeps_message_and_attributes_when_pickled(
    error: type[DLiteError], protocol: int
) -> None:
    original = example(error)
    original.add_note("while loading")
    restored = pickle.loads(pickle.dumps(original, protocol))
    assert type(restored) is error
    assert str(restored) == str(original)
    assert vars(restored) == vars(original)
    assert str(copy.copy(original)) == str(original)


@pytest.mark.parametrize("error", ALL, ids=lambda error: error.__name__)
def test_each_error_has_a_code_a_status_and_says_whether_to_retry(error: type[DLiteError]) -> None:
    assert re.fullmatch(r"[a-z_]+", error.code)
    assert 400 <= error.http_status < 600
    assert error.retryable == (error.http_status in {409, 503})


def test_codes_tell_the_errors_apart() -> None:
    assert len({error.code for error in ALL}) == len(ALL)


def test_the_drawn_tree_is_the_class_tree() -> None:
    rows = tree()
    assert sorted(name for _, name, _ in rows) == sorted(error.__name__ for error in ALL)
    path: list[str] = []
    for depth, name, status in rows:
        error = getattr(errors, name)
        path[depth:] = [name]
        if depth:
            assert path[depth - 1] in {base.__name__ for base in error.__bases__}
        if status is not None:
            assert error.http_status == status, name


@pytest.mark.parametrize("error", ALL, ids=lambda error: error.__name__)
def test_each_error_reaches_a_langchain_host_as_itself(error: type[DLiteError]) -> None:
    from dlite_agent.integrations.langchain_errors import langchain_errors

    original = example(error)
    with pytest.raises(error) as caught, langchain_errors():
        raise original
    restored = pickle.loads(pickle.dumps(caught.value))
    assert type(restored) is type(caught.value)
    assert str(restored) == str(caught.value) == str(original)
    assert (restored.code, restored.http_status) == (error.code, error.http_status)


def test_errors_are_also_the_builtin_that_callers_expect() -> None:
    assert issubclass(errors.ConfigurationError, ValueError)
    assert issubclass(errors.RequestError, ValueError)
    assert issubclass(errors.MissingDependencyError, ImportError)
    assert issubclass(errors.CapacityError, RuntimeError)


def test_context_length_error_says_the_numbers_and_what_to_do() -> None:
    error = ContextLengthExceededError(prompt_tokens=41_203, max_tokens=1_024, limit=40_960)
    assert str(error) == (
        "prompt has 41203 tokens and max_tokens=1024, but the limit is 40960; "
        "shorten the history, lower max_tokens or raise max_context"
    )
