"""Nothing is called equal that was not seen: no numbers, zero against zero, the same on all ranks, closed gates."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from gopt.cli.main import main
from helpers import Builder, Network, edit_rank, perceptron, sgd
from plants import gradient_calls, own_values, replace

import gopt
from gopt.verification.all_ranks import AllRanks
from gopt.verification.result import Outcome, Verification
from gopt.verification.variants import PLAIN
from gopt.verification.verify import Verifier


def write(folder: Path, build: Callable[[Builder, Network], None], **options: object) -> Path:
    """A perceptron whose update somebody writes, as two ranks at stage 0."""
    b = Builder()
    net = perceptron(b, **options)  # type: ignore[arg-type]
    build(b, net)
    gopt.shard(gopt.load(b.save(folder / "step.onnx")), 2, stage=0).write(folder / "out")
    return folder / "out"


def run(out: Path, **options: object) -> Verification:
    return Verifier(out).run(confirm=False, **options)  # type: ignore[arg-type]


def not_reduced(out: Path) -> None:
    """Let every rank update with its own gradients."""
    for rank in range(2):

        def drop(model, rank=rank):
            found = gradient_calls(model)
            assert found
            for node in found:
                replace(model, node, own_values(node, rank))

        edit_rank(out, rank, drop)


def doubts(result: Verification) -> dict[str, str]:
    return {each.name: each.why for each in result.open()}


# --- no numbers -----------------------------------------------------------------------------------------------------


def rooted(b: Builder, net: Network) -> None:
    """A second state holds the square root of what goes below zero, and the parameter follows it."""
    sgd(b, net, skip=["w0"])
    new = b.op("Sub", "w0", b.op("Mul", net.gradients["w0"], b.const(0.1)))
    b.output("w0_out", b.op("Add", new, b.op("Mul", b.op("Sqrt", b.op("Neg", b.op("Abs", new))), b.const(1.0))), (3, 5))


def test_a_reference_without_numbers_proves_nothing(tmp_path, capsys):
    out = write(tmp_path, rooted)
    result = run(out)
    assert result.outcome is Outcome.UNCONFIRMED
    where = "not finite in the source in step 1 of 'gradients as they are': nothing can be compared with it"
    assert doubts(result) == {"w0": f"{where}; --data FILE gives batches that fit the model"}
    assert main(["verify", str(out), "--no-confirm", "--json"]) == 4
    record = json.loads(capsys.readouterr().out)
    assert (record["equal"], record["outcome"]) == (False, "unconfirmed")
    assert [each["name"] for each in record["unconfirmed"]] == ["w0"]
    assert main(["verify", str(out), "--no-confirm"]) == 4
    assert "w0 is not confirmed: not finite in the source in step 1" in capsys.readouterr().out


def test_no_rank_runs_from_starts_from_which_the_source_leaves_the_numbers_again(tmp_path, monkeypatch):
    steps, real = [], AllRanks.step
    monkeypatch.setattr(AllRanks, "step", lambda self, *given: steps.append(1) or real(self, *given))
    assert run(write(tmp_path, rooted)).outcome is Outcome.UNCONFIRMED
    assert len(steps) == 1


def test_a_loss_without_numbers_is_named_first(tmp_path):
    b = Builder()
    net = perceptron(b)
    net.loss = b.op("Log", b.op("Neg", net.loss))
    sgd(b, net)
    gopt.shard(gopt.load(b.save(tmp_path / "step.onnx")), 2).write(tmp_path / "out")
    assert next(iter(doubts(run(tmp_path / "out")))) == "loss"


def corrected(power: bool = False) -> Callable[[Builder, Network], None]:
    """SGD whose rate is divided by 1 - 0.9 to the count of steps, which begins at zero; ``power``: it is stored."""

    def build(b: Builder, net: Network) -> None:
        if power:
            b.state("count", np.ones((), np.float32))
            b.output("count_out", b.op("Mul", "count", b.const(0.9)), ())
            rest = "count"
        else:
            b.state("count", np.zeros((), np.float32))
            b.output("count_out", b.op("Add", "count", b.const(1.0)), ())
            rest = b.op("Pow", b.const(0.9), "count")
        rate = b.op("Div", b.const(0.1), b.op("Sub", b.const(1.0), rest))
        b.output("loss", net.loss, ())
        for name, shape in net.params.items():
            b.output(f"{name}_out", b.op("Sub", name, b.op("Mul", net.gradients[name], rate)), shape)

    return build


@pytest.mark.parametrize("power", [False, True])
def test_a_start_from_which_the_source_leaves_the_numbers_is_passed_over(tmp_path, power):
    """A counter of zero under a bias correction: the source itself divides by zero."""
    result = run(write(tmp_path, corrected(power)))
    assert result.equal and not doubts(result)
    assert any("passed over" in note and "count moved on" in note for note in result.notes)


def test_an_error_behind_a_start_that_is_passed_over_is_found(tmp_path):
    out = write(tmp_path, corrected())
    not_reduced(out)
    assert run(out).outcome is Outcome.DIFFERENT


def test_batches_on_which_the_source_leaves_the_numbers_are_passed_over(tmp_path):
    b = Builder()
    net = perceptron(b)
    mean = b.op("Add", b.op("ReduceMean", "x", keepdims=0), b.const(0.3))  # below zero for some batches
    net.loss = b.op("Add", net.loss, b.op("Mul", b.op("Sqrt", mean), b.const(0.0)))
    sgd(b, net)
    gopt.shard(gopt.load(b.save(tmp_path / "step.onnx")), 2).write(tmp_path / "out")
    found = [run(tmp_path / "out", seed=seed, steps=1) for seed in range(6)]
    assert all(result.equal for result in found)
    assert 1 <= sum(any("other batches" in note for note in result.notes) for result in found) <= 5


def steep(b: Builder, net: Network) -> None:
    """SGD at a rate that is fed, of gradients so large that the second step has none."""
    b.output("loss", net.loss, ())
    rate = b.op("Mul", b.input("lr", ()), b.const(1e24))
    for name, shape in net.params.items():
        b.output(f"{name}_out", b.op("Sub", name, b.op("Mul", net.gradients[name], rate)), shape)


def test_a_rate_by_which_the_source_leaves_the_numbers_is_made_smaller(tmp_path):
    result = run(write(tmp_path, steep))
    assert result.equal and not doubts(result)
    assert any("passed over" in note and "smaller lr" in note for note in result.notes)


def test_a_rate_that_the_user_gave_stays(tmp_path):
    assert run(write(tmp_path, steep), settings={"lr": 0.01}).outcome is Outcome.UNCONFIRMED


def test_an_error_in_steps_of_a_smaller_rate_is_found(tmp_path):
    out = write(tmp_path, steep)
    not_reduced(out)
    assert run(out).outcome is Outcome.DIFFERENT


def test_ranks_without_numbers_are_different(tmp_path):
    out = write(tmp_path, sgd)

    def tamper(rank: int, feeds: dict[str, np.ndarray]) -> None:
        feeds["x"] = feeds["x"] * np.float32(np.nan)

    assert run(out, variants=[PLAIN], tamper=tamper).outcome is Outcome.DIFFERENT


def test_ranks_with_numbers_beside_a_source_without_are_different(tmp_path):
    out = write(tmp_path, rooted)

    def plant(model):
        for node in model.graph.node:
            if node.op_type == "Sqrt":
                node.op_type = "Abs"

    for rank in range(2):
        edit_rank(out, rank, plant)
    assert run(out).outcome is Outcome.DIFFERENT


def test_a_check_that_misses_infinities_is_noted(tmp_path):
    """IsNaN alone lets an infinite gradient through: the source itself breaks, which says nothing of the ranks."""

    def build(b: Builder, net: Network) -> None:
        b.output("loss", net.loss, ())
        for name, shape in net.params.items():
            g = net.gradients[name]
            bad = b.op("ReduceMax", b.op("Cast", b.op("IsNaN", g), to=1), keepdims=0)
            new = b.op("Sub", name, b.op("Mul", g, b.const(0.1)))
            b.output(f"{name}_out", b.op("Where", b.op("Cast", bad, to=9), name, new), shape)

    result = run(write(tmp_path, build))
    assert result.equal
    assert any("one infinite gradient" in note and "not finite" in note for note in result.notes)


# --- nothing seen ---------------------------------------------------------------------------------------------------


def test_a_gradient_that_is_always_zero_is_not_confirmed(tmp_path):
    """A factor of zero, which nobody changes, stands before a gradient."""

    def build(b: Builder, net: Network) -> None:
        net.gradients["w0"] = b.op("Mul", net.gradients["w0"], b.const(0.0))
        sgd(b, net)

    result = run(write(tmp_path, build))
    assert result.outcome is Outcome.UNCONFIRMED
    assert set(doubts(result)) == {"w0"}


def test_a_parameter_that_never_moves_is_not_confirmed(tmp_path):
    """Its whole step is taken back: the gate depends on nothing that could open it."""

    def build(b: Builder, net: Network) -> None:
        sgd(b, net, skip=["b1"])
        new = b.op("Sub", "b1", b.op("Mul", net.gradients["b1"], b.const(0.1)))
        b.output("b1_out", b.op("Where", b.const(False, "bool"), new, "b1"), (2,))

    result = run(write(tmp_path, build))
    assert result.outcome is Outcome.UNCONFIRMED
    assert doubts(result) == {"b1": "it never changed: zero against zero"}


def test_batches_that_are_equal_show_no_reduction(tmp_path):
    """The user's data is one batch for all: what is left out of a reduction could not be seen."""
    out = write(tmp_path, sgd)
    assert run(out).equal
    generator = np.random.default_rng(0)
    np.savez(tmp_path / "one.npz", x=generator.standard_normal((4, 3)), y=generator.standard_normal((4, 2)))
    result = run(out, data=str(tmp_path / "one.npz"))
    assert result.outcome is Outcome.UNCONFIRMED, result.to_json()
    assert set(doubts(result)) == {"w0", "b0", "w1", "b1"}
    assert "same on every rank" in doubts(result)["w0"]


# --- gates ----------------------------------------------------------------------------------------------------------


def counted(b: Builder, net: Network, opens: Callable[[str], str]) -> None:
    """Parameters move only where ``opens`` says so of a counter that begins at 0."""
    step = b.state("step", np.array(0, np.int64))
    open_ = opens(step)
    b.output("loss", net.loss, ())
    b.output("step_out", b.op("Add", step, b.const(1, "int64")), (), "int64")
    for name, shape in net.params.items():
        new = b.op("Sub", name, b.op("Mul", net.gradients[name], b.const(0.1)))
        b.output(f"{name}_out", b.op("Where", open_, new, name), shape)


GATES = {
    "after a while": lambda b, step: b.op("GreaterOrEqual", step, b.const(1000, "int64")),
    "every tenth": lambda b, step: b.op(
        "Equal", b.op("Mod", b.op("Add", step, b.const(1, "int64")), b.const(10, "int64")), b.const(0, "int64")
    ),
    "between": lambda b, step: b.op(
        "And", b.op("Greater", step, b.const(40, "int64")), b.op("Less", step, b.const(50, "int64"))
    ),
}


@pytest.mark.parametrize("gate", GATES)
def test_a_closed_gate_is_opened(tmp_path, gate):
    """The first steps show nothing: a counter beyond its threshold does."""

    def build(b: Builder, net: Network) -> None:
        counted(b, net, lambda step: GATES[gate](b, step))

    out = write(tmp_path, build)
    assert run(out).equal
    not_reduced(out)
    assert run(out, variants=[PLAIN]).outcome is Outcome.EQUAL, "the gate is closed in the first steps"
    assert run(out).outcome is Outcome.DIFFERENT


def test_a_flag_is_tried_both_ways(tmp_path):
    """A hyper-parameter that says whether to update at all, or to add up."""

    def build(b: Builder, net: Network) -> None:
        hold = b.input("hold", (), "bool")
        b.output("loss", net.loss, ())
        for name, shape in net.params.items():
            new = b.op("Sub", name, b.op("Mul", net.gradients[name], b.const(0.1)))
            b.output(f"{name}_out", b.op("Where", hold, name, new), shape)

    out = write(tmp_path, build)
    assert run(out).equal
    not_reduced(out)
    assert run(out).outcome is Outcome.DIFFERENT


@pytest.mark.parametrize("most", [1e-3, 300.0])
def test_a_clip_far_away_is_reached(tmp_path, most):
    """A local norm shows only where the clip is active: 64 times the gradient may not be enough."""

    def build(b: Builder, net: Network) -> None:
        squares = [b.op("ReduceSum", b.op("Mul", g, g), keepdims=0) for g in net.gradients.values()]
        norm = b.op("Sqrt", b.op("Sum", *squares))
        factor = b.op("Min", b.op("Div", b.const(most), b.op("Add", norm, b.const(1e-6))), b.const(1.0))
        net.gradients = {name: b.op("Mul", g, factor) for name, g in net.gradients.items()}
        sgd(b, net)

    result = run(write(tmp_path, build), steps=1)
    assert result.equal
    wide = {name for name in result.worst if "4096" in name}
    assert wide == ({"gradients × 4096", "gradients × 1/4096"} if most < 1 else {"gradients × 4096"})
