"""What the manifest and the report say of an output folder is what its files have, by a reader that shares no code with
gopt. Nothing is run here: ``tests/numeric`` and the other laws compare numbers."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import onnx
import pytest
from contract_reader import Folder, elements, label, metadata
from gopt.cli.main import main
from helpers import FIXTURES
from onnx import ModelProto, numpy_helper
from products import part

CASES = [
    ("mlp_adamw", ["--ranks", "2"]),
    ("mlp_adamw", ["--ranks", "3", "--accumulate", "2", "--stage", "1"]),
    ("mlp_muon", ["--ranks", "2", "--stage", "0", "--accumulate", "3"]),
    ("cnn_mom_fp16", ["--mesh", "dp=2,shard=2", "--stage", "3"]),
    ("mlp_adamw_fp16_scaler", ["--ranks", "3", "--partition", "whole", "-O", "shard.style=broadcast"]),
    ("gpt_adamw", ["--mesh", "shard=2,tp=2"]),
    ("gpt_adamw", ["--mesh", "sp=2", "--stage", "0"]),
    ("cnn_sgd", ["--mesh", "h=2"]),
    ("cnn_sgd", ["--mesh", "shard=3,tp=2"]),
    ("mlp_ort_adamw", ["--ranks", "3"]),
    ("mlp_lamb", ["--ranks", "13", "--only-ranks", "0,12"]),
    ("optim/rprop_etas", ["--ranks", "2"]),  # an output behind a CastLike that changes nothing
]
MESHES = ("shard=5", "shard=8", "dp=3", "dp=2,shard=3", "shard=2,dp=2", "tp=2", "dp=2,tp=2", "cp=2", "ep=2", "w=2")


def named(name: str) -> ModelProto:
    """A fixture whose nodes all have names of their own, so that what is left of it can be told."""
    model = onnx.load(FIXTURES / f"{name}.onnx")
    for place, node in enumerate(model.graph.node):
        node.name = f"n{place}:{node.op_type}"
    return model


def sharded(model: ModelProto, options: list[str], folder: Path) -> Folder | None:
    onnx.save(model, folder / "step.onnx")
    code = main(["shard", str(folder / "step.onnx"), "-q", "-o", str(folder / "out"), *options])
    assert code in (0, 2, 3, 4)  # not each step has each axis; some fixtures are no steps
    return None if code else Folder(folder / "out")


def check(folder: Folder, model: ModelProto) -> None:
    nodes_are_as_the_report_says(folder)
    values_are_as_the_report_says(folder)
    nothing_is_told_twice(folder)
    states_are_as_the_manifest_says(folder, model)
    assert all(each["count"] > 0 for each in folder.report["checks"] if each["name"] in ("reads", "outputs"))


def nodes_are_as_the_report_says(folder: Folder) -> None:
    source = folder.source_nodes()
    for number, rank in folder.ranks.items():
        left = {
            label(node) for node in rank.nodes
            if label(node) in source and source[label(node)].op_type == node.op_type
        }  # fmt: skip
        made = [node for node in rank.nodes if "gopt.pass" in metadata(node.metadata_props)]
        refolded = {label(node) for node in made if label(node) in source}  # one operator, over fewer weights
        assert folder.told("removed_ops", number) - refolded == source.keys() - left - refolded
        assert folder.told("added_ops", number) == {label(node) for node in made}
        assert {label(node) for node in rank.nodes} <= left | {label(node) for node in made}


def values_are_as_the_report_says(folder: Folder) -> None:
    """All that the source has and a rank has not is removed, and the other way round: results, outputs, constants."""
    source = folder.source_values()
    for number, rank in folder.ranks.items():
        here = rank.values | rank.constants
        new = here - source
        assert all(name.startswith("gopt.") for name in new)
        assert folder.told("added_vars", number) == new
        held_apart = (
            folder.states.keys() & here
        )  # a gathered value has the name of the parameter that no rank holds whole
        assert folder.told("removed_vars", number) - held_apart == source - here


def nothing_is_told_twice(folder: Folder) -> None:
    """On a rank, and of operators in a phase, each name stands once."""
    for number in folder.ranks:
        for what in ("removed_vars", "added_vars", "added_ops"):
            names = folder.names(what, number)
            assert len(names) == len(set(names)), what


def states_are_as_the_manifest_says(folder: Folder, model: ModelProto) -> None:
    stored = {each.name: numpy_helper.to_array(each).reshape(-1) for each in model.graph.initializer}
    whole = {tensor: np.zeros(len(stored[tensor]), bool) for tensor in folder.states}
    nbytes = {"parameters": 0, "optimizer_states": 0}
    for number in folder.ranks:
        for tensor, places, values in folder.pieces(number):
            np.testing.assert_array_equal(values, stored[tensor][places], strict=True)
            whole[tensor][places] = True
        for state in folder.held(number):
            kind = folder.states[state["pieces"][0]["tensor"]]["kind"] if state["pieces"] else ""
            size = folder.ranks[number].types[state["input"]].itemsize
            counts = [len(elements(folder.states[each["tensor"]]["shape"], each)) for each in state["pieces"]]
            if kind in ("parameter", "optimizer_state", "accumulator"):
                nbytes["parameters" if kind == "parameter" else "optimizer_states"] += size * sum(counts)
    told = [each["bytes"] for each in folder.report["ranks"]]
    assert nbytes == {kind: sum(each[kind] for each in told) for kind in nbytes}
    if len(folder.ranks) == folder.manifest["mesh"]["ranks"]:
        assert all(found.all() for found in whole.values())


@pytest.mark.parametrize(("name", "options"), CASES, ids=lambda value: value if isinstance(value, str) else None)
def test_a_folder_is_what_it_says(name, options, tmp_path):
    model = named(name)
    folder = sharded(model, options, tmp_path)
    assert folder is not None
    check(folder, model)


FILES = sorted(
    path for path in FIXTURES.glob("**/*.onnx") if path.parent.name in ("fixtures", "families", "optim", "real")
)
SETTINGS = (
    ["--ranks", "2"], ["--ranks", "3", "--stage", "3"], ["--ranks", "3", "--stage", "1", "--accumulate", "2"],
    ["--ranks", "3", "--partition", "whole", "-O", "shard.style=broadcast"], ["--ranks", "3", "--partition", "rows"],
    ["--mesh", "shard=2,tp=2"], ["--mesh", "dp=2,shard=2", "--accumulate", "2"], ["--mesh", "cp=2"],
    ["--mesh", "shard=2,tp=3"], ["--mesh", "sp=2"], ["--mesh", "ep=2"], ["--mesh", "h=2"],
)  # fmt: skip
PAIRS = [(path, options) for place, path in enumerate(FILES) for options in SETTINGS]
BY_TURNS = [(path, SETTINGS[place % len(SETTINGS)]) for place, path in enumerate(FILES)]


def what_is_told_is_so(path: Path, options: list[str], place: Path) -> None:
    folder = sharded(onnx.load(path), options, place)
    if folder is not None:
        values_are_as_the_report_says(folder)
        nothing_is_told_twice(folder)


@pytest.mark.parametrize(("path", "options"), part(BY_TURNS, 24), ids=lambda value: getattr(value, "stem", None))
def test_all_that_is_removed_and_added_is_told(path, options, tmp_path):
    what_is_told_is_so(path, options, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(("path", "options"), PAIRS, ids=lambda value: getattr(value, "stem", None))
def test_all_that_is_removed_and_added_is_told_with_every_setting(path, options, tmp_path):
    what_is_told_is_so(path, options, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("seed", part(range(150), 150))
def test_a_drawn_folder_is_what_it_says(seed, tmp_path):
    draw = random.Random(seed)
    files = [path for path in FIXTURES.glob("**/*.onnx") if path.parent.name in ("fixtures", "families", "optim")]
    files = [path for path in sorted(files) if path.stem not in ("mlp_rmsprop", "mlp_adamw_external")]  # without values
    model = named(str(draw.choice(files).relative_to(FIXTURES).with_suffix("")))
    options = ["--mesh", draw.choice(MESHES)]
    stage = draw.randrange(4)
    options += ["--stage", str(stage)]
    if stage:
        options += ["--partition", draw.choice(["flat", "rows", "whole"])]
    if draw.random() < 0.4:
        options += ["--bucket-mb", draw.choice(["0", "0.001", "0.01"])]
    if draw.random() < 0.2:
        options += ["--accumulate", "2"]
    folder = sharded(model, options, tmp_path)
    if folder is not None:
        check(folder, model)


@pytest.mark.parametrize(("mesh", "made", "role"), [("tp=2", "embedding", "count"), ("sp=2", "view_5", "runs")])
def test_no_name_of_the_source_is_made_again(mesh, made, role, tmp_path):
    """A source may have a value of any name, also one that reads like a part of another value."""
    model = named("gpt_adamw")
    old = next(node.output[0] for node in model.graph.node if node.op_type == "Tanh" or node.op_type == "Erf")
    for node in model.graph.node:
        for names in (node.input, node.output):
            for place, name in enumerate(names):
                names[place] = f"{made}.{role}" if name == old else name
    for info in model.graph.value_info:
        info.name = f"{made}.{role}" if info.name == old else info.name
    folder = sharded(model, ["--mesh", mesh], tmp_path)
    assert folder is not None
    check(folder, model)
