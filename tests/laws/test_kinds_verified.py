"""``verify`` on steps of the table ``KINDS``: where ranks hold what the source makes, it says so."""

from __future__ import annotations

import pytest
from products import part
from whole_gen.forwards import parameter
from whole_gen.judge import SIZES, Verdict, drawn, is_due, judged
from whole_gen.kinds import load_all
from whole_gen.writer import Writer

KINDS = load_all()
FINE = ("right", "noted", "unconfirmed")


def verified(name: str, seed: int) -> tuple[Verdict, Writer]:
    def make(samples: int, scale: int) -> Writer:
        w = Writer(seed, samples, scale)
        KINDS[name](w)
        return w

    samples = SIZES[seed % len(SIZES)]
    w = make(samples, 1)
    return judged(make, drawn(seed, w=w), seed, samples, verify=True), w


@pytest.mark.parametrize("name, seed", part([(name, seed) for seed in range(6) for name in sorted(KINDS)], 12))
def test_a_right_step_is_no_alarm(name, seed):
    found, w = verified(name, seed)
    assert found.kind in FINE or (found.kind == "refused" and is_due(w, found.text)), found


@pytest.mark.parametrize("seed", [2, 7, 21, 79, 83])
def test_the_gradient_of_a_loss_that_is_not_shown(seed):
    """A mean over a count was shown beside the gradient of a plain mean: "not proportional to the change of the loss";
    and once a sum was averaged without a note, since a two of a square was taken for one over the samples."""
    found, _ = verified("shown_apart", seed)
    assert found.kind in ("right", "noted"), found


@pytest.mark.parametrize("seed", [3, 78, 91])
def test_a_constant_that_divides_a_rate_by_the_samples(seed):
    found, _ = verified("divided_sum", seed)
    assert found.kind in ("right", "noted"), found


@pytest.mark.parametrize("seed", [0, 158, 351])
def test_a_queue_in_columns_is_asked_for_as_one_in_rows_is(seed):
    """The rows that it keeps stand turned before they are joined: a gradient of its shape was looked for."""
    found, w = verified("queue_gathered", seed)
    assert found.kind == "refused" and is_due(w, found.text), found


@pytest.mark.parametrize(
    "name, seed", [("learned_weights_shown", 2), ("learned_weights_shown", 73), ("learned_weights", 189)]
)
def test_learned_weights_of_losses(name, seed):
    """Where the weighed losses are shown too, the gradients of the weights are made of them: it was refused, and a hint
    called a parameter a statistic. The gradient of a single number was called its new value."""
    found, _ = verified(name, seed)
    assert found.kind == "right", found


def test_a_root_of_a_size_is_a_function_of_the_samples():
    """Where no sample's elements, but shapes alone are behind it, it was taken for a constant: a mean was added up."""
    found, w = verified("open_samples", 705)
    assert found.kind == "refused" and is_due(w, found.text), found


@pytest.mark.rest
def test_a_gradient_of_a_masked_loss_beside_a_shown_sum_of_all():
    """Samples meet in a normalisation, so that no sums over them tell: the sum that is shown refuted the gradient, and
    the last two batches drawn confirmed each of its numbers, as they do any number."""
    found, _ = verified("batch_norm", 707)
    assert found.kind == "unconfirmed" and "show the loss" in found.text, found


def test_two_samples_and_the_two_of_a_square_leave_no_constant():
    """The mean of squares over two samples has the gradient x'e: verify took a step that is right for another one."""

    def make(samples: int, scale: int) -> Writer:
        w = Writer(2001, samples, scale)
        x, y, a = w.fed("x", [3]), w.fed("y", [2]), parameter(w, "a", 3, 2)
        e = x @ a - y
        w.out("loss", (e * e).sum(1).mean())
        w.becomes(a, a - (x.turn(1, 0) @ (e / (w.samples / 2.0))) * 0.07)
        return w

    assert judged(make, drawn(2, ["dp=2"]), 2, 2, verify=True).kind == "right"
