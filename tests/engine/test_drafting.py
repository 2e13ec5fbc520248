"""Which drafter an engine gets, and where its cost table comes from."""

from __future__ import annotations

from pathlib import Path

import pytest

from dlite_agent.config import EngineConfig
from dlite_agent.decoding.controller import Controller
from dlite_agent.decoding.load import Load
from dlite_agent.drafters.drafter import Drafter
from dlite_agent.drafters.null import NullDrafter
from dlite_agent.drafters.workspace import WorkspaceIndex
from dlite_agent.engine.drafting import TenantDrafters, cost_table_of, make_drafter, make_drafters
from dlite_agent.errors import DrafterMismatchError
from dlite_agent.models.kv_pool import PAGE_ROWS
from dlite_agent.models.transformer import DenseTransformer
from dlite_agent.sampling import KeyedNoise
from dlite_agent.testing import tiny_config, tiny_qwen3


@pytest.fixture(scope="module")
def target() -> DenseTransformer:
    return tiny_qwen3()


class Stages:
    """Which stages of loading were heard of."""

    def __init__(self) -> None:
        self.heard: list[str] = []

    def __call__(self, stage: str, fraction: float) -> None:
        self.heard.append(stage)


def make(target: DenseTransformer, load: Load | None = None, **options: object) -> Drafter:
    config = EngineConfig(**options)  # type: ignore[arg-type]
    return make_drafter(config, target, load or Load(), Stages())


def test_auto_is_a_controller_that_reads_the_load(target: DenseTransformer, tmp_path: Path) -> None:
    load = Load()
    drafter = make(target, load, cache_dir=str(tmp_path))
    assert isinstance(drafter, Controller)
    assert drafter.name == "auto(suffix)"
    assert drafter.load is load
    assert drafter.costs.origin == "measured"


@pytest.mark.parametrize("name", ["null", "lookup", "suffix"])
def test_a_drafter_that_is_named_is_that_alone_and_nothing_is_measured(
    target: DenseTransformer, tmp_path: Path, name: str
) -> None:
    drafter = make(target, drafter=name, cache_dir=str(tmp_path / "cache"))
    assert drafter.name == name
    assert not (tmp_path / "cache").exists()
    with pytest.raises(DrafterMismatchError):
        make(target, drafter="nobody")


def test_tenants_share_what_is_measured_and_nothing_that_is_learnt(
    target: DenseTransformer,
) -> None:
    config, workspaces = EngineConfig(reproducible=True), WorkspaceIndex()
    drafters = make_drafters(config, target, Load(), Stages(), workspaces)
    ours, theirs = drafters.of("ours"), drafters.of("theirs")
    assert isinstance(ours, Controller)
    assert isinstance(theirs, Controller)
    assert drafters.of("ours") is ours
    assert ours.costs is theirs.costs
    assert ours.asked_sources[0].counts is not theirs.asked_sources[0].counts
    read = list(range(100, 140))
    workspaces.add(read, tenant="ours")
    ids = [7, *read[:12]]
    drafted = [
        drafter.propose(drafter.start(ids), ids[-1], None, len(ids) - 1, KeyedNoise(0), 8)
        for drafter in (ours, theirs)
    ]
    assert list(drafted[0].token_ids) == read[12 : 12 + len(drafted[0].token_ids)] != []
    assert drafted[0].source == "workspace"
    assert drafted[1].token_ids == ()


def test_the_tenant_that_was_not_seen_for_longest_is_forgotten() -> None:
    made: list[str] = []

    def make(tenant: str) -> Drafter:
        made.append(tenant)
        return NullDrafter()

    drafters = TenantDrafters(make, max_tenants=2)
    for tenant in ("a", "b", "a", "c", "a", "b"):
        drafters.of(tenant)
    assert made == ["a", "b", "c", "b"]


def test_a_model_is_measured_once_on_a_machine(target: DenseTransformer, tmp_path: Path) -> None:
    config = EngineConfig(cache_dir=str(tmp_path))
    stages = Stages()
    rows_before = target.rows_computed
    first = cost_table_of(config, target, stages)
    assert stages.heard == ["measuring"]
    assert target.rows_computed == rows_before
    again = Stages()
    second = cost_table_of(config, target, again)
    assert again.heard == []
    assert second.origin == "cached"
    assert second.seconds == first.seconds
    assert cost_table_of(config, tiny_qwen3(seed=1), Stages()).origin == "measured"


def test_off_writes_nothing_and_measures_every_time(target: DenseTransformer) -> None:
    config = EngineConfig(cache_dir="off")
    assert cost_table_of(config, target, Stages()).origin == "measured"
    assert cost_table_of(config, target, Stages()).origin == "measured"


def test_folder_that_cannot_be_written_to_is_no_error(
    target: DenseTransformer, tmp_path: Path
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("here", encoding="utf-8")
    config = EngineConfig(cache_dir=str(blocked))
    assert cost_table_of(config, target, Stages()).origin == "measured"
    assert blocked.read_text(encoding="utf-8") == "here"


def test_reproducible_reads_no_clock_and_no_file(target: DenseTransformer, tmp_path: Path) -> None:
    stages = Stages()
    config = EngineConfig(cache_dir=str(tmp_path), reproducible=True)
    table = cost_table_of(config, target, stages)
    assert table.origin == "frozen"
    assert stages.heard == []
    assert list(tmp_path.iterdir()) == []
    drafter = make(target, cache_dir=str(tmp_path), reproducible=True)
    assert isinstance(drafter, Controller)
    assert drafter._clock is None


def test_rows_are_free_where_every_forward_has_the_same(target: DenseTransformer) -> None:
    table = cost_table_of(EngineConfig(audit=True), target, Stages())
    assert table.round_s(17) == table.step_s


def test_full_pool_is_priced_by_its_shape(tmp_path: Path) -> None:
    page_bytes = PAGE_ROWS * tiny_config().kv_bytes_per_token(4)
    full = tiny_qwen3(max_kv_bytes=page_bytes)
    with full.new_cache() as kv:
        kv.reserve(1)
        table = cost_table_of(EngineConfig(cache_dir=str(tmp_path)), full, Stages())
    assert table.origin == "frozen"
    assert list(tmp_path.iterdir()) == []
