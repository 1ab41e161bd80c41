"""A plan holds no memory, changes no graph, and asks only for what ranks may share."""

from __future__ import annotations

import numpy as np
from runtime_graphs import sharded_sgd

from gopt.runtime.device import Host
from gopt.runtime.execution_plan import plan_execution
from gopt.runtime.partition import CallStep
from gopt.runtime.shared_memory import NOT_SHARED, SharedMemory, SharedSend
from gopt.runtime.tuning.tuning import NO_TUNING

CUTS = [0, 4, 8]
REPLACES = {"w.new": "w", "b.new": "b", "p.new": "p", "m.new": "m"}


def test_the_graph_stays_as_it_was(tmp_path):
    graph = sharded_sgd(tmp_path, 0, CUTS)
    before = [node.to_proto().SerializeToString() for node in graph.nodes]
    plan = plan_execution(graph, REPLACES, member=lambda group: 0)
    assert [node.to_proto().SerializeToString() for node in graph.nodes] == before
    assert [step.index for step in plan.steps if isinstance(step, CallStep)] == [0, 1] and plan.calls() == ["shard"] * 2


def test_requests_depend_on_what_is_planned(tmp_path):
    graph = sharded_sgd(tmp_path, 0, CUTS)
    tuned = plan_execution(graph, REPLACES, member=lambda group: 0)
    assert {number: each.count for number, each in tuned.send_requests().items()} == {0: 8}
    for plan in (plan_execution(graph), plan_execution(graph, REPLACES, Host(NO_TUNING), lambda group: 0)):
        assert not plan.plans_memory and not plan.send_requests() and not plan.gather_requests()
    assert not plan_execution(graph, REPLACES).gather_requests(), "no member: nothing is shared"


def test_what_was_granted_is_waited_for_and_not_overwritten(tmp_path):
    plan = plan_execution(sharded_sgd(tmp_path, 0, CUTS), REPLACES, member=lambda group: 0)
    memory = np.zeros(8, np.float32)
    granted = plan.resolve(SharedMemory(sends={0: SharedSend(memory, [memory])}))
    alone = plan.resolve(NOT_SHARED)
    assert granted.waits == alone.waits == [step.inputs for step in plan.steps]
    assert granted.assignment.sends[0].names == ("gw", "gb")
