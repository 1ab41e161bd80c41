"""What folders of splits are, by their own manifests and reports."""

from __future__ import annotations

import json
import math
from pathlib import Path

import onnx
import pytest
from gopt.cli.main import main
from helpers import source

from gopt import api
from gopt.artifact.manifest_check import read_manifest
from gopt.artifact.server_entries import Mode
from gopt.errors import InputError
from gopt.offline.inspect_folder import inspect_folder
from gopt.offline.inspect_split import SplitInspection
from gopt.parameter_server.options import SplitOptions
from gopt.parameter_server.slicing import Slicing
from gopt.records.roles import Roles

pytestmark = pytest.mark.usefixtures("unchecked")


def split(folder: Path, **given: object) -> SplitInspection:
    options = SplitOptions(**{"trainers": 2, "servers": 2, "minimum": 16, **given})  # type: ignore[arg-type]
    api.split(source("mlp_adamw"), options).write(folder)
    found = inspect_folder(folder)
    assert isinstance(found, SplitInspection)
    return found


def test_every_byte_of_a_parameter_travels_once_each_way(tmp_path: Path) -> None:
    found = split(tmp_path / "out", servers=3)
    held = sum(each.parameters for each in found.per_server)
    assert found.pushed == found.pulled == held == 11048
    assert sum(each.optimizer_states for each in found.per_server) == 2 * held
    assert found.keys == {"parameter": 3, "scalar": 0, "state": 0, "value": 0, "metric": 0}


def test_half_precision_on_the_wire_is_half_the_bytes(tmp_path: Path) -> None:
    wide, narrow = split(tmp_path / "a"), split(tmp_path / "b", wire="float16")
    assert (narrow.pushed, narrow.pulled) == (wide.pushed // 2, wide.pulled // 2)
    assert [each.parameters for each in narrow.per_server] == [each.parameters for each in wide.per_server]


def test_idle_servers_and_roles_are_told(tmp_path: Path) -> None:
    found = split(tmp_path / "out", servers=6, slicing=Slicing.OFF, roles=Roles.default(2, 6))
    assert found.idle == [4, 5] and found.roles == "trainer:0-1;server:2-7"
    record = found.to_json()
    assert record["what"] == "split" and record["idle"] == [4, 5] and json.dumps(record)


def test_a_report_of_other_ranks_is_refused(tmp_path: Path) -> None:
    split(tmp_path / "out")
    path = tmp_path / "out/report.json"
    report = json.loads(path.read_text())
    report["pipeline"][0]["facts"]["pushed_by_server"] = [1]
    path.write_text(json.dumps(report))
    with pytest.raises(InputError, match="written for another split"):
        inspect_folder(tmp_path / "out")
    del report["pipeline"][0]["facts"]["keys"]
    path.write_text(json.dumps(report))
    with pytest.raises(InputError, match=r"pipeline\[0\].facts"):
        inspect_folder(tmp_path / "out")


def test_the_command_shows_it_and_prints_each_file_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    split(tmp_path / "out")
    assert main(["inspect", str(tmp_path / "out")]) == 0
    assert "2 trainers and 2 servers: mode sync" in capsys.readouterr().out
    assert main(["inspect", str(tmp_path / "out"), "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["per_server"]) == 2
    assert main(["inspect", str(tmp_path / "out"), "--text"]) == 0
    heads = [line for line in capsys.readouterr().out.splitlines() if line.startswith("; rank")]
    assert heads == ["; rank 0", "; rank 2", "; rank 3"]
    assert len(read_manifest(tmp_path / "out")[0].ranks) == 4


@pytest.mark.parametrize("given", [{}, {"servers": 3, "wire": "float16"}, {"mode": Mode.GEO}, {"accumulate": 2}])
def test_sizes_are_those_of_the_files(given, tmp_path: Path) -> None:
    found = split(tmp_path / "out", **given)
    before, trainer, server = found.facts.sizes
    assert (before.role, before.nodes) == ("source", found.source.counts["nodes"])
    assert trainer.role == "trainer" and trainer.traffic == found.pushed
    files = [onnx.load(tmp_path / "out" / name, load_external_data=False) for name in found.trainer_files]
    assert trainer.nodes == sum(len(model.graph.node) for model in files)
    fullest = max(found.per_server, key=lambda each: each.parameters + each.optimizer_states)
    assert server.role == f"server {fullest.server}" and server.parameters == fullest.parameters
    model = onnx.load(tmp_path / f"out/server_{fullest.server:04d}.onnx", load_external_data=False)
    assert server.nodes == len(model.graph.node)
    assert server.initializers == sum(_bytes(each) for each in model.graph.initializer)
    assert before.parameters == 11048 and server.initializers >= server.parameters + server.optimizer_states


def _bytes(tensor: onnx.TensorProto) -> int:
    return math.prod(tensor.dims) * onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize


def test_a_folder_without_sizes_is_shown(tmp_path: Path, capsys) -> None:
    """Those of older versions have none."""
    split(tmp_path / "out")
    assert main(["inspect", str(tmp_path / "out")]) == 0
    assert "Before and after" in capsys.readouterr().out
    path = tmp_path / "out/report.json"
    report = json.loads(path.read_text())
    del report["pipeline"][0]["facts"]["sizes"]
    path.write_text(json.dumps(report))
    assert main(["inspect", str(tmp_path / "out")]) == 0
    assert "Before and after" not in capsys.readouterr().out
