"""What mappings cost, and that propagation settles conflicts by it."""

from __future__ import annotations

from math import inf

import pytest
from helpers import source

import gopt
from gopt.errors import OptionError
from gopt.ir.phase import Phase
from gopt.offline.times import times
from gopt.passes.pipeline import build_pipeline
from gopt.records.mesh import Mesh
from gopt.records.placements import REPLICATED, Partial, Shard
from gopt.records.topology import Link, Topology
from gopt.spmd.traffic import find_calls
from gopt.tensor_parallel.cost import Cost, Packed
from gopt.verification.verify import Verifier

ROWS, COLUMNS, SUM = Shard(0, (8, 8, 8, 8)), Shard(1, (8, 8, 8, 8)), Partial("sum")
SLOW_STARTS = "1000GB/s:1ms"


@pytest.mark.parametrize(
    ("before", "after", "sent", "rounds"),
    [
        (SUM, REPLICATED, 1.5, 2),
        (SUM, ROWS, 0.75, 1),
        (ROWS, REPLICATED, 0.75, 1),
        (ROWS, COLUMNS, 0.1875, 1),
        (REPLICATED, ROWS, 0, 0),
        (ROWS, ROWS, 0, 0),
    ],
)
def test_a_mapping_costs_bytes_or_seconds(before, after, sent, rounds):
    link = Link(1e6, 1e-3)
    assert Cost(4).of(before, after, 1000) == 1000 * sent
    assert Cost(4, link).of(before, after, 1000) == pytest.approx(rounds * 3 * 1e-3 + sent * 1e-3)
    assert Cost(4, link).of(before, after, 1000, packed=True) == pytest.approx(sent * 1e-3)


def test_where_no_mapping_is_there_is_no_price():
    assert Cost(4).of(ROWS, SUM, 8) == Cost(4, Link(1e6, 1e-3)).of(ROWS, SUM, 8) == inf


def test_the_link_is_that_of_the_axis():
    mesh = Mesh.parse("dp=2,tp=4")
    assert Cost.parse("dp=25GB/s:10us,tp=200GB/s:5us", mesh, "tp") == Cost(4, Link(200e9, 5e-6))
    assert Cost.parse("4x200GB/s:5us,25GB/s:10us", mesh, "tp") == Cost(4, Link(200e9, 5e-6))
    assert Cost.parse("", mesh, "tp") == Cost(4)
    with pytest.raises(OptionError):
        Cost.parse("dp=1GB/s", mesh, "tp")


def test_what_the_update_alone_reads_is_packed():
    training = source("gpt_adamw").training
    packed = Packed.of(training.graph)
    by_phase = {phase: [node for node in training.graph.nodes if node.phase is phase] for phase in Phase}
    assert all(packed.has(gradient, Phase.BACKWARD) for gradient in training.gradients.values())
    single = [name for node in by_phase[Phase.FORWARD] for name in node.outputs if elements(training, name) == 1]
    assert set(single) - packed.late and all(packed.has(name, Phase.FORWARD) for name in single)
    assert packed.has("a value that a pass makes", Phase.UPDATE)
    assert not packed.has("a value that a pass makes", Phase.BACKWARD)
    products = [node.outputs[0] for node in by_phase[Phase.FORWARD] if node.is_a("MatMul", "Gemm")]
    assert products and not any(packed.has(name, Phase.FORWARD) for name in products)


def elements(training, name: str) -> int:
    type = training.graph.type_of(name)
    return type.elements if type.static else 0


def made(link: str):
    passes = build_pipeline(defaults={"tensor-parallel": {"link": link}})
    return gopt.shard(source("gpt_adamw"), Mesh.parse("tp=4"), pipeline=passes)


def test_slow_starts_cost_bytes(tmp_path):
    """Fewer rounds of more bytes; the result is right all the same."""
    by_bytes, by_time = made(""), made(SLOW_STARTS)
    topology = Topology.parse(SLOW_STARTS, by_time.program.mesh)
    seconds = [times(find_calls(each.program), topology).total for each in (by_bytes, by_time)]
    sent = [each.report().figures.traffic.sent for each in (by_bytes, by_time)]
    assert seconds[1] < seconds[0] and sent[1] > sent[0]
    assert made("1MB/s").report().figures.traffic.sent == sent[0], "where bytes alone cost time, they decide"
    by_time.write(tmp_path / "out")
    result = Verifier(tmp_path / "out").run(confirm=False)
    assert result.equal and result.compared
