"""Parameters that trainers read through casts alone travel in the type of the casts, and no trainer casts them."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
from helpers import FIXTURES
from split_gen.judge import Setting, judge

import gopt
from gopt.artifact.manifest_check import read_manifest
from gopt.parameter_server.options import SplitOptions

SETTINGS = [
    Setting(), Setting(accumulate=3), Setting(wire="bfloat16", pull="end", cap=1),
    Setting(wire="float16", trainers=3, servers=2, slicing="classic", minimum=5),
]  # fmt: skip


@pytest.mark.parametrize("setting", SETTINGS, ids=Setting.told)
def test_servers_have_the_states_of_the_source(setting: Setting, tmp_path: Path) -> None:
    found = judge(FIXTURES / "mlp_adamw_bf16.onnx", setting, tmp_path, steps=2)
    assert found.outcome == "equal", found.why


@pytest.mark.parametrize(
    ("given", "casts", "wire"),
    [({}, 0, "bfloat16"), ({"accumulate": 2}, 0, "bfloat16"), ({"wire": "bfloat16"}, 0, "bfloat16"),
     ({"wire": "float16"}, 4, "float16")],
)  # fmt: skip
def test_no_trainer_casts_a_parameter(given: dict[str, object], casts: int, wire: str, tmp_path: Path) -> None:
    split = gopt.split(FIXTURES / "mlp_adamw_bf16.onnx", SplitOptions(trainers=2, servers=2, **given))  # type: ignore[arg-type]
    report = split.write(tmp_path / "split")
    manifest, _ = read_manifest(tmp_path / "split")
    assert manifest.parameter_server is not None
    assert {key.wire for key in manifest.parameter_server.keys} == {wire}
    assert report.figures.casts.in_forward == casts
    names, left = set(split.source.training.gradients), 0
    for file in (tmp_path / "split").glob("trainer*.onnx"):
        nodes = onnx.load(file, load_external_data=False).graph.node
        left += sum(node.op_type == "Cast" and node.input[0] in names for node in nodes)
    assert left == casts
