"""Copies between device and host: each node reads its own memory, and the bits stay."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from helpers import source
from products import part

import gopt
from gopt.artifact.manifest_check import read_manifest
from gopt.errors import UnsupportedError
from gopt.ir.graph import COMM, Graph, Node
from gopt.ir.host_copies import HOST, TO_DEVICE, TO_HOST, CopiedStep, FileNodes, with_copies
from gopt.ir.load import load
from gopt.ir.types import numpy_dtype
from gopt.operators.kinds import VIEWS
from gopt.runtime.executor import Executor
from gopt.runtime.session import SessionCache

pytestmark = pytest.mark.usefixtures("unchecked")


def node(op_type: str, inputs: str, output: str, domain: str = "") -> Node:
    return Node(op_type, inputs.split(), [output], domain=domain)


def copied(nodes, inputs, outputs, states=None, activations=(), nbytes=lambda name: 8) -> CopiedStep:
    step = FileNodes(nodes, inputs.split(), outputs.split())
    return with_copies(step, states or {}, activations, nbytes)


def texts(step: CopiedStep) -> list[str]:
    return [repr(node) for node in step.nodes]


ADAM = [
    node("MatMul", "x p", "y"), node("MatMul", "x y", "g"), node("Mul", "m b", "bm"), node("Mul", "g c", "cg"),
    node("Add", "bm cg", "m_new"), node("Sqrt", "m_new", "d"), node("Div", "m_new d", "u"), node("Sub", "p u", "p_new"),
]  # fmt: skip


def test_the_gradient_goes_to_the_host_and_the_step_comes_back():
    step = copied(ADAM, "x p m", "p_new m_new", {"m": "m_new"})
    copies = [repr(node) for node in step.nodes if node.domain == HOST]
    assert copies == ["g.host = ToHost(g)", "u.device = ToDevice(u)"]
    assert texts(step)[-1] == "p_new = Sub(p, u.device)"
    assert {"m", "bm", "cg", "m_new", "u"} <= step.on_host and not {"p_new", "y", "p"} & step.on_host


def test_a_new_state_made_by_a_product_comes_from_the_device():
    nodes = [node("MatMul", "m x", "m_new")]
    step = copied(nodes, "x m", "m_new", {"m": "m_new"})
    assert texts(step) == [
        "m.device = ToDevice(m)", "m_new.device = MatMul(m.device, x)", "m_new = ToHost(m_new.device)",
    ]  # fmt: skip


def test_calls_keep_their_order_beside_the_host():
    nodes = [
        node("Relu", "x", "g"), node("Add", "m g", "m_new"), node("Neg", "m_new", "u"),
        node("AllGather", "u", "w", COMM), node("AllReduce", "x", "z", COMM),
    ]  # fmt: skip
    step = copied(nodes, "x m", "m_new w z", {"m": "m_new"})
    assert [each.outputs[0] for each in step.nodes if each.domain == COMM] == ["w", "z"]


def test_a_value_is_on_the_host_during_its_longest_rest():
    nodes = [
        node("Relu", "x", "a"), node("Neg", "a", "b"), node("Abs", "b", "c"), node("Abs", "c", "d"),
        node("Add", "a d", "e"), node("Mul", "a e", "f"),
    ]  # fmt: skip
    step = copied(nodes, "x", "f", activations=["a"])
    assert texts(step) == [
        "a = Relu(x)", "b = Neg(a)", "a.host = ToHost(a)", "c = Abs(b)", "d = Abs(c)", "a.device = ToDevice(a.host)",
        "e = Add(a.device, d)", "f = Mul(a.device, e)",
    ]  # fmt: skip


def test_a_copy_back_begins_at_the_reader_before():
    nodes = [
        node("Relu", "x", "a"), node("Neg", "a", "b"), node("Abs", "b", "c"), node("Abs", "c", "d"),
        node("Mul", "b d", "e"), node("Abs", "e", "f"), node("Mul", "a f", "g"),
    ]  # fmt: skip
    order = texts(copied(nodes, "x", "g", activations=["a", "b"]))
    assert order.index("a.device = ToDevice(a.host)") < order.index("e = Mul(b.device, d)")


def test_views_are_made_again_of_the_copy():
    nodes = [
        node("Relu", "x", "a"), node("Reshape", "a s", "v"), node("Neg", "v", "b"), node("Abs", "b", "c"),
        node("Abs", "c", "d"), node("Add", "v d", "e"),
    ]  # fmt: skip
    step = copied(nodes, "x", "e", activations=["a"])
    assert texts(step)[-2:] == ["v.device = Reshape(a.device, s)", "e = Add(v.device, d)"]


def test_values_between_files_stay_on_the_host():
    forward = copied([node("Relu", "x", "a"), node("Neg", "a", "b")], "x", "a b", activations=["a"])
    assert texts(forward) == ["a.device = Relu(x)", "b = Neg(a.device)", "a = ToHost(a.device)"]
    nodes = [node("Reshape", "a s", "v"), node("Neg", "y", "b"), node("Mul", "v b", "c")]
    backward = copied(nodes, "a y", "c", activations=["a"])
    assert texts(backward) == [
        "b = Neg(y)", "a.device = ToDevice(a)", "v.device = Reshape(a.device, s)", "c = Mul(v.device, b)",
    ]  # fmt: skip


def test_a_body_that_reads_across_is_refused_by_name():
    branch = node("If", "x", "z")
    branch.captures = ("u",)
    nodes = [node("Mul", "m m", "m_new"), node("Neg", "m_new", "u"), branch]
    with pytest.raises(UnsupportedError, match="'u', which would be copied"):
        copied(nodes, "x m", "m_new z", {"m": "m_new"})


FIXTURES = (
    "gpt_adamw", "gpt_adamw_clip_sched_fp16", "mlp_mom_clip_sched", "cnn_mom_fp16", "mlp_muon",
    "families/llama_adamw_clip",
)  # fmt: skip
OPTIONS = (
    ("shard=2", {"stage": 2}), ("shard=2", {"stage": 3, "accumulate": 2}), ("dp=2", {"stage": 0}),
    ("shard=2", {"stage": 1, "partition": "whole", "recompute": "selective"}),
    ("pp=2", {"accumulate": 2, "schedule": "zb-h1"}), ("pp=2,shard=2", {"stage": 2, "recompute": "full"}),
)  # fmt: skip
CASES = list(product(FIXTURES, OPTIONS, ("states", "activations", "states,activations")))


@pytest.mark.parametrize(("fixture", "options", "what"), part(CASES, 10))
def test_rank_files_with_copies_compute_the_same_bits(fixture, options, what, tmp_path):
    mesh, settings = options
    passes = {"offload": {"least": "1B"}}
    gopt.shard(source(fixture), mesh, offload=what, passes=passes, **settings).write(tmp_path / "ranks")
    check_folder(tmp_path / "ranks")


@pytest.mark.slow
@pytest.mark.parametrize(("fixture", "options", "what"), CASES)
def test_all_rank_files_with_copies_compute_the_same_bits(fixture, options, what, tmp_path):
    test_rank_files_with_copies_compute_the_same_bits(fixture, options, what, tmp_path)


def check_folder(folder: Path) -> None:
    manifest, _ = read_manifest(folder)
    rank = manifest.ranks[-1]
    following = {state.input: state.output for state in manifest.states_of(rank)}
    states = {name: following[name] for name in manifest.host.states if name in following}
    crossed = 0
    for name in rank.files.values():
        graph = without_calls(load(folder / name, own=True))
        step = FileNodes(graph.nodes, graph.inputs, graph.outputs)
        result = with_copies(step, states, manifest.host.activations, byte_counts(graph))
        check_memories(graph, result, states)
        crossed += sum(node.domain == HOST for node in result.nodes)
        equal_bits(graph, result)
    assert crossed


def byte_counts(graph: Graph) -> Callable[[str], int]:
    return lambda name: graph.type_of(name).nbytes


def check_memories(graph: Graph, step: CopiedStep, states: Mapping[str, str]) -> None:
    """Each node but a copy has all operands and results in one memory, and makes them before they are read."""
    made = {*graph.inputs, *graph.initializers}
    for node in step.nodes:
        assert made.issuperset(node.reads), node
        made.update(node.outputs)
        sides = {name in step.on_host for name in (*node.reads, *node.outputs) if name not in graph.initializers}
        if node.domain == HOST:
            assert (node.outputs[0] in step.on_host) is (node.op_type == TO_HOST)
            assert (node.inputs[0] in step.on_host) is (node.op_type == TO_DEVICE)
        else:
            assert len(sides) <= 1, node
    for name in graph.outputs:
        assert name in made
        assert name not in states.values() or name in step.on_host


def without_calls(graph: Graph) -> Graph:
    """A graph whose calls are inputs, so that one rank runs alone."""
    calls = [node for node in graph.nodes if node.domain == COMM]
    inputs = {name: graph.type_of(name) for node in calls for name in node.outputs if name}
    nodes = [node for node in graph.nodes if node.domain != COMM]
    outputs = {name: type for name, type in graph.outputs.items() if name not in inputs}
    return replace(graph, nodes=nodes, inputs={**graph.inputs, **inputs}, outputs=outputs)


def equal_bits(graph: Graph, step: CopiedStep) -> None:
    draw = np.random.default_rng(3)
    feeds = {name: _values(draw, type) for name, type in graph.inputs.items() if name not in graph.initializers}
    nodes = [node if node.domain != HOST else Node("Identity", node.inputs, node.outputs) for node in step.nodes]
    types = graph.types | {new: graph.type_of(old) for new, old in step.original.items()}
    twin = replace(graph, nodes=nodes, types=types)
    due, got = (Executor(each, SessionCache()).run(feeds) for each in (graph, twin))
    for name in graph.outputs:
        np.testing.assert_array_equal(got[name], due[name], err_msg=name)


def _values(draw, type):
    if type.dtype == "bool":
        return draw.random(type.dims) < 0.5
    if type.dtype.startswith("int"):
        return draw.integers(0, 2, type.dims).astype(numpy_dtype(type.dtype))
    return draw.uniform(0.1, 1.0, type.dims).astype(numpy_dtype(type.dtype))


def test_random_graphs_keep_every_value_and_memory():
    for seed in range(60):
        draw = random.Random(seed)
        names, nodes = ["x", "p", "m", "n"], []
        for number in range(draw.randint(4, 24)):
            kind = draw.choice(["Add", "Mul", "Identity", "MatMul", "Neg"])
            reads = draw.choices(names, k=1 if kind in ("Identity", "Neg") else 2)
            nodes.append(node(kind, " ".join(reads), f"v{number}"))
            names.append(f"v{number}")
        nodes += [node("Add", f"m {names[-1]}", "m_new"), node("Add", f"n {names[-2]}", "n_new")]
        outputs = ["m_new", "n_new", *draw.sample(names[4:], 2)]
        states = {"m": "m_new", "n": "n_new"}
        activations = [name for name in draw.sample(names[4:], 3) if name not in outputs]
        step = copied(nodes, "x p m n", " ".join(outputs), states, activations, lambda name: len(name))
        made = {"x", "p", "m", "n"}
        values: dict[str, object] = dict.fromkeys(made)
        values.update((name, name) for name in made)
        for each in step.nodes:
            assert made.issuperset(each.reads), (seed, each)
            made.update(each.outputs)
            operands = [values[name] for name in each.inputs]
            copy = each.domain == HOST or each.is_in(VIEWS)
            values[each.outputs[0]] = operands[0] if copy else (each.op_type, *operands)
            if each.domain != HOST:
                assert len({name in step.on_host for name in (*each.reads, *each.outputs)}) == 1, (seed, each)
        due: dict[str, object] = {name: name for name in ("x", "p", "m", "n")}
        for each in nodes:
            operands = [due[name] for name in each.inputs]
            due[each.outputs[0]] = operands[0] if each.is_in(VIEWS) else (each.op_type, *operands)
        assert all(values[name] == due[name] for name in outputs), seed
        assert all((name in step.on_host) is (name in states.values()) for name in outputs), seed
