"""What a request lacks is said before any work: axes that nobody knows or that do nothing, passes that are needed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import jsonschema
import numpy as np
import onnx
import pytest
from gopt.cli.main import main
from helpers import FIXTURES, ROOT, Builder, calls, edit_manifest, perceptron, rank_path, sgd
from onnx import numpy_helper

import gopt
from gopt.errors import OptionError, UnsupportedError
from gopt.offline.merge import reshard
from gopt.passes.pipeline import Pipeline, build_pipeline, parse_pipeline
from gopt.records.mesh import Mesh, axis_kinds
from gopt.verification.verify import Verifier

MLP, CNN = FIXTURES / "mlp_mom_clip_sched.onnx", FIXTURES / "cnn_mom_fp16.onnx"


def equal(folder: Path, model: Path | None = None) -> bool:
    return Verifier(folder, model).run(steps=2, confirm=False).equal


# --- axes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "meant"),
    [("shrad=4", "shard"), ("dpp=2", "dp"), ("Shard=4", "shard"), ("tpp=2", "tp"), ("fsdp=4", "shard"), ("ddp=2", "dp"),
     ("dp_replicate=2", "dp"), ("shar=1", "shard"), ("dp=2,shards=2", "shard")],
)  # fmt: skip
def test_a_name_near_a_known_one(text, meant, tmp_path, capsys):
    with pytest.raises(OptionError, match="no mesh axis is called") as caught:
        Mesh.parse(text)
    assert f"{meant!r}" in caught.value.hints[0]
    for command in (["shard", str(MLP), "-o", str(tmp_path / "out")], ["plan", str(MLP)]):
        assert main([*command, "--mesh", text]) == 2
        assert "no mesh axis is called" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_kind_of_an_axis_that_is_not_there():
    with pytest.raises(OptionError, match="'rep', which is not an axis of the mesh shard=2"):
        Mesh.parse("shard=2", axis_kinds(["rep=replica"]))
    assert main(["shard", str(MLP), "--ranks", "2", "--axis", "rep=replica", "--dry-run"]) == 2


@pytest.mark.parametrize("mesh", ["ep=4", "ep=2", "tp=1,ep=2", "dp=1,ep=4", "shard=1,ep=2"])
def test_a_mesh_that_does_nothing(mesh, tmp_path, capsys):
    out = tmp_path / "out"
    assert main(["shard", str(MLP), "--mesh", mesh, "-o", str(out)]) == 4
    text = capsys.readouterr().err
    assert "no weights of experts are found" in text and f"shard={Mesh.parse(mesh).ranks}" in text
    assert "--axis ep=replica" in text
    assert main(["plan", str(MLP), "--mesh", mesh]) == 4
    assert not out.exists()


def test_copies_that_are_meant(tmp_path):
    """Ranks that see the same data are legal when the user says so: each is the source, and all stay equal."""
    out = tmp_path / "out"
    assert main(["shard", str(MLP), "--mesh", "tp=2", "--axis", "tp=replica", "-o", str(out)]) == 0
    assert not calls(onnx.load(rank_path(out, 1)))
    notes = json.loads((out / "report.json").read_text())["notes"]
    assert "no call goes along mesh axis tp: its ranks hold and compute the same" in notes
    verifier = Verifier(out)
    assert verifier.which == [0, 0]
    assert verifier.run(steps=2, confirm=False).equal


@pytest.mark.parametrize("axis", ["cp", "sp", "h", "w"])
def test_axes_that_have_nothing_to_share_out(axis):
    """An MLP has neither tokens nor images."""
    source = gopt.load(MLP)
    with pytest.raises(UnsupportedError, match=f"to divide among the 2 ranks along {axis}"):
        gopt.shard(source, Mesh(((axis, 2), ("shard", 2))))
    gopt.shard(source, Mesh(((axis, 1), ("shard", 2))))


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize(("kind", "which"), [("replica", [0, 1, 0, 1]), ("data", [0, 1, 2, 3])])
def test_an_axis_of_another_name(kind, which, stage, tmp_path):
    out, mesh = tmp_path / "out", Mesh.parse("zone=2,shard=2", axis_kinds({"zone": kind}))
    gopt.shard(gopt.load(MLP), mesh, stage=stage).write(out)
    for name in ("manifest", "report"):
        record = json.loads((out / f"{name}.json").read_text())
        jsonschema.validate(record, json.loads((ROOT / f"gopt/schemas/{name}.schema.json").read_text()))
        assert record["mesh"]["kinds"] == {"zone": kind}
    verifier = Verifier(out)
    assert verifier.which == which
    assert verifier.run(steps=2, confirm=False).equal
    other = reshard(out, Mesh.parse("shard=2"))
    other.write(tmp_path / "other")
    assert equal(tmp_path / "other")


def test_the_kind_decides(tmp_path):
    """Ranks that were sharded as seeing the same are unequal on batches of their own."""
    out = tmp_path / "out"
    gopt.shard(gopt.load(MLP), Mesh.parse("zone=2,shard=2", axis_kinds({"zone": "replica"}))).write(out)
    edit_manifest(out, lambda record: record["mesh"]["kinds"].update(zone="data"))
    assert not equal(out)


def test_a_manifest_from_before_kinds(tmp_path):
    """Then an axis of any other name saw the same data."""
    out = tmp_path / "out"
    gopt.shard(gopt.load(MLP), Mesh.parse("zone=2,shard=2", axis_kinds({"zone": "replica"}))).write(out)
    edit_manifest(out, lambda record: record["mesh"].pop("kinds"))
    assert equal(out)
    assert main(["merge", str(out), "-o", str(tmp_path / "whole.onnx")]) == 0


def test_reshard_remembers_what_was_said(tmp_path, capsys):
    out = tmp_path / "out"
    args = ["shard", str(MLP), "--mesh", "zone=2,shard=2", "--axis", "zone=data", "-o", str(out)]
    assert main(args) == 0
    assert main(["reshard", str(out), "--mesh", "zone=3", "-o", str(tmp_path / "three")]) == 0
    assert json.loads((tmp_path / "three" / "manifest.json").read_text())["mesh"]["kinds"] == {"zone": "data"}
    assert equal(tmp_path / "three")
    capsys.readouterr()
    assert main(["reshard", str(out), "--mesh", "lane=3", "-o", str(tmp_path / "lanes")]) == 2
    assert "no mesh axis is called 'lane'" in capsys.readouterr().err
    assert main(["reshard", str(out), "--mesh", "ep=3", "-o", str(tmp_path / "copies")]) == 4


def test_axes_of_a_configuration(tmp_path):
    path, out = tmp_path / "gopt.toml", tmp_path / "out"
    path.write_text('[mesh]\nzone = 2\nshard = 2\n\n[axes]\nzone = "data"\n')
    assert main(["shard", str(MLP), "--config", str(path), "-o", str(out)]) == 0
    assert Verifier(out).which == [0, 1, 2, 3]
    path.write_text("[mesh]\nzone = 2\n\n[axes]\nzone = 2\n")
    assert main(["shard", str(MLP), "--config", str(path), "--dry-run"]) == 3


def trained(folder: Path, mesh: Mesh) -> dict[str, np.ndarray]:
    """States after three steps of ``gopt run`` on one file of samples."""
    b, out = Builder(), folder / str(mesh)
    sgd(b, perceptron(b))
    generator = np.random.default_rng(0)
    np.savez(folder / "data.npz", x=generator.standard_normal((48, 3)), y=generator.standard_normal((48, 2)))
    gopt.shard(gopt.load(b.save(folder / "step.onnx")), mesh).write(out)
    kept = ["--checkpoint", str(folder / f"{mesh}.kept")]
    assert main(["run", str(out), "--data", str(folder / "data.npz"), "--steps", "3", *kept]) == 0
    step = next((folder / f"{mesh}.kept").glob("step_*"))
    assert main(["merge", str(step), "-o", str(folder / f"{mesh}.onnx")]) == 0
    stored = onnx.load(folder / f"{mesh}.onnx").graph.initializer
    return {each.name: numpy_helper.to_array(each) for each in stored}


def test_training_deals_samples_out_by_what_ranks_see(tmp_path):
    """Ranks along a data axis take samples of their own; along a replica axis those of their neighbour."""
    kinds = axis_kinds({"zone": "data", "rep": "replica"})
    like = trained(tmp_path, Mesh.parse("dp=2,shard=2"))
    same = trained(tmp_path, Mesh.parse("zone=2,shard=2", {"zone": kinds["zone"]}))
    two = trained(tmp_path, Mesh.parse("shard=2"))
    copies = trained(tmp_path, Mesh.parse("rep=2,shard=2", {"rep": kinds["rep"]}))
    assert all(np.array_equal(like[name], same[name]) for name in like)
    assert all(np.array_equal(two[name], copies[name]) for name in two)
    assert not np.array_equal(like["w0"], two["w0"])


def test_ranks_that_share_no_states_are_said_to(tmp_path):
    notes = gopt.shard(gopt.load(MLP), Mesh.parse("dp=2")).report().to_json()["notes"]
    assert "no axis of the mesh dp=2 shards states: every rank holds all of them, at any stage" in notes
    assert not any("shards states" in note for note in gopt.shard(gopt.load(MLP), 2).report().to_json()["notes"])


@pytest.mark.parametrize(("mesh", "meant"), [("dp=4", "shard=4"), ("dp=2,tp=2", "shard=2,tp=2")])
def test_a_stage_that_shards_nothing_is_refused(mesh, meant, tmp_path, capsys):
    """The command line and Python say the same, each in its own options, of a folder's ranks too."""
    gopt.shard(MLP, "shard=2").write(tmp_path / "ranks")
    folder, out = str(tmp_path / "ranks"), str(tmp_path / "out")
    for verb, how in [
        ("shard", ["--stage", "3"]), ("shard", ["-O", "shard.stage=1"]), ("shard", ["--pipeline", "shard{stage=2}"]),
        ("reshard", ["--stage", "3", "-o", out]),
    ]:  # fmt: skip
        path, dry = (str(MLP), ["--dry-run"]) if verb == "shard" else (folder, [])
        assert main([verb, path, "--mesh", mesh, *dry, *how]) == 2
        said = capsys.readouterr().err
        assert f"shards nothing on the mesh {mesh}" in said and f"write --mesh {meant}, or --stage 0" in said
    for options in ({"stage": 3}, {"passes": {"shard": {"stage": 3}}}, {"pipeline": [("shard", {"stage": 3})]}):
        with pytest.raises(OptionError) as refused:
            gopt.shard(MLP, mesh, **options)
        assert f"stage=3 shards nothing on the mesh {mesh}" in str(refused.value)
        assert f'write mesh="{meant}", or stage=0' in refused.value.__notes__[0]
    assert main(["shard", str(MLP), "--mesh", mesh, "--dry-run", "--stage", "0"]) == 0
    assert main(["reshard", folder, "--mesh", mesh, "-o", out]) == 0, "the stage of the folder is not asked for"


def with_calls(folder: Path, group: str) -> Path:
    """A step that reduces its own gradients over an axis."""
    b = Builder()
    b.extra_domains += ["gopt.comm"]
    net = perceptron(b)
    for name, gradient in net.gradients.items():
        net.gradients[name] = b.op("AllReduce", gradient, domain="gopt.comm", group=group, reduce="mean")
    sgd(b, net)
    return b.save(folder / "step.onnx")


def test_calls_of_the_source_along_an_axis_of_another_name(tmp_path):
    path, mesh = with_calls(tmp_path, "zone"), Mesh.parse("zone=2,shard=2", axis_kinds({"zone": "data"}))
    with pytest.raises(OptionError, match="not declared when the source was loaded"):
        gopt.shard(gopt.load(path), Mesh.parse("zone=2", axis_kinds({"zone": "data"})))
    with pytest.raises(UnsupportedError, match="joins only a part of the ranks"):
        gopt.shard(gopt.load(path, axes={"zone": "data"}), mesh)
    made = gopt.shard(gopt.load(path, axes={"zone": "data"}), Mesh.parse("zone=2", axis_kinds({"zone": "data"})))
    made.write(tmp_path / "out")
    assert equal(tmp_path / "out") and equal(tmp_path / "out", path)


def test_calls_of_the_source_are_weighed_as_they_are_taken_over(tmp_path):
    path, out = with_calls(tmp_path, "shard"), tmp_path / "out"
    assert main(["plan", str(path), "--ranks", "2"]) == 0
    assert main(["shard", str(path), "--ranks", "2", "--auto", "-o", str(out)]) == 0
    assert equal(out, path)


def test_calls_of_the_source_are_use_enough(tmp_path):
    path, out = with_calls(tmp_path, "tp"), tmp_path / "out"
    gopt.shard(gopt.load(path), Mesh.parse("tp=2")).write(out)
    assert calls(onnx.load(rank_path(out, 0)))
    assert equal(out)


class Noisy(Builder):
    """Draws noise for every batch."""

    def input(self, name: str, shape: Sequence[int | str], dtype: str = "float32") -> str:
        value = super().input(name, shape, dtype)
        return self.op("Add", value, self.op("RandomNormalLike", value)) if name == "x" else value


def test_random_numbers_where_ranks_must_compute_the_same(tmp_path):
    b = Noisy()
    sgd(b, perceptron(b))
    source = gopt.load(b.save(tmp_path / "step.onnx"))
    gopt.shard(source, Mesh.parse("shard=2"))
    for mesh in (Mesh.parse("shard=2,tp=2"), Mesh.parse("rep=2", axis_kinds({"rep": "replica"}))):
        with pytest.raises(UnsupportedError, match="draws different values on each rank"):
            gopt.shard(source, mesh)


def test_random_numbers_inside_a_body(tmp_path):
    b = Builder()
    draw = onnx.helper.make_node("RandomNormal", [], ["drawn"], shape=[3, 5], dtype=1)
    info = onnx.helper.make_tensor_value_info("drawn", 1, (3, 5))
    body = onnx.helper.make_graph([draw], "body", [], [info])
    net = perceptron(b)
    noise = b.op("If", b.const(True, "bool"), then_branch=body, else_branch=body)
    b.output("noise", noise, (3, 5))
    sgd(b, net)
    source = gopt.load(b.save(tmp_path / "step.onnx"))
    with pytest.raises(UnsupportedError, match=r"If 'n.*draws different values on each rank"):
        gopt.shard(source, Mesh.parse("shard=2,tp=2"))


# --- passes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "pipeline", "mesh", "lacks"),
    [(MLP, "fuse-collectives,prune", "shard=4", "shard"), (MLP, "prune", "dp=2", "shard"),
     (MLP, "statistics,prune", "dp=2,shard=2", "shard"), (CNN, "shard,prune", "shard=2", "statistics"),
     (CNN, "hoist-casts,shard{stage=3}", "shard=2", "statistics"), (CNN, "statistics", "shard=2", "shard")],
)  # fmt: skip
def test_a_pass_is_missing(model, pipeline, mesh, lacks, tmp_path, capsys):
    out = tmp_path / "out"
    assert main(["shard", str(model), "--mesh", mesh, "--pipeline", pipeline, "-o", str(out)]) == 2
    text = capsys.readouterr().err
    assert f"the pipeline has no pass {lacks}: " in text and f"add {lacks} to it" in text
    assert not out.exists()


def test_micro_steps_need_shard_on_one_rank():
    with pytest.raises(OptionError, match="no pass shard: nothing else sums the gradients of 2 micro-steps"):
        gopt.shard(gopt.load(MLP), 1, accumulate=2, pipeline=build_pipeline(parse_pipeline("prune")))


def test_an_empty_pipeline():
    with pytest.raises(OptionError, match="no pass shard: 2 ranks see different data"):
        gopt.shard(gopt.load(MLP), 2, pipeline=Pipeline(()))


@pytest.mark.parametrize(
    ("model", "pipeline", "mesh"),
    [(MLP, "prune", "shard=1"), (MLP, "shard", "shard=2"), (CNN, "prune", "dp=1"),
     (CNN, "shard,statistics{statistics=local}", "shard=2"), (CNN, "statistics,shard", "dp=2"),
     (FIXTURES / "mlp_ort_adamw.onnx", "shard,prune", "shard=2"), (MLP, "fuse-collectives", "rep=2")],
)  # fmt: skip
def test_passes_that_a_step_can_do_without(model, pipeline, mesh, tmp_path):
    """Whatever is legal is right."""
    kinds = axis_kinds({"rep": "replica"}) if "rep" in mesh else {}
    pipes = build_pipeline(parse_pipeline(pipeline))
    gopt.shard(gopt.load(model), Mesh.parse(mesh, kinds), pipeline=pipes).write(tmp_path / "out")
    assert equal(tmp_path / "out")
