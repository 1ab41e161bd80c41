"""A rank's file that was edited: a call that no group can make is refused by its name, before any rank runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from gopt.cli.main import main
from helpers import FIXTURES, calls, edit_rank
from onnx import ModelProto, NodeProto


def attribute(node: NodeProto, name: str) -> int:
    return next(place for place, each in enumerate(node.attribute) if each.name == name)


def renamed(node: NodeProto) -> None:
    node.op_type = "Split"


def without(name: str) -> Callable[[NodeProto], None]:
    return lambda node: node.attribute.__delitem__(attribute(node, name))


def cut(node: NodeProto) -> None:
    del node.attribute[attribute(node, "cuts")].ints[-1]


def elsewhere(node: NodeProto) -> None:
    node.attribute[attribute(node, "group")].s = b"tp"


EDITS = {
    "another operator": (renamed, "gopt.comm has no operator 'Split'"),
    "no group": (without("group"), "ReduceScatter needs the attribute 'group'"),
    "no cuts": (without("cuts"), "ReduceScatter needs"),
    "a cut less": (cut, "cuts"),
    "another axis": (elsewhere, "names no axis of the mesh shard=2"),
}


@pytest.fixture(scope="module")
def sharded(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("calls") / "out"
    assert main(["shard", str(FIXTURES / "mlp_sgd.onnx"), "--ranks", "2", "-o", str(folder)]) == 0
    return folder


@pytest.mark.parametrize("name", EDITS)
def test_a_call_that_no_group_can_make_is_refused(sharded, capsys, name):
    edit, words = EDITS[name]
    path = sharded / "rank_0001.onnx"
    whole = path.read_bytes()

    def plant(model: ModelProto) -> None:
        edit(calls(model, "ReduceScatter")[0])

    edit_rank(sharded, 1, plant)
    capsys.readouterr()
    code = main(["verify", str(sharded), "--steps", "1"])
    path.write_bytes(whole)
    said = capsys.readouterr().err
    assert code == 3, said
    # Once onnx knows the collectives, its checker says so first.
    assert (words in said and "rank_0001.onnx: 'gopt." in said) or "rank_0001.onnx: is not a valid ONNX model" in said
