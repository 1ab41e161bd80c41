"""The step as a timeline, from the files of a rank."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from helpers import FIXTURES

import gopt
from gopt.artifact.manifest_check import read_manifest
from gopt.artifact.report_check import read_report
from gopt.errors import InputError
from gopt.offline.html_report import step_timeline as module
from gopt.offline.html_report.record import Span, Timeline
from gopt.offline.html_report.step_timeline import step_timeline

pytestmark = pytest.mark.usefixtures("unchecked")


def timeline(folder: Path, rank: int = 0) -> Timeline:
    manifest, _ = read_manifest(folder)
    return step_timeline(folder, manifest, read_report(folder, manifest), rank)


@pytest.fixture(scope="module")
def micro(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("timeline") / "out"
    gopt.shard(gopt.load(FIXTURES / "mlp_adamw.onnx"), 2, stage=2, accumulate=2).write(folder)
    return folder


def test_phases_come_in_order_and_files_one_behind_the_other(micro):
    found = timeline(micro)
    compute = [each for each in found.spans if each.lane == 0]
    assert list(dict.fromkeys(each.kind for each in compute)) == ["forward", "backward", "update"]
    assert "(micro, 2 times)" in compute[0].name and compute[-1].name.endswith("(update)")
    assert all(a.end <= b.start for a, b in pairwise(compute))
    assert found.focus == (0, max(each.end for each in found.spans))
    assert found.unit == "operators" and found.dropped == 0


def test_every_operator_is_in_one_bar(micro):
    found = timeline(micro)
    calls = [each for each in found.spans if each.lane]
    operators = sum(int(each.name.split()[0]) for each in found.spans if each.lane == 0)
    assert operators + len(calls) == found.focus[1]


def test_a_call_reaches_to_its_first_reader_and_says_what_it_moves(micro):
    found = timeline(micro)
    scatter = next(each for each in found.spans if each.kind == "ReduceScatter")
    gather = next(each for each in found.spans if each.kind == "AllGather")
    assert found.lanes[scatter.lane] == "calls over shard"
    assert scatter.nbytes == gather.nbytes == 11048, "all parameters and their gradients, in float32"
    assert gather.end == found.focus[1], "nobody computes with new parameters in this step"
    assert scatter.start < scatter.end <= gather.start


def test_calls_that_are_open_at_once_have_lanes_of_their_own():
    lanes = module._Lanes()
    taken = [lanes.free("calls over dp", start, end) for start, end in ((0, 5), (1, 9), (5, 6), (6, 20))]
    assert taken == [1, 2, 1, 1] and lanes.names == ["compute", "calls over dp", "calls over dp (2)"]
    lanes.free("calls over tp", 0, 1)
    lanes.free("calls over dp", 7, 8)
    spans = [Span(lane, "AllReduce", "", 0, 1) for lane in range(len(lanes.names))]
    names, shown = lanes.in_groups(spans)
    assert names == ("compute", "calls over dp", "calls over dp (2)", "calls over dp (3)", "calls over tp")
    assert [names[each.lane] for each in shown] == lanes.names, "each span stays on the lane of its name"
    many = [lanes.free("calls over ep", 0, 9) for _ in range(9)]
    assert len(set(many)) == lanes.BESIDE


def test_a_missing_file_is_refused(micro, tmp_path):
    manifest, _ = read_manifest(micro)
    with pytest.raises(InputError, match=r"has no source\.onnx"):
        step_timeline(tmp_path, manifest, read_report(micro, manifest), 0)
    (tmp_path / "source.onnx").write_bytes((micro / "source.onnx").read_bytes())
    with pytest.raises(InputError, match="rank 0 has no file for the phase micro"):
        step_timeline(tmp_path, manifest, read_report(micro, manifest), 0)


def test_a_long_timeline_is_cut_and_says_so(micro, monkeypatch):
    monkeypatch.setattr(module, "SPANS", 3)
    found = timeline(micro)
    assert len(found.spans) == 3 and found.dropped > 0
