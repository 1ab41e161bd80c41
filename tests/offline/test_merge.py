"""Ranks back into one model and into other ranks: exact, whatever the layout."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from gopt.cli.main import main
from helpers import FIXTURES, NAMES, edit_manifest, stage_on
from hypothesis import given, settings
from hypothesis import strategies as st
from products import part, spread
from recipes import Recipe, build

import gopt
from gopt.artifact.manifest_check import read_manifest
from gopt.errors import GoptError, InputError, OptionError
from gopt.offline import merge as module
from gopt.offline.diff import diff
from gopt.offline.folder_contents import read_folder
from gopt.offline.merge import merge, reshard
from gopt.passes.pipeline import build_pipeline
from gopt.records.mesh import Mesh
from gopt.verification.verify import Verifier

pytestmark = pytest.mark.usefixtures("unchecked")


def values(path: Path) -> dict[str, bytes]:
    training = gopt.load(path).training
    stored = training.graph.initializers
    names = [state.tensor for state in training.states if state.tensor in stored]
    return {name: np.ascontiguousarray(stored[name].numpy()).tobytes() for name in names}


@pytest.mark.parametrize("name", part(NAMES, 5))
def test_merge_gives_back_the_source(name, tmp_path):
    path = FIXTURES / f"{name}.onnx"
    pipeline = build_pipeline(defaults={"shard": {"stage": 3, "partition": "rows"}})
    gopt.shard(gopt.load(path), Mesh.parse("dp=2,shard=3"), pipeline=pipeline).write(tmp_path / "out")
    merged = merge(tmp_path / "out", tmp_path / "back.onnx")
    assert values(tmp_path / "back.onnx") == values(path)
    assert merged.states + len(merged.missing) == len(gopt.load(path).training.states)
    # A model with opaque operators comes back with the functions that let any runtime run it.
    lines = diff(path, tmp_path / "back.onnx").lines
    assert all(line.kind == "model" for line in lines) and (not lines or "_ort_" in name), lines


layouts = st.sampled_from(
    [
        ("shard=1", {"stage": 2}),
        ("shard=4", {"stage": 1}),
        ("shard=3", {"stage": 3, "bucket-mb": 0}),
        ("dp=2", {"stage": 0}),
        ("dp=2,shard=2", {"stage": 3, "partition": "rows"}),
        ("shard=5", {"stage": 2, "partition": "whole", "style": "broadcast"}),
        ("shard=2,tp=2", {"stage": 2, "partition": "rows", "rule": "ceil", "min-piece": 2}),
    ]
)


@settings(max_examples=5)
@given(st.booleans(), st.booleans(), layouts, layouts, st.sampled_from([1, 2]))
def test_merge_after_reshard_is_merge(half, ema, first, second, micro_steps):
    with TemporaryDirectory() as text:
        folder = Path(text)
        (folder / "step.onnx").write_bytes(build(Recipe(half=half, ema=ema, widths=(3, 5, 4))).SerializeToString())
        pipeline = build_pipeline(defaults={"shard": first[1]})
        gopt.shard(gopt.load(folder / "step.onnx"), Mesh.parse(first[0]), pipeline=pipeline).write(folder / "a")
        fresh = {"partition": "flat", "style": "gather", "rule": "balanced", "min-piece": None, "bucket-mb": None}
        sharded = reshard(
            folder / "a", Mesh.parse(second[0]), options={"shard": fresh | second[1]}, accumulate=micro_steps
        )
        sharded.write(folder / "b")
        for side in ("a", "b"):
            merge(folder / side, folder / f"{side}.onnx")
        assert (folder / "a.onnx").read_bytes() == (folder / "b.onnx").read_bytes()
        assert values(folder / "a.onnx") == values(folder / "step.onnx")
        assert Verifier(folder / "b").run(steps=1, confirm=False).equal


def test_resharded_ranks_keep_what_was_chosen(tmp_path):
    pipeline = build_pipeline(defaults={"shard": {"stage": 3, "partition": "whole"}})
    gopt.shard(gopt.load(FIXTURES / "mlp_adamw.onnx"), 2, pipeline=pipeline).write(tmp_path / "a")
    report = reshard(tmp_path / "a", Mesh.parse("shard=3")).report().to_json()
    options = next(each["options"] for each in report["pipeline"] if each["name"] == "shard")
    assert (options["stage"], options["partition"]) == (3, "whole")
    assert report["source"] == json.loads((tmp_path / "a" / "report.json").read_text())["source"]


def test_large_values_lie_beside_the_model(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "EMBED", 1000)
    path = FIXTURES / "mlp_adamw.onnx"
    gopt.shard(gopt.load(path), 3).write(tmp_path / "out")
    merged = merge(tmp_path / "out", tmp_path / "back.onnx")
    assert merged.data and Path(merged.data).stat().st_size > 1000
    assert values(tmp_path / "back.onnx") == values(path)
    assert (tmp_path / "back.onnx").stat().st_size < path.stat().st_size


def test_an_existing_model_is_kept(tmp_path):
    gopt.shard(gopt.load(FIXTURES / "mlp_sgd.onnx"), 2).write(tmp_path / "out")
    (tmp_path / "back.onnx").write_text("mine")
    with pytest.raises(OptionError, match="exists already"):
        merge(tmp_path / "out", tmp_path / "back.onnx")
    assert (tmp_path / "back.onnx").read_text() == "mine"
    merge(tmp_path / "out", tmp_path / "back.onnx", force=True)
    assert main(["merge", str(tmp_path / "out"), "-o", str(tmp_path / "b.onnx")]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["b.onnx", "back.onnx", "out"]


@pytest.mark.parametrize("damage", ["rank", "pieces", "source", "manifest", "values"])
def test_what_is_incomplete_is_refused(damage, tmp_path):
    out = tmp_path / "out"
    gopt.shard(gopt.load(FIXTURES / "mlp_adamw.onnx"), 3, stage=3).write(out)
    if damage == "rank":
        (out / "rank_0001.onnx").unlink()
    elif damage == "source":
        (out / "source.onnx").unlink()
    elif damage == "values":
        (out / "states.bin").write_bytes((out / "states.bin").read_bytes()[:100])
    else:
        manifest = json.loads((out / "manifest.json").read_text())
        if damage == "pieces":
            manifest["ranks"].pop()
        else:
            manifest["ranks"][0]["state"][0].pop("pieces")
        (out / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(GoptError) as caught:
        merge(out, tmp_path / "back.onnx")
    assert caught.value.exit_code == 3 and not (tmp_path / "back.onnx").exists()


@pytest.mark.parametrize("partition", ["flat", "whole"])
@pytest.mark.parametrize(("kept", "lost"), [([0], "ranks 1-2 are missing"), ([0, 2], "rank 1 is missing")])
def test_ranks_that_are_missing_are_named(kept, lost, partition, tmp_path):
    """Of whole tensors too: a state of which nobody is there would go unnoticed."""
    source = gopt.load(FIXTURES / "mlp_adamw.onnx")
    gopt.shard(source, 3, stage=3, partition=partition, only_ranks=kept).write(tmp_path / "out")
    with pytest.raises(InputError, match=f"holds {len(kept)} of 3 ranks: {lost}, with the values of '"):
        merge(tmp_path / "out", tmp_path / "back.onnx")
    gopt.shard(source, 3, stage=0, only_ranks=kept).write(tmp_path / "all")
    assert merge(tmp_path / "all", tmp_path / "back.onnx").missing == ()


def test_a_folder_that_is_none(tmp_path):
    shutil.copy(FIXTURES / "mlp_sgd.onnx", tmp_path)
    with pytest.raises(InputError, match="not an output folder"):
        merge(tmp_path, tmp_path / "x.onnx")


@pytest.mark.parametrize(
    ("before", "now", "told"),
    [
        (
            {"stage": 3, "partition": "rows", "persist": 5, "rule": "ceil"},
            {"stage": 0},
            {"partition", "persist", "rule"},
        ),
        ({"stage": 3, "persist": 5}, {"stage": "2"}, {"persist"}),
        ({"partition": "whole", "style": "broadcast", "owners": "in-order"}, {"partition": "flat"}, {"style"}),
        ({"partition": "rows"}, {"stage": 3}, set()),
    ],
)
def test_what_has_no_use_any_more_falls_away_with_a_note(before, now, told, tmp_path):
    pipeline = build_pipeline(defaults={"shard": before})
    gopt.shard(gopt.load(FIXTURES / "mlp_adamw.onnx"), 2, pipeline=pipeline).write(tmp_path / "a")
    notes: list[str] = []
    reshard(tmp_path / "a", Mesh.parse("shard=3"), options={"shard": now}, note=notes.append).write(tmp_path / "b")
    assert {note.split()[1].split("=")[0] for note in notes} == told
    assert Verifier(tmp_path / "b").run(steps=1, confirm=False).equal


def test_what_is_given_now_and_has_no_use_is_refused(tmp_path):
    gopt.shard(gopt.load(FIXTURES / "mlp_adamw.onnx"), 2).write(tmp_path / "a")
    with pytest.raises(OptionError, match="partition has no use at stage 0"):
        reshard(tmp_path / "a", Mesh.parse("shard=3"), options={"shard": {"stage": 0, "partition": "rows"}})


# --- parts of dimensions ----------------------------------------------------------------------------------------------


def split_ranks(tmp_path: Path, name: str, mesh: str, **options: Any) -> Path:
    gopt.shard(gopt.load(FIXTURES / f"{name}.onnx"), Mesh.parse(mesh), **options).write(tmp_path / mesh)
    return tmp_path / mesh


@pytest.mark.parametrize(
    ("name", "mesh"),
    spread(["gpt_adamw", "emb_adamw", "gpt_adamw_clip_sched_fp16"], ["tp=2", "shard=2,tp=3", "dp=2,tp=3"]),
)
def test_merge_of_parts_is_the_source(name, mesh, tmp_path):
    """Of queries, keys and values in one weight as well, of which a rank has part of each."""
    out = split_ranks(tmp_path, name, mesh, stage=stage_on(mesh, 3))
    boxes = [piece.box for state in read_manifest(out)[0].ranks[0].state for piece in state.pieces]
    runs = any(len(ends) > 2 for box in boxes for ends in box or ())
    assert any(boxes) and runs == (name.startswith("gpt") and mesh == "tp=2")  # two heads have no three parts
    merge(out, tmp_path / "back.onnx")
    assert values(tmp_path / "back.onnx") == values(FIXTURES / f"{name}.onnx")


def test_parts_become_other_parts_and_come_back(tmp_path):
    before = split_ranks(tmp_path, "gpt_adamw", "shard=2,tp=3")
    for number, mesh in enumerate(["tp=2", "shard=3", "dp=2,tp=4", "shard=2,tp=3"]):
        after = tmp_path / str(number)
        reshard(before, Mesh.parse(mesh)).write(after)
        before = after
    assert (before / "states.bin").read_bytes() == (tmp_path / "shard=2,tp=3" / "states.bin").read_bytes()
    merge(before, tmp_path / "back.onnx")
    assert values(tmp_path / "back.onnx") == values(FIXTURES / "gpt_adamw.onnx")


def first_box(manifest: dict[str, Any], rank: int) -> dict[str, Any]:
    """The first piece of a rank that is a part of a tensor."""
    pieces = [piece for state in manifest["ranks"][rank]["state"] for piece in state["pieces"]]
    return next(piece for piece in pieces if "box" in piece)


def moved(box: list[list[int]], by: int) -> list[list[int]]:
    """The box a little further along the dimension of which it is a part."""
    return [[end + by for end in ends] if ends[0] else ends for ends in box]


@pytest.mark.parametrize("damage", ["overlap", "absent"])
def test_boxes_that_do_not_tile_are_refused(damage, tmp_path):
    out = split_ranks(tmp_path, "mlp_adamw", "tp=2")

    def edit(manifest: dict[str, Any]) -> None:
        piece = first_box(manifest, 1)
        other = first_box(manifest, 0)
        assert piece["tensor"] == other["tensor"]
        piece["box"] = other["box"] if damage == "absent" else moved(piece["box"], -1)

    edit_manifest(out, edit)
    with pytest.raises(InputError, match="do not tile it"):
        merge(out, tmp_path / "back.onnx")
    assert not (tmp_path / "back.onnx").exists()


def test_rows_are_copied_from_file_to_file(tmp_path):
    """Only a tensor of which inner dimensions are parts is put together in memory, and it is not kept there."""
    held = read_folder(split_ranks(tmp_path, "mlp_adamw", "tp=2")).graph.initializers
    kinds = {name: (len(tensor.parts), tensor.reader is not None) for name, tensor in held.items()}
    assert kinds["fc1.weight"] == (2, False) and kinds["fc2.weight"] == (0, True)
    held["fc2.weight"].read()
    assert held["fc2.weight"].array is None


def exchange(one: str, other: str):
    """Two files under one another's names."""

    def edit(folder: Path) -> None:
        kept = (folder / one).read_bytes()
        (folder / one).write_bytes((folder / other).read_bytes())
        (folder / other).write_bytes(kept)

    return edit


def copied(one: str, other: str):
    return lambda folder: shutil.copy(folder / one, folder / other)


RANKS, SERVERS = ("rank_0000.onnx", "rank_0001.onnx"), ("server_0000.onnx", "server_0001.onnx")


@pytest.mark.parametrize("damage", [exchange(*RANKS), copied(*RANKS)], ids=["exchanged", "copied"])
@pytest.mark.parametrize("partition", ["rows", "flat"])
def test_files_of_other_ranks_are_refused(damage, partition, tmp_path):
    """Shards are of one size: the file of another rank fits."""
    step = build(Recipe(widths=(16, 16), bias=False))
    (tmp_path / "step.onnx").write_bytes(step.SerializeToString())
    gopt.shard(gopt.load(tmp_path / "step.onnx"), "shard=2", stage=3, partition=partition).write(tmp_path / "out")
    damage(tmp_path / "out")
    refused(tmp_path / "out", tmp_path)


def test_values_that_another_program_put_there_are_merged(tmp_path):
    """An engine of the user's own may leave its states in ``states.bin``."""
    gopt.shard(gopt.load(FIXTURES / "mlp_adamw.onnx"), "shard=2", stage=3).write(tmp_path / "out")
    stored = tmp_path / "out" / "states.bin"
    values = np.fromfile(stored, "<f4")
    (values + 1).astype("<f4").tofile(stored)
    merge(tmp_path / "out", tmp_path / "merged.onnx")
    before = gopt.load(FIXTURES / "mlp_adamw.onnx").training
    after = gopt.load(tmp_path / "merged.onnx").training.graph.initializers
    floats = [state.tensor for state in before.states if before.graph.types[state.tensor].dtype == "float32"]
    assert len(floats) > 8
    for name in floats:
        np.testing.assert_array_equal(after[name].numpy(), before.graph.initializers[name].numpy() + np.float32(1))


@pytest.mark.parametrize(
    "damage", [exchange(*SERVERS), copied(*SERVERS), copied(SERVERS[0], "trainer.onnx")],
    ids=["exchanged", "copied", "trainer"],
)  # fmt: skip
def test_files_of_other_roles_are_refused(damage, tmp_path):
    options = gopt.SplitOptions(trainers=2, servers=2, minimum=16)
    gopt.split(gopt.load(FIXTURES / "mlp_adamw.onnx"), options).write(tmp_path / "out")
    damage(tmp_path / "out")
    refused(tmp_path / "out", tmp_path)


def refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError):
        merge(folder, tmp_path / "merged.onnx")
    with pytest.raises(InputError):
        reshard(folder, Mesh.parse("shard=3"))
    assert not (tmp_path / "merged.onnx").exists()
