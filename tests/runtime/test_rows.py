"""NumPy's rows have the bits of ONNX Runtime, whatever the values, and scratch is never read after it was reused."""

from __future__ import annotations

import itertools

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gopt.graph.model import Graph, Node
from gopt.graph.types import TensorType
from gopt.runtime import rows
from gopt.runtime.cut import Segment
from gopt.runtime.program import run_graph
from gopt.runtime.rows import Rows, operation
from gopt.runtime.session import Value

LENGTH = 169
ODD = np.array(
    [0.0, -0.0, 1.0, -1.0, 3.0, 1e-45, -1e-40, 1.17549435e-38, 3.4e38, -3.4e38, np.inf, -np.inf, np.nan], np.float32
)
LEFT, RIGHT = (np.ascontiguousarray(each.reshape(-1)) for each in np.meshgrid(ODD, ODD))
FLOAT, BOOL = TensorType("float32", (LENGTH,)), TensorType("bool", (LENGTH,))
BINARY, UNARY = ("Add", "Sub", "Mul", "Div"), ("Sqrt", "Neg", "Abs", "Identity")
COMPARISONS = ("Less", "Greater", "LessOrEqual", "GreaterOrEqual", "Equal")


def graph(nodes: list[Node], types: dict[str, TensorType], results: list[str]) -> Graph:
    header = onnx.ModelProto(ir_version=9, opset_import=[onnx.helper.make_opsetid("", 20)])
    made = {name for node in nodes for name in node.outputs}
    inputs = {name: type for name, type in types.items() if name not in made}
    return Graph("g", nodes, inputs, {name: types[name] for name in results}, {}, types, header)


def by_rows(
    nodes: list[Node], types: dict[str, TensorType], results: list[str], values: dict[str, np.ndarray],
    over: dict[str, str] | None = None,
) -> dict[str, np.ndarray]:  # fmt: skip
    made = {name for node in nodes for name in node.outputs}
    inputs = [name for name in dict.fromkeys(n for node in nodes for n in node.inputs) if name not in made]
    long = [name for name in inputs if types[name].elements == LENGTH]
    worker = Rows(Segment(tuple(nodes), tuple(inputs), tuple(results)), LENGTH, long, types, over or {}, {})
    held = {name: value.copy() for name, value in values.items()}
    into = {name: np.empty(LENGTH, types[name].dtype) for name in results}
    into |= {name: held[row] for name, row in (over or {}).items()}
    worker.run({name: Value(value) for name, value in held.items()}, into)
    return into


def same(mine: np.ndarray, theirs: np.ndarray) -> bool:
    """Bit for bit; any NaN equals any other."""
    if mine.dtype.kind == "f":
        nan = np.isnan(mine)
        same_nan = np.array_equal(nan, np.isnan(theirs))
        return same_nan and mine[~nan].tobytes() == theirs[~nan].tobytes()
    return mine.tobytes() == theirs.tobytes()


@pytest.mark.parametrize("kind", [*BINARY, *UNARY, *COMPARISONS])
@pytest.mark.parametrize("tile", [LENGTH, 16])
def test_every_operator_has_the_bits_of_the_runtime(kind, tile, monkeypatch):
    monkeypatch.setattr(rows, "TILE", tile)
    node = Node(kind, ["a"] if kind in UNARY else ["a", "b"], ["y"])
    types = {"a": FLOAT, "b": FLOAT, "y": BOOL if kind in COMPARISONS else FLOAT}
    values = {name: value for name, value in (("a", LEFT), ("b", RIGHT)) if name in node.inputs}
    expected = run_graph(graph([node], {k: v for k, v in types.items() if k in (*node.inputs, "y")}, ["y"]), values)
    assert same(by_rows([node], types, ["y"], values)["y"], expected["y"])


@pytest.mark.parametrize("target", ["float16", "float64"])
def test_casts_between_floats_have_the_bits_of_the_runtime(target):
    codes = {"float16": 10, "float64": 11}
    node = Node("Cast", ["a"], ["y"], attributes={"to": codes[target]})
    types = {"a": FLOAT, "y": TensorType(target, (LENGTH,))}
    values = {"a": np.linspace(-7e4, 7e4, LENGTH, dtype=np.float32) ** 3 / 2**40}
    assert same(by_rows([node], types, ["y"], values)["y"], run_graph(graph([node], types, ["y"]), values)["y"])


@pytest.mark.parametrize(
    ("node", "types"),
    [
        (Node("Tanh", ["a"], ["y"]), {"a": FLOAT, "y": FLOAT}),
        (Node("Add", ["a", "a"], ["y"]), dict.fromkeys("ay", TensorType("float16", (LENGTH,)))),
        (Node("Div", ["a", "a"], ["y"]), dict.fromkeys("ay", TensorType("int32", (LENGTH,)))),
        (Node("Cast", ["a"], ["y"]), {"a": FLOAT, "y": TensorType("int32", (LENGTH,))}),
        (Node("Cast", ["a"], ["y"]), {"a": TensorType("float64", (LENGTH,)), "y": TensorType("float16", (LENGTH,))}),
        (Node("Add", ["a", "b"], ["y"]), {"a": FLOAT, "y": FLOAT}),
        (Node("Add", ["a", "a"], ["y"], domain="other"), {"a": FLOAT, "y": FLOAT}),
    ],
)
def test_what_has_no_one_answer_is_left_to_the_runtime(node, types):
    assert operation(node, types) is None


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_random_nodes_in_place_or_not(data):
    """Any order of nodes, any results, any of them over a row that it may replace: what it would be without."""
    types = {"a": FLOAT, "b": FLOAT, "c": BOOL, "s": TensorType("float32", ())}
    nodes: list[Node] = []
    for number in range(data.draw(st.integers(1, 12))):
        floats = [name for name, type in types.items() if type == FLOAT]
        bools = [name for name, type in types.items() if type == BOOL]
        draw = lambda names: data.draw(st.sampled_from(names))  # noqa: E731
        kind, made = draw([*BINARY, *UNARY, "Less", "Where"]), f"v{number}"
        if kind == "Where":
            reads = [draw(bools), draw(floats), draw(floats)]
        else:
            reads = [draw(floats)] if kind in UNARY else [draw(floats), draw([*floats, "s"])]
        nodes.append(Node(kind, reads, [made]))
        types[made] = BOOL if kind == "Less" else FLOAT
    made = [node.outputs[0] for node in nodes]
    results = data.draw(st.lists(st.sampled_from(made), min_size=1, unique=True))
    read = {name for node in nodes for name in node.inputs}
    free = [name for name in ("a", "b") if name in read]
    wanted = [name for name in results if types[name] == FLOAT]
    over = dict(zip(data.draw(st.permutations(wanted)), data.draw(st.lists(st.sampled_from(free), unique=True))))
    values = {"a": LEFT, "b": RIGHT, "c": LEFT < RIGHT, "s": np.float32(0.75)}
    values = {name: np.asarray(value) for name, value in values.items() if name in read}
    plain = dict(values)
    with np.errstate(all="ignore"):
        for node in nodes:
            does = operation(node, types)
            assert does is not None
            out = np.empty(LENGTH, types[node.outputs[0]].dtype)
            does(*[plain[name] for name in node.inputs], out=out)
            plain[node.outputs[0]] = out
    kept, rows.TILE = rows.TILE, data.draw(st.sampled_from([7, 64, LENGTH]))
    try:
        found = by_rows(nodes, types, results, values, over)
    finally:
        rows.TILE = kept
    for name in results:
        assert same(found[name], plain[name]), (name, nodes, over)


def test_scratch_is_used_again():
    names = [f"v{n}" for n in range(20)]
    nodes = [Node("Neg", [before], [after]) for before, after in itertools.pairwise(["a", *names])]
    types = dict.fromkeys(["a", *names], FLOAT)
    worker = Rows(Segment(tuple(nodes), ("a",), (names[-1],)), LENGTH, ["a"], types, {}, {})
    assert len(worker._scratch) == 1
