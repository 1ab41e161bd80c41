"""Two output folders as a reviewer reads them: the cause first, no graph of a rank read."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
from helpers import FIXTURES, source

import gopt
import gopt.offline.diff.folders as folders
from gopt.offline.diff import diff, review
from gopt.offline.diff.sections import Section
from gopt.records.mesh import Mesh

pytestmark = pytest.mark.usefixtures("unchecked")


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sharded(tmp_path_factory.mktemp("review") / "a")


def sharded(folder: Path, ranks: int | Mesh = 2, **options: object) -> Path:
    gopt.shard(source("mlp_adamw"), ranks, **options).write(folder)  # type: ignore[arg-type]
    return folder


def sections(a: Path, b: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Section]:
    monkeypatch.setattr(folders, "load", lambda *_, **__: pytest.fail("a graph was read"))
    found = review(a, b)
    assert found.exit_code == 1 and found.review[0].title == "Cause"
    return {each.title: each for each in found.review}


def test_equal_folders(first: Path, tmp_path: Path) -> None:
    found = review(first, sharded(tmp_path / "b"))
    assert found.equal and not found.sections


def test_an_option(first: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = sections(first, sharded(tmp_path / "b", bucket_mb=0.005), monkeypatch)
    assert set(found["Cause"].rows) == {
        ("shard.bucket_mb", "None", "0.005"), ("fuse-collectives.cap_mb", "None", "0.005"),
    }  # fmt: skip
    assert ("0-1", "calls of ReduceScatter over shard", "1", "2", "+1") in found["Ranks"].rows
    added = [row for row in found["Operators"].rows if row[:3] == ("added", "shard", "communication")]
    assert [row[3:6] for row in added] == [("2", "4", "+1 gopt.comm.AllGather, +1 gopt.comm.ReduceScatter")]
    assert {row[1] for row in found["States"].rows} == {"held in other pieces, or on other ranks"}


def test_another_mesh(first: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = sections(first, sharded(tmp_path / "b", 3), monkeypatch)
    assert found["Cause"].rows == (("mesh", "shard=2", "shard=3"),)
    assert ("2", "the rank", "absent", "new", "") in found["Ranks"].rows
    assert ("0", "parameters", *("10.8 KiB",) * 2, "+0.0%") not in found["Ranks"].rows


def test_another_source(first: Path, tmp_path: Path) -> None:
    model = onnx.load(FIXTURES / "mlp_adamw.onnx")
    held = next(e for e in model.graph.initializer if onnx.numpy_helper.to_array(e).tolist() == pytest.approx(0.01))
    held.CopyFrom(onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(held) * 2, held.name))
    onnx.save(model, tmp_path / "mlp_adamw.onnx")
    gopt.shard(gopt.load(tmp_path / "mlp_adamw.onnx"), 2).write(tmp_path / "b")
    found = {each.title: each for each in review(first, tmp_path / "b").review}
    assert [row[0] for row in found["Cause"].rows] == ["source"]
    assert [row[-1].endswith("0.01 -> float32[] 0.02") for row in found["Source: Values"].rows] == [True]


def test_a_folder_that_was_changed_is_compared_node_by_node(first: Path, tmp_path: Path) -> None:
    path = sharded(tmp_path / "b") / "rank_0001.onnx"
    model = onnx.load(path, load_external_data=False)
    next(node for node in model.graph.node if node.op_type == "Sqrt").op_type = "Abs"
    path.write_bytes(model.SerializeToString())
    found = review(first, tmp_path / "b")
    assert [line.where for line in found.lines if line.kind == "op"] == ["rank 1"] and not found.review


def test_all_that_differs_has_the_review_as_well(first: Path, tmp_path: Path) -> None:
    other = sharded(tmp_path / "b", stage=3)
    record = diff(first, other).to_json()
    assert record["sections"][0]["title"] == "Cause" and {"removed", "added"} <= {
        each["kind"] for each in record["lines"]
    }
    assert not diff(first, other).without({line.kind for line in diff(first, other).lines}).sections
