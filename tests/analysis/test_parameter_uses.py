"""What forward and backward read of the parameters."""

import pytest
from small_graphs import sgd_step

from gopt.analysis.parameter_uses import low_precision_uses, parameter_users, trained_bytes


@pytest.mark.parametrize(("half", "dtype", "size"), [(False, "", 4), (True, "float16", 2)])
def test_parameters_count_in_the_type_in_which_they_are_read(half, dtype, size, tmp_path):
    training = sgd_step(tmp_path, half=half)
    users = parameter_users(training)
    read = [name for name in training.gradients if name in users]
    assert read
    assert {low_precision_uses(training, users[name]) for name in read} == {dtype}
    _, parameters = trained_bytes(training)
    assert parameters == size * sum(training.graph.types[name].elements for name in read)


def test_readers_in_the_update_do_not_count(tmp_path):
    training = sgd_step(tmp_path)
    (update,) = [node for node in training.graph.nodes if node.outputs == [training.states[0].updated]]
    assert update not in parameter_users(training).get(training.states[0].tensor, [])


def test_no_reader_is_no_cast(tmp_path):
    assert low_precision_uses(sgd_step(tmp_path, half=True), []) == ""
