"""Files that differ in values alone are checked once; whatever else differs is checked whole."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
from helpers import FIXTURES

import gopt
from gopt.errors import GoptError
from gopt.ir import twin_files
from gopt.ir.load import load
from gopt.ir.twin_files import TwinFiles
from gopt.records.mesh import Mesh


@pytest.fixture
def ranks(tmp_path: Path) -> list[Path]:
    gopt.shard(gopt.load(FIXTURES / "mlp_sgd.onnx"), Mesh.parse("dp=3,shard=7")).write(tmp_path / "out")
    return sorted((tmp_path / "out").glob("rank_*.onnx"))


def test_a_twin_is_what_a_whole_load_gives(ranks: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    checked = []
    whole = twin_files.checked_graph
    monkeypatch.setattr(twin_files, "checked_graph", lambda *a, **more: checked.append(a) or whole(*a, **more))
    files = TwinFiles("gopt.rank")
    for path in ranks:
        found, wanted = files.load(path), load(path, own=True)
        assert [str(node) for node in found.nodes] == [str(node) for node in wanted.nodes]
        assert (found.inputs, found.outputs, found.types) == (wanted.inputs, wanted.outputs, wanted.types)
        assert (found.metadata, found.header) == (wanted.metadata, wanted.header)
        assert found.initializers.keys() == wanted.initializers.keys()
        for name, tensor in wanted.initializers.items():
            own = found.initializers[name]
            assert (own.type, own.path, own.offset) == (tensor.type, tensor.path, tensor.offset)
            assert not own.path or own.numpy().tobytes() == tensor.numpy().tobytes()
    assert len(ranks) == 21 and len(checked) <= 4


@pytest.mark.parametrize("edit", ["node", "dims", "raw", "offset", "name"])
def test_what_is_no_twin_is_refused_as_ever(edit: str, ranks: list[Path]) -> None:
    files = TwinFiles("gopt.rank")
    for path in ranks[:-1]:
        files.load(path)
    model = onnx.load(ranks[-1], load_external_data=False)
    external = next(each for each in model.graph.initializer if each.external_data)
    constant = next(each for each in model.graph.initializer if each.raw_data)
    if edit == "node":
        model.graph.node[0].input[0] = "nowhere"
    elif edit == "dims":
        external.dims[:] = [3, 9]
    elif edit == "raw":
        constant.raw_data = constant.raw_data[:-1]
    elif edit == "name":
        external.name = constant.name
    else:
        next(each for each in external.external_data if each.key == "offset").value = str(1 << 40)
    ranks[-1].write_bytes(model.SerializeToString())
    with pytest.raises(GoptError) as whole:
        load(ranks[-1], own=True)
    with pytest.raises(GoptError) as found:
        files.load(ranks[-1])
    assert str(found.value) == str(whole.value)


def test_as_many_graphs_are_held_as_files_differ_at_most(ranks: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(twin_files, "_KEPT", 1)
    files = TwinFiles("nothing")  # so that no file is another's twin
    for path in ranks:
        files.load(path)
    assert len(files._seen) == 1
