"""Conditions on the number of samples that only raise. By hand, ``pytest -m torch``, but for those on frames."""

from __future__ import annotations

import sys

import pytest

pytestmark = pytest.mark.torch
torch = pytest.importorskip("torch")

import raising_forms as forms  # noqa: E402
import test_size_branches as branches  # noqa: E402

from gopt.errors import UnsupportedError  # noqa: E402
from gopt.frontends.pytorch.export import export  # noqa: E402
from gopt.frontends.pytorch.options import Dynamic, ExportOptions  # noqa: E402
from gopt.frontends.pytorch.raising_guards import may_catch, only_raises  # noqa: E402

ASSUMED = (forms.refused, forms.asserted, forms.divided, forms.torch_checked, forms.one_line)


@pytest.mark.parametrize("form", ASSUMED, ids=lambda each: each.__name__)
def test_code_that_only_raises_is_an_assumption(form):
    _, uses = branches.uses_of(branches.step_of(form))
    assert not uses.branches and len(uses.assumed) == 1 and "raising_forms.py" in next(iter(uses.assumed))


@pytest.mark.parametrize("form", [forms.caught, forms.kept, forms.both, forms.beside], ids=lambda each: each.__name__)
def test_an_error_that_is_caught_or_a_value_that_is_kept_is_a_branch(form):
    with pytest.raises(UnsupportedError, match="takes a branch"):
        branches.uses_of(branches.step_of(form))


def test_an_export_names_the_line_that_raises_and_holds_at_other_sizes(tmp_path):
    found = export(
        branches.step_of(forms.refused), tmp_path / "step.onnx", options=ExportOptions(dynamic=Dynamic.BATCH)
    )
    assert any("holds for the sizes at which no error is raised in raising_forms.py" in x for x in found.notes)


def test_distances_are_one_formula_at_every_size(tmp_path):
    """torch takes products of matrices from 26 rows on, and the check compares 67."""
    step = branches.step_of(lambda h, x: h + torch.cdist(h, h).sum(1, keepdim=True))
    found = export(step, tmp_path / "step.onnx", options=ExportOptions(dynamic=Dynamic.BATCH))
    assert any(note.endswith("no code branches on the size") for note in found.notes)


def frame(inside):
    if inside and sys._getframe():
        raise AssertionError
    try:
        return sys._getframe()
    except ValueError:
        return None


def test_frames_outside_of_conditions_raise_nothing():
    here = sys._getframe()
    assert not only_raises(here) or here.f_lineno, "this line is a condition itself"
    assert may_catch(frame(False)) and not may_catch(here)
