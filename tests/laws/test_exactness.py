"""No note: the ranks' step is the step of one large batch. A note: it is not, and the option it names makes it so."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
from derive_gen.make import make
from helpers import FIXTURES
from products import spread
from whole_gen.exactness import of_kind
from whole_gen.kinds import load_all

import gopt
from gopt.analysis.coupling import find_couplings
from gopt.analysis.training import TrainingGraph
from gopt.artifact.open_couplings import open_couplings
from gopt.errors import GoptError, UnsupportedError

OF = ("kinds_reduction", "kinds_critics", "kinds_noise", "kinds_distilled", "kinds_published", "kinds_bent")
KINDS = [name for name, step in load_all().items() if step.__module__.endswith(OF)]
CASES = FIXTURES / "cases" / "losses"
SUMS = "are sums over the samples, and ranks average them"


@pytest.mark.parametrize(("name", "seed"), spread(KINDS, [100, 200]))
def test_what_is_told_of_a_step_is_so(name: str, seed: int) -> None:
    found = of_kind(name, seed + KINDS.index(name))
    assert found.kind in ("right", "refused"), found


def test_a_derivative_that_a_mask_chooses_begins_as_one_that_is_multiplied() -> None:
    """The weights of a linear critic, by a constant that divides by the samples, stand in a Where."""
    assert of_kind("linear_critic", 3030).kind == "right"


def test_a_size_of_the_batch_that_is_a_number_counts_samples() -> None:
    """What is shown is a sum; the backward divides by a Size, and was called a sum, too."""
    assert of_kind("shown_apart", 95004).kind == "right"
    assert of_kind("folded_by_hand", 96347).kind == "right"  # such a number divides the loss alone


def test_a_sum_that_is_taken_axis_by_axis_counts_all_of_them() -> None:
    """Behind it stands one constant that divides by the samples and their places."""
    assert of_kind("folded_start", 96148).kind == "right"
    assert of_kind("folded_start", 96733).kind == "right"
    assert of_kind("folded_start", 96544).kind == "right"  # whose samples and places stand in one dimension


def test_a_gradient_times_weights_and_a_constant_of_the_model_stays_a_mean() -> None:
    """A LoRA whose factors are scaled by two: no constant stands where samples are."""
    assert not find_couplings(gopt.load(CASES.parent / "split" / "lora_scaled.onnx").training)


@pytest.mark.parametrize("seed", [98103, 98109, 98139, 98174, 99039, 99069, 99114])
def test_a_two_of_a_square_is_told_from_a_batch_of_two(seed: int) -> None:
    """What is shown is a mean, and the backward that of a sum, or one term of two is: each was called exact once."""
    kinds = [name for name, step in load_all().items() if step.__module__.endswith("kinds_reduction")]
    assert of_kind(kinds[seed % len(kinds)], seed).kind == "right"


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3000, 3120))
def test_what_is_told_of_fresh_steps_is_so(seed: int) -> None:
    found = of_kind(KINDS[seed % len(KINDS)], seed)
    assert found.kind in ("right", "refused"), found


@pytest.mark.parametrize(
    ("case", "told", "exact"),
    [
        ("a1_sum_backward", f"the gradients {SUMS}", "--loss-reduction sum is exact"),
        ("a3_sum_shown", "", ""),
        ("two_red_joint", f"('w0', 'w1') {SUMS}", "--loss-reduction auto is exact"),
        ("c06_sam", "is moved by a gradient of a rank's own samples", "--statistics sync"),
        ("c18_aux", "are no sums over samples of one kind: 't24'", "--statistics sync may make it exact"),
    ],
)
def test_a_case_of_others_is_told_and_settled(case: str, told: str, exact: str) -> None:
    """The note of a case; its option leaves none, and verify calls inexact what the note calls so."""
    source = gopt.load(CASES / f"{case}.onnx")
    first = gopt.shard(source, 2)
    facts = open_couplings(first.program)
    assert [(told in each.what, exact in each.exact) for each in facts] == [(True, True)] * bool(told)
    notes = gopt.verify(first, steps=1).notes
    assert any("0.5 off" in note and SUMS in note for note in notes) == (SUMS in told)
    if exact:
        option = {"statistics": "sync"} if "sync" in exact else {"loss_reduction": exact.split()[1]}
        settled = gopt.shard(source, 2, **option)
        assert open_couplings(settled.program) == ()
        result = gopt.verify(settled, steps=1)
        assert result.equal and not any("large batch" in note for note in result.notes)


def test_sums_are_not_averaged_with_statistics_of_all_ranks() -> None:
    source = gopt.load(CASES / "a1_sum_backward.onnx")
    with pytest.raises(UnsupportedError, match=SUMS) as refused:
        gopt.shard(source, 2, statistics="sync")
    assert refused.value.hints[0] == "say --loss-reduction sum"
    assert open_couplings(gopt.shard(source, 2, statistics="sync", loss_reduction="sum").program) == ()


def test_auto_is_written_out_and_refused_where_nothing_is_exact() -> None:
    step = gopt.shard(gopt.load(CASES / "two_red_joint.onnx"), 2, loss_reduction="auto", stage=2)
    assert str(step.program.loss_reduction) == "sum:w0,w1"
    with pytest.raises(UnsupportedError, match="'router'"):
        gopt.shard(gopt.load(CASES / "c18_aux.onnx"), 2, loss_reduction="auto")


def told_of_derived(seed: int, folder: Path) -> tuple[set[str], set[str]]:
    """What is told of a derived step by its gradients, and by its loss alone: its backward is of that loss."""
    forward = make(seed)
    onnx.save(forward.model, folder / "forward.onnx")
    options = gopt.DeriveOptions(loss=forward.loss, optimizer="sgd", dims=forward.dims, **forward.knobs)
    try:
        gopt.derive(folder / "forward.onnx", folder / "step.onnx", options)
    except GoptError:
        return set(), set()
    known = gopt.load(folder / "step.onnx").training
    forward_alone = TrainingGraph(known.graph, known.losses, known.states, {}, known.batch, [], [], [])
    by_gradients, by_loss = find_couplings(known), find_couplings(forward_alone)
    return {each.kind.value for each in by_gradients}, {each.kind.value for each in by_loss}


@pytest.mark.parametrize(
    "seed", [128, 211, *(pytest.param(n, marks=pytest.mark.slow) for n in (113, 136, *range(600, 700)))]
)
def test_nothing_more_is_told_of_a_derived_step_than_of_its_loss(seed: int, tmp_path: Path) -> None:
    """128: a scaled and shifted value; 211: a MaxPool, whose backward scatters to places of samples."""
    by_gradients, by_loss = told_of_derived(seed, tmp_path)
    assert by_gradients <= by_loss
