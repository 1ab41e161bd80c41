"""Recompute on pipeline stages: each backward action makes its values again, and a schedule saves fewer in between."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from itertools import product
from typing import Any

import pytest
from helpers import last_reads, source
from products import part, spread

import gopt
from gopt.api import Sharded
from gopt.errors import OptionError, UnsupportedError
from gopt.ir.graph import RECOMPUTE
from gopt.ir.node_kinds import draws
from gopt.lower.lowering import lower
from gopt.lower.phases import phases
from gopt.lower.rank_graph import RankGraph
from gopt.operators.kinds import MAY_DRAW
from gopt.records.pass_facts import OverlapFacts
from gopt.spmd.program import SpmdProgram
from gopt.spmd.stage_plan import transfers
from gopt.spmd.step_memory import live, stage_runs
from gopt.spmd.traffic import calls_of

pytestmark = pytest.mark.usefixtures("unchecked")

FIXTURES = (
    "gpt_adamw", "gpt_adamw_clip_sched_fp16", "families/llama_adamw_clip", "mlp_adamw", "cnn_sgd",
    "real/dropout_mlp_random",
)  # fmt: skip
MESHES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("pp=2", {}),
    ("pp=2", {"accumulate": 4, "schedule": "1f1b"}),
    ("pp=3", {"accumulate": 3, "schedule": "gpipe"}),
    ("pp=3", {"accumulate": 3, "schedule": "zb-h1"}),
    ("pp=2,shard=2", {"stage": 1, "accumulate": 2, "schedule": "zb-h1"}),
    ("shard=2,pp=2", {"stage": 2, "accumulate": 3, "schedule": "1f1b"}),
    ("pp=2,shard=2", {"stage": 3, "accumulate": 2, "schedule": "zb-v"}),
    ("shard=2,pp=2", {"stage": 3, "accumulate": 2, "schedule": "1f1b"}),
    ("pp=2,tp=2", {"accumulate": 2, "schedule": "zb-h1"}),
)
CASES = [(*case, policy) for case, policy in product(product(FIXTURES, MESHES), ("full", "selective", "bound"))]


@pytest.mark.parametrize(("fixture", "mesh", "policy"), part(CASES, 6))
def test_ranks_on_stages_compute_the_step(fixture, mesh, policy, tmp_path):
    axes, options = mesh
    try:
        if policy == "bound":
            before = gopt.shard(source(fixture), axes, **options).report().before_after
            assert before is not None
            policy = f"{int(0.85 * before.largest.peak_live)}B"
        result = gopt.shard(source(fixture), axes, recompute=policy, verify_each=True, **options)
    except UnsupportedError as error:
        assert "bytes alive at once" in str(error) or ("random" in fixture and "tp" in axes)  # a bound out of reach
        return
    assert not any(node.op_type in MAY_DRAW for node in copies(result))
    result.write(tmp_path / "ranks")
    verified = gopt.verify(tmp_path / "ranks", steps=2, confirm=False)
    assert verified.equal, verified.reason()
    if "random" not in fixture:  # what a stage draws and sends is not proven yet
        assert gopt.prove(tmp_path / "ranks").proven


@pytest.mark.rest
def test_a_gather_of_another_stage_of_the_member_is_not_read_early(tmp_path):
    """The first and the last stage are on one member, and share the tied table, which each gathers in its own turn."""
    options = {"stage": 3, "accumulate": 2, "schedule": "zb-v"}
    gopt.shard(source("gpt_adamw"), "pp=2,shard=2", recompute="selective", **options).write(tmp_path / "ranks")
    assert gopt.verify(tmp_path / "ranks", steps=2, confirm=False).equal
    assert gopt.prove(tmp_path / "ranks").proven


@pytest.mark.slow
@pytest.mark.parametrize(("fixture", "mesh", "policy"), CASES)
def test_all_ranks_on_stages_compute_the_step(fixture, mesh, policy, tmp_path):
    test_ranks_on_stages_compute_the_step(fixture, mesh, policy, tmp_path)


def copies(result: Sharded) -> list[Any]:
    return [node for node in result.program.graph.nodes if node.made_by == RECOMPUTE]


@pytest.mark.parametrize(
    ("fixture", "mesh", "schedule", "left"),
    [
        ("gpt_adamw", "pp=2", "1f1b", 0.2), ("gpt_adamw", "pp=2", "gpipe", 0.4),
        ("families/llama_adamw_clip", "pp=3", "gpipe", 0.5),
    ],
)  # fmt: skip
def test_less_is_saved_between_actions(fixture, mesh, schedule, left):
    """Of the stages together; the last stage saves the values of the loss, which is outside of repeated blocks."""
    plain, again = (
        gopt.shard(source(fixture), mesh, accumulate=4, schedule=schedule, recompute=policy).program
        for policy in (None, "full")
    )  # fmt: skip
    assert sum(run.saved for run in stage_runs(again)) <= left * sum(run.saved for run in stage_runs(plain))
    for before, behind in zip(stage_runs(plain), stage_runs(again)):
        assert behind.peaks.peak < before.peaks.peak


def test_a_bound_is_met_by_each_stage_for_itself():
    options = {"accumulate": 4, "schedule": "1f1b"}
    plain = gopt.shard(source("gpt_adamw"), "pp=2", **options)
    first, second = (run.peaks.peak for run in stage_runs(plain.program))
    assert first > second
    bounded = gopt.shard(source("gpt_adamw"), "pp=2", recompute=f"{second}B", **options)
    assert max(run.peaks.peak for run in stage_runs(bounded.program)) <= second
    stages = {bounded.program.value_stages[node.first_output] for node in copies(bounded)}
    assert stages == {0}, "the second stage was within the bound"


def test_a_copy_that_both_halves_of_a_backward_read_is_made_once():
    result = gopt.shard(source("gpt_adamw"), "pp=2", accumulate=2, schedule="zb-h1", recompute="full")
    made, read = Counter[str](), set[str]()
    for graph in lower(result.program, [0, 1]).ranks:
        names = {name for node in graph.nodes for name in node.outputs}
        made.update(name for name in names if name.endswith(".again"))
        if graph.phase.name == "weight":
            read |= {value.input for value in graph.saved if value.input in graph.phase.graph.inputs}
    assert any(name.endswith(".again") for name in read)
    made = Counter({name: count for name, count in made.items() if name in read})
    assert set(made.values()) == {1}


def held(graphs: dict[str, RankGraph], order: list[tuple[str, int]], counted: Collection[str] | None = None) -> int:
    """The most bytes in the files of a rank, one after the other: what a run holds that frees each value behind its
    last reader, and saved values at the end of the last file that reads them. ``counted``: values that count; None:
    all."""
    saved: dict[tuple[int, str], int] = {}
    sums = {value.input: value.type.nbytes for graph in graphs.values() for value in graph.accumulators}
    sums = {} if counted is not None else sums
    most, number_of = 0, {phase: number for number, phase in enumerate(dict(order))}
    for phase, micro_batch in [*order, ("update", -1)]:
        rank, graph = graphs[phase], graphs[phase].graph()
        states = {state.output for state in rank.states} | {value.output for value in rank.accumulators}
        kept = {value.input for value in rank.saved if value.input in graph.outputs}
        owner, last = last_reads(graph.nodes)
        alive: dict[str, int] = {}
        for number, node in enumerate(graph.nodes):
            for name in filter(None, node.outputs):
                counts = (counted is None or name in counted) and name not in owner and name not in states
                if counts and name in last | dict.fromkeys(graph.outputs):
                    alive[name] = graph.types[name].nbytes
            most = max(most, sum(alive.values()) + sum(saved.values()) + sum(sums.values()))
            for name in [name for name in alive if last.get(name, 0) <= number and name not in graph.outputs]:
                del alive[name]
        kept = kept if counted is None else kept & {*counted}
        saved.update(((micro_batch, name), graph.types[name].nbytes) for name in kept)
        behind = [later for name, later in graphs.items() if number_of.get(name, 0) > number_of.get(phase, -1)]
        still = {value.input for later in behind for value in later.saved if value.input in later.phase.graph.inputs}
        for key in [key for key in saved if key[0] == micro_batch and key[1] not in still]:
            del saved[key]
        most = max(most, sum(saved.values()) + sum(sums.values()))
    return most


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1", "interleaved:2"])
@pytest.mark.parametrize("policy", [None, "full", "selective"])
def test_the_peak_is_the_peak_of_the_files_in_the_order_of_the_schedule(schedule, policy):
    program = gopt.shard(source("gpt_adamw"), "pp=2", accumulate=4, schedule=schedule, recompute=policy).program
    assert program.stages is not None and program.stages.schedule is not None
    for rank in range(2):
        graphs = {graph.phase.name: graph for graph in lower(program, [rank]).ranks}
        measured = held(graphs, program.stages.schedule.runs(rank))
        planned = live(program, calls_of(program), program.mesh.coordinates(rank)).peak
        assert abs(measured - planned) <= 0.05 * planned, (rank, measured, planned)


@pytest.mark.parametrize(
    ("fixture", "schedule", "bucket_mb"),
    spread(
        ["gpt_adamw", "families/llama_adamw_clip", "families/moe_adamw"], ["", "gpipe", "zb-h1", "interleaved:2"],
        ["", "0.002"],
    ),
)  # fmt: skip
def test_the_report_has_the_gathered_bytes_of_the_files(fixture, schedule, bucket_mb):
    options: dict[str, Any] = {"accumulate": 4, "schedule": schedule} if schedule else {}
    if bucket_mb:
        options["passes"] = {"shard": {"bucket-mb": bucket_mb}}
    sharded = gopt.shard(source(fixture), "pp=2,shard=2", stage=3, prove=False, **options)
    program = sharded.program
    gathered = {name for call in calls_of(program) if call.before_use for name in call.node.outputs}
    measured = []
    for rank in (0, 2):
        graphs = {graph.phase.name: graph for graph in lower(program, [rank]).ranks}
        order = []
        if program.stages is not None and program.stages.schedule is not None:
            order = program.stages.schedule.runs(rank // 2)
        else:
            graphs = {"update": graphs.popitem()[1]}
        measured.append(held(graphs, order, gathered))
    figures = sharded.report().figures
    assert figures.overlap.peak_gathered_bytes == max(measured) > 0
    (facts,) = (run.result.facts for run in sharded.ran if run.record.name == "overlap")
    assert isinstance(facts, OverlapFacts) and facts.peak_gathered_bytes == max(measured)


def saved_of_states(program: SpmdProgram) -> dict[str, int]:
    """Values saved for each micro-batch, though no batch is in them -> bytes; without values of another stage."""
    fed, sent = {*program.training.batch}, set[str]()
    for node in program.graph.nodes:
        if not fed.isdisjoint(node.reads) or draws(node):
            fed.update(node.outputs)
        if transfers(node) or not sent.isdisjoint(node.reads):
            sent.update(node.outputs)
    kept = {name for phase in phases(program) for name in phase.saved}
    return {name: program.graph.types[name].nbytes for name in kept - fed - sent}


@pytest.mark.parametrize(
    ("fixture", "schedule", "style"),
    spread(
        ["gpt_adamw", "cnn_mom_fp16", "families/moe_adamw", "mlp_adamw_bf16"], ["gpipe", "1f1b", "zb-h1", "zb-v"],
        ["gather", "broadcast"],
    ),
)  # fmt: skip
def test_parameters_are_gathered_by_each_action_and_never_saved(fixture, schedule, style):
    options = {"accumulate": 4, "schedule": schedule}
    passes = {"shard": {"style": style, "partition": "whole"} if style == "broadcast" else {}}
    plain = gopt.shard(source(fixture), "pp=2,shard=2", stage=2, **options).program
    program = gopt.shard(source(fixture), "pp=2,shard=2", stage=3, passes=passes, **options).program
    assert saved_of_states(program) == {}
    whole, apart = ([run.saved for run in stage_runs(each)] for each in (plain, program))
    if not any(".stage" in name for phase in phases(program) for name in phase.saved):  # parameters of other stages
        assert all(map(int.__le__, apart, whole)), "no more bytes are saved than where parameters are whole"


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1", "interleaved:2"])
def test_the_peak_with_gathers_is_the_peak_of_the_files(schedule):
    program = gopt.shard(source("gpt_adamw"), "pp=2,shard=2", stage=3, accumulate=4, schedule=schedule).program
    assert program.stages is not None and program.stages.schedule is not None
    for rank in range(4):
        graphs = {graph.phase.name: graph for graph in lower(program, [rank]).ranks}
        measured = held(graphs, program.stages.schedule.runs(rank // 2))
        planned = live(program, calls_of(program), program.mesh.coordinates(rank)).peak
        assert abs(measured - planned) <= 0.05 * planned, (rank, measured, planned)


def test_gathered_parameters_cannot_be_kept_for_each_micro_batch():
    keep = {"shard": {"reshard-after-forward": False}}
    with pytest.raises(OptionError, match="for each micro-batch of a pipeline"):
        gopt.shard(source("mlp_adamw"), "pp=2,shard=2", stage=3, accumulate=2, passes=keep)
    gopt.shard(source("mlp_adamw"), "pp=2,shard=2", stage=3, passes=keep)
