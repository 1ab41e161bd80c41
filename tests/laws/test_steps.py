"""Drawn training steps against an oracle that knows their true gradients: right and proven, or refused for a reason."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import onnx
import pytest
from helpers import calls, edit_ranks
from products import part
from steps_gen.__main__ import alike, setting, tried
from steps_gen.graphs import reordered
from steps_gen.judge import GOOD, Setting, differences, judge
from steps_gen.make import make
from steps_gen.plan import TRAPS, Plan, draw

import gopt
from gopt.analysis.role_map import RoleMap
from gopt.records.mesh import Mesh
from gopt.verification.verify import Verifier

SEEDS = range(24)


@pytest.mark.parametrize("seed", part(SEEDS, 6))
def test_a_drawn_step_is_right_and_proven_or_refused(seed):
    verdict = tried(draw(seed), setting(seed))
    assert verdict.outcome in GOOD, f"{draw(seed).told()}: {verdict}"


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1000, 2000))
def test_a_thousand_drawn_steps(seed):
    test_a_drawn_step_is_right_and_proven_or_refused(seed)


@pytest.mark.parametrize("seed", part(range(3_000, 3_040), 8))
def test_a_sum_over_gradients_keeps_the_signs_of_its_terms(seed):
    plan = replace(draw(seed), clip="global-signs")
    verdict = tried(plan, setting(seed))
    assert verdict.outcome in GOOD, f"{plan.told()}: {verdict}"


@pytest.mark.parametrize("seed", part(range(9_000, 9_024), 6))
def test_a_drawn_step_of_one_size_is_never_wrong(seed):
    """Where shapes tell nothing apart, more is refused, or not confirmed."""
    verdict = tried(alike(draw(seed)), setting(seed))
    assert verdict.outcome in (*GOOD, "unjust", "unconfirmed"), f"{alike(draw(seed)).told()}: {verdict}"


# --- once wrong, once doubted, once refused without need --------------------------------------------------------------

ADAM = ("adam",)
ONCE_WRONG = {
    "a clip by value of a reshaped gradient": Plan(clip="value", clip_layout="reshape"),
    "a clip by norm of a transposed gradient": Plan(clip="norm", clip_layout="transpose-pair"),
    "a global clip of flat gradients": Plan(clip="global-flat"),
    "a gate and a last zero": Plan(rules=("nesterov",), gate="flag", tail=("add-zero",)),
    "an accumulation gate and an identity": Plan(rules=ADAM, gate="accumulate", tail=("identity",)),
    "a finite gate and a clip": Plan(rules=ADAM, gate="finite", tail=("clip",), tail_on="all"),
    "a gate every other step, negated twice": Plan(rules=ADAM, gate="every", tail=("neg-neg",), tail_on="all"),
    "a gate as a number": Plan(rules=ADAM, gate="flag-number", gate_form="mix", tail=("mul-one",)),
    "a multiplicative step of halves": Plan(form="exp", precision="half"),
    "a multiplicative step in float64": Plan(form="exp", tail=("wide-pair",)),
    "a relative step": Plan(form="relative", rules=("soft-sign",), decay="decoupled"),
    "a pruning mask that the forward reads": Plan(rules=ADAM, mask="forward"),
    "a rate per row": Plan(rules=ADAM, rates="rows"),
    "halves beside masters, reached through gradients": Plan(
        network="weight-norm", widths=(1, 2, 5), precision="master", rules=("trust", "adagrad", "rms")
    ),
    "a centred gradient under a clip": Plan(rules=("centred",), clip="value"),
}
DOUBTED = {
    "a rate per row": Plan(rates="rows"),
    "a centred gradient": Plan(rules=("centred",)),
    "weight normalisation": Plan(network="weight-norm"),
    "weight normalisation under a clip": Plan(network="weight-norm", rules=("adamax",), clip="global-flat"),
    "a convolution": Plan(network="convolution", activation="Relu"),
    "the scale of a normalisation over the batch": Plan(network="batch-norm", batch=5),
}
REFUSED = {
    "a reshape before an output": Plan(tail=("reshape",)),
    "a flat pair before an output": Plan(tail=("flat-pair",)),
    "a transposed pair before an output": Plan(tail=("transpose-pair",)),
    "an expand before an output": Plan(tail=("expand",), rules=ADAM, tail_on="all"),
    "parameters of rank 0 alone": Plan(network="all-scalar"),
    "a half and its master": Plan(precision="master"),
    "a schedule with a condition": Plan(schedule="if"),
    "a condition that captures": Plan(schedule="if-captures"),
    "a mask as an input": Plan(mask="input"),
    "an update in a function": Plan(function=True, tail=("reshape",)),
    "a function that transposes": Plan(function=True, tail=("transpose-pair", "div-one"), metric=True),
    "a function that goes flat": Plan(function=True, tail=("flat-pair", "expand"), rules=ADAM, clip="global-flat"),
    "a batch of one and a layer of one": Plan(widths=(6, 1, 2), batch=1),
    "flat momentum of joined gradients": Plan(rules=("flat-state",), layout="joined"),
    "a clip over flat gradients that had another shape": Plan(network="convolution", clip="global-flat"),
    "a clip over gradients of one row": Plan(layout="joined", clip="global-flat", rules=ADAM),
    "a state that follows its old value through a sign": Plan(rules=("rprop",)),
    "a maximum that starts high": Plan(
        network="layer-norm", loss="cross-entropy", rules=("amsgrad",), clip="global-flat"
    ),
    "a mean of what a loss scale divides in front of a join": Plan(
        scale="dynamic", rules=("centred",), layout="joined"
    ),
    "many states of two parameters that meet": Plan(network="twins", rules=("amsgrad",)),
    "relative steps of two parameters that meet": Plan(network="twins", rules=("amsgrad",), form="relative"),
    "a normalisation of one row": Plan(network="layer-norm", batch=1),
    "a clip over a flat gradient of one element": Plan(network="elementwise", widths=(2, 1, 1), clip="global-flat"),
    "a weight of one element in front of twins": Plan(network="twins", widths=(1, 1, 2), batch=2),
    "a flat moment of a weight with several readers": Plan(network="tied", rules=("flat-state",)),
}


OPEN = {
    "masters of scalars": Plan(network="all-scalar", precision="master"),
    "a mask of one element": Plan(network="batch-norm", widths=(1, 1, 3), rules=("rprop",), mask="input"),
}
"""Doubted by verify, or refused without need."""


def proven(plan: Plan) -> None:
    verdict = judge(make(plan), Setting("shard=3", 2))
    assert verdict.outcome == "proven", verdict


@pytest.mark.parametrize("what", part([*ONCE_WRONG, *DOUBTED, *REFUSED], 8))
def test_mended_steps(what):
    proven({**REFUSED, **DOUBTED, **ONCE_WRONG}[what])


@pytest.mark.xfail(strict=True, reason="known defect: once mended, move the plan to ONCE_WRONG or REFUSED")
@pytest.mark.parametrize("what", OPEN)
def test_open_steps(what):
    proven(OPEN[what])


def test_a_last_sign_that_is_as_large_as_the_batch_is_refused():
    """Once the batch was paired with it, and became a parameter."""
    assert judge(make(replace(draw(9046), scrambled=False))).outcome == "refused"


@pytest.mark.parametrize("seed", part([42075372, 56854176, 730000804, 750000436], 2))
def test_once_called_unequal(seed):
    """The last place of a half turned: of a parameter, of a gradient that is a state's maximum, or that a state, scaled
    to a length, already points along."""
    verdict = tried(draw(seed), setting(seed))
    assert verdict.outcome == "proven", verdict


@pytest.mark.parametrize("seed", [20113, 60408, 60415, 60479])
def test_once_written_wrong(seed):
    """A rate of what the loss is cast from; a count behind a join; a mask for Rprop's sign; that sign as a metric."""
    assert judge(make(replace(draw(seed), scrambled=False)), setting(seed)).outcome == "refused"


@pytest.mark.parametrize("how", [Setting(stage=0), Setting(stage=2), Setting("dp=2,shard=2", 3, "rows")])
def test_a_function_that_turns_one_row_gets_its_column(how):
    """Once the gradient was turned before the call, which turned it again: a column broadcast along a row."""
    verdict = judge(make(Plan(widths=(6, 1, 2), scale="state", rules=("turned-state",), function=True)), how)
    assert verdict.outcome == "proven", verdict


def test_a_scalar_step_whose_rate_follows_the_loss_is_refused():
    assert judge(make(Plan(network="all-scalar", trap="loss-rate"))).outcome == "refused"


@pytest.mark.parametrize("trap", TRAPS[1:])
def test_updates_that_read_the_batch_are_refused(trap):
    verdict = judge(make(Plan(rules=ADAM, trap=trap)))
    assert verdict.outcome == "refused" and "'" in verdict.why, verdict


# --- the oracle sees what is wrong ----------------------------------------------------------------------------------


def sharded(plan: Plan, folder: Path, stage: int = 0) -> Path:
    onnx.save(make(plan).model, folder / "step.onnx")
    gopt.shard(gopt.load(folder / "step.onnx"), Mesh.parse("shard=2"), stage=stage).write(folder / "out")
    return folder / "out"


def test_a_sum_for_a_mean_is_seen(tmp_path):
    plan = Plan(rules=("momentum",))
    out = sharded(plan, tmp_path)
    assert list(differences(make(plan), out)) == []

    def double(model: onnx.ModelProto) -> None:
        for node in calls(model, "AllReduce"):
            node.ClearField("attribute")
            node.attribute.append(onnx.helper.make_attribute("group", "shard"))

    edit_ranks(out, double)
    assert list(differences(make(plan), out))


@pytest.mark.parametrize("widths", [(1, 1), (1, 1, 1)])
def test_a_last_sign_of_one_element_is_refused_where_the_batch_has_one_too(widths, tmp_path):
    """Once it passed for a metric; what the hint names settles it."""
    plan = Plan(widths=widths, batch=1, rules=("rprop",))
    verdict = judge(make(plan), Setting(stage=0))
    assert verdict.outcome == "refused" and "'p0.sign'" in verdict.why, verdict
    onnx.save(make(plan).model, tmp_path / "step.onnx")
    signs = {f"p{n}.sign": f"p{n}.sign_new" for n in range(2 * len(widths) - 2)}
    named = gopt.load(tmp_path / "step.onnx", roles=RoleMap(states=signs))
    assert signs.keys() <= {state.tensor for state in named.training.states}
    gopt.shard(named, 2, stage=0).write(tmp_path / "out")
    assert list(differences(make(plan), tmp_path / "out")) == []


def test_verify_sees_three_hundredths_of_an_update_of_halves(tmp_path):
    """What it allows one element's last place hides no rate that is off."""
    out = sharded(draw(42075372), tmp_path)

    def faster(model: onnx.ModelProto) -> None:
        for node in model.graph.node:
            node.input[:] = ["faster" if name == "lr" else name for name in node.input]
        model.graph.initializer.append(onnx.helper.make_tensor("factor", 1, [], [1.03]))
        model.graph.node.insert(0, onnx.helper.make_node("Mul", ["lr", "factor"], ["faster"]))

    assert Verifier(out).run(settings={"lr": 0.05}).equal
    edit_ranks(out, faster)
    assert not Verifier(out).run(settings={"lr": 0.05}).equal


def test_a_gradient_that_stays_local_is_seen(tmp_path):
    plan = Plan(rules=ADAM)
    out = sharded(plan, tmp_path)

    def local(model: onnx.ModelProto) -> None:
        made = calls(model, "AllReduce")
        copies = [onnx.helper.make_node("Identity", [a], [b]) for node in made for a, b in zip(node.input, node.output)]
        kept = [node for node in model.graph.node if node.domain != "gopt.comm"]
        model.graph.ClearField("node")
        model.graph.node.extend([*kept, *copies])
        model.CopyFrom(reordered(model, None))

    edit_ranks(out, local)
    assert list(differences(make(plan), out))
