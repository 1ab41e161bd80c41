"""Which updates are alike."""

import random

import onnx
import pytest
from helpers import FIXTURES, Builder, perceptron

import gopt
from gopt.analysis.isomorphism import assign_classes, signature
from gopt.analysis.update_subgraphs import find_updates
from gopt.ir.graph import Node


def test_a_node_of_the_file_is_alike_by_its_attributes(tmp_path):
    b = Builder()
    x = b.input("x", (2, 3))
    for axis in (0, 1, 1):
        b.output(f"y{len(b.outputs)}", b.op("Softmax", x, axis=axis), (2, 3))
    from gopt.ir.load import load

    first, second, third = load(b.save(tmp_path / "g.onnx")).nodes
    assert signature(first) != signature(second) == signature(third)


def test_the_attributes_of_a_made_node_count_as_well():
    one, two = (Node("Softmax", ["x"], ["y"], attributes={"axis": axis}) for axis in (0, 1))
    assert signature(one) != signature(two)


def classes(rates, folder):
    """Numbers of the updates of a perceptron's parameters, each with its own rate."""
    b = Builder()
    network = perceptron(b)
    b.output("loss", network.loss, ())
    for name, rate in zip(network.params, rates, strict=True):
        step = b.op("Mul", network.gradients[name], b.const(rate))
        b.output(f"{name}_out", b.op("Sub", name, step), network.params[name])
    training = gopt.load(b.save(folder / "step.onnx")).training
    updates = find_updates(training, whole_accumulators=False)
    assign_classes(training, updates)
    return [updates.subgraphs[name].equivalence_class for name in network.params]


def test_updates_with_equal_constants_are_one_class(tmp_path):
    assert len(set(classes([0.1, 0.1, 0.1, 0.1], tmp_path))) == 1


def test_updates_with_another_rate_are_another_class(tmp_path):
    first, second, third, fourth = classes([0.1, 0.2, 0.1, 0.2], tmp_path)
    assert first == third != second == fourth


@pytest.mark.parametrize("seed", range(3))
def test_the_order_of_states_in_the_file_does_not_count(tmp_path, seed):
    """AdamW's two moments, listed in another order for every parameter, still make one class."""
    model = onnx.load(FIXTURES / "mlp_adamw.onnx")
    for values in (model.graph.initializer, model.graph.input):
        shuffled = list(values)
        random.Random(seed).shuffle(shuffled)
        del values[:]
        values.extend(shuffled)
    onnx.save(model, tmp_path / "step.onnx")
    source = gopt.load(tmp_path / "step.onnx")
    updates = find_updates(source.training, whole_accumulators=False).subgraphs.values()
    assert len({each.equivalence_class for each in updates}) == 1
    suffixes = {tuple(state.tensor.rpartition(".")[2] for state in each.states[1:]) for each in updates}
    assert suffixes == {("exp_avg", "exp_avg_sq")}
