"""States that PyTorch updates in place: the same memory in every step, the bits of new memory, and nothing that was
handed out changes."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import helper
from runtime_graphs import make

from gopt.runtime.device import Host
from gopt.runtime.execution_plan import plan_execution
from gopt.runtime.executor import Executor, no_calls
from gopt.runtime.tuning.tuning import NO_TUNING

pytestmark = pytest.mark.torch
device = pytest.importorskip("gopt.runtime.pytorch.device")
op = helper.make_node
NODES = [
    op("Mul", ["m", "decay"], ["kept"]), op("Add", ["kept", "x"], ["m_new"]), op("Sub", ["w", "m_new"], ["w_new"]),
    op("Reshape", ["w", "flat"], ["shown"]), op("Identity", ["b"], ["a_new"]), op("Identity", ["a"], ["b_new"]),
    op("Identity", ["decay"], ["c_new"]), op("Neg", ["c"], ["negative"]), op("Identity", ["m_new"], ["twin_new"]),
    op("Add", ["twin", "negative"], ["told"]),
]  # fmt: skip
STATES = ("w", "m", "a", "b", "c", "twin")
REPLACES = {f"{name}_new": name for name in STATES}
CONSTANTS = {"decay": np.full(3, 0.5, np.float32), "flat": np.array([3, 1], np.int64)}


def graph(folder):
    outputs = {f"{name}_new": ("float32", [3]) for name in STATES} | {"shown": ("float32", [3, 1])}
    outputs |= {"told": ("float32", [3])}
    return make(folder, NODES, {name: ("float32", [3]) for name in (*STATES, "x")}, outputs, CONSTANTS)


def trained(program, where, steps: int = 4) -> tuple[list[dict[str, np.ndarray]], list[dict[str, int]]]:
    """The results of each step, as they are after the last step; and where the states lay."""
    random, outs, places = np.random.default_rng(0), [], []
    states = {name: where.hold(random.standard_normal(3).astype(np.float32)) for name in STATES}
    for _ in range(steps):
        feeds = {"x": random.standard_normal(3).astype(np.float32)}
        shown = program.advance(states, feeds, no_calls)
        values = {name: np.array(where.to_host(where.view(value))) for name, value in states.items()}
        outs.append({**{name: where.to_host(value) for name, value in shown.items()}, **values})
        places.append({name: id(value) for name, value in states.items()})
    return outs, places


@pytest.mark.parametrize("execution", ["NODES", "TRACE", "COMPILED"])
def test_states_stay_in_their_memory_with_the_bits_of_new_memory(execution, tmp_path):
    where, host = device.TorchDevice("cpu", device.Execution[execution]), Host(NO_TUNING)
    found, places = trained(Executor(plan_execution(graph(tmp_path), REPLACES, where), where.sessions()), where)
    due, _ = trained(Executor(plan_execution(graph(tmp_path), REPLACES, host), host.sessions()), host)
    for mine, theirs in zip(found, due, strict=True):
        for name, value in theirs.items():
            np.testing.assert_array_equal(mine[name], value, err_msg=name)
    assert all(place == places[0] for place in places)
    np.testing.assert_array_equal(CONSTANTS["decay"], np.full(3, 0.5, np.float32))


def called(before, after):
    return op("AllReduce", [before], [after], domain="gopt.comm", group="shard", reduce="sum")


def squares(nodes, execution, folder):
    """A device, a program from ``w`` and ``x`` to ``w_new`` and ``y``, all of 3 by 3 elements, and first values."""
    square = ("float32", [3, 3])
    where = device.TorchDevice("cpu", device.Execution[execution])
    model = make(folder, nodes, dict.fromkeys(("w", "x"), square), dict.fromkeys(("w_new", "y"), square))
    program = Executor(plan_execution(model, {"w_new": "w"}, where), where.sessions())
    random = np.random.default_rng(0)
    return where, program, *(random.standard_normal((3, 3)).astype(np.float32) for _ in range(2))


@pytest.mark.parametrize("execution", ["NODES", "TRACE", "COMPILED"])
def test_a_view_of_a_state_keeps_its_elements_for_segments_behind_the_update(execution, tmp_path):
    nodes = [
        op("Transpose", ["w"], ["turned"]), op("MatMul", ["x", "turned"], ["a"]), called("a", "b"),
        op("Sub", ["w", "b"], ["w_new"]), called("x", "c"), op("MatMul", ["c", "turned"], ["y"]),
    ]  # fmt: skip
    where, program, w, x = squares(nodes, execution, tmp_path)
    states = {"w": where.hold(w)}
    for _ in range(2):
        shown = program.advance(states, {"x": x}, lambda index, node, inputs, buffer=None: [inputs[0].clone()])
        np.testing.assert_allclose(where.to_host(shown["y"]), x @ w.T, rtol=1e-5, atol=1e-5)
        w = w - x @ w.T
    np.testing.assert_allclose(where.to_host(states["w"]), w, rtol=1e-4, atol=1e-4)


class _OnItsWay:
    """A call that reads its operand when it is waited for."""

    def __init__(self, operand):
        self._operand = operand

    def result(self):
        return [self._operand.clone()]


@pytest.mark.parametrize("execution", ["NODES", "TRACE", "COMPILED"])
def test_a_call_on_its_way_reads_a_view_of_a_state_before_an_update_overwrites_the_state(execution, tmp_path):
    nodes = [
        op("Transpose", ["w"], ["turned"]), called("x", "b"), op("Transpose", ["turned"], ["back"]),
        op("Sub", ["b", "x"], ["nothing"]), called("back", "sent"), called("nothing", "n"),
        op("Sub", ["w", "n"], ["less"]), op("Sub", ["less", "x"], ["w_new"]), called("n", "d"),
        op("Add", ["sent", "d"], ["y"]),
    ]  # fmt: skip
    where, program, w, x = squares(nodes, execution, tmp_path)
    states = {"w": where.hold(w)}
    place = states["w"].data_ptr()
    for _ in range(2):
        shown = program.advance(states, {"x": x}, lambda index, node, inputs, buffer=None: _OnItsWay(inputs[0]))
        np.testing.assert_array_equal(where.to_host(shown["y"]), w)
        w = w - x
    np.testing.assert_array_equal(where.to_host(states["w"]), w)
    assert states["w"].data_ptr() == place
