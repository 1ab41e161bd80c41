"""Steps of others that took many rounds of hints, or made folders that gopt could not read (fixtures/cases)."""

from __future__ import annotations

import re
from pathlib import Path

import onnx
import pytest
from helpers import FIXTURES
from whole_gen.judge import Setting, judged
from whole_gen.kinds import of_seed
from whole_gen.writer import Writer

import gopt
from gopt.errors import InputError, UnsupportedError


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


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("name", ["folded_start", "adversaries_side_by_side"])
def test_a_named_gradient_is_taken_or_the_refusal_says_what_settles_it(name: str, seed: int) -> None:
    def make(samples: int, scale: int) -> Writer:
        return of_seed(seed, samples, scale, only=name)

    found = judged(make, Setting("dp=2", named=True))
    due = "--batch mask" if name == "folded_start" else "does not come from the backward"
    assert found.kind in ("right", "noted") or (found.kind == "refused" and re.search(due, found.text)), found


def test_a_metric_behind_the_update_is_no_result_of_micro_steps(tmp_path: Path) -> None:
    path = tmp_path / "step.onnx"
    onnx.save(of_seed(0, 4, 1, only="metric_of_new_weights").model(), path)
    with pytest.raises(UnsupportedError, match=r"'later' reads the batch 'x'") as refused:
        gopt.shard(gopt.load(path), 2, accumulate=2)
    assert refused.value.hints == ("leave out --accumulate, or the output 'later' of the model",)
