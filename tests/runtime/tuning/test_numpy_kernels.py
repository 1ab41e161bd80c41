"""NumPy's rows and LLVM's loops have the bits of ONNX Runtime, whatever the values, and no row is read too late."""

from __future__ import annotations

import itertools
import sys
import tracemalloc

import numpy as np
import onnx
import pytest
from helpers import run_graph
from hypothesis import given, settings
from hypothesis import strategies as st

from gopt.ir.graph import Graph, Node
from gopt.ir.types import TensorType
from gopt.runtime.host_value import Value
from gopt.runtime.partition import Segment
from gopt.runtime.tuning import numpy_kernels
from gopt.runtime.tuning.llvm_kernels import LlvmKernel, is_supported
from gopt.runtime.tuning.numpy_kernels import NumpyKernel, operation

LENGTH = 169
ODD = np.array(
    [0.0, -0.0, 1.0, -1.0, 3.0, 1e-45, -1e-40, 1.17549435e-38, 3.4e38, -3.4e38, np.inf, -np.inf, np.nan], np.float32
)
LEFT, RIGHT = (np.ascontiguousarray(each.reshape(-1)) for each in np.meshgrid(ODD, ODD))
FLOAT, BOOL = TensorType("float32", (LENGTH,)), TensorType("bool", (LENGTH,))
KINDS = pytest.mark.parametrize("worker", [NumpyKernel, LlvmKernel])
BINARY, UNARY = ("Add", "Sub", "Mul", "Div"), ("Sqrt", "Neg", "Abs", "Identity")
COMPARISONS = ("Less", "Greater", "LessOrEqual", "GreaterOrEqual", "Equal")


def graph(nodes: list[Node], types: dict[str, TensorType], results: list[str]) -> Graph:
    header = onnx.ModelProto(ir_version=9, opset_import=[onnx.helper.make_opsetid("", 20)])
    made = {name for node in nodes for name in node.outputs}
    inputs = {name: type for name, type in types.items() if name not in made}
    return Graph("g", nodes, inputs, {name: types[name] for name in results}, {}, types, header)


def by_rows(
    nodes: list[Node], types: dict[str, TensorType], results: list[str], values: dict[str, np.ndarray],
    aliases: dict[str, str] | None = None, kind: type[NumpyKernel] | type[LlvmKernel] = NumpyKernel,
) -> dict[str, np.ndarray]:  # fmt: skip
    made = {name for node in nodes for name in node.outputs}
    inputs = [name for name in dict.fromkeys(n for node in nodes for n in node.inputs) if name not in made]
    long = [name for name in inputs if types[name].elements == LENGTH]
    length = values[long[0]].size
    worker = kind(Segment(tuple(nodes), tuple(inputs), tuple(results)), length, long, types, aliases or {}, {})
    held = {name: value.copy() for name, value in values.items()}
    into = {name: np.empty(length, types[name].dtype) for name in results}
    into |= {name: held[row] for name, row in (aliases or {}).items()}
    worker.run(*({name: Value(value) for name, value in each.items()} for each in (held, into)))
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
@KINDS
def test_every_operator_has_the_bits_of_the_runtime(kind, tile, worker, monkeypatch):
    monkeypatch.setattr(numpy_kernels, "TILE", tile)
    node = Node(kind, ["a"] if kind in UNARY else ["a", "b"], ["y"])
    types = {"a": FLOAT, "b": FLOAT, "y": BOOL if kind in COMPARISONS else FLOAT}
    values = {name: value for name, value in (("a", LEFT), ("b", RIGHT)) if name in node.inputs}
    expected = run_graph(graph([node], {k: v for k, v in types.items() if k in (*node.inputs, "y")}, ["y"]), values)
    assert same(by_rows([node], types, ["y"], values, kind=worker)["y"], expected["y"])


@pytest.mark.parametrize("target", ["float16", "float64"])
@KINDS
def test_casts_between_floats_have_the_bits_of_the_runtime(target, worker):
    codes = {"float16": 10, "float64": 11}
    node = Node("Cast", ["a"], ["y"], attributes={"to": codes[target]})
    types = {"a": FLOAT, "y": TensorType(target, (LENGTH,))}
    values = {"a": np.linspace(-7e4, 7e4, LENGTH, dtype=np.float32) ** 3 / 2**40}
    found = by_rows([node], types, ["y"], values, kind=worker)["y"]
    assert same(found, run_graph(graph([node], types, ["y"]), values)["y"])
    back = Node("Cast", ["a"], ["y"], attributes={"to": 1})
    types = {"a": types["y"], "y": FLOAT}
    again = by_rows([back], types, ["y"], {"a": found}, kind=worker)["y"]
    assert same(again, found.astype(np.float32))


@KINDS
def test_truths_and_whole_numbers(worker):
    whole = np.arange(-80, 89, dtype=np.int64)
    types = {
        "i": TensorType("int64", (LENGTH,)), "j": TensorType("int64", (LENGTH,)), "b": BOOL, "c": BOOL, "d": BOOL,
        "e": BOOL, "same": BOOL, "f": FLOAT, "n": TensorType("int32", (LENGTH,)), "k": TensorType("int64", (LENGTH,)),
    }  # fmt: skip
    nodes = [
        Node("Less", ["i", "j"], ["b"]), Node("Not", ["b"], ["c"]), Node("Or", ["b", "c"], ["d"]),
        Node("And", ["d", "b"], ["e"]), Node("Equal", ["b", "e"], ["same"]),
        Node("Cast", ["e"], ["f"], attributes={"to": 1}), Node("Cast", ["e"], ["n"], attributes={"to": 6}),
        Node("Where", ["e", "i", "j"], ["k"]),
    ]  # fmt: skip
    values = {"i": whole, "j": whole[::-1].copy()}
    found = by_rows(nodes, types, ["b", "c", "d", "e", "same", "f", "n", "k"], values, kind=worker)
    expected = run_graph(graph(nodes, types, list(found)), values)
    assert all(same(found[name], expected[name]) for name in found)


@pytest.mark.parametrize("length", [1, 2, 3, 7, 8, 15, 16, 31, 32, 33, 63, 64, 65, 127, 129, 1000])
def test_a_loop_of_any_length_from_any_address(length):
    """Vectors, and what is left of them; nothing is written behind the end."""
    types = {name: TensorType("float32", (length,)) for name in ("a", "b", "x", "y")}
    nodes = [Node("Div", ["a", "b"], ["x"]), Node("Sub", ["x", "b"], ["y"])]
    worker = LlvmKernel(Segment(tuple(nodes), ("a", "b"), ("y",)), length, ("a", "b"), types, {}, {})
    for offset in range(4):
        memory = np.random.default_rng(length).normal(size=(3, length + 8)).astype(np.float32)
        before = memory[2].copy()
        a, b, y = (row[offset : offset + length] for row in memory)
        worker.run({"a": Value(a), "b": Value(b)}, {"y": Value(y)})
        assert np.array_equal(y, a / b - b)
        assert np.array_equal(memory[2, :offset], before[:offset])
        assert np.array_equal(memory[2, offset + length :], before[offset + length :])


def test_two_rows_of_one_memory():
    types = dict.fromkeys(("a", "b", "y"), FLOAT)
    worker = LlvmKernel(
        Segment((Node("Add", ["a", "b"], ["y"]),), ("a", "b"), ("y",)), LENGTH, "ab", types, {"y": "a"}, {}
    )
    row = np.arange(LENGTH, dtype=np.float32)
    worker.run({"a": Value(row), "b": Value(row)}, {"y": Value(row)})
    assert np.array_equal(row, 2 * np.arange(LENGTH))


def test_what_is_no_loop():
    add = Node("Add", ["a", "b"], ["y"])
    assert is_supported([add], dict.fromkeys("aby", FLOAT))
    equal = Node("Equal", ["a", "b"], ["y"])
    assert not is_supported([equal], {**dict.fromkeys("ab", TensorType("uint8", (LENGTH,))), "y": BOOL})
    assert not is_supported([Node("Tanh", ["a"], ["y"])], dict.fromkeys("ay", FLOAT))
    assert not is_supported([add] * 2000, dict.fromkeys("aby", FLOAT))
    assert not is_supported([add], dict.fromkeys("aby", FLOAT), crossing=1024)


def test_without_llvm(monkeypatch):
    from gopt.runtime.tuning import llvm_kernels

    monkeypatch.setitem(sys.modules, "llvmlite", None)
    llvm_kernels._machine.cache_clear()
    try:
        assert not is_supported([Node("Add", ["a", "b"], ["y"])], dict.fromkeys("aby", FLOAT))
    finally:
        llvm_kernels._machine.cache_clear()


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
@settings(max_examples=30, deadline=None)
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
    aliases = dict(zip(data.draw(st.permutations(wanted)), data.draw(st.lists(st.sampled_from(free), unique=True))))
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
    kept, numpy_kernels.TILE = numpy_kernels.TILE, data.draw(st.sampled_from([7, 64, LENGTH]))
    try:
        both = [by_rows(nodes, types, results, values, aliases, kind) for kind in (NumpyKernel, LlvmKernel)]
    finally:
        numpy_kernels.TILE = kept
    for found, name in itertools.product(both, results):
        assert same(found[name], plain[name]), (name, nodes, aliases)


@pytest.mark.parametrize("singles", ["", "c", "a", "b", "ca", "cb", "ab"])
@KINDS
def test_where_loses_the_sign_of_the_zeros_that_the_runtime_loses(singles, worker):
    values = {"c": RIGHT > 0, "a": np.where(LEFT > 0, LEFT, np.float32(-0.0)), "b": np.full(LENGTH, -0.0, np.float32)}
    for truth in (True, False):
        held = {name: value[:1].reshape(()) if name in singles else value for name, value in values.items()}
        if "c" in singles:
            held["c"] = np.array(truth)
        types = {name: TensorType(str(value.dtype), value.shape) for name, value in held.items()} | {"y": FLOAT}
        node = Node("Where", ["c", "a", "b"], ["y"])
        assert operation(node, types) is not None
        found = by_rows([node], types, ["y"], held, kind=worker)["y"]
        assert same(found, run_graph(graph([node], types, ["y"]), held)["y"])
    tall = {"c": TensorType("bool", ()), "a": TensorType("float32", (LENGTH, 1)), "b": TensorType("float32", ())}
    assert operation(node, tall | {"y": tall["a"]}) is None, "which one it is hangs on the ranks"


def test_scratch_is_used_again():
    names = [f"v{n}" for n in range(20)]
    nodes = [Node("Neg", [before], [after]) for before, after in itertools.pairwise(["a", *names])]
    types = dict.fromkeys(["a", *names], TensorType("float32", (numpy_kernels.TILE,)))
    tracemalloc.start()
    try:
        worker = NumpyKernel(Segment(tuple(nodes), ("a",), (names[-1],)), numpy_kernels.TILE, ["a"], types, {}, {})
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    row = numpy_kernels.TILE * 4
    assert worker and row < held < 2 * row, "one row for all values between the first and the last"
