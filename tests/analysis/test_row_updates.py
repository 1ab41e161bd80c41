"""What updates do to a row whose gradient is zero: derived, and tried on drawn numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from helpers import FIXTURES, Builder, perceptron, run_graph

import gopt
from gopt.analysis.row_updates import RowUpdate, row_update
from gopt.analysis.row_values import RowValues
from gopt.analysis.training import Phase, TrainingGraph
from gopt.analysis.update_subgraphs import find_updates
from gopt.ir.graph import Graph, Node
from gopt.ir.tensor import Tensor
from gopt.ir.types import TensorType, numpy_dtype

ROLES = {"asgd", "asgd_decay", "asgd_constant_lr", "asgd_decay_constant_lr"}
"""Optimizers whose roles a user must name."""
OPTIMIZERS = sorted(path.stem for path in (FIXTURES / "optim").glob("*.onnx") if path.stem not in ROLES)


def updates(training: TrainingGraph) -> list[RowUpdate]:
    values = RowValues(training.graph)
    found = find_updates(training, whole_accumulators=False).subgraphs
    return [
        row_update(values, subgraph)
        for subgraph in found.values()
        if len(training.graph.types[subgraph.parameter.tensor].dims) == 2
    ]


def without_gradients(training: TrainingGraph, seed: int) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """States before and after an update whose gradients are zero: drawn ones, of which a variance is positive."""
    graph, generator = training.graph, np.random.default_rng(seed)
    nodes = [node for node in graph.nodes if node.phase is Phase.UPDATE or node.is_a("Constant")]
    made = {name for node in nodes for name in node.outputs}
    read = dict.fromkeys(name for node in nodes for name in node.reads if name not in made)
    gradients, states = set(training.gradients.values()), {state.tensor for state in training.states}
    feeds = {}
    for name in read:
        if name in graph.initializers and name not in graph.inputs:
            continue
        type = graph.types[name]
        stored = graph.initializers[name].numpy() if name in graph.initializers else None
        if name in gradients:
            feeds[name] = np.zeros(type.dims, numpy_dtype(type.dtype))
        elif stored is not None and not (name in states and type.elements > 1):
            feeds[name] = stored
        else:
            feeds[name] = generator.uniform(0.7, 0.75, type.dims).astype(numpy_dtype(type.dtype))
    types = {**{name: graph.types[name] for name in feeds}}
    outputs = {state.updated: graph.types[state.updated] for state in training.states if state.updated in made}
    part = replace(graph, nodes=nodes, inputs=types, outputs=outputs, file_nodes=None)
    return feeds, run_graph(part, feeds)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_what_is_said_to_stay_stays_and_the_rest_moves(name):
    training = gopt.load(FIXTURES / "optim" / f"{name}.onnx").training
    before, after = without_gradients(training, 1)
    state_of = training.state_of()
    for update in updates(training):
        moved = {state for state in update.states if not np.array_equal(before[state], after[state_of[state].updated])}
        assert moved <= set(update.moved)
        assert not update.by_row or update.lazy_is_dense == (not moved)


@pytest.mark.parametrize("name", ["sgd", "adagrad", "clip_value_sgd", "sgd_momentum", "sgd_decay", "adam", "rmsprop"])
def test_lazy_is_dense_for_some(name):
    training = gopt.load(FIXTURES / "optim" / f"{name}.onnx").training
    found = {update.lazy_is_dense for update in updates(training)}
    assert found == {name in ("sgd", "adagrad", "clip_value_sgd")}


# --- one update after the other ---------------------------------------------------------------------------------------

Way = Callable[[Builder, str, str], str]
"""Builder, parameter, gradient: the new parameter."""


def update_of(way: Way, folder: Path, *, cast_like: bool = False) -> RowUpdate:
    """The update of a net; ``cast_like``: with a CastLike in place of each Cast."""
    b = Builder()
    net = perceptron(b, (3, 2), bias=False)
    new = way(b, "w0", net.gradients["w0"])
    b.output("loss", net.loss, ())
    b.output("w0_out", new, (3, 2))
    training = gopt.load(b.save(folder / "step.onnx")).training
    if cast_like:
        training.graph.nodes[:] = [as_cast_like(training.graph, node) for node in training.graph.nodes]
    [found] = updates(training)
    return found


def as_cast_like(graph: Graph, node: Node) -> Node:
    """A Cast, by the type of a new constant; any other node as it is."""
    if node.op_type != "Cast":
        return node
    like, type = f"{node.outputs[0]}.like", TensorType(graph.types[node.outputs[0]].dtype, ())
    graph.types[like] = type
    graph.initializers[like] = Tensor(type, array=np.zeros((), numpy_dtype(type.dtype)))
    cast = Node("CastLike", [node.inputs[0], like], node.outputs)
    cast.phase = node.phase
    return cast


def stepped(b: Builder, w: str, direction: str) -> str:
    return str(b.op("Sub", w, b.op("Mul", direction, b.input("lr", ()))))


STAY: dict[str, Way] = {
    "sgd": stepped,
    "no decay": lambda b, w, g: stepped(b, b.op("Mul", w, b.op("Sub", b.const(1.0), b.const(0.0))), g),
    "sign": lambda b, w, g: stepped(b, w, b.op("Sign", g)),
    "clip": lambda b, w, g: stepped(b, w, b.op("Clip", g, b.const(-0.1), b.const(0.1))),
    "bounded root": lambda b, w, g: stepped(
        b, w, b.op("Div", b.op("Tanh", g), b.op("Add", b.op("Abs", w), b.const(1e-3)))
    ),
    "mask": lambda b, w, g: stepped(b, w, b.op("Mul", g, b.const(np.ones((3, 2))))),
    "gate": lambda b, w, g: b.op("Where", flag(b), stepped(b, w, b.op("Tanh", g)), w),
    "wider": lambda b, w, g: b.op("Cast", stepped64(b, w, g), to=1),
}
MOVE: dict[str, Way] = {
    "decay": lambda b, w, g: stepped(b, b.op("Mul", w, b.const(0.99)), g),
    "coupled decay": lambda b, w, g: stepped(b, w, b.op("Add", g, b.op("Mul", w, b.const(0.01)))),
    "clip off zero": lambda b, w, g: stepped(b, w, b.op("Clip", g, b.const(0.01), b.const(0.1))),
    "zero by zero": lambda b, w, g: stepped(b, w, b.op("Div", g, b.op("Sqrt", b.op("Mul", g, g)))),
    "noise": lambda b, w, g: stepped(b, w, b.op("Add", g, b.const(np.ones((3, 2))))),
    "narrower": lambda b, w, g: stepped(b, b.op("Cast", b.op("Cast", w, to=10), to=1), g),
    "gated decay": lambda b, w, g: b.op("Where", flag(b), stepped(b, w, b.op("Tanh", g)), b.op("Mul", w, b.const(0.9))),
    "cosine": lambda b, w, g: stepped(b, w, b.op("Cos", g)),
    "rounded to zero": lambda b, w, g: stepped(b, w, b.op("Div", b.op("Tanh", g), b.op("Cast", half(b, w), to=1))),
}


def stepped64(b: Builder, w: str, g: str) -> str:
    wide = [b.op("Cast", name, to=11) for name in (w, g)]
    return str(b.op("Sub", wide[0], b.op("Mul", wide[1], b.op("Cast", b.input("lr", ()), to=11))))


def flag(b: Builder) -> str:
    return str(b.op("Greater", b.input("setting", ()), b.const(0.0)))


def half(b: Builder, w: str) -> str:
    return str(b.op("Cast", b.op("Add", b.op("Abs", w), b.const(1e-9)), to=10))


@pytest.mark.parametrize("name", STAY)
def test_these_leave_a_row(name, tmp_path):
    found = update_of(STAY[name], tmp_path)
    assert found.lazy_is_dense and found.states == ("w0",) and found.moved == ()


@pytest.mark.parametrize("name", MOVE)
def test_these_move_a_row_or_may(name, tmp_path):
    found = update_of(MOVE[name], tmp_path)
    assert found.by_row and not found.lazy_is_dense and found.moved == ("w0",)


@pytest.mark.parametrize("name", ["wider", "narrower", "rounded to zero"])
def test_a_cast_to_the_type_of_another_value_is_a_cast(name, tmp_path):
    way = {**STAY, **MOVE}[name]
    assert update_of(way, tmp_path, cast_like=True) == update_of(way, tmp_path)


def test_operands_of_its_shape_are_listed(tmp_path):
    mask = update_of(STAY["mask"], tmp_path)
    assert len(mask.operands) == 1 and update_of(stepped, tmp_path).operands == ()


def test_a_reduction_needs_all_rows_unless_zeros_add_nothing(tmp_path):
    def way(kind: str, of: Callable[[Builder, str, str], str]) -> Way:
        return lambda b, w, g: stepped(b, w, b.op("Div", g, b.op(kind, of(b, w, g), keepdims=0)))

    for kind in ("ReduceSumSquare", "ReduceL1", "ReduceL2", "ReduceMean"):
        assert update_of(way(kind, lambda b, w, g: b.op("Abs", g)), tmp_path).all_rows == ""
    assert "over all rows" in update_of(way("ReduceMax", lambda b, w, g: b.op("Abs", g)), tmp_path).all_rows
    assert "over all rows" in update_of(way("ReduceSumSquare", lambda b, w, g: w), tmp_path).all_rows
    assert update_of(stepped, tmp_path).all_rows == ""


def test_an_update_of_each_row_is_told(tmp_path):
    def way(b: Builder, w: str, g: str) -> str:
        square = b.op("ReduceMean", b.op("Mul", g, g), b.const([1], "int64"), keepdims=1)
        return stepped(b, w, b.op("Div", g, b.op("Add", b.op("Sqrt", square), b.const(1e-3))))

    found = update_of(way, tmp_path)
    assert found.lazy_is_dense and not found.by_element and "is not elementwise" in found.why
