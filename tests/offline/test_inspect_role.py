"""Single files of a split: they say of themselves whose they are."""

from __future__ import annotations

import json
from pathlib import Path

import onnx
import pytest
from gopt.cli.main import main
from helpers import source

import gopt
from gopt.errors import InputError
from gopt.offline.inspect_role import inspect_role
from gopt.parameter_server.options import SplitOptions


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home: Path = tmp_path_factory.mktemp("split") / "out"
    options = SplitOptions(trainers=2, servers=2, minimum=16)
    gopt.split(source("mlp_mom_clip_sched"), options).write(home)
    return home


def test_a_trainer_pulls_and_pushes(folder: Path) -> None:
    found = inspect_role(folder / "trainer.onnx")
    assert found is not None and (found.role, found.number) == ("trainer", None)
    assert [each.op for each in found.messages] == ["Pull", "Pull", "Push", "Push"]
    pulled = [each.nbytes for each in found.messages if each.op == "Pull"]
    assert sum(pulled) == sum(each.nbytes for each in found.messages if each.op == "Push") == 11048
    assert found.batch == ("x", "y") and not found.states and not found.collectives


def test_a_server_merges_and_completes_a_norm(folder: Path) -> None:
    found = inspect_role(folder / "server_0001.onnx")
    assert found is not None and (found.role, found.number) == ("server", 1)
    assert {each.op for each in found.messages} == {"Aggregate"} and found.collectives == {"AllReduce": 1}
    assert all(each.server == 1 for each in found.messages) and sum(found.states.values()) == 4 + 2 * 5504


def test_any_other_file_is_none(folder: Path) -> None:
    assert inspect_role(folder / "source.onnx") is None


def test_the_command_knows_such_a_file(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(folder / "trainer.onnx")]) == 0
    assert "the step of all trainers" in capsys.readouterr().out
    assert main(["inspect", str(folder / "server_0000.onnx"), "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert (record["what"], record["number"]) == ("server", 0)
    assert main(["inspect", str(folder / "trainer.onnx"), "--text"]) == 0
    said = capsys.readouterr()
    assert "without roles" not in said.err and "gopt.comm.Push" in said.out


@pytest.mark.parametrize(
    ("role", "message"), [("king", "'king'"), ("trainer", "bucket")], ids=["of no role", "a message without a bucket"]
)
def test_damaged_files_are_refused(role: str, message: str, folder: Path, tmp_path: Path) -> None:
    model = onnx.load(folder / "trainer.onnx", load_external_data=False)
    next(each for each in model.metadata_props if each.key == "gopt.role").value = role
    if role == "trainer":
        node = next(each for each in model.graph.node if each.op_type == "Push")
        kept = [each for each in node.attribute if each.name != "bucket"]
        del node.attribute[:]
        node.attribute.extend(kept)
    (tmp_path / "broken.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(InputError, match=message):
        inspect_role(tmp_path / "broken.onnx")
