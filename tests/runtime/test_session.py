"""Segments on the runtime: every kind of value in and out, sessions shared, failures named."""

from __future__ import annotations

import builtins
import subprocess
import sys
import types
import weakref

import ml_dtypes
import numpy as np
import pytest
from helpers import run_graph
from onnx import helper
from runtime_graphs import alone, comm, make, sgd_feeds, sharded_sgd

from gopt.errors import RunError, UnsupportedError
from gopt.ir.types import dtype_code
from gopt.runtime import session
from gopt.runtime.executor import Executor
from gopt.runtime.host_value import array_of, runtime_value
from gopt.runtime.partition import partition
from gopt.runtime.reference_eval import evaluate
from gopt.runtime.session import NoKernelError, SessionCache

op = helper.make_node
BF16 = ml_dtypes.bfloat16
VECTOR = ("float32", [2])


def echo(index, node, inputs):
    return inputs


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16", "int64", "int8", "uint16", "bool"])
@pytest.mark.parametrize("shape", [(), (3,), (0,), (2, 0, 3), (2, 2)])
def test_every_type_and_shape_passes_segments_and_calls(tmp_path, dtype, shape):
    kind = (dtype, shape)
    way = {"reduce": "max"} if dtype == "bool" else {}
    nodes = [op("Identity", ["x"], ["a"]), comm("AllReduce", ["a"], ["b"], **way), op("Identity", ["b"], ["y"])]
    graph = make(tmp_path, nodes, {"x": kind}, {"y": kind, "b": kind})
    number = helper.tensor_dtype_to_np_dtype(dtype_code(dtype))
    x = np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(number)
    found = alone(graph).run({"x": x}, echo)
    for name in ("y", "b"):
        assert found[name].dtype == number
        assert found[name].shape == shape
        assert found[name].tobytes() == x.tobytes()


@pytest.mark.parametrize("kind", ["quotient", "not", "nothing"])
def test_a_node_has_the_bits_in_a_session_that_it_has_alone(kind, tmp_path):
    """Rewrites of the runtime make another rounding of (1 / a) · b, and other zeros of a Where behind a Not."""
    row, generator = ("float32", [1000]), np.random.default_rng(0)
    feeds = {name: generator.standard_normal(1000).astype(np.float32) for name in "ab"}
    feeds["a"][::2] *= 0
    inputs = {"a": row, "b": row}
    if kind == "quotient":
        nodes = [op("Div", ["one", "b"], ["t"]), op("Mul", ["t", "a"], ["y"])]
        due = np.float32(1) / feeds["b"] * feeds["a"]
    elif kind == "nothing":
        nodes = [op("Neg", ["a"], ["t"]), op("Add", ["zero", "t"], ["u"]), op("Reshape", ["u", "all"], ["y"])]
        feeds["a"] = np.abs(feeds["a"])
        due = np.float32(0) - feeds["a"]
    else:
        nodes = [op("Not", ["c"], ["t"]), op("Where", ["t", "a", "b"], ["y"])]
        feeds["c"], inputs["c"] = feeds["b"] > 0, ("bool", [1000])
        due = np.where(feeds["c"], feeds["b"], feeds["a"] + np.float32(0))
    made = make(
        tmp_path,
        nodes,
        inputs,
        {"y": row},
        {"one": np.ones((), "f4"), "zero": np.zeros((), "f4"), "all": np.array([-1])},
    )
    assert alone(made).run(feeds)["y"].tobytes() == due.tobytes()


def test_float8_passes_too(tmp_path):
    kind = ("float8e4m3fn", [3])
    graph = make(tmp_path, [op("Identity", ["x"], ["a"]), comm("AllGather", ["a"], ["y"], axis=0, sizes=[3])],
                 {"x": kind}, {"y": kind}, values={"a": kind})  # fmt: skip
    x = np.array([1, 2, -0.5], ml_dtypes.float8_e4m3fn)
    assert alone(graph).run({"x": x}, echo)["y"].tolist() == [1, 2, -0.5]


def test_outputs_that_are_inputs_or_constants(tmp_path):
    constants = {"small": np.array([1, 2], np.float32), "large": np.arange(5000, dtype=np.float32)}
    outputs = {"x": VECTOR, "small": VECTOR, "large": ("float32", [5000]), "y": VECTOR}
    graph = make(tmp_path, [op("Add", ["x", "small"], ["y"])], {"x": VECTOR}, outputs, constants)
    x = np.array([3, 4], np.float32)
    found = alone(graph).run({"x": x})
    assert list(found) == list(outputs)
    assert found["x"].tolist() == [3, 4]
    assert found["y"].tolist() == [4, 6]
    assert found["large"].tolist() == constants["large"].tolist()


def test_a_node_may_make_an_output_of_a_constant_alone(tmp_path):
    nodes = [op("Identity", ["c"], ["y"]), op("Constant", [], ["z"], value_float=2.0), op("Relu", ["x"], ["r"])]
    outputs = {"y": ("float32", []), "z": ("float32", []), "r": VECTOR}
    graph = make(tmp_path, nodes, {"x": VECTOR}, outputs, {"c": np.array(5, np.float32)})
    program = alone(graph)
    for _ in range(2):
        found = program.run({"x": np.ones(2, np.float32)})
        assert (found["y"], found["z"]) == (5, 2)


def test_inputs_that_nobody_reads_may_be_fed(tmp_path):
    graph = make(tmp_path, [op("Relu", ["x"], ["y"])], {"x": VECTOR, "spare": VECTOR}, {"y": VECTOR})
    ones = np.ones(2, np.float32)
    assert alone(graph).run({"x": ones, "spare": ones})["y"].tolist() == [1, 1]


def test_large_constants_stay_out_of_the_model(tmp_path):
    constants = {"w": np.ones((2000, 2), np.float32), "b": np.array([1, 2], np.float32)}
    nodes = [op("MatMul", ["x", "w"], ["h"]), op("Add", ["h", "b"], ["y"])]
    graph = make(tmp_path, nodes, {"x": ("float32", [1, 2000])}, {"y": ("float32", [1, 2])}, constants)
    sizes = []
    cache = SessionCache()
    get = cache.get
    cache.get = lambda model, **given: sizes.append(len(model)) or get(model, **given)
    found = Executor(graph, cache).run({"x": np.ones((1, 2000), np.float32)})
    assert found["y"].tolist() == [[2001, 2002]]
    assert max(sizes) < 1000


def test_calls_may_read_constants_and_inputs_and_segments_may_be_empty(tmp_path):
    nodes = [comm("AllReduce", ["c", "x"], ["d", "y"]), comm("AllReduce", ["y"], ["z"])]
    graph = make(tmp_path, nodes, {"x": VECTOR}, {"d": VECTOR, "z": VECTOR}, {"c": np.array([7, 8], np.float32)})
    calls = []

    def call(index, node, inputs):
        calls.append((index, node.outputs[0], [value.tolist() for value in inputs]))
        return [value + 1 for value in inputs]

    found = alone(graph).run({"x": np.array([1, 2], np.float32)}, call)
    assert calls == [(0, "d", [[7, 8], [1, 2]]), (1, "z", [[2, 3]])]
    assert (found["d"].tolist(), found["z"].tolist()) == ([8, 9], [3, 4])


def test_results_of_a_call_need_not_be_contiguous(tmp_path):
    kind = ("float32", [2, 3])
    nodes = [comm("AllReduce", ["x"], ["s"]), op("Neg", ["s"], ["y"])]
    graph = make(tmp_path, nodes, {"x": kind}, {"y": kind}, values={"s": kind})
    x = np.arange(6, dtype=np.float32).reshape(3, 2).T
    assert alone(graph).run({"x": x}, lambda *call: [call[2][0].T.copy().T])["y"].tolist() == (-x).tolist()


def test_a_state_has_its_stored_value_until_another_is_fed(tmp_path):
    graph = make(
        tmp_path, [op("Add", ["w", "g"], ["w.new"])], {"w": VECTOR, "g": VECTOR}, {"w.new": VECTOR},
        {"w": np.array([1, 2], np.float32)},
    )  # fmt: skip
    program, g = alone(graph), np.ones(2, np.float32)
    first = program.run({"g": g})["w.new"]
    assert first.tolist() == [2, 3]
    assert program.run({"g": g, "w": first})["w.new"].tolist() == [3, 4]
    assert program.run({"g": g})["w.new"].tolist() == [2, 3]


def test_results_outlive_program_and_cache(tmp_path):
    graph = make(tmp_path, [op("Neg", ["x"], ["y"])], {"x": ("bfloat16", [1000])}, {"y": ("bfloat16", [1000])})
    kept = [alone(graph).run({"x": np.full(1000, n, BF16)})["y"] for n in range(20)]
    assert [float(array.min()) for array in kept] == [float(array.max()) for array in kept] == [-n for n in range(20)]


def test_feeds_are_never_written_to(tmp_path):
    cuts = [0, 8, 8]
    feeds = sgd_feeds(cuts)[0]
    for array in feeds.values():
        array.flags.writeable = False
    before = {name: array.copy() for name, array in feeds.items()}
    alone(sharded_sgd(tmp_path, 0, cuts)).run(feeds, lambda i, node, inputs: echo_sgd(node, inputs))
    assert all((before[name] == feeds[name]).all() for name in feeds)


def echo_sgd(node, inputs):
    if node.op_type == "ReduceScatter":
        return [np.concatenate([value.ravel() for value in inputs])]
    return [inputs[0][:6].reshape(2, 3), inputs[0][6:]]


def test_ranks_share_the_sessions_of_equal_segments(tmp_path):
    cache, cuts = SessionCache(), [0, 3, 3, 8]
    for rank in range(3):
        Executor(sharded_sgd(tmp_path, rank, cuts), cache)
    assert (cache.built, cache.reused) == (4, 2)
    Executor(sharded_sgd(tmp_path, 0, cuts), cache)
    assert (cache.built, cache.reused) == (4, 4)


def test_metadata_of_a_rank_do_not_keep_sessions_apart(tmp_path):
    cache = SessionCache()
    for rank in range(8):
        graph = make(tmp_path, [op("Relu", ["x"], ["y"])], {"x": VECTOR}, {"y": VECTOR})
        entry = graph.header.metadata_props.add()
        entry.key, entry.value = "gopt.rank", str(rank)
        Executor(graph, cache)
    assert (cache.built, cache.reused) == (1, 7)


def test_runs_repeat_bit_for_bit(tmp_path):
    kind = ("float32", [64, 64])
    nodes = [op("MatMul", ["x", "x"], ["a"]), op("Softmax", ["a"], ["b"]), op("ReduceSum", ["b"], ["y"])]
    graph = make(tmp_path, nodes, {"x": kind}, {"b": kind, "y": ("float32", [1, 1])})
    x = np.random.default_rng(0).normal(size=(64, 64)).astype(np.float32)
    runs = {alone(graph).run({"x": x})["b"].tobytes() for _ in range(5)}
    assert len(runs) == 1


@pytest.mark.parametrize(
    ("feeds", "message"),
    [
        ({}, "input 'x' \\(float32\\[2\\]\\) was not fed"),
        ({"x": np.ones(3, np.float32)}, "input 'x' is float32\\[2\\], but was fed float32\\[3\\]"),
        ({"x": np.ones(2)}, "but was fed float64"),
        ({"x": np.ones(2, np.float32), "z": np.ones(2)}, "no input 'z'"),
        ({"x": np.ones(2, "M8[s]")}, "no tensors of datetime64"),
    ],
)
def test_feeds_that_do_not_fit_are_refused(tmp_path, feeds, message):
    graph = make(tmp_path, [op("Relu", ["x"], ["y"])], {"x": VECTOR}, {"y": VECTOR})
    with pytest.raises(RunError, match=message):
        alone(graph).run(feeds)


def test_a_failing_segment_is_one_line(tmp_path):
    nodes = [op("Reshape", ["x", "shape"], ["y"])]
    graph = make(tmp_path, nodes, {"x": ("float32", ["N"]), "shape": ("int64", [2])}, {"y": ("float32", ["A", "B"])})
    with pytest.raises(RunError, match=r"ONNX Runtime failed: .*") as caught:
        alone(graph).run({"x": np.ones(5, np.float32), "shape": np.array([2, 2])})
    assert "\n" not in caught.value.message


def test_an_undefined_result_may_not_be_read(tmp_path):
    nodes = [comm("Reduce", ["x"], ["y"], root=0), comm("AllReduce", ["y"], ["z"])]
    graph = make(tmp_path, nodes, {"x": VECTOR}, {"z": VECTOR}, values={"y": VECTOR})
    with pytest.raises(RunError, match=r"'y' is undefined on this rank, and AllReduce reads it"):
        alone(graph).run({"x": np.ones(2, np.float32)}, lambda *_: [])


def test_a_call_must_give_what_its_node_makes(tmp_path):
    graph = make(tmp_path, [comm("AllReduce", ["x"], ["y"])], {"x": VECTOR}, {"y": VECTOR})
    with pytest.raises(RunError, match=r"gave 2 values, not 1"):
        alone(graph).run({"x": np.ones(2, np.float32)}, lambda *call: call[2] * 2)


def test_an_unknown_type_at_a_border_is_named(tmp_path):
    nodes = [comm("AllReduce", ["x"], ["s"]), op("Relu", ["s"], ["y"])]
    graph = make(tmp_path, nodes, {"x": VECTOR}, {"y": VECTOR})
    graph.types.pop("s", None)
    with pytest.raises(UnsupportedError, match=r"type of value 's', which crosses a call, is unknown"):
        alone(graph)


def test_types_unknown_to_onnx_are_asked_of_the_runtime(tmp_path):
    nodes = [
        op("Gelu", ["x"], ["g"], domain="com.microsoft"), comm("AllReduce", ["x"], ["s"]), op("Add", ["g", "s"], ["y"])
    ]  # fmt: skip
    graph = make(
        tmp_path, nodes, {"x": VECTOR}, {"y": VECTOR}, values={"s": VECTOR},
        opsets=[helper.make_opsetid("com.microsoft", 1)],
    )  # fmt: skip
    assert graph.type_of("g").dtype == "undefined"
    assert alone(graph).run({"x": np.zeros(2, np.float32)}, echo)["y"].tolist() == [0, 0]


# --- whole graphs ---------------------------------------------------------------------------------------------------


def test_without_a_kernel_the_reference_evaluator_runs(tmp_path):
    kind = ("float64", [3])
    constants = {"c": np.full(3, 2.0), "big": np.ones(1000), "w": np.ones(3)}
    nodes = [op("Erf", ["x"], ["e"]), op("Mul", ["e", "c"], ["m"]), op("ReduceSum", ["big"], ["s"], keepdims=0)]
    nodes += [op("Add", ["m", "s"], ["a"]), op("Add", ["a", "w"], ["y"])]
    graph = make(tmp_path, nodes, {"x": kind, "w": kind}, {"y": kind, "x": kind}, constants)
    with pytest.raises(NoKernelError):
        alone(graph)
    found = run_graph(graph, {"x": np.zeros(3)})
    assert found["y"].tolist() == [1001, 1001, 1001]
    assert found["x"].tolist() == [0, 0, 0]
    assert found["y"].dtype == np.float64


def test_the_evaluator_names_what_is_not_fed(tmp_path):
    graph = make(tmp_path, [op("Relu", ["x"], ["y"])], {"x": VECTOR}, {"y": VECTOR})
    with pytest.raises(RunError, match=r"input 'x' was not fed"):
        evaluate(graph, {})


def test_a_graph_with_collectives_needs_its_ranks(tmp_path):
    graph = make(tmp_path, [comm("AllReduce", ["x"], ["y"])], {"x": VECTOR}, {"y": VECTOR})
    with pytest.raises(RunError, match="a collective is in a graph that one rank runs alone"):
        alone(graph).run({"x": np.ones(2, np.float32)})


# --- a broken installation ------------------------------------------------------------------------------------------


@pytest.fixture
def fresh_runtime():
    session.runtime.cache_clear()
    yield
    session.runtime.cache_clear()


def test_an_empty_runtime_is_named(fresh_runtime, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxruntime", types.ModuleType("onnxruntime"))
    with pytest.raises(RunError, match=r"installed, but empty") as caught:
        SessionCache().get(b"")
    assert "exactly one of" in caught.value.hints[0]


def test_a_missing_runtime_is_named(fresh_runtime, monkeypatch):
    real = builtins.__import__

    def missing(name, *rest):
        if name == "onnxruntime":
            raise ImportError("No module named 'onnxruntime'")
        return real(name, *rest)

    monkeypatch.delitem(sys.modules, "onnxruntime", raising=False)
    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(RunError, match=r"cannot be imported"):
        SessionCache().get(b"")


def test_a_malformed_model_is_refused_in_one_line():
    with pytest.raises(RunError, match=r"ONNX Runtime refuses a segment") as caught:
        SessionCache().get(b"nonsense")
    assert "\n" not in caught.value.message


def test_external_constants_are_mapped(tmp_path):
    data = np.arange(4000, dtype=np.float32)
    (tmp_path / "d.bin").write_bytes(data.tobytes())
    graph = make(tmp_path, [op("Add", ["x", "w"], ["y"])], {"x": ("float32", [1])}, {"y": ("float32", [4000])},
                 {"w": data})  # fmt: skip
    tensor = graph.initializers["w"]
    tensor.proto, tensor.path, tensor.offset = None, str(tmp_path / "d.bin"), 0
    assert alone(graph).run({"x": np.ones(1, np.float32)})["y"].tolist() == (data + 1).tolist()


def test_a_result_keeps_neither_other_results_nor_what_was_read(tmp_path):
    row = ("float32", [3])
    graph = make(tmp_path, [op("Neg", ["x"], ["y"]), op("Add", ["x", "x"], ["z"])], {"x": row}, {"y": row, "z": row})
    (segment,) = partition(graph)
    inputs, made = session.session_of(segment, graph, dict(graph.types), SessionCache(keep=False))
    binding = made.io_binding()
    binding.bind_ortvalue_input(inputs[0], runtime_value(np.arange(3, dtype=np.float32)))
    for name in segment.outputs:
        binding.bind_output(name, "cpu")
    session.run_bound(made, binding)
    gone = weakref.ref(binding._iobinding)
    results = session.results_of(binding)
    del binding, made
    assert gone() is None
    assert [array_of(each).tolist() for each in results] == [[0, -1, -2], [0, 2, 4]]


_ARENA = """
import os
from pathlib import Path
import numpy as np
import onnx
from gopt.runtime.session import CPU, make_session, shrink_arena

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

text = '<ir_version: 8, opset_import: ["": 17]> g (float[N] x) => (float[N] y) { h = Neg(x) k = Exp(h) y = Neg(k) }'
model = onnx.parser.parse_model(text)
session = make_session(model.SerializeToString(), [CPU])
x = np.ones(1 << 24, np.float32)
session.run(None, {"x": x})
before = resident()
shrink_arena()
assert before - resident() > x.nbytes // 2, before - resident()
assert session.run(None, {"x": x})[0][0] < 0
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="where the system tells a process's memory")
def test_the_arena_gives_back_what_no_value_has():
    """In a process of its own: what other tests hold of the arena stands between what is free."""
    subprocess.run([sys.executable, "-c", _ARENA], check=True)
