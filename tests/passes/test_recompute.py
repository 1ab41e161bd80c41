"""The pass ``recompute``: ranks stay equal, memory falls as planned, and a wrong copy is named."""

from __future__ import annotations

import random
from itertools import product
from typing import Any

import numpy as np
import pytest
from helpers import source

import gopt
from gopt.api import Sharded
from gopt.errors import InvariantError, OptionError
from gopt.ir.graph import RECOMPUTE, Graph, Node
from gopt.ir.min_cut import SINK, SOURCE, Network
from gopt.ir.types import numpy_dtype
from gopt.operators.kinds import MAY_DRAW, VIEWS
from gopt.runtime.partition import Segment, partition
from gopt.runtime.session import SessionCache, session_of
from gopt.spmd.kept_nodes import check_kept_nodes
from gopt.spmd.program import SpmdProgram

pytestmark = pytest.mark.usefixtures("unchecked")


def sharded(name: str, policy: str, mesh: str = "shard=2", **options: Any) -> Sharded:
    return gopt.shard(source(name), mesh, recompute=policy, verify_each=True, **options)


def facts(result: Sharded) -> Any:
    return next(run.record.facts for run in result.program.passes if run.record.name == RECOMPUTE)


@pytest.mark.parametrize(
    ("name", "policy", "mesh", "options"),
    [
        ("gpt_adamw", "full", "shard=2", {"stage": 3, "bucket_mb": 0.01}),
        ("gpt_adamw", "selective", "dp=2,shard=2", {"stage": 1}),
        ("gpt_adamw", "110KiB", "shard=2", {"stage": 2, "accumulate": 2}),
        ("gpt_adamw", "full", "shard=2,tp=2", {"stage": 3, "accumulate": 2}),
        ("gpt_adamw_clip_sched_fp16", "full", "shard=2", {"stage": 3}),
        ("gpt_adamw_clip_sched_fp16", "selective", "tp=2", {"stage": 0}),
    ],
)
def test_ranks_stay_equal_to_the_source_and_are_proven_so(name, policy, mesh, options, tmp_path):
    result = sharded(name, policy, mesh, **options)
    figures = facts(result)
    assert figures["nodes"] and figures["saved_bytes"] < figures["saved_bytes_before"]
    assert gopt.verify(result, steps=2).equal
    result.write(tmp_path / "out")
    assert gopt.prove(tmp_path / "out").proven


@pytest.mark.parametrize(("policy", "less", "more"), [("full", 0.3, 0.33), ("selective", 0.35, 0.03)])
def test_less_memory_for_few_operations(policy, less, more):
    figures = facts(sharded("gpt_adamw", policy))
    assert figures["live_bytes"] <= (1 - less) * figures["live_bytes_before"]
    assert figures["operations_added"] <= more * figures["operations"]


def test_each_reader_transposes_a_parameter_for_itself():
    """The copy for a product of the forward does not live until the product of the backward."""
    graph = sharded("gpt_adamw", "full").program.graph
    states = {name for name in graph.inputs if name.endswith("weight")}
    copies = [node for node in graph.nodes if node.made_by == RECOMPUTE and node.is_a("Transpose")]
    weights = {name for node in copies if node.inputs[0] in states for name in node.outputs}
    assert weights
    readers = graph.users()
    backward = [name for name in weights if any(node.made_by != RECOMPUTE for node in readers[name])]
    assert backward
    assert all(len(readers[name]) == 1 for name in backward)


def test_a_bound_holds_with_the_fewest_operations():
    before = facts(sharded("gpt_adamw", "selective"))["live_bytes_before"]
    costs = []
    for share in (0.95, 0.8, 0.65):
        figures = facts(sharded("gpt_adamw", f"{int(share * before)}B"))
        assert figures["live_bytes"] <= share * before
        costs.append(figures["operations_added"])
    assert costs == sorted(costs)


# --- what a run holds -----------------------------------------------------------------------------------------------


def measured(graph: Graph, states: set[str]) -> int:
    """The most bytes of results that a run holds, node by node, where each goes behind its last reader."""
    rng = np.random.default_rng(0)
    values: dict[str, Any] = {name: tensor.numpy() for name, tensor in graph.initializers.items()}
    for name, type in graph.inputs.items():
        kind = numpy_dtype(type.dtype)
        draw = rng.integers(0, 8, type.dims) if kind.kind in "iu" else rng.random(type.dims)
        values.setdefault(name, np.asarray(draw, kind))
    last = {name: number for number, node in enumerate(graph.nodes) for name in node.reads}
    types, cache, live, most = dict(graph.types), SessionCache(), dict[str, Any](), 0
    for number, node in enumerate(graph.nodes):
        if node.is_in(VIEWS) and node.inputs[0]:
            shape = graph.types[node.outputs[0]].dims
            results = [np.asarray(values[node.inputs[0]]).reshape(shape)]
        else:
            segment = Segment((node,), tuple(dict.fromkeys(node.reads)), tuple(filter(None, node.outputs)))
            inputs, session = session_of(segment, graph, types, cache)
            results = session.run(list(segment.outputs), {name: values[name] for name in inputs})
        for name, result in zip(filter(None, node.outputs), results):
            values[name] = result
            if name not in states:
                live[name] = result
        memory = {id(owner(value)): owner(value).nbytes for value in live.values()}
        most = max(most, sum(memory.values()))
        for name in [name for name in live if last.get(name, len(graph.nodes)) <= number]:
            del live[name], values[name]
    return most


def owner(array: Any) -> Any:
    """The array that has the memory of a view."""
    while isinstance(getattr(array, "base", None), np.ndarray):
        array = array.base
    return array


@pytest.mark.parametrize("policy", ["full", "selective", "90KiB"])
def test_a_run_holds_what_is_planned(policy):
    result = sharded("gpt_adamw", policy, "shard=1")
    states = {state.output for state in result.program.states}
    held, planned = measured(result.program.graph, states), facts(result)["live_bytes"]
    assert abs(held - planned) <= 0.05 * planned


@pytest.mark.parametrize("policy", ["full", "selective"])
def test_copies_begin_a_segment_so_that_none_runs_early(policy):
    steps = partition(sharded("gpt_adamw", policy, "shard=1").program.graph)
    rows = [[node.made_by == RECOMPUTE for node in step.nodes] for step in steps if isinstance(step, Segment)]
    assert sum(map(any, rows)) > 1
    assert all(row == sorted(row, reverse=True) for row in rows)


# --- planted errors -------------------------------------------------------------------------------------------------


def planted(name: str, chosen: Any) -> tuple[SpmdProgram, Node]:
    """A program with one more copy of the first node of its step for which ``chosen`` holds."""
    program = gopt.shard(source(name), "shard=2", verify_each=True).program
    node = next(node for node in program.graph.nodes if node.source is not None and chosen(node, program))
    outputs = [f"{output}.again" for output in node.outputs]
    copy = Node(node.op_type, node.inputs, outputs, domain=node.domain, attributes=dict(node.attributes))
    copy.source, copy.phase, copy.made_by = node.source, node.phase, RECOMPUTE
    program.graph.types.update((new, program.graph.type_of(old)) for new, old in zip(outputs, node.outputs))
    program.graph.nodes = [*program.graph.nodes, copy]
    return program, copy


def test_a_copy_that_reads_another_value_is_named():
    program = sharded("gpt_adamw", "full").program
    node = next(node for node in program.graph.nodes if node.made_by == RECOMPUTE and node.is_a("Gelu"))
    node.inputs = ["add_1"]
    with pytest.raises(InvariantError, match=r"Gelu '.*again' reads 'add_1' for 'view_29'"):
        check_kept_nodes(program)


def test_a_second_update_of_a_statistic_is_named():
    def moves(node: Node, program: SpmdProgram) -> bool:
        return not program.training.new_statistics.isdisjoint(node.source.outputs if node.source else ())

    program, _ = planted("cnn_sgd", moves)
    with pytest.raises(InvariantError, match="a second time") as error:
        check_kept_nodes(program)
    assert "new value of a state" in str(error.value.hints) or "it is of the update" in str(error.value.hints)


def test_a_second_draw_is_named(monkeypatch):
    program, copy = planted("gpt_adamw", lambda node, _: node.is_a("Gelu"))
    check_kept_nodes(program)  # of what draws nothing, a copy is the same
    assert copy.source is not None
    for node in (copy, copy.source, *(node for node in program.graph.nodes if node.source is copy.source)):
        monkeypatch.setattr(node, "op_type", min(MAY_DRAW - {"If", "Loop", "Scan"}))  # the source is shared by tests
    with pytest.raises(InvariantError, match="a second time") as error:
        check_kept_nodes(program)
    assert "it draws other numbers" in str(error.value.hints)


def test_options_that_are_none():
    with pytest.raises(OptionError, match="recompute cannot be 'half'"):
        sharded("mlp_sgd", "half")
    with pytest.raises(OptionError, match="cannot read 'a=b' as a rule"):
        sharded("mlp_sgd", "full", passes={RECOMPUTE: {"override": "a=b"}})


# --- the cut --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(30))
def test_no_cut_is_smaller(seed):
    rng = random.Random(seed)
    network, count = Network(), rng.randint(1, 6)
    vertices = [SOURCE, SINK, *(network.vertex() for _ in range(count))]
    edges = [
        (start, end, rng.choice([0, 1, 2, 3, 7, 0.5]))
        for start, end in product(vertices, vertices)
        if start not in (end, SINK) and end != SOURCE and rng.random() < 0.5
    ]  # fmt: skip
    for edge in edges:
        network.edge(*edge)

    def size(behind: set[int]) -> float:
        return sum(capacity for start, end, capacity in edges if start not in behind and end in behind)

    sides = ({SINK, *(v for v, bit in zip(vertices[2:], bits) if bit)} for bits in product((0, 1), repeat=count))
    assert size(network.behind_cut()) == min(map(size, sides))
