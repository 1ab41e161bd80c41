"""The size of the report: at 2,000 nodes the share of the limits that 20,000 and 100,000 have."""

from __future__ import annotations

import pytest
import report_size


@pytest.mark.parametrize("shape", ["mlp", "gpt"])
def test_a_node_of_the_graph_takes_fifty_bytes_at_most(shape):
    nodes, size, _ = report_size.measure(shape, 2000)
    assert 0 < size < 50 * nodes


def test_the_limits():
    assert report_size.limit(19_984) == 1_000_000 and report_size.limit(100_020) == 5_001_000.0
