"""Mode geo as it is written: the whole step on trainers, parameters alone on servers, and what is refused."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import onnx
import pytest
from helpers import ROOT, source

from gopt import api
from gopt.artifact.manifest_check import read_manifest
from gopt.artifact.server_entries import Mode
from gopt.errors import OptionError, UnsupportedError
from gopt.ir.load import load
from gopt.parameter_server.geo import place_geo_nodes
from gopt.parameter_server.options import SplitOptions


def options(**given: object) -> SplitOptions:
    return SplitOptions(**{"trainers": 2, "servers": 2, "minimum": 16, "mode": Mode.GEO, "every": 3, **given})  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["mlp_adamw", "mlp_adamw_fp16_scaler", "mlp_muon", "mlp_ort_adamw"])
def test_trainers_have_the_whole_step_and_servers_parameters_alone(name: str, tmp_path: Path) -> None:
    step = source(name)
    made = api.split(step, options())
    made.write(tmp_path / "out")
    manifest, _ = read_manifest(tmp_path / "out")
    assert manifest.schedule == {"step": 3, "sync": 1}
    trainer = {state.input: state for state in manifest.ranks[0].state}
    assert {state.tensor for state in step.training.states} <= trainer.keys()
    assert all(state.local for state in trainer.values())
    assert {state.pieces[0].tensor for state in trainer.values() if state.copy} == set(step.training.gradients)
    own = onnx.load(tmp_path / "out/trainer.onnx", load_external_data=False).graph
    assert len(own.node) >= len(step.training.graph.nodes) - len(step.training.looked_through)
    for rank in manifest.ranks[2:]:
        graph = load(tmp_path / "out" / rank.files["step"], own=True)
        assert {node.op_type for node in graph.nodes} == {"Aggregate", "Add"}
        assert all(piece.tensor in step.training.gradients for state in rank.state for piece in state.pieces)
    held = sum(p.elements for rank in manifest.ranks[2:] for state in rank.state for p in state.pieces)
    assert held == sum(step.training.graph.types[name].elements for name in step.training.gradients)


def test_what_trainers_last_knew_starts_as_the_parameter(tmp_path: Path) -> None:
    step = source("mlp_adamw")
    api.split(step, options()).write(tmp_path / "out")
    graph = load(tmp_path / "out/trainer.sync.onnx", own=True)
    for state in read_manifest(tmp_path / "out")[0].ranks[0].state:
        if state.input in graph.inputs:
            (piece,) = state.pieces
            wanted = step.training.graph.initializers[piece.tensor].numpy()
            assert np.array_equal(graph.initializers[state.input].numpy(), wanted)
    assert sum(each.startswith("gopt.geo.last") for each in graph.inputs) == len(step.training.gradients)


def test_values_are_stored_once(tmp_path: Path) -> None:
    step = source("mlp_adamw")
    api.split(step, options()).write(tmp_path / "out")
    values = sum(step.training.graph.types[state.tensor].nbytes for state in step.training.states)
    assert (tmp_path / "out/states.bin").stat().st_size < values + 64 * len(step.training.states)


def test_the_number_of_trainers_is_part_of_the_files() -> None:
    entry = api.split(source("mlp_sgd"), options()).manifest().parameter_server
    assert entry is not None and entry.fixed_trainers and entry.every == 3


def test_a_global_norm_is_local_and_needs_no_rounds() -> None:
    assert api.split(source("mlp_mom_clip_sched"), options()).step.keys


def test_a_parameter_that_is_made_from_its_master_is_refused() -> None:
    training = api.load(ROOT / "fixtures/mlp_sgd.onnx").training
    state = training.parameters[0]
    node = training.graph.producers()[state.updated]
    node.inputs = [name if name != state.tensor else training.parameters[1].tensor for name in node.inputs]
    with pytest.raises(UnsupportedError, match="mode geo: the update makes 'fc1"):
        place_geo_nodes(training)


@pytest.mark.parametrize(
    ("given", "message"),
    [({"accumulate": 2}, "--mode geo"), ({"compensation": 1.0}, "--mode async"), ({"count": "push"}, "--mode async")],
)
def test_options_that_do_not_go_with_it_are_refused(given: dict[str, object], message: str) -> None:
    with pytest.raises(OptionError) as refused:
        options(**given)
    assert re.search(message, refused.value.message)
