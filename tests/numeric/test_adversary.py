"""Steps that an adversary once broke gopt with: sharded wrongly, refused, or not confirmed before they were mended.

The files were exported from PyTorch (``h_``: written as ONNX text) by throw-away scripts, metadata stripped.
"""

from pathlib import Path

import onnx
import onnx.parser
import onnx.printer
import pytest
from products import fewer, spread

import gopt
from gopt.analysis.coupling import CouplingKind
from gopt.analysis.role_map import RoleMap
from gopt.artifact.open_couplings import open_couplings
from gopt.errors import UnsupportedError
from gopt.verification.verify import Verifier

HERE = Path(__file__).parent / "adversary"
EQUAL = sorted(path.stem for path in HERE.glob("*.onnx"))


@pytest.mark.parametrize(("name", "stage"), fewer(spread(EQUAL, range(4)), 5))
def test_the_ranks_are_equal(name, stage, tmp_path):
    gopt.shard(gopt.load(HERE / f"{name}.onnx"), 3, stage=stage).write(tmp_path / "out")
    result = Verifier(tmp_path / "out").run(confirm=stage % 2 == 0)
    assert result.equal, result.to_json()
    assert result.compared > 0


def test_a_state_that_would_be_dropped_is_refused(tmp_path):
    """The update of a kept gradient does not read its old value: without names that pair them, nothing does."""
    text = onnx.printer.to_text(onnx.load(HERE / "dynamic_lr_gnorm.onnx"))
    onnx.save(onnx.parser.parse_model(text.replace('.g"', '.kept"')), tmp_path / "step.onnx")
    with pytest.raises(UnsupportedError, match=r"w1\.kept") as caught:
        gopt.load(tmp_path / "step.onnx")
    assert any("--states" in hint for hint in caught.value.hints)


def test_norms_of_flattened_gradients_are_split():
    """``clip_grad_norm_`` exports Reshape + ReduceL2: a full reduction does not mind."""
    report = gopt.shard(gopt.load(HERE / "clip_stack.onnx"), 3).report().to_json()
    shard = next(each for each in report["pipeline"] if each["name"] == "shard")
    assert shard["facts"]["parameters"] == {"split": 4}


def test_an_update_inside_a_function_is_read_as_any_other(tmp_path):
    """It reads the batch itself, which no name can settle for gopt: the same refusal as without the function."""
    model = onnx.parser.parse_model(
        """<ir_version: 9, opset_import: ["" : 18, "own" : 1]>
        step (float[4] x, float[4] w) => (float loss, float[4] w1)
        { d = Mul(x, w)  loss = ReduceSum<keepdims=0>(d)  w1 = own.update(w, x) }
        <domain: "own", opset_import: ["" : 18]>
        update (w, g) => (w1) { w1 = Sub(w, g) }"""
    )
    onnx.save(model, tmp_path / "step.onnx")
    with pytest.raises(UnsupportedError, match="w1") as caught:
        gopt.load(tmp_path / "step.onnx")
    assert "--states" in caught.value.hints[0]


@pytest.mark.parametrize("name", ["h_scalar_size", "h_sizenumel"])
def test_a_sum_divided_by_a_size_is_a_mean(name):
    rules = gopt.shard(HERE / f"{name}.onnx", 2).program.reductions
    assert [each.rule for each in rules.values()] == ["mean"]


def test_a_factor_of_a_product_makes_gradients_means():
    sharded = gopt.shard(HERE / "h_ga_exact.onnx", 2, loss_reduction="auto")
    assert str(sharded.program.loss_reduction) == "mean" and open_couplings(sharded.program) == ()


@pytest.mark.parametrize("path", sorted((HERE / "refused").glob("*.onnx")), ids=lambda path: path.stem)
def test_a_sum_by_weights_that_may_hold_the_number_of_samples_is_refused(path):
    with pytest.raises(UnsupportedError, match="which may divide by their number") as caught:
        gopt.shard(path, 2)
    assert "--statistics s=mean" in caught.value.hints[0]
    assert gopt.verify(gopt.shard(path, 2, statistics="s=mean"), steps=2).outcome == "equal"


COUNTS = HERE / "counts"
SIZED = ["cma", "sumcount2"]
"""Steps that add a constant to a state, which is the number of samples."""


@pytest.mark.parametrize("name", ["countB_sub", "logmean", "powB"])
def test_a_constant_that_may_be_a_number_of_samples_is_refused(name):
    source = gopt.load(COUNTS / f"{name}.onnx")
    for statistics in ("auto", "sync"):
        with pytest.raises(UnsupportedError, match=r"may be a number of samples|made of sums|counts samples") as caught:
            gopt.shard(source, 2, statistics=statistics)
    assert caught.value.hints


@pytest.mark.parametrize("name", SIZED)
def test_a_state_that_counts_samples_by_a_constant_is_asked_for(name):
    with pytest.raises(UnsupportedError, match="is the size of a batch") as caught:
        gopt.load(COUNTS / f"{name}.onnx")
    assert "--statistics cnt=sum" in caught.value.hints[0]


@pytest.mark.parametrize(
    ("name", "statistics", "rules"),
    [
        ("sumcount2", {"cnt": "sum"}, {"acc": "sum", "cnt": "sum"}),
        ("sumcount2", {"cnt": "mean"}, {"acc": "sum"}),
        ("cma", {"cnt": "sum"}, {"s": "sum+mean", "cnt": "sum"}),
        ("sumcount_shape", {}, {"acc": "sum", "cnt": "sum", "s": "sum"}),
        ("sumcount_ones_vc", {}, {"acc": "sum", "cnt": "sum"}),
        ("inttok", {}, {"n": "sum"}),
        ("lossema", {}, {"b": "mean"}),
        ("lossema_sum", {}, {"b": "mean"}),
        ("std2", {}, {"s": "mean"}),
        ("splitmaxdiff", {}, {"s": "mean"}),
    ],
)  # fmt: skip
def test_statistics_beside_numbers_of_samples_follow_all_samples(name, statistics, rules):
    states = {"acc": "acc_out", "s": "s_out", "cnt": "cnt_out"} if name == "sumcount_shape" else {}
    sharded = gopt.shard(gopt.load(COUNTS / f"{name}.onnx", roles=RoleMap(states=states, statistics=statistics)), 2)
    assert {each.tensor: each.rule for each in sharded.program.reductions.values()} == rules
    assert gopt.verify(sharded, steps=2).outcome == "equal"


@pytest.mark.parametrize(
    ("name", "kind"), [("std2", CouplingKind.STATISTICS), ("splitmaxdiff", CouplingKind.PLACE)]
)  # fmt: skip
def test_what_is_told_of_a_statistic_is_told_where_the_forward_does_not_read_it(name, kind):
    assert kind in {each.kind for each in open_couplings(gopt.shard(COUNTS / f"{name}.onnx", 2).program)}


@pytest.mark.parametrize("option", [{}, {"params": {"w": "gw"}}, {"statistics": {"s": "mean"}}])
def test_an_update_that_reads_a_new_statistic_is_told_so(option):
    with pytest.raises(UnsupportedError, match="reads 's_out', the new value of the statistic 's'"):
        gopt.load(COUNTS / "popart.onnx", roles=RoleMap(**option))


def test_a_rule_against_the_data_flow_is_noted():
    sharded = gopt.shard(COUNTS / "std2.onnx", 2, statistics="s=sum")
    told = [each for each in open_couplings(sharded.program) if each.kind is CouplingKind.REDUCTION]
    assert "by mean, and ranks combine it by sum" in told[0].what and "--statistics s=mean" in told[0].exact


@pytest.mark.parametrize("rule", ["mean", "root", "local"])
def test_a_rule_for_all_statistics_against_the_data_flow_is_noted(rule):
    states = {"acc": "acc_out", "s": "s_out", "cnt": "cnt_out"}
    sharded = gopt.shard(gopt.load(COUNTS / "sumcount_shape.onnx", roles=RoleMap(states=states)), 2, statistics=rule)
    told = {each.value for each in open_couplings(sharded.program) if each.kind is CouplingKind.REDUCTION}
    assert set(states.values()) <= told
