"""The order of an update's states: by how each is updated, whatever the file lists first."""

from __future__ import annotations

import zlib

import pytest
from helpers import FIXTURES

import gopt
from gopt.analysis.state_order import StateOrder
from gopt.analysis.update_subgraphs import find_updates


def updates():
    training = gopt.load(FIXTURES / "mlp_adamw.onnx").training
    return training.graph, [*find_updates(training, whole_accumulators=False).subgraphs.values()]


@pytest.mark.parametrize("turned", [False, True])
def test_moments_come_in_one_order_however_they_are_listed(turned):
    graph, subgraphs = updates()
    order = StateOrder(graph)
    for subgraph in subgraphs:
        subgraph.states[1:] = sorted(subgraph.states[1:], key=lambda state: state.tensor, reverse=turned)
        order.sort(subgraph)
        parameter, *moments = [state.tensor for state in subgraph.states]
        assert moments == [f"{parameter}.exp_avg", f"{parameter}.exp_avg_sq"]


def test_equal_updates_are_looked_at_once(monkeypatch):
    """The checksums of the first update serve all others."""
    graph, subgraphs = updates()
    assert len(subgraphs) > 2
    asked = []
    checksum = zlib.crc32
    monkeypatch.setattr("gopt.analysis.state_order.zlib.crc32", lambda data: asked.append(data) or checksum(data))
    order = StateOrder(graph)
    order.sort(subgraphs[0])
    structure = len([data for data in asked if b"[" in data])
    for subgraph in subgraphs[1:]:
        order.sort(subgraph)
    assert structure == len([data for data in asked if b"[" in data]) > 0
