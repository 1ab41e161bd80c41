"""Steps of others that took many rounds of hints, or made folders that gopt could not read (fixtures/cases)."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers import FIXTURES

import gopt
from gopt.errors import InputError


def test_moments_in_eight_bits_with_scales_of_blocks_need_no_hint(tmp_path: Path) -> None:
    path = FIXTURES / "cases" / "roles" / "c09_int8.onnx"
    source = gopt.load(path)
    assert {state.tensor for state in source.training.states} == {
        f"{name}{kind}" for name in ("w0", "b0", "w1") for kind in ("", ".m8", ".absmax")
    }
    gopt.shard(source, mesh="shard=2").write(tmp_path / "ranks")
    assert gopt.verify(tmp_path / "ranks", steps=1).equal


def test_a_value_that_no_manifest_can_say_is_refused_on_load() -> None:
    with pytest.raises(InputError, match="value 'big' overflows: dimensions"):
        gopt.load(FIXTURES / "cases" / "report" / "i28730_step_overflow.onnx")
