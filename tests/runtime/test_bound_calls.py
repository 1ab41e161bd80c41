"""Calls as the executor makes them: what stays in place is bound once, and what moved is seen."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gopt.errors import RunError
from gopt.ir.graph import COMM, Node
from gopt.runtime.bound_calls import BoundCall, PendingCall
from gopt.runtime.device import HOST
from gopt.runtime.host_value import Value
from gopt.runtime.partition import CallStep
from gopt.runtime.planner.buffers import Buffers


def bound(
    op: str, buffers: Buffers = Buffers(), buffer: Any = None, gathered: Any = None, may_lack: tuple[str, ...] = ()
) -> BoundCall:
    node = Node(op, ["a", "b"], ["x", "y"], domain=COMM, attributes={"group": "shard"})
    return BoundCall(CallStep(3, node), HOST, buffers, may_lack, False, buffer, gathered or {})


def test_what_is_sent_from_a_buffer_is_handed_over_as_it_lies_there():
    flat = np.arange(4, dtype=np.float32)
    views = {"a": flat[:1], "b": flat[1:]}
    seen: list[Any] = []
    call = bound("AllReduce", Buffers(send_views=views), flat)
    for _ in range(2):
        call.start({}, lambda *given: seen.append(given) or [])
    for number, node, inputs, buffer in seen:
        assert (number, node) == (3, call.node) and buffer is flat
        assert inputs[0] is views["a"] and inputs[1] is views["b"]


def test_an_input_that_is_undefined_on_this_rank_is_named():
    values = {"a": Value(np.zeros(1))}
    with pytest.raises(RunError, match="'b' is undefined on this rank, and Broadcast reads it"):
        bound("Broadcast", may_lack=("b",)).start(values, lambda *_: [])


def test_results_in_the_buffer_keep_their_values_from_step_to_step():
    flat = np.arange(4, dtype=np.float32)
    call, results = bound("AllReduce", buffer=flat), [flat[:1], flat[1:]]
    first = call.store(results)
    assert all(value.persistent for value in first.values()) and first["y"].array is results[1]
    assert call.store(results) is first


def test_results_that_moved_are_seen():
    """An engine that made new arrays, after one that worked in the buffer."""
    flat = np.arange(4, dtype=np.float32)
    call = bound("AllReduce", buffer=flat)
    call.store([flat[:1], flat[1:]])
    moved = call.store([np.full(1, 7.0, np.float32), np.full(3, 8.0, np.float32)])
    assert moved["x"].array.tolist() == [7.0] and moved["y"].array.tolist() == [8.0] * 3
    assert not moved["x"].persistent, "the next step has other arrays"


def test_a_gather_of_states_is_copied_to_where_they_lie():
    flat = np.zeros(4, np.float32)
    views = {"x": flat[:1], "y": flat[1:]}
    gathered = {name: Value(view, persistent=True) for name, view in views.items()}
    call = bound("AllGather", Buffers(gathered_views=views), flat, gathered)
    found = call.store([np.full(1, 7.0, np.float32), np.full(3, 8.0, np.float32)])
    assert found == gathered and flat.tolist() == [7.0, 8.0, 8.0, 8.0]
    flat[:] = 1.0
    assert call.store([flat[:1], flat[1:]]) == gathered and flat.tolist() == [1.0] * 4


@pytest.mark.parametrize("results", [[np.zeros(1)], [np.zeros(1)] * 3])
def test_another_number_of_results_is_refused(results):
    with pytest.raises(RunError, match=f"AllReduce .* gave {len(results)} values, not 2"):
        bound("AllReduce").store(results)


def test_no_results_are_no_values():
    assert bound("Reduce").store([]) == {}


def test_a_call_under_way_gives_its_values_once():
    class Future:
        def result(self) -> list[Any]:
            return [np.zeros(1), np.ones(2)]

    call = bound("AllReduce")
    pending = {name: PendingCall(call, Future()) for name in "z"}
    waited = PendingCall(call, Future())
    pending |= dict.fromkeys(call.node.outputs, waited)
    values: dict[str, Any] = {}
    waited.resolve(values, pending)
    assert [*pending] == ["z"] and values["y"].array.tolist() == [1.0, 1.0]
