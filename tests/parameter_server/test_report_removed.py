"""The report of a split against source and files: all that a role lacks or has besides is in it, and no more."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import onnx
import pytest
from helpers import FIXTURES
from onnx import ModelProto

import gopt
from gopt.artifact.server_entries import Mode, PullAt
from gopt.parameter_server.options import SplitOptions

WAYS: dict[str, dict[str, Any]] = {
    "sync": {}, "micro": {"accumulate": 2}, "async": {"mode": Mode.ASYNC}, "geo": {"mode": Mode.GEO},
    "end": {"pull": PullAt.END},
}  # fmt: skip
QUICK = [
    ("optim/rprop_etas", "sync"), ("mlp_adamw", "sync"), ("emb_adamw", "micro"), ("mlp_adamw_fp16_scaler", "end"),
    ("mlp_adamw_bf16", "async"),
]  # fmt: skip
NAMES = ["mlp_adamw", "mlp_adamw_bf16", "emb_adamw", "cnn_sgd", "mlp_mom_clip_sched", "mlp_lamb", "mlp_adamw_accum"]
ALL = [(name, way) for name in NAMES for way in WAYS if (name, way) not in QUICK]


def values(model: ModelProto) -> set[str]:
    names = {name for node in model.graph.node for name in (*node.input, *node.output)}
    return names | {each.name for each in model.graph.input} - {""}


def numbers(text: str) -> Iterator[int]:
    for part in text.replace(" ", "").split(","):
        first, _, last = part.partition("-")
        yield from range(int(first), int(last or first) + 1)


def told(groups: list[dict[str, Any]]) -> set[tuple[int, str]]:
    return {
        (rank, name) for group in groups for rank in numbers(group["ranks"]) for row in group["rows"]
        for name in row["names"]
    }  # fmt: skip


@pytest.mark.parametrize(
    ("name", "way"), [*QUICK, *(pytest.param(*each, marks=pytest.mark.slow) for each in ALL)]
)  # fmt: skip
def test_the_report_is_complete(name: str, way: str, tmp_path: Path) -> None:
    source, path = onnx.load(FIXTURES / f"{name}.onnx"), tmp_path / "step.onnx"
    for place, node in enumerate(source.graph.node):
        node.name = node.name or f"n{place}"
    onnx.save(source, path)
    try:
        split = gopt.split(path, SplitOptions(trainers=2, servers=2, minimum=64, **WAYS[way]))
    except gopt.GoptError:
        pytest.skip("it cannot be split so")
    split.write(tmp_path / "split")
    report, manifest = (json.loads((tmp_path / "split" / f"{n}.json").read_text()) for n in ("report", "manifest"))
    own, operators = values(source) - {""}, {(node.name, node.op_type) for node in source.graph.node}
    lacking, without, besides = set(), set(), set()
    for rank in manifest["ranks"]:
        models = [onnx.load(tmp_path / "split" / file, load_external_data=False) for file in rank["files"].values()]
        held = set().union(*map(values, models)) - {""}
        ran = {(node.name, node.op_type) for model in models for node in model.graph.node}
        lacking |= {(rank["rank"], each) for each in own - held}
        without |= {(rank["rank"], name) for name, _ in operators - ran}
        besides |= held - own
    assert told(report["removed_vars"]) == lacking
    assert told(report["removed_ops"]) >= without
    added = {each for group in report["added_vars"] for row in group["rows"] for each in row["names"]}
    assert added - own == besides  # operators of gopt may make values of the source, too
