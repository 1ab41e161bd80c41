"""Updates in tiles give what they give at once, bit for bit; memory is reused only where nothing else reads it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from products import fewer, spread
from recipes import DIRECTIONS, Recipe
from test_run import samples, train, values, written

from gopt.ir.graph import Graph, Node
from gopt.ir.types import TensorType
from gopt.runtime.execution_plan import plan_execution
from gopt.runtime.executor import Executor
from gopt.runtime.partition import Segment
from gopt.runtime.planner.assignment import BufferAssignment
from gopt.runtime.session import SessionCache
from gopt.runtime.tuning import numpy_kernels, tiling, tuning
from gopt.runtime.tuning.tiling import CompiledRun, ElementwiseRun, split_elementwise

RECIPES = {
    "clip and ema": Recipe(widths=(3, 6, 4), norm="sumsquare-chain", ema=True),
    "half with a loss scale": Recipe(widths=(3, 6, 4), half=True, loss_scale=True, check="max-below-inf"),
    "ratios of norms": Recipe(widths=(3, 6, 4), trust=True, second_clip=True, metric=True),
    "rows": Recipe(widths=(3, 6, 4), rows=True, own_constants=True),
    **{each: Recipe(widths=(3, 6, 4), direction=(each,)) for each in DIRECTIONS},
}


WAYS = {
    "one rank": ("shard=1", 1, {"stage": 0}),
    "stage 2": ("shard=2", 1, {"stage": 2}),
    "micro-steps at stage 3": ("shard=3", 2, {"stage": 3}),
    "stage 0": ("dp=2", 1, {"stage": 0}),
}


@pytest.mark.parametrize(("what", "llvm", "way"), fewer(spread(RECIPES, [True, False], WAYS), 7))
def test_tiles_and_rooms_change_nothing(what, way, llvm, tmp_path, monkeypatch):
    mesh, micro_steps, options = WAYS[way]
    if not llvm:
        monkeypatch.setattr(tiling, "is_supported", lambda *_: False)
    folder, data = written(tmp_path, mesh, micro_steps, RECIPES[what], **options), samples(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(tuning, "assign_buffers", lambda graph, *_: BufferAssignment(graph))
        train(folder, data, 3, checkpoint=tmp_path / "plain")
    runs: list[CompiledRun] = []
    buffers: list[BufferAssignment] = []
    real_assignment = tuning.assign_buffers
    monkeypatch.setattr(
        tuning, "assign_buffers", lambda *given: (buffers.append(real_assignment(*given)), buffers[-1])[1]
    )
    real = CompiledRun.run
    monkeypatch.setattr(CompiledRun, "run", lambda self, given: (runs.append(self), real(self, given))[1])
    for name, value in (("MIN_TILED_LENGTH", 4), ("TILE", 5), ("MIN_NODES", 1)):
        monkeypatch.setattr(tiling, name, value)
    monkeypatch.setattr(numpy_kernels, "TILE", 5)
    train(folder, data, 3, checkpoint=tmp_path / "tiled")
    # Plain descent at stage 2 has no state but whole parameters, which are gathered.
    assert runs and (any(run.overwrites for run in runs) or what in ("gradient", "sign"))
    if options["stage"] == 2 and what not in ("half with a loss scale", "ratios of norms", "rows"):
        # Parameters that are gathered are states; what is cut of them is updated where it lies.
        own = {name for each in buffers for name in each.slices} - {
            name for each in buffers for gather in each.gathers.values() for name in gather.states
        }
        assert own and any(run.overwrites & own for run in runs)
    plain, tiled = (values(tmp_path / name / "step_00000003", tmp_path) for name in ("plain", "tiled"))
    for name, value in plain.items():
        assert np.array_equal(value, tiled[name], equal_nan=True), name


def graph(nodes: list[Node], inputs: dict[str, Any], outputs: list[str]) -> Graph:
    import onnx

    header = onnx.ModelProto(ir_version=9, opset_import=[onnx.helper.make_opsetid("", 20)])
    names = {name for node in nodes for name in node.outputs}
    types = {**inputs, **dict.fromkeys(names, TensorType("float32", (8,)))}
    types |= {name: TensorType("float32", ()) for name in names if name.startswith("s")}
    return Graph("g", nodes, inputs, {name: types[name] for name in outputs}, {}, types, header)


ROW = TensorType("float32", (8,))


@pytest.fixture
def small(monkeypatch):
    for name, value in (("MIN_TILED_LENGTH", 4), ("TILE", 3), ("MIN_NODES", 1)):
        monkeypatch.setattr(tiling, name, value)
    monkeypatch.setattr(numpy_kernels, "TILE", 3)


def run(made: Graph, replaces: dict[str, str], **feeds: Any) -> dict[str, np.ndarray]:
    return Executor(plan_execution(made, replaces), SessionCache()).run(feeds, lambda *_: [])


def test_a_norm_inside_makes_two_runs(small):
    nodes = [
        Node("Mul", ["w", "w"], ["a"]), Node("ReduceSum", ["a"], ["s"], attributes={"keepdims": 0}),
        Node("Mul", ["w", "s"], ["b"]), Node("Add", ["b", "a"], ["out"]),
    ]  # fmt: skip
    made = graph(nodes, {"w": ROW}, ["out"])
    parts = split_elementwise(Segment(tuple(nodes), ("w",), ("out",)), made.types)
    assert [isinstance(part, ElementwiseRun) for part in parts] == [True, False, True]
    w = np.arange(8, dtype=np.float32)
    np.testing.assert_array_equal(run(made, {"out": "w"}, w=w.copy())["out"], w * (w * w).sum() + w * w)


def test_rows_that_need_no_gradient_wait_for_those_that_do(small):
    nodes = [
        Node("Mul", ["w", "w"], ["decayed"]), Node("ReduceSum", ["g"], ["s"], attributes={"keepdims": 0}),
        Node("Mul", ["g", "s"], ["move"]), Node("Sub", ["decayed", "move"], ["out"]),
    ]  # fmt: skip
    parts = split_elementwise(
        Segment(tuple(nodes), ("w", "g"), ("out",)), graph(nodes, {"w": ROW, "g": ROW}, ["out"]).types
    )
    found = [(part.segment if isinstance(part, ElementwiseRun) else part).nodes for part in parts]
    assert [[node.outputs[0] for node in nodes] for nodes in found] == [["s"], ["decayed", "move", "out"]]


def test_a_state_is_written_over_once_nobody_reads_it(small):
    nodes = [Node("Add", ["w", "g"], ["out"]), Node("Mul", ["out", "out"], ["product"])]
    made = graph(nodes, {"w": ROW, "g": ROW}, ["out", "product"])
    w, g = np.arange(8, dtype=np.float32), np.ones(8, np.float32)
    found = run(made, {"out": "w"}, w=w, g=g)
    np.testing.assert_array_equal(found["product"], (np.arange(8) + 1.0) ** 2)
    assert np.shares_memory(found["out"], w) or np.array_equal(w, np.arange(8) + 1)


def test_a_state_that_is_read_later_keeps_its_memory(small):
    nodes = [
        Node("Add", ["w", "g"], ["out"]), Node("ReduceSum", ["out"], ["s"], attributes={"keepdims": 0}),
        Node("Mul", ["w", "s"], ["late"]),
    ]  # fmt: skip
    made = graph(nodes, {"w": ROW, "g": ROW}, ["out", "late"])
    w, g = np.arange(8, dtype=np.float32), np.ones(8, np.float32)
    found = run(made, {"out": "w"}, w=w, g=g)
    np.testing.assert_array_equal(w, np.arange(8))
    np.testing.assert_array_equal(found["late"], np.arange(8) * (np.arange(8) + 1).sum())


def test_results_of_the_step_before_can_still_be_read(small):
    nodes = [Node("Add", ["x", "x"], ["double"])]
    made = Executor(plan_execution(graph(nodes, {"x": ROW}, ["double"]), {}), SessionCache())
    first = made.run({"x": np.ones(8, np.float32)}, lambda *_: [])["double"]
    second = made.run({"x": np.zeros(8, np.float32)}, lambda *_: [])["double"]
    assert first.tolist() == [2.0] * 8 and second.tolist() == [0.0] * 8


def test_more_rows_than_a_function_takes():
    count, types = 513, {"v0": ROW}
    nodes = [Node("Where", [f"c{k}", f"x{k}", f"v{k}"], [f"v{k + 1}"]) for k in range(count)]
    types |= {
        f"{kind}{k}": TensorType(dtype, (64,))
        for k in range(count)
        for kind, dtype in (("c", "bool"), ("x", "float32"))
    }
    types = {name: TensorType(type.dtype, (64,)) for name, type in types.items()}
    made = graph(nodes, types, [f"v{count}"])
    made.types.update({name: types["v0"] for node in nodes for name in node.outputs})
    feeds = {name: np.full(64, place, type.dtype) for place, (name, type) in enumerate(types.items())}
    assert (run(made, {}, **feeds)[f"v{count}"] == feeds[f"x{count - 1}"]).all()


def test_what_is_fed_may_lie_in_any_order_and_change(small):
    """Loops and bindings go by the address; a copy made of an odd one is not a value of the next step."""
    square = TensorType("float32", (8, 8))
    nodes = [Node("Add", ["w", "x"], ["sum"]), Node("Tanh", ["sum"], ["out"])]
    made = graph(nodes, {"w": square, "x": square}, ["out"])
    made.types.update({"sum": square, "out": square})
    for part in (nodes[:1], nodes):  # by LLVM or NumPy, and by a session
        made.nodes[:] = part
        result = part[-1].outputs[0]
        program = Executor(plan_execution(replace(made, outputs={result: square}), {result: "w"}), SessionCache())
        x = np.arange(64, dtype=np.float32).reshape(8, 8).T
        for _ in range(3):
            x += 1
            w = np.ones((8, 8), np.float32)
            due = w + x if len(part) == 1 else np.tanh(w + x)
            np.testing.assert_allclose(program.run({"w": w, "x": x}, lambda *_: [])[result], due, rtol=1e-6)


def test_a_state_that_is_another_one_before_it_was_replaced():
    """The old value is the input itself, without an Identity; its place is written again two steps later."""
    nodes = [Node("Mul", ["w", "half"], ["new"]), Node("Mul", ["older", "half"], ["late"])]
    made = graph(nodes, dict.fromkeys(("w", "half", "old", "older"), ROW), ["new", "w", "old", "late"])
    program = Executor(plan_execution(made, {"new": "w", "w": "old", "old": "older"}), SessionCache())
    held = {name: np.full(8, value, np.float32) for name, value in (("w", 64), ("old", 128), ("older", 256))}
    for step in range(6):
        found = program.run({**held, "half": np.full(8, 0.5, np.float32)}, lambda *_: [])
        assert found["late"].tolist() == [128 / 2**step] * 8
        held = {"w": found["new"], "old": found["w"], "older": found["old"]}
        assert [held[name][0] for name in ("w", "old", "older")] == [32 / 2**step, 64 / 2**step, 128 / 2**step]


def test_short_rows_go_only_where_no_session_is_cut_for_them():
    row, one = TensorType("float32", (64,)), TensorType("float32", ())
    chain = [Node("Mul", [f"v{k}", "w"], [f"v{k + 1}"]) for k in range(8)]
    types = {"w": row, "s": one, "t": one, **{f"v{k}": row for k in range(9)}}
    kinds = lambda nodes, outputs: [  # noqa: E731
        isinstance(part, ElementwiseRun)
        for part in split_elementwise(Segment(tuple(nodes), ("v0", "w"), outputs), types)
    ]
    assert kinds(chain, ("v8",)) == [True]
    norm = Node("ReduceSum", ["v8"], ["s"], attributes={"keepdims": 0})
    assert kinds([*chain, norm], ("s", "v8")) == [False]
    assert kinds([*chain, Node("ReduceSum", ["v0"], ["s"], attributes={"keepdims": 0})], ("s", "v8")) == [False, True]
    assert kinds(chain[:7], ("v7",)) == [False]
