"""The pass ``overlap``: where gathers are issued, what it leaves alone, and that the ranks stay equal to the source."""

from __future__ import annotations

from typing import Any

import pytest
from helpers import NAMES, source
from hypothesis import given
from hypothesis import strategies as st
from products import fewer, spread

import gopt
from gopt.api import Sharded
from gopt.artifact.report_builder import call_bytes
from gopt.errors import OptionError
from gopt.ir.node_kinds import heavy
from gopt.passes.overlap import Issue, LiveRange, issue
from gopt.passes.pipeline import build_pipeline
from gopt.records.mesh import Mesh
from gopt.spmd.program import SpmdProgram
from gopt.spmd.traffic import CallContent, find_calls, measure, peak_gathered
from gopt.verification.verify import Verifier

FLAT = Mesh((("shard", 4),))
HYBRID = Mesh((("dp", 2), ("shard", 2)))
PLAIN = ("hoist-casts", "shard", "statistics", "prune")


def sharded(name: str, mesh: Mesh = FLAT, *, passes: Any = None, cap: float = 0.005, **options: Any) -> Sharded:
    """A fixture cut into many buckets; ``options`` of shard, and of overlap after ``overlap_``."""
    ours = {key.removeprefix("overlap_"): options.pop(key) for key in list(options) if key.startswith("overlap_")}
    defaults: dict[str, Any] = {"shard": {"bucket-mb": cap, **options}} | ({"overlap": ours} if ours else {})
    if passes is None or "fuse-collectives" in passes:
        defaults["fuse-collectives"] = {"cap-mb": cap}
    items = None if passes is None else [(each, {}) for each in passes]
    return gopt.shard(source(name), mesh, pipeline=build_pipeline(items, defaults))


def facts(result: Sharded) -> Any:
    return next(each.record.facts for each in result.ran if each.record.name == "overlap")


# --- the plan, without a graph --------------------------------------------------------------------------------------

CHAIN = [LiveRange(10, 19, 5), LiveRange(20, 29, 5), LiveRange(30, 39, 5), LiveRange(40, 49, 5)]


@pytest.mark.parametrize(
    ("prefetch", "expected"), [(0, [10, 20, 30, 40]), (1, [0, 10, 20, 30]), (2, [0, 0, 10, 20]), (9, [0, 0, 0, 0])]
)
def test_a_gather_is_issued_before_the_first_reader_of_one_before(prefetch, expected):
    assert [each.at for each in issue(CHAIN, prefetch, None)] == expected


@pytest.mark.parametrize(
    ("limit", "expected"), [(4, [10, 20, 30, 40]), (5, [0, 20, 30, 40]), (10, [0, 0, 20, 30]), (15, [0, 0, 10, 20])]
)
def test_a_limit_holds_gathers_back(limit, expected):
    found = issue(CHAIN, 2, limit)
    assert [each.at for each in found] == expected
    assert [bool(each.why) for each in found] == [each.at > free.at for each, free in zip(found, issue(CHAIN, 2, None))]


def test_a_bucket_is_not_gathered_again_while_its_copy_is_in_use():
    found = issue([LiveRange(10, 30, 5), LiveRange(40, 50, 5, copy=30)], 1, None)
    assert found == [Issue(0), Issue(31, "an earlier copy is still in use")]


def test_room_between_two_long_windows_is_used():
    windows = [LiveRange(0, 10, 6), LiveRange(20, 30, 6), LiveRange(25, 40, 4)]
    assert [each.at for each in issue(windows, 1, 10)] == [0, 11, 20]


@given(
    st.lists(st.tuples(st.integers(0, 60), st.integers(0, 40), st.integers(1, 9)), min_size=1, max_size=12),
    st.integers(0, 5),
    st.one_of(st.none(), st.integers(0, 60)),
)
def test_a_plan_keeps_its_promises(drawn, prefetch, limit):
    windows = [LiveRange(first, first + length, size) for first, length, size in sorted(drawn)]

    def peak(starts):
        places = range(max(window.last for window in windows) + 1)
        pairs = list(zip(starts, windows))
        return max(sum(w.nbytes for start, w in pairs if start <= place <= w.last) for place in places)

    found = issue(windows, prefetch, limit)
    free = [windows[place - prefetch].first if place >= prefetch else 0 for place in range(len(windows))]
    assert all(least <= each.at <= window.first for least, each, window in zip(free, found, windows))
    assert [bool(each.why) for each in found] == [each.at > least for least, each in zip(free, found)]
    if limit is not None:
        assert peak([each.at for each in found]) <= max(limit, peak([window.first for window in windows]))


# --- the graph ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mesh", [FLAT, HYBRID], ids=str)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("name", ["gpt_adamw", "gpt_adamw_clip_sched_fp16", "cnn_mom_fp16", "mlp_muon"])
def test_calls_that_reduce_stand_behind_what_completes_their_inputs(name, stage, mesh):
    step = sharded(name, mesh, stage=stage).program
    nodes, calls = step.graph.nodes, find_calls(step)
    early = [call for call in calls if call.carries is CallContent.GRADIENTS]
    assert early
    for call in early:
        between = nodes[call.ready + 1 : call.place]
        assert all(node.made_by and not heavy(node) for node in between), (call.node, between)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_no_update_waits_before_the_backward_is_done(stage):
    without = measure(find_calls(sharded("gpt_adamw_clip_sched_fp16", passes=PLAIN, stage=stage).program))
    with_it = measure(find_calls(sharded("gpt_adamw_clip_sched_fp16", stage=stage).program))
    assert with_it.by_kind["gradients"] > 0.4
    assert with_it.by_kind["gradients"] >= without.by_kind["gradients"]


def test_statistics_travel_behind_the_forward():
    assert facts(sharded("cnn_sgd"))["by_kind"]["other"] == 1.0
    assert facts(sharded("cnn_sgd"))["moved_earlier"] >= 1


@pytest.mark.parametrize("mesh", [FLAT, HYBRID], ids=str)
def test_prefetch_hides_gathers_and_a_limit_bounds_what_is_alive(mesh):
    by_distance = {d: facts(sharded("gpt_adamw", mesh, stage=3, overlap_prefetch=d)) for d in (0, 1, 2, 5)}
    assert by_distance[0]["by_kind"]["parameters"] < 0.2
    assert by_distance[1]["by_kind"]["parameters"] > 0.8
    peaks = [by_distance[d]["peak_gathered_bytes"] for d in (0, 1, 2, 5)]
    assert peaks == sorted(peaks)
    assert peaks[0] < peaks[1] < peaks[3]
    for distance in (1, 2, 5):
        for limit in (peaks[0], peaks[0] + 2000, peaks[1]):
            held = facts(
                sharded("gpt_adamw", mesh, stage=3, overlap_prefetch=distance, **{"overlap_limit-mb": limit / 2**20})
            )
            assert held["peak_gathered_bytes"] <= limit
            assert held["gathers"] == by_distance[distance]["gathers"]


def test_a_limit_below_what_is_in_use_is_reported():
    result = sharded("gpt_adamw", stage=3, **{"overlap_limit-mb": 0})
    record = next(each.record for each in result.ran if each.record.name == "overlap")
    assert record.note.startswith("over the limit")
    assert (
        record.facts["peak_gathered_bytes"]
        == facts(sharded("gpt_adamw", stage=3, overlap_prefetch=0))["peak_gathered_bytes"]
    )


@pytest.mark.parametrize("name", NAMES)
def test_only_the_order_changes(name):
    for stage in (1, 2, 3):
        plain, placed = (sharded(name, passes=p, stage=stage) for p in (PLAIN, (*PLAIN[:-1], "overlap", "prune")))
        assert sorted(map(repr, plain.program.graph.nodes)) == sorted(map(repr, placed.program.graph.nodes))
        both = [measure(find_calls(each.program)).hidden_share for each in (plain, placed)]
        assert both[1] >= both[0]


@pytest.mark.parametrize("mesh", [FLAT, HYBRID, Mesh((("shard", 3), ("tp", 2)))], ids=str)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("name", ["gpt_adamw_clip_sched_fp16", "cnn_mom_fp16", "mlp_lamb", "mlp_adamw_accum"])
def test_bytes_sent_are_the_mean_of_the_ranks(name, stage, mesh):
    result = sharded(name, mesh, stage=stage)
    for call in find_calls(result.program):
        each = [call_bytes(result.program, rank, call.node) for rank in result.ranks]
        assert call.sent == pytest.approx(sum(each) / len(each), abs=1)


def test_one_rank_and_an_empty_graph_are_nothing_to_do():
    result = gopt.shard(source("mlp_adamw"), 1)
    record = next(each.record for each in result.ran if each.record.name == "overlap")
    assert record.note == "the step makes no calls"
    assert find_calls(SpmdProgram.start(source("mlp_adamw").training, FLAT)) == []
    assert peak_gathered([]) == 0


@pytest.mark.parametrize("options", [{"overlap_prefetch": -1}, {"overlap_limit-mb": -1}, {"overlap_limit-mb": "nan"}])
def test_options_out_of_range_are_refused(options):
    with pytest.raises(OptionError):
        sharded("mlp_adamw", **options)


def test_a_second_run_changes_nothing():
    step = sharded("gpt_adamw", stage=3).program
    before = [id(node) for node in step.graph.nodes]
    build_pipeline([("overlap", {})]).run(step)
    assert [id(node) for node in step.graph.nodes] == before


# --- the ranks run --------------------------------------------------------------------------------------------------


KNOBS = [(0, None), (1, None), (2, 0.01), (5, None), (5, 0.012)]
"""How many gathers ahead, and how many MiB of them."""


@pytest.mark.parametrize(
    ("name", "stage", "knobs"),
    fewer(spread(["gpt_adamw_clip_sched_fp16", "gpt_adamw", "cnn_mom_fp16"], [1, 2, 3], KNOBS), 3),
    ids=str,
)
def test_ranks_equal_the_source(name, stage, knobs, tmp_path):
    prefetch, limit = knobs
    mesh = HYBRID if prefetch == 2 else FLAT
    result = sharded(name, mesh, stage=stage, overlap_prefetch=prefetch, **{"overlap_limit-mb": limit})
    result.write(tmp_path / "out")
    found = Verifier(tmp_path / "out").run(confirm=False)
    assert found.equal, found.worst
    assert found.compared > 0


@pytest.mark.parametrize("name", ["gpt_adamw_clip_sched_fp16", "mlp_adamw_fp16_scaler", "mlp_muon"])
def test_ranks_equal_the_source_at_stage_0(name, tmp_path):
    sharded(name, stage=0).write(tmp_path / "out")
    assert Verifier(tmp_path / "out").run(confirm=False).equal
