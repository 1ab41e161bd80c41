"""Device configurations and sharding specs as they stand in a file."""

from __future__ import annotations

import pytest
import specs
from specs import say

from gopt.errors import InputError
from gopt.ir.device_specs import (
    Configuration,
    ShardedDim,
    TensorSpec,
    add_configuration,
    read_configurations,
    with_specs,
    without_specs,
)
from gopt.ir.load import load


def read(model, folder):
    return read_configurations(load(specs.save(model, folder)))


def test_a_file_without_them(tmp_path):
    assert read(specs.model(), tmp_path) == []


def test_what_a_spec_says(tmp_path):
    model = specs.model(two=2, four=4)
    say(model, "fc1.weight", {-2: [(32, 1), (None, 2)]})
    say(model, "fc2.weight", {1: [(64, 2)]}, devices=[-1, -2], groups={-1: [0, 2], -2: [1, 3]}, configuration="four")
    model.graph.node[1].device_configurations.add(configuration_id="two").pipeline_stage = 0
    first = TensorSpec("fc1.weight", "node_permute", ((0,), (1,)), (ShardedDim(0, ((32, 1), (None, 2))),))
    second = TensorSpec("fc2.weight", "node_permute_1", ((0, 2), (1, 3)), (ShardedDim(1, ((64, 2),)),))
    assert read(model, tmp_path) == [Configuration("two", 2, (first,), 1), Configuration("four", 4, (second,))]
    assert second.devices == {0, 1, 2, 3}


def test_what_is_written_is_read_again(tmp_path):
    graph = load(specs.save(specs.model(two=2), tmp_path))
    spec = TensorSpec("fc1.weight", "node_permute", ((0, 2), (1, 3)), (ShardedDim(0, ((4, 1), (16, 2))),))
    add_configuration(graph.header, "new", ["a", "b", "c", "d"])
    before = graph.nodes[0].to_bytes()
    graph.nodes[0].encoded = with_specs(graph.nodes[0], {"new": [spec]})
    assert read_configurations(graph)[1] == Configuration("new", 4, (spec,))
    assert without_specs(graph.nodes[0].encoded) == before
    graph.nodes[0].encoded = with_specs(graph.nodes[0], {}, ["new"])
    assert graph.nodes[0].encoded == before
    add_configuration(graph.header, "new", ["a"])
    assert [each.num_devices for each in graph.header.configuration] == [2, 1]


def test_the_version_follows_the_specs():
    header = specs.model(ir=10)
    add_configuration(header, "new", ["a", "b"])
    assert header.ir_version == 11


def other_name(model):
    model.configuration.add(name="two", num_devices=2)


def fewer_names(model):
    model.configuration[0].device.append("one")


def no_configurations(model):
    say(model, "fc1.weight", {0: [(64, 2)]})
    model.ClearField("configuration")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda model: say(model, "fc1.weight", {0: [(64, 2)]}, configuration="three"), "'three', which the model"),
        (lambda model: say(model, "nothing", {}, node="permute"), "the node has no such value"),
        (lambda model: say(model, "fc1.weight", {2: [(64, 2)]}), "has axis 2: the value has 2 dimensions"),
        (lambda model: say(model, "fc1.weight", {0: [(64, 2)], -2: [(64, 2)]}), "names an axis twice"),
        (lambda model: say(model, "fc1.weight", {0: [(64, 2)]}, devices=[0, 2]), "names device 2: there are 2"),
        (lambda model: say(model, "fc1.weight", {0: [(64, 2)]}, devices=[]), "names no device"),
        (lambda model: say(model, "fc1.weight", {0: [(64, 0)]}), r"divides axis 0 into \[0\] shards"),
        (no_configurations, "'two', which the model does not have"),
        (other_name, "has no name of its own"),
        (fewer_names, "says 2 devices and names 1"),
    ],
)
def test_what_the_format_forbids(change, message, tmp_path):
    """``onnx.checker`` looks at none of it."""
    model = specs.model(two=2)
    change(model)
    with pytest.raises(InputError, match=message):
        read(model, tmp_path)
