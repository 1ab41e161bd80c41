"""Sharding specs of the file as placements of parameters."""

from __future__ import annotations

import pytest
import specs
from specs import say

import gopt
from gopt.errors import InputError, OptionError, UnsupportedError
from gopt.passes.pipeline import build_pipeline
from gopt.records.mesh import Mesh
from gopt.records.placements import Shard
from gopt.tensor_parallel.choose import Choice
from gopt.tensor_parallel.patterns import Pattern
from gopt.tensor_parallel.sizes import Sizes
from gopt.tensor_parallel.specs import WHY, with_specs
from gopt.verification.verify import Verifier

GROUPS = {-1: [0, 2], -2: [1, 3]}


def placed(model, folder, mesh="tp=2", choices=(), patterns="", notes=None, **given):
    training = gopt.load(specs.save(model, folder)).training
    note = [].append if notes is None else notes.append
    found = with_specs(
        training, Mesh.parse(mesh), "tp", Sizes.BALANCED, dict(choices), patterns=Pattern.parse(patterns), note=note,
        **given,
    )  # fmt: skip
    return {name: choice.placement for name, choice in found.items()}


@pytest.mark.parametrize(
    ("dims", "placement"),
    [
        ({0: [(64, 2)]}, Shard(0, (32, 32))),
        ({-1: [(None, 2)]}, Shard(1, (16, 16))),
        ({0: [(64, 2)], 1: [(32, 1)]}, Shard(0, (32, 32))),
        ({0: [(4, 1), (16, 2)]}, Shard(0, (8, 8), 4)),  # four runs, each cut alike
        ({0: [(2, 1), (2, 1), (16, 2)]}, Shard(0, (8, 8), 4)),
        ({0: [(16, 2), (4, 1)]}, Shard(0, (32, 32))),
        ({0: [(3, 2), (21, 1)], 1: []}, None),
    ],
)
def test_dimensions(dims, placement, tmp_path):
    model = say(specs.model(two=2), "fc1.weight", dims)
    if placement is None:
        with pytest.raises(InputError, match="says 3 x 21 of axis 0, which has 64 elements"):
            placed(model, tmp_path)
    else:
        assert placed(model, tmp_path) == {"fc1.weight": placement}


def test_what_is_split_in_blocks_keeps_them_whole(tmp_path):
    model = say(specs.model(three=3), "fc1.weight", {0: [(8, 3), (8, 1)]}, devices=[0, 1, 2], configuration="three")
    assert placed(model, tmp_path, "tp=3") == {"fc1.weight": Shard(0, (24, 24, 16))}


def test_views_and_new_values_are_their_parameter(tmp_path):
    model = say(specs.model(two=2), "permute", {1: [(64, 2)]})  # the transposed weight
    assert placed(model, tmp_path) == {"fc1.weight": Shard(0, (32, 32))}
    training = gopt.load(specs.save(model, tmp_path)).training
    new = next(state.updated for state in training.states if state.tensor == "fc1.weight")
    model = say(specs.model(two=2), new, {0: [(64, 2)]}, node=new)
    assert placed(model, tmp_path) == {"fc1.weight": Shard(0, (32, 32))}


def test_states_of_its_shape_are_their_parameter(tmp_path):
    state = next(s for s in gopt.load(specs.FIXTURES / "mlp_adamw.onnx").training.states if s.of == "fc1.weight")
    model = say(specs.model("mlp_adamw", two=2), state.tensor, {1: [(32, 2)]})
    assert placed(model, tmp_path) == {"fc1.weight": Shard(1, (16, 16))}


def test_one_group_of_all_devices_is_replicated(tmp_path):
    found = {"fc1.weight": Choice(Shard(0, (32, 32)), "column"), "fc2.weight": Choice(Shard(1, (32, 32)), "row")}
    model = say(specs.model(two=2), "fc1.weight", {}, devices=[-1], groups={-1: [0, 1]})
    assert set(placed(model, tmp_path, choices=found)) == {"fc2.weight"}
    model = say(specs.model(two=2), "fc1.weight", {0: [(64, 1)]}, devices=[1])
    with pytest.raises(UnsupportedError, match="has it on 1 of 2 devices alone"):
        placed(model, tmp_path)


def test_devices_may_be_the_ranks_of_the_mesh(tmp_path):
    model = say(
        specs.model(four=4), "fc1.weight", {0: [(64, 2)]}, devices=[-1, -2], groups=GROUPS, configuration="four"
    )
    assert placed(model, tmp_path, "dp=2,tp=2") == {"fc1.weight": Shard(0, (32, 32))}
    with pytest.raises(UnsupportedError, match=r"part 0 on devices \[0, 2\], and on the mesh tp=2,dp=2 ranks \[0, 1\]"):
        placed(model, tmp_path, "tp=2,dp=2")


@pytest.mark.parametrize(
    ("change", "mesh", "message"),
    [
        (lambda model: say(model, "fc1.weight", {0: [(64, 2)]}), "tp=4", "'two' of the model has 2 devices"),
        (lambda model: say(model, "fc1.weight", {0: [(64, 2)]}), "tp=1,dp=2", "splits it into 2 shards, and the mesh"),
        (lambda model: say(model, "fc1.weight", {0: [(64, 2)]}, devices=[1, 0]), "tp=2", r"part 0 on devices \[1\]"),
        (
            lambda model: say(model, "fc1.weight", {0: [(64, 2)]}, devices=[0]),
            "tp=2",
            "names 1 devices or groups",
        ),
        (lambda model: say(model, "fc1.weight", {0: [(64, 2)], 1: [(32, 2)]}), "tp=2", "splits it twice"),
        (lambda model: say(model, "fc1.weight", {0: [(8, 2), (8, 2)]}), "tp=2", "splits it twice"),
    ],
)
def test_what_gopt_does_not_split_so(change, mesh, message, tmp_path):
    model = specs.model(two=2)
    change(model)
    with pytest.raises(UnsupportedError, match=message):
        placed(model, tmp_path, mesh)
    assert placed(model, tmp_path, mesh, configuration="none") == {}


def test_contradictions_are_named(tmp_path):
    model = say(specs.model(two=2), "fc1.weight", {0: [(64, 2)]})
    say(model, "permute", {0: [(32, 2)]}, node="addmm")
    with pytest.raises(InputError, match=r"specs of 'fc1.weight' contradict .* 'node_permute', .* 'node_addmm'"):
        placed(model, tmp_path)


def test_what_the_user_says_goes_before_the_file(tmp_path):
    model = say(specs.model(two=2), "fc1.weight", {0: [(64, 2)]})
    assert placed(model, tmp_path, patterns="fc1.*:replicate") == {}


def test_activations_and_stages_are_noted(tmp_path):
    model = say(specs.model(two=2), "addmm", {1: [(64, 2)]})
    model.graph.node[1].device_configurations[0].pipeline_stage = 1
    notes: list[str] = []
    assert placed(model, tmp_path, notes=notes) == {}
    assert notes == [
        "sharding specs of 1 values that follow from no parameter alone are not used",
        "pipeline stages of the file are not used: the mesh has no axis pp",
    ]


def test_several_configurations(tmp_path):
    model = say(specs.model(two=2, other=2, four=4), "fc1.weight", {0: [(64, 2)]})
    assert placed(model, tmp_path)["fc1.weight"].dim == 0, "those without specs do not count"
    say(model, "fc1.weight", {1: [(32, 2)]}, configuration="other")
    with pytest.raises(OptionError, match="several device configurations of the model fit the mesh tp=2: 'two', 'oth"):
        placed(model, tmp_path)
    assert placed(model, tmp_path, configuration="other")["fc1.weight"].dim == 1
    with pytest.raises(OptionError, match="no device configuration 'twin'"):
        placed(model, tmp_path, configuration="twin")


def test_ranks_equal_the_source_and_have_no_specs(tmp_path):
    """Rows where the structure says columns; the kept source has the specs, a rank's file is of one device."""
    model = say(specs.model(two=2), "fc1.weight", {1: [(32, 2)]})
    passes = build_pipeline(defaults={"tensor-parallel": {"parameters": "fc2.*:replicate"}})
    made = gopt.shard(gopt.load(specs.save(model, tmp_path)), Mesh.parse("tp=2"), pipeline=passes)
    assert made.ran[0].record.facts["parameters"]["fc1.weight"] == f"{WHY}: {Shard(1, (16, 16))}"
    made.write(tmp_path / "out")
    result = Verifier(tmp_path / "out").run(confirm=False)
    assert result.equal and result.compared
    for name, kept in (("source", True), ("rank_0000", False)):
        file = specs.onnx.load(tmp_path / f"out/{name}.onnx", load_external_data=False)
        assert bool(file.configuration) == any(node.device_configurations for node in file.graph.node) == kept
