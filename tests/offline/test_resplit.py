"""Values of ranks, servers and trainers: back into a model, and to others, bit for bit."""

from __future__ import annotations

import copy
import json
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from gopt.cli.main import main
from helpers import FIXTURES, source

import gopt
from gopt import api
from gopt.artifact.checkpoint_index import INDEX_FILE, open_index, rank_states_file
from gopt.artifact.manifest_check import read_manifest
from gopt.artifact.safetensors_file import safetensors_chunks
from gopt.artifact.server_entries import Mode, PullAt, ServerPlanEntry
from gopt.errors import GoptError, InputError, OptionError, RunError
from gopt.ir.external_data import load_state
from gopt.ir.types import TensorType
from gopt.offline.diff import diff
from gopt.offline.folder_contents import read_folder
from gopt.offline.inspect_folder import inspect_folder
from gopt.offline.merge import merge, reshard
from gopt.offline.resplit import resplit
from gopt.parameter_server.options import SplitOptions
from gopt.parameter_server.placement import Placement
from gopt.parameter_server.slicing import Slicing
from gopt.records.roles import Roles

pytestmark = pytest.mark.usefixtures("unchecked")

NAMES = ("cnn_sgd", "emb_adamw", "mlp_adamw_fp16_scaler", "mlp_lamb", "mlp_mom_clip_sched", "mlp_ort_adamw")


def split(name: str, folder: Path, **given: object) -> Path:
    options = SplitOptions(**{"trainers": 2, "servers": 3, "minimum": 16, **given})  # type: ignore[arg-type]
    api.split(source(name), options).write(folder)
    return folder


def plan(folder: Path) -> ServerPlanEntry:
    entry = read_manifest(folder)[0].parameter_server
    assert entry is not None
    return entry


@pytest.mark.parametrize("name", NAMES)
def test_merge_gives_back_what_was_split(name: str, tmp_path: Path) -> None:
    given = {"accumulate": 2} if name == "cnn_sgd" else {"pull": PullAt.END} if name == "emb_adamw" else {}
    split(name, tmp_path / "out", **given)
    merged = merge(tmp_path / "out", tmp_path / "back.onnx")
    lines = diff(FIXTURES / f"{name}.onnx", tmp_path / "back.onnx").lines
    assert not merged.missing and all(line.kind == "model" for line in lines) and (not lines or "_ort_" in name)


def test_states_that_are_no_inputs_come_back(tmp_path: Path) -> None:
    model = onnx.load(FIXTURES / "mlp_sgd.onnx")
    held = {each.name for each in model.graph.initializer}
    inputs = [each for each in model.graph.input if each.name not in held]
    del model.graph.input[:]
    model.graph.input.extend(inputs)
    onnx.save(model, tmp_path / "held.onnx")
    states = {state.tensor: state.updated for state in source("mlp_sgd").training.states}
    loaded = api.load(tmp_path / "held.onnx", roles=api.RoleMap(states=states))
    api.split(loaded, SplitOptions(trainers=1, servers=2)).write(tmp_path / "out")
    assert merge(tmp_path / "out", tmp_path / "back.onnx").states == len(states)
    assert read_folder(tmp_path / "out").graph.inputs.keys() >= states.keys()


def test_there_and_back_between_splits_and_ranks(tmp_path: Path) -> None:
    first = split("mlp_adamw", tmp_path / "a", slicing=Slicing.CLASSIC, placement=Placement.HASH)
    resplit(first, {"servers": 5, "trainers": 1}).write(tmp_path / "b")
    assert (plan(tmp_path / "b").servers, plan(tmp_path / "b").slicing) == (5, "classic")
    reshard(tmp_path / "b", gopt.Mesh.parse("shard=2")).write(tmp_path / "ranks")
    resplit(tmp_path / "ranks", {"servers": 2, "trainers": 2}).write(tmp_path / "c")
    for name in ("b", "ranks", "c"):
        merge(tmp_path / name, tmp_path / f"{name}.onnx")
        assert diff(FIXTURES / "mlp_adamw.onnx", tmp_path / f"{name}.onnx").equal


def test_the_same_split_again_is_the_same_folder(tmp_path: Path) -> None:
    given = {"mode": Mode.ASYNC, "compensation": 0.5, "count": "push", "wire": "float16", "fixed_trainers": True,
             "given": {"fc1.*": 2}, "roles": Roles.parse("server:0-2;trainer:3,4")}  # fmt: skip
    split("mlp_adamw", tmp_path / "a", **given)
    resplit(tmp_path / "a", {}).write(tmp_path / "b")
    assert diff(tmp_path / "a", tmp_path / "b").equal
    assert (tmp_path / "a/manifest.json").read_bytes() == (tmp_path / "b/manifest.json").read_bytes()


@pytest.mark.parametrize("layout", ["whole", "modulo", "range", "columns"])
def test_tables_come_back_and_keep_their_layout(layout: str, tmp_path: Path) -> None:
    path = FIXTURES / "sparse/dlrm_adagrad.onnx"
    options = SplitOptions(trainers=2, servers=3, minimum=16, tables={"*": layout})
    api.split(api.load(path), options).write(tmp_path / "a")
    merge(tmp_path / "a", tmp_path / "a.onnx")
    assert diff(path, tmp_path / "a.onnx").equal
    resplit(tmp_path / "a", {"servers": 2}).write(tmp_path / "b")
    assert {table.layout for table in plan(tmp_path / "b").tables} == {layout}
    merge(tmp_path / "b", tmp_path / "b.onnx")
    assert diff(path, tmp_path / "b.onnx").equal


def test_what_means_nothing_any_more_is_dropped_with_a_note(tmp_path: Path) -> None:
    given = {"mode": Mode.ASYNC, "compensation": 0.5, "given": {"fc1.*": 2}, "roles": Roles.default(2, 3)}
    split("mlp_adamw", tmp_path / "a", **given)
    notes: list[str] = []
    made = resplit(tmp_path / "a", {"mode": Mode.SYNC, "servers": 2}, note=notes.append)
    assert made.step.options.compensation is None and not made.step.options.given
    assert [note.split()[0] for note in notes] == ["compensation", "the", "the"]


def test_of_ranks_both_counts_are_needed(tmp_path: Path) -> None:
    gopt.shard(source("mlp_sgd"), 2).write(tmp_path / "ranks")
    with pytest.raises(OptionError, match="the number of trainers is missing"):
        resplit(tmp_path / "ranks", {"servers": 2})


@pytest.mark.parametrize("trainers", [1, 2, 3])
def test_a_checkpoint_of_any_number_of_trainers_is_read(trainers: int, tmp_path: Path) -> None:
    """Of trainers the chief's values count."""
    home = split("cnn_sgd", tmp_path / "out")
    rng = np.random.default_rng(0)
    np.savez(tmp_path / "data.npz", **{
        each.name: rng.integers(0, 4, (48, *map(int, each.shape[1:]))) if each.dtype.startswith("int")
        else rng.standard_normal((48, *map(int, (each.shape or ())[1:]))).astype(each.dtype)
        for each in read_manifest(home)[0].common.inputs if each.kind == "batch"
    })  # fmt: skip
    command = ["run", str(home), "--data", str(tmp_path / "data.npz"), "--steps", "2", "--engine", "threads",
               "--trainers", str(trainers), "--checkpoint", str(tmp_path / "ck")]  # fmt: skip
    hyper = [each.name for each in read_manifest(home)[0].common.inputs if each.kind == "hyper"]
    assert main(command + [part for name in hyper for part in ("--set", f"{name}=0.1")]) == 0
    step = tmp_path / "ck/step_00000002"
    resplit(step, {"servers": 1}).write(tmp_path / "other")
    merge(step, tmp_path / "a.onnx")
    merge(tmp_path / "other", tmp_path / "b.onnx")
    assert diff(tmp_path / "a.onnx", tmp_path / "b.onnx").equal
    assert not diff(tmp_path / "a.onnx", FIXTURES / "cnn_sgd.onnx").equal
    chief, merged = load_state(step / "rank_0000.safetensors"), api.load(tmp_path / "a.onnx").training.graph
    assert chief
    for name, value in chief.items():
        assert np.array_equal(merged.initializers[name].numpy(), value.numpy())


def test_a_report_of_another_split_is_refused(tmp_path: Path) -> None:
    for name, servers in (("a", 2), ("b", 3)):
        split("mlp_sgd", tmp_path / name, servers=servers)
    (tmp_path / "a/report.json").write_bytes((tmp_path / "b/report.json").read_bytes())
    with pytest.raises(InputError, match="ranks"):
        read_folder(tmp_path / "a")
    gopt.shard(source("mlp_sgd"), 4).write(tmp_path / "ranks")
    (tmp_path / "a/report.json").write_bytes((tmp_path / "ranks/report.json").read_bytes())
    with pytest.raises(InputError, match="ranks"):
        read_folder(tmp_path / "a")


@pytest.mark.parametrize("mode", [Mode.SYNC, Mode.ASYNC])
@pytest.mark.parametrize("lost", [[1], [2], [0, 2]])
def test_a_checkpoint_of_a_run_that_lost_trainers_is_merged_and_resharded(
    tmp_path: Path, mode: Mode, lost: list[int]
) -> None:  # fmt: skip
    home = split("mlp_adamw", tmp_path / "a", trainers=3, servers=2, mode=mode)
    batch = {"x": np.ones((48, 32), "f4"), "y": np.zeros(48, "i8")}
    step = gopt.run(home, batch, 2, settings={"lr": 0.1}, checkpoint=tmp_path / "kept").path
    merge(step, tmp_path / "whole.onnx")
    index = open_index(step)
    for rank in lost:
        (step / rank_states_file(rank)).unlink()
    left = {name: entry for name, entry in index.files.items() if (step / name).exists()}
    (step / INDEX_FILE).write_text(replace(index, files=left).text())
    merge(step, tmp_path / "left.onnx")
    assert (tmp_path / "left.onnx").read_bytes() == (tmp_path / "whole.onnx").read_bytes()
    for trainers in (1, 4):
        resplit(step, {"trainers": trainers}).write(tmp_path / f"{trainers}")
        assert gopt.run(tmp_path / f"{trainers}", batch, 1, settings={"lr": 0.1}).ranks == trainers + 2
    (tmp_path / "left.onnx").unlink()
    gopt.seal(step)
    merge(step, tmp_path / "left.onnx")


@pytest.mark.parametrize("edit", ["lacks", "other type", "in common"])
def test_the_files_of_trainers_that_do_not_count_are_compared(tmp_path: Path, edit: str) -> None:
    home = split("cnn_sgd", tmp_path / "a", trainers=3, servers=2)
    draw = np.random.default_rng(0)
    batch = {"x": draw.random((24, 1, 8, 8)).astype("f4"), "y": np.zeros(24, "i8")}
    step = gopt.run(home, batch, 1, settings={"lr": 0.1}, checkpoint=tmp_path / "kept").path
    path, index = step / rank_states_file(2), open_index(step)
    values = {name: np.array(tensor.numpy()) for name, tensor in load_state(path).items()}
    state = next(iter(values))
    if edit == "lacks":
        del values[state]
    elif edit == "other type":
        values[state] = values[state].astype("f8")
    else:  # running statistics are each trainer's own; here the manifest says that all have one
        manifest = tmp_path / "kept/manifest.json"
        manifest.write_text(manifest.read_text().replace(', "local": true', ""))
    types = {name: TensorType(str(value.dtype), value.shape) for name, value in values.items()}
    path.write_bytes(b"".join(safetensors_chunks(types, values.values())))
    digest = index.of_run(read_manifest(tmp_path / "kept")[0]).digest()
    (step / INDEX_FILE).write_text(replace(index, manifest=digest).text())
    with pytest.raises(RunError, match=rf"rank_000[12]\.safetensors has .*{state}"):
        merge(step, tmp_path / "back.onnx")


def test_a_server_that_is_gone_is_named(tmp_path: Path) -> None:
    split("mlp_sgd", tmp_path / "a")
    (tmp_path / "a/server_0001.onnx").unlink()
    with pytest.raises(InputError, match="server_0001"):
        read_folder(tmp_path / "a")


def test_whatever_a_report_says_no_reader_crashes(tmp_path: Path) -> None:
    """One value after another by something else."""
    home, rng = split("mlp_sgd", tmp_path / "a"), random.Random(3)
    path = home / "report.json"
    kept = json.loads(path.read_text())
    for key in (*kept["pipeline"][0]["options"], *kept["pipeline"][0]["facts"]) * 2:
        report = copy.deepcopy(kept)
        table = report["pipeline"][0]["options" if key in report["pipeline"][0]["options"] else "facts"]
        table[key] = rng.choice([0, 1, 5, -1, 10**12, "", "x", "geo", [], [1], {"nix": 7}, None, True, 0.5])
        path.write_text(json.dumps(report))
        for read in (inspect_folder, read_folder, lambda folder: resplit(folder, {"servers": 2})):
            try:
                read(home)
            except GoptError as error:
                assert error.exit_code in (2, 3), (key, table[key])
