"""Steps on states that stay on the device: the same bits as steps that are fed everything."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx import helper
from runtime_graphs import comm, make, no_call, sgd_feeds, sharded_sgd

from gopt.errors import RunError
from gopt.ir.graph import Node
from gopt.runtime.device import Host
from gopt.runtime.execution_plan import plan_execution
from gopt.runtime.executor import Executor
from gopt.runtime.shared_memory import SharedGather, SharedMemory
from gopt.runtime.tuning.tiling import MIN_TILED_LENGTH
from gopt.runtime.tuning.tuning import tuning_of
from gopt.verification.variants import FirstRun

REPLACES = {"w.new": "w", "b.new": "b", "p.new": "p", "m.new": "m"}
CUTS = [0, 8]


def call(index: int, node: Node, inputs: list[Any], *_: Any) -> list[Any]:
    """A group of one."""
    flat = np.concatenate([each.reshape(-1) for each in inputs])
    return [flat] if node.op_type == "ReduceScatter" else [flat[:6].reshape(2, 3).copy(), flat[6:].copy()]


def program(folder: Any, tuned: bool) -> tuple[Executor, dict[str, Any], np.ndarray]:
    """A program, its states where ``advance`` takes them, and a batch."""
    device = Host(tuning_of(tuned))
    made = Executor(plan_execution(sharded_sgd(folder, 0, CUTS), REPLACES, device), device.sessions())
    states = dict(sgd_feeds(CUTS)[0])
    batch = states.pop("x")
    made.bind_states(states)
    return made, {name: device.hold(array) for name, array in states.items()}, batch


@pytest.mark.parametrize("tuned", [False, True])
def test_states_advance_as_if_they_were_fed(tuned, tmp_path):
    made, states, batch = program(tmp_path, tuned)
    other, fed = program(tmp_path, False)[0], dict(sgd_feeds(CUTS)[0])
    for _ in range(5):
        shown = made.advance(states, {"x": batch}, call)
        due = other.run(fed, call)
        assert [*shown] == ["loss"] and shown["loss"].tobytes() == due["loss"].tobytes()
        fed |= {REPLACES[name]: value for name, value in due.items() if name in REPLACES}
        assert {name: value.array.tobytes() for name, value in states.items()} == {
            name: fed[name].tobytes() for name in states
        }


def test_what_stands_before_calls_is_taken_from_a_run_on_equal_feeds(tmp_path):
    graph = sharded_sgd(tmp_path, 0, CUTS)
    made, feeds, early, ran = Executor(graph, Host().sessions()), dict(sgd_feeds(CUTS)[0]), {}, []
    made.mark = lambda name, begin, end: ran.append(name)
    due = made.run(feeds, call)
    runs, first = len(ran), made.run(feeds, call, early)
    again = made.run(feeds, call, early)
    assert len(ran) == 3 * runs - len(early) and early and "x" in made.early_inputs
    assert {name: value.tobytes() for name, value in due.items()} == {n: value.tobytes() for n, value in first.items()}
    assert {name: value.tobytes() for name, value in due.items()} == {n: value.tobytes() for n, value in again.items()}
    twice = made.run(feeds, lambda *given: [2 * array for array in call(*given)], early)
    assert any(twice[name].tobytes() != value.tobytes() for name, value in due.items()), "what is behind calls runs"
    remembered = FirstRun()
    assert remembered.results_for(made, feeds) == {}
    remembered.results = early
    assert remembered.results_for(made, {name: np.array(value) for name, value in feeds.items()}) is early
    assert remembered.results_for(made, {**feeds, "x": feeds["x"] + 1}) is None


@pytest.mark.parametrize("same", [False, True])
def test_states_that_are_replaced_between_steps_are_the_ones_that_advance(same, tmp_path):
    """As a parameter server does: new values in the dictionary of the step before, or in another one."""
    made, states, batch = program(tmp_path, True)
    other, due, _ = program(tmp_path, False)
    for _ in range(3):
        kept = {name: Host().hold(value.array.copy()) for name, value in due.items()}
        states = states if same else {}
        states.update((name, Host().hold(value.array.copy())) for name, value in kept.items())
        made.advance(states, {"x": batch}, call)
        other.advance(due, {"x": batch}, call)
        assert {name: value.array.tobytes() for name, value in states.items()} == {
            name: value.array.tobytes() for name, value in due.items()
        }


def momentum(folder: Any) -> Executor:
    """p and m, long enough that both are updated in place; the file stores the start of m."""
    op, rows = helper.make_node, ("float32", [MIN_TILED_LENGTH])
    nodes = [
        op("ReduceMax", ["x"], ["loss"], keepdims=0),
        op("Mul", ["m", "half"], ["decayed"]),
        op("Add", ["decayed", "x"], ["m.new"]),
        op("Mul", ["m.new", "half"], ["step"]),
        op("Sub", ["p", "step"], ["p.new"]),
    ]
    constants = {"half": np.array(0.5, np.float32), "m": np.ones(MIN_TILED_LENGTH, np.float32)}
    states = {"p": rows, "m": rows}
    outputs = {"loss": ("float32", []), "p.new": rows, "m.new": rows}
    graph = make(folder, nodes, {"x": rows, **states}, outputs, constants, {"m": rows})
    device = Host(tuning_of(True))
    return Executor(plan_execution(graph, {"p.new": "p", "m.new": "m"}, device), device.sessions())


def row(value: float) -> np.ndarray:
    return np.full(MIN_TILED_LENGTH, value, np.float32)


def firsts(states: dict[str, Any]) -> dict[str, float]:
    return {name: float(value.array[0]) for name, value in states.items()}


def test_states_in_place_are_those_that_the_dictionary_has(tmp_path):
    """A state may be given anew before a step, or not at all: the dictionary has the new value of each behind it."""
    made, x = momentum(tmp_path), row(1)
    states = {"p": Host().hold(row(8)), "m": Host().hold(row(2))}
    made.advance(states, {"x": x}, no_call)
    assert firsts(states) == {"p": 7.0, "m": 2.0}
    states["p"] = Host().hold(row(4))
    made.advance(states, {"x": x}, no_call)
    assert firsts(states) == {"p": 3.0, "m": 2.0}
    other: dict[str, Any] = {"p": Host().hold(row(16))}
    made.advance(other, {"x": x}, no_call)
    assert firsts(other) == {"p": 15.25, "m": 1.5}, "m begins with the file's value"


def test_a_state_in_place_can_be_fed(tmp_path):
    made, x = momentum(tmp_path), row(1)
    states = {"p": Host().hold(row(8)), "m": Host().hold(row(2))}
    for fed in (6, 10):
        made.advance(states, {"x": x, "m": row(fed)}, no_call)
    assert firsts(states) == {"p": 3.0, "m": 6.0}


def test_a_batch_that_is_written_over_is_read_anew(tmp_path):
    """One array for all batches, as a loader may have it."""
    losses = []
    for reused in (True, False):
        made, states, batch = program(tmp_path, True)
        for turn in range(4):
            batch = batch if reused else batch.copy()
            batch[:] = turn
            losses.append(made.advance(states, {"x": batch}, call)["loss"].tobytes())
    assert losses[:4] == losses[4:] and len(set(losses)) == 4


def test_what_is_not_there_is_named(tmp_path):
    made, states, _ = program(tmp_path, True)
    with pytest.raises(RunError, match=r"input 'x' .* was not fed, and the file stores no value"):
        made.advance(states, {}, call)
    with pytest.raises(RunError, match=r"input 'm' is float32\[8\], but was fed float32\[3\]"):
        made.bind_states({"m": np.zeros(3, np.float32)})


@pytest.mark.parametrize("tuned", [False, True])
def test_held_inputs_give_the_same_bits_run_after_run(tuned, tmp_path):
    made, fed = program(tmp_path, tuned)[0], dict(sgd_feeds(CUTS)[0])
    due = {name: value.copy() for name, value in program(tmp_path, False)[0].run(fed, call).items()}
    held = made.hold({name: value for name, value in fed.items() if name != "x"} | {"unknown": np.zeros(1)})
    assert "unknown" not in held
    for _ in range(3):
        shown = made.run({**held, "x": fed["x"]}, call)
        assert all(shown[name].tobytes() == due[name].tobytes() for name in due)


def test_a_held_input_must_fit(tmp_path):
    with pytest.raises(RunError, match="input 'w' is"):
        program(tmp_path, False)[0].hold({"w": np.zeros((1, 1), np.float32)})


def shared_shard(folder: Any) -> Executor:
    """p, long enough to be updated in place, in memory shared by a group of one: it is gathered before it is read."""
    op, row = helper.make_node, ("float32", [MIN_TILED_LENGTH])
    cuts = [0, MIN_TILED_LENGTH]
    nodes = [
        comm("AllGather", ["p"], ["w"], cuts=cuts, shapes=[str(MIN_TILED_LENGTH)]),
        op("ReduceMax", ["w"], ["loss"], keepdims=0),
        op("Mul", ["x", "loss"], ["scaled"]),
        op("Mul", ["scaled", "half"], ["half.step"]),
        op("Add", ["half.step", "half.step"], ["step"]),
        op("Sub", ["p", "step"], ["p.new"]),
    ]
    outputs = {"loss": ("float32", []), "p.new": row}
    constants = {"half": np.array(0.5, np.float32)}
    graph = make(folder, nodes, {"x": row, "p": row}, outputs, constants, {"w": row})
    device = Host(tuning_of(True))
    granted = SharedGather(np.zeros(MIN_TILED_LENGTH, np.float32), cuts, 0)
    plan = plan_execution(graph, {"p.new": "p"}, device, lambda group: 0)
    return Executor(plan, device.sessions(), SharedMemory(gathers={0: granted}))


def test_a_shard_in_shared_memory_that_is_replaced_between_steps_advances(tmp_path):
    """The dictionary has the shared memory again after the step, and not the array that was put there."""
    made, x = shared_shard(tmp_path), row(0.5)
    states = {"p": Host().hold(row(8))}
    for given in (8, 4):
        states["p"] = Host().hold(row(given))
        made.advance(states, {"x": x}, lambda index, node, inputs, *_: [inputs[0].copy()])
        assert firsts(states) == {"p": given / 2}
