"""The chain from a value back to the choice that placed it."""

from __future__ import annotations

import pytest
from gopt.cli.main import main
from helpers import FIXTURES, source

import gopt
from gopt.errors import OptionError
from gopt.records.mesh import Mesh


def explanation(name: str = "gpt_adamw"):
    (found,) = gopt.shard(source(name), Mesh.parse("tp=2")).program.explanations
    return found


def test_a_chain_ends_at_a_parameter():
    lines = explanation().lines("mul_17")
    assert lines[0] == "mul_17, float32[4,8,64]: sharded along dimension 2 in [32, 32] along tp"
    assert lines[1].startswith("by Mul node_mul_17, from view_41, ")
    assert lines[-1].endswith(
        "blocks.1.down.weight, float32[16,64]: sharded along dimension 1 in [32, 32] along tp (row)"
    )


def test_what_readers_get_in_its_place():
    lines = explanation().lines("view_44")
    assert lines[0] == "view_44, float32[4,8,16]: a partial sum along tp"
    assert lines[1] == "  readers get gopt.tensor-parallel.view_44.whole: replicated along tp"


def test_a_whole_value_has_no_chain():
    assert explanation().lines("add_1") == ["add_1, float32[4,8,16]: replicated along tp"]


def test_a_value_that_is_not_there():
    with pytest.raises(OptionError, match="no value 'mul_'"):
        explanation().lines("mul_")


def test_the_command_writes_nothing(tmp_path, capsys):
    model, out = str(FIXTURES / "gpt_adamw.onnx"), tmp_path / "out"
    assert main(["shard", model, "--mesh", "tp=2", "--explain", "mm_5", "-o", str(out)]) == 0
    assert capsys.readouterr().out.startswith("mm_5, float32[32,16]: a partial sum along tp\nby MatMul")
    assert not out.exists()
    assert main(["shard", model, "--mesh", "shard=2", "--explain", "mm_5", "-o", str(out)]) == 0
    assert "every value is whole" in capsys.readouterr().out
