"""What other sessions of a tenant know, within a budget, and nothing of other tenants."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlite_agent.drafters.suffix import SuffixDrafter
from dlite_agent.drafters.workspace import Workspace, WorkspaceIndex
from dlite_agent.errors import ConfigurationError
from dlite_agent.sampling import KeyedNoise

FILE = list(range(100, 140))
NOISE = KeyedNoise(0)


def drafted(workspace: Workspace | None, ids: list[int], budget: int = 8) -> tuple[str, list[int]]:
    drafter = SuffixDrafter(
        min_reached=0.0, workspace=None if workspace is None else lambda: workspace
    )
    state = drafter.start(ids)
    block = drafter.propose(state, ids[-1], None, len(ids) - 1, NOISE, budget)
    assert len(block.confidence) == len(block.token_ids)
    if block.source == "workspace":
        assert state.matched >= 3
    return block.source, list(block.token_ids)


def test_new_session_copies_what_another_has_read() -> None:
    workspace = Workspace()
    assert workspace.add(FILE)
    assert drafted(workspace, [1, *FILE[:4]]) == ("workspace", FILE[4:12])
    assert drafted(None, [1, *FILE[:4]]) == ("suffix", [])


def test_own_longer_match_wins() -> None:
    workspace = Workspace()
    workspace.add(FILE)
    own = [*FILE[:5], 77, 78, 79, 80, *FILE[:5]]
    assert drafted(workspace, own)[0] == "suffix"
    shorter = [FILE[3], 77, 78, *FILE[:4]]
    assert drafted(workspace, shorter) == ("workspace", FILE[4:12])
    assert drafted(workspace, [FILE[2], 55, 50, 51, FILE[2]], 2) == ("suffix", [55, 50])


def test_two_tokens_are_no_match() -> None:
    workspace = Workspace()
    workspace.add(FILE)
    assert drafted(workspace, [1, *FILE[:2]]) == ("suffix", [])


def test_no_copy_crosses_the_end_of_a_span() -> None:
    workspace = Workspace()
    workspace.add(FILE)
    workspace.add(list(range(200, 220)))
    assert drafted(workspace, FILE[-8:-3]) == ("workspace", FILE[-3:])
    assert drafted(workspace, FILE[-8:]) == ("suffix", [])
    assert drafted(workspace, [*FILE[-2:], *range(200, 204)])[1] == list(range(204, 212))


def test_known_and_short_spans_are_not_added_again() -> None:
    workspace = Workspace()
    assert workspace.add(FILE)
    size = workspace.num_tokens
    assert not workspace.add(FILE)
    assert not workspace.add([1, 2, 3])
    assert workspace.num_tokens == size


def test_span_that_is_read_again_outlives_its_generation() -> None:
    workspace = Workspace()
    workspace.add(FILE)
    workspace.age()
    assert drafted(workspace, FILE[:4])[0] == "workspace"
    workspace.add(FILE)
    workspace.age()
    assert drafted(workspace, FILE[:4])[0] == "workspace"
    workspace.age()
    assert drafted(workspace, FILE[:4])[0] == "suffix"


def test_tenants_never_see_each_other() -> None:
    index = WorkspaceIndex()
    index.add(FILE, tenant="a")
    assert drafted(index.of("a"), FILE[:5])[0] == "workspace"
    for other in ("", "b"):
        assert drafted(index.of(other), FILE[:5]) == ("suffix", [])
        assert index.of(other).num_tokens == 0


@settings(max_examples=25, deadline=None)
@given(
    spans=st.lists(
        st.tuples(st.sampled_from("abc"), st.integers(0, 4_000), st.integers(0, 9)), max_size=30
    )
)
def test_budget_holds_and_other_tenants_text_is_never_found(
    spans: list[tuple[str, int, int]],
) -> None:
    max_bytes = 200_000
    index = WorkspaceIndex(max_bytes)
    for tenant, length, seed in spans:
        rng = random.Random(seed)
        base = 10_000 * ord(tenant)
        index.add([base + rng.randrange(10_000) for _ in range(length)], tenant=tenant)
        assert index.nbytes <= max_bytes
    for tenant in "abc":
        base = 10_000 * ord(tenant)
        for generation in (index.of(tenant)._young, index.of(tenant)._old):
            held = generation.index.last(10**6)
            assert all(i == -1 or base <= i < base + 10_000 for i in held)


def test_least_recently_used_tenant_forgets_first() -> None:
    index = WorkspaceIndex(150_000)
    rng = random.Random(0)
    index.add(FILE, tenant="idle")
    index.add(FILE, tenant="busy")
    for _ in range(40):
        index.add([rng.randrange(5_000) for _ in range(300)], tenant="busy")
        index.of("busy")
    assert index.of("idle").num_tokens == 0
    assert index.of("busy").num_tokens > 0


def test_span_beyond_the_budget_is_not_kept() -> None:
    index = WorkspaceIndex(50_000)
    index.add(list(range(20_000)))
    assert index.nbytes <= 50_000
    index.add(FILE)
    assert drafted(index.of(), FILE[:5])[0] == "workspace"


def test_budget_must_be_positive() -> None:
    with pytest.raises(ConfigurationError, match="max_bytes is 0"):
        WorkspaceIndex(0)
