"""Reduction with a failure that a function decides: no command is run, so it is quick."""

from __future__ import annotations

import onnx
import pytest
from helpers import Builder, perceptron, sgd

from gopt.errors import OptionError
from gopt.offline.reduce.reduction import Reduction, parameter_groups, read_model, reduce_model
from gopt.offline.reduce.search import SearchBudget
from gopt.offline.reproducer.failure import Failure

FAILURE = Failure(70, "KeyError", "'a'")


def step(layers: int = 6) -> onnx.ModelProto:
    b = Builder()
    sgd(b, perceptron(b, (5,) * layers))
    b.output("odd", b.op("Sin", "w2"), (5, 5))
    return b.model()


def ops(model: onnx.ModelProto) -> list[str]:
    return [node.op_type for node in model.graph.node]


def reduced(model: onnx.ModelProto, wanted, **bounds) -> tuple[Reduction, list[onnx.ModelProto]]:
    """Reduce while ``wanted`` holds; every graph that is tried is kept, too."""
    tried: list[onnx.ModelProto] = []

    def fails(data: bytes) -> Failure | None:
        tried.append(onnx.load_from_string(data))
        return FAILURE if wanted(tried[-1]) else None

    return reduce_model(model, fails, bounds=SearchBudget(**bounds), tell=lambda _: None), tried


@pytest.mark.parametrize("op_type", ["Sin", "Tanh", "ReduceMean"])
def test_one_operator_is_left_of_many(op_type):
    model = step()
    found, tried = reduced(model, lambda each: op_type in ops(each))
    assert found.nodes_before == len(model.graph.node) > 50
    assert found.nodes == 1 and ops(found.model) == [op_type] and found.stopped == ""
    assert found.tries == len(tried) - 1 <= 20, "outputs and halves first"
    for each in tried:
        onnx.checker.check_model(each, full_check=True)


def test_two_operators_far_apart_are_left():
    found, _ = reduced(step(), lambda each: "Tanh" in ops(each) and "Transpose" in ops(each))
    assert found.nodes <= 4


def test_what_must_stay_stays_and_sizes_become_small():
    found, _ = reduced(step(), lambda each: {"loss", "w1_out"} <= {info.name for info in each.graph.output})
    assert {info.name for info in found.model.graph.output} == {"loss", "w1_out"}
    assert max(dim.dim_value for info in found.model.graph.input for dim in info.type.tensor_type.shape.dim) == 2


def test_another_failure_is_not_the_same():
    def fails(data: bytes) -> Failure | None:
        names = ops(onnx.load_from_string(data))
        return FAILURE if "Sin" in names else Failure(4, "UnsupportedError") if "Tanh" in names else None

    assert ops(reduce_model(step(), fails, tell=lambda _: None).model) == ["Sin"]


def test_tries_and_time_are_bounded():
    found, tried = reduced(step(), lambda each: "Tanh" in ops(each) and "Sin" in ops(each), tries=3)
    assert (found.tries, len(tried), found.stopped) == (3, 4, "3 tries")
    found, _ = reduced(step(), lambda each: "Tanh" in ops(each), seconds=-1)
    assert (found.tries, found.stopped) == (0, "-1 seconds") and found.nodes == found.nodes_before


def test_progress_has_counts():
    said: list[str] = []
    reduce_model(step(), lambda data: FAILURE, tell=said.append)
    assert said[1].startswith("outputs: ") and "1 of 2000 tries, 0 kept" in said[1]


def test_a_command_that_does_not_fail_is_refused():
    with pytest.raises(OptionError, match="does not fail"):
        reduce_model(step(), lambda data: None, tell=lambda _: None)


def test_parameters_are_grouped_with_their_states(tmp_path):
    from helpers import FIXTURES

    groups = parameter_groups(FIXTURES / "mlp_adamw.onnx")
    assert max(map(len, groups)) == 3
    (tmp_path / "x.onnx").write_bytes(b"nothing")
    assert parameter_groups(tmp_path / "x.onnx") == ()


def test_external_values_move_into_the_model():
    from helpers import FIXTURES

    model = read_model(FIXTURES / "mlp_adamw_external.onnx")
    assert all(tensor.raw_data or not tensor.external_data for tensor in model.graph.initializer)
    onnx.checker.check_model(model, full_check=True)


def test_a_body_keeps_what_it_reads():
    b = Builder()
    x, flag = b.input("x", (3,)), b.input("flag", (), "bool")
    outer = b.op("Exp", x)
    inner = onnx.helper.make_graph(
        [onnx.helper.make_node("Neg", [outer], ["inner"])], "body", [],
        [onnx.helper.make_tensor_value_info("inner", 1, (3,))],
    )  # fmt: skip
    b.output("out", b.op("If", flag, then_branch=inner, else_branch=inner), (3,))
    found, _ = reduced(b.model(), lambda each: "If" in ops(each))
    assert ops(found.model) == ["If"]
    assert {info.name for info in found.model.graph.input} == {"flag", outer}
