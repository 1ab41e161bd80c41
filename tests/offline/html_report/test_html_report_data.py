"""What the page of a folder shows: of sharded ranks, of one rank, and of trainers and servers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from gopt.cli.main import main
from helpers import FIXTURES

import gopt
from gopt.artifact.report_groups import total
from gopt.errors import InputError
from gopt.offline.html_report.data import report_page
from gopt.offline.html_report.record import ReportPage

MODEL = FIXTURES / "mlp_adamw.onnx"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("page") / "two"
    gopt.shard(gopt.load(MODEL), 2).write(out)
    return out


@pytest.fixture(scope="module")
def split(tmp_path_factory: pytest.TempPathFactory) -> ReportPage:
    out = tmp_path_factory.mktemp("page") / "split"
    assert main(["split", str(MODEL), "--trainers", "3", "--servers", "2", "-o", str(out), "-q"]) == 0
    return report_page(out)


def test_the_figures_are_those_of_the_report(folder):
    page, report = report_page(folder), json.loads((folder / "report.json").read_text())
    assert (page.heading.mesh, page.heading.ranks, page.heading.stage, page.folder) == ("shard=2", 2, 2, "two")
    sizes = {row.what: row.values for row in page.before_after.rows}
    told = report["before_after"]
    assert sizes["optimizer states"] == (told["source"]["optimizer_states"], told["largest"]["optimizer_states"])
    assert sizes["nodes"] == (111, 73) and page.before_after.columns == ("source", "rank 0")
    assert [each.sent for each in page.ranks] == [
        sum(call["bytes_sent"] for call in rank["communication"]) for rank in report["ranks"]
    ]
    assert {(each.group, each.op) for each in page.groups} == {("shard", "ReduceScatter"), ("shard", "AllGather")}
    assert page.proof is None and page.timeline.source == "plan"
    assert [each.name for each in page.checks] == [each["name"] for each in report["checks"]]


def test_the_counts_by_role_are_those_of_the_groups(folder):
    page = report_page(folder)
    assert sum(each.removed_ops for each in page.roles) == total(page.removed_ops) == 60
    assert sum(each.added_ops for each in page.roles) == total(page.added_ops) == 24
    assert sum(each.removed_vars for each in page.roles) == total(page.removed_vars)
    assert sum(each.added_vars for each in page.roles) == total(page.added_vars)


def test_passes_have_their_options(folder):
    options = {each.name: each.options for each in report_page(folder).passes}
    assert "stage=2" in options["shard"] and "partition=flat" in options["shard"]


def test_one_rank_has_no_traffic(tmp_path):
    gopt.shard(gopt.load(MODEL), 1).write(tmp_path / "one")
    page = report_page(tmp_path / "one")
    assert page.groups == () and [each.label for each in page.bars] == ["rank 0"]
    assert page.timeline.lanes == ("compute",)


def test_a_split_has_trainers_and_servers(split):
    assert (split.heading.ranks, split.heading.servers, split.heading.stage) == (5, 2, None)
    assert split.ranks[0].role == "trainer" and split.ranks[0].ranks == "0-2"
    assert {each.role for each in split.balance} == {"trainer", "server"}
    sizes = {row.what: row.values for row in split.before_after.rows}
    assert split.before_after.columns[:2] == ("source", "trainer 0") and len(split.before_after.columns) == 3
    assert sizes["parameters"][0] == 11048 and sizes["parameters"][1] == 0 < sizes["parameters"][2]
    assert sizes["optimizer states"][0] == 2 * 11048
    assert {each.op for each in split.groups} == {"Push", "Pull"}
    assert {"messages with server 0", "messages with server 1"} <= set(split.timeline.lanes)


def test_a_page_grows_with_the_graph_and_not_with_its_ranks(folder, tmp_path):
    """Of 64 ranks it says little more than of 2: those that are alike are one."""
    gopt.shard(gopt.load(MODEL), 64).write(tmp_path / "many")
    sizes = [len(json.dumps(report_page(each).to_json())) for each in (folder, tmp_path / "many")]
    assert sizes[1] < 1.5 * sizes[0]


def test_the_trace_and_the_proof_are_checked_against_the_folder(folder, tmp_path):
    trace = tmp_path / "trace.json"
    trace.write_text(json.dumps({"traceEvents": [
        {"name": "segment of 1", "ph": "X", "pid": 7, "tid": 0, "ts": 1.0, "dur": 2.0},
    ]}))  # fmt: skip
    with pytest.raises(InputError, match="it has rank 7, the folder 2 ranks"):
        report_page(folder, trace=trace)
    with pytest.raises(InputError, match=r"nothing\.json"):
        report_page(folder, verification=tmp_path / "nothing.json")


def test_what_is_no_output_folder_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"is not an output folder: it has no manifest\.json"):
        report_page(tmp_path)
