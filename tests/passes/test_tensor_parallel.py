"""The pass ``tensor-parallel``: ranks and source run side by side, and what the folder says."""

from __future__ import annotations

import json

import pytest
from helpers import FIXTURES, NAMES, source, stage_on
from products import fewer, part, spread

import gopt
from gopt.errors import OptionError, UnsupportedError
from gopt.ir.phase import Phase
from gopt.passes.pipeline import build_pipeline
from gopt.records.mesh import Mesh
from gopt.spmd.step_memory import live
from gopt.spmd.traffic import calls_of
from gopt.verification.verify import Verifier


def equal(folder) -> None:
    result = Verifier(folder).run(confirm=False)
    assert result.equal, result.to_json()
    assert result.compared > 0


def pipeline(**options):
    return build_pipeline(defaults={"tensor-parallel": options})


@pytest.mark.parametrize(("name", "mesh"), fewer(spread(NAMES, ["tp=2", "dp=2,tp=2", "shard=2,tp=2"]), 5))
def test_every_fixture(name, mesh, tmp_path):
    gopt.shard(source(name), Mesh.parse(mesh)).write(tmp_path / "out")
    equal(tmp_path / "out")


@pytest.mark.parametrize(("stage", "sequence"), fewer(spread(range(4), [False, True]), 2))
def test_stages_behind_it(stage, sequence, tmp_path):
    options = build_pipeline(defaults={"tensor-parallel": {"sequence": sequence}, "shard": {"stage": stage}})
    gopt.shard(source("gpt_adamw"), Mesh.parse("shard=2,tp=2"), pipeline=options).write(tmp_path / "out")
    equal(tmp_path / "out")


@pytest.mark.parametrize("partition", ["whole", "rows"])
def test_partitions_behind_it(partition, tmp_path):
    gopt.shard(source("mlp_adamw"), Mesh.parse("shard=2,tp=2"), partition=partition).write(tmp_path / "out")
    equal(tmp_path / "out")


@pytest.mark.rest
@pytest.mark.parametrize("stage", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_micro_steps(stage, tmp_path):
    made = gopt.shard(source("gpt_adamw_clip_sched_fp16"), Mesh.parse("shard=2,tp=2"), stage=stage, accumulate=2)
    made.write(tmp_path / "out")
    equal(tmp_path / "out")


def test_four_members(tmp_path):
    gopt.shard(source("gpt_adamw"), Mesh.parse("tp=4"), pipeline=pipeline(sequence=True)).write(tmp_path / "out")
    equal(tmp_path / "out")


def test_ranks_hold_parts(tmp_path):
    gopt.shard(source("mlp_sgd"), Mesh.parse("tp=2")).write(tmp_path / "out")
    manifest = json.loads((tmp_path / "out/manifest.json").read_text())
    boxes = {
        piece["tensor"]: piece["box"] for state in manifest["ranks"][1]["state"] for piece in state["pieces"]
    }  # fmt: skip
    assert boxes["fc1.weight"] == [[32, 64], [0, 32]]
    assert boxes["fc1.bias"] == [[32, 64]]
    assert boxes["fc2.weight"] == [[0, 10], [32, 64]]
    assert [state["pieces"][0]["tensor"] for state in manifest["common"]["state"]] == ["fc2.bias"]
    shapes = {state["tensor"]: state["shape"] for state in manifest["states"]}
    assert shapes["fc1.weight"] == [64, 32]  # of the source


def test_one_member_changes_nothing():
    made = gopt.shard(source("mlp_sgd"), Mesh.parse("shard=2,tp=1"))
    assert made.ran[0].record.note == "no axis splits the computation"
    assert not made.program.parts


def test_the_report_says_what_is_split():
    facts = gopt.shard(source("mlp_sgd"), Mesh.parse("tp=2")).ran[0].record.facts
    assert set(facts["parameters"]) == {"fc1.weight", "fc1.bias", "fc2.weight"}
    assert facts["mappings"] == {"reduce from region": 1}
    assert facts["computed_whole"] == {}


def test_a_step_without_a_pair_is_refused():
    with pytest.raises(UnsupportedError, match="no parameter can be split along tp"):
        gopt.shard(gopt.load(FIXTURES / "mlp_sgd.onnx"), Mesh.parse("tp=128"))


def test_tokens_need_a_dimension():
    with pytest.raises(OptionError, match="the 8 tokens of 'x' do not cut into 16 parts along tp"):
        gopt.shard(source("gpt_adamw"), Mesh.parse("tp=16"), pipeline=pipeline(sequence=True))


UNEVEN = ["mlp_adamw", "emb_adamw", "cnn_sgd", "gpt_adamw", "gpt_adamw_clip_sched_fp16"]


@pytest.mark.parametrize(
    ("name", "mesh", "stage"), fewer(spread(UNEVEN, ["dp=2,tp=3", "shard=2,tp=3", "tp=4"], [0, 2, 3]), 7)
)
def test_uneven_parts(name, mesh, stage, tmp_path):
    gopt.shard(source(name), Mesh.parse(mesh), stage=stage_on(mesh, stage)).write(tmp_path / "out")
    equal(tmp_path / "out")


@pytest.mark.parametrize("sequence", [False, True])
def test_uneven_parts_of_micro_steps(sequence, tmp_path):
    options = build_pipeline(defaults={"tensor-parallel": {"sequence": sequence}, "shard": {"stage": 3}})
    gopt.shard(source("mlp_adamw"), Mesh.parse("shard=2,tp=3"), pipeline=options, accumulate=2).write(tmp_path / "out")
    equal(tmp_path / "out")


@pytest.mark.parametrize(("rule", "first"), [("balanced", 0), ("ceil", 0), ("floor-last", 4)])
def test_each_rule_of_sizes(rule, first, tmp_path):
    """Its name is in report and manifest; the ranks with the largest parts decide what all must decide alike."""
    made = gopt.shard(source("mlp_adamw"), Mesh.parse("tp=5"), pipeline=pipeline(sizes=rule))
    assert made.program.of(first) is made.program and len(made.program.variants) > 1
    made.write(tmp_path / "out")
    equal(tmp_path / "out")
    manifest, report = (json.loads((tmp_path / "out" / f"{name}.json").read_text()) for name in ("manifest", "report"))
    assert manifest["split"] == {"tp": rule}
    assert next(each for each in report["pipeline"] if each["name"] == "tensor-parallel")["options"]["sizes"] == rule


@pytest.mark.parametrize("partition", part(["whole", "rows", "flat"], 1, first=1))
def test_what_is_replicated_lies_in_the_same_buckets_whatever_the_sizes(partition, tmp_path):
    """With caps at which the sizes of parts would pack otherwise."""
    options = {"partition": partition, "bucket-mb": 0.002, "rule": "ceil" if partition == "rows" else "balanced"}
    passes = build_pipeline(defaults={"shard": options, "fuse-collectives": {"cap-mb": 0.002}})
    made = gopt.shard(source("gpt_adamw"), Mesh.parse("shard=2,tp=3"), pipeline=passes)
    assert len({repr(each.layout) for each in made.program.variants}) == 1
    made.write(tmp_path / "out")
    equal(tmp_path / "out")


def test_figures_are_those_of_each_rank():
    report = gopt.shard(source("gpt_adamw"), Mesh.parse("dp=2,tp=3")).report()
    held = [each.nbytes.parameters for each in report.ranks]
    assert held[0] == held[3] > held[1] == held[2] == held[4] == held[5]
    sent = [each.bytes_sent for each in report.ranks]
    assert sent[0] > sent[1] and abs(report.figures.traffic.sent - sum(sent) / len(sent)) <= 4  # rounded call by call
    assert {each.ranks for each in report.added_ops} == {"0-5"}, "the same nodes, told once for all ranks"


def test_fewer_heads_than_members_stay_whole(tmp_path):
    made = gopt.shard(source("gpt_adamw"), Mesh.parse("tp=3"))
    assert "2 heads of 8 stays whole: they are fewer than 3 members (2 times)" in made.ran[0].record.note


AXES = ["cp=2", "sp=2", "cp=3", "cp=2,tp=2", "sp=2,tp=2", "cp=2,sp=2", "dp=2,cp=2", "shard=2,cp=2"]


@pytest.mark.parametrize(
    ("name", "mesh"), fewer(spread(["gpt_adamw", "emb_adamw", "gpt_adamw_clip_sched_fp16"], AXES), 2)
)
def test_tokens_along_axes_of_their_own(name, mesh, tmp_path):
    if (name, mesh) == ("emb_adamw", "cp=2,sp=2"):
        pytest.skip("six tokens are not cut into four equal parts")
    gopt.shard(source(name), Mesh.parse(mesh)).write(tmp_path / "out")
    equal(tmp_path / "out")


def test_tokens_along_two_axes_by_sequence(tmp_path):
    gopt.shard(source("gpt_adamw"), Mesh.parse("cp=2,tp=2"), pipeline=pipeline(sequence=True)).write(tmp_path / "out")
    equal(tmp_path / "out")


def test_samples_along_an_axis_of_any_name_and_micro_steps(tmp_path):
    options = {"tensor-parallel": {"inputs": "x:dim0@cp;y:dim0@cp"}}
    passes = build_pipeline(defaults=options)
    gopt.shard(source("mlp_adamw"), Mesh.parse("cp=2"), pipeline=passes, accumulate=2).write(tmp_path / "out")
    equal(tmp_path / "out")


def test_the_manifest_says_what_a_rank_is_fed(tmp_path):
    gopt.shard(source("gpt_adamw"), Mesh.parse("cp=3,tp=2")).write(tmp_path / "out")
    manifest = json.loads((tmp_path / "out/manifest.json").read_text())
    fed = [{each["input"]: each["box"] for each in rank["fed"]} for rank in manifest["ranks"]]
    assert [each["x"] for each in fed[::2]] == [[[0, 4], [0, 3]], [[0, 4], [3, 6]], [[0, 4], [6, 8]]]
    assert fed[0] == fed[1], "ranks along tp are fed alike"
    assert manifest["common"]["inputs"][0]["shape"] == [4, 8], "of the whole batch"
    assert manifest["split"] == {"tp": "balanced", "cp": "balanced"}


def test_activations_gathered_anew_in_the_backward(tmp_path):
    """One call more for each of the forward: what it gathered does not live until the backward reads it."""
    kept, anew = (
        gopt.shard(source("gpt_adamw"), Mesh.parse("tp=2"), pipeline=pipeline(sequence=True, regather=regather))
        for regather in (False, True)
    )

    def gathers(made: gopt.Sharded, phase: Phase) -> int:
        return sum(node.op_type == "AllGather" and node.phase is phase for node in made.program.graph.nodes)

    forward = gathers(kept, Phase.FORWARD)
    assert forward == gathers(anew, Phase.FORWARD) > 0
    assert gathers(anew, Phase.BACKWARD) == gathers(kept, Phase.BACKWARD) + forward
    assert peak(anew) < peak(kept)
    anew.write(tmp_path / "out")
    equal(tmp_path / "out")


def peak(made: gopt.Sharded) -> int:
    """Bytes alive at once on the first rank."""
    return live(made.program, calls_of(made.program), made.program.mesh.coordinates(0)).peak


def test_what_the_backward_sums_anew_is_not_packed_with_the_sum_of_the_forward():
    made = gopt.shard(source("families/t5_adamw"), Mesh.parse("tp=2"), pipeline=pipeline(regather=True))
    nodes = made.program.graph.nodes
    again = [node for node in nodes if node.op_type == "AllReduce" and node.outputs[0].endswith(".whole1")]
    forward = max(at for at, node in enumerate(nodes) if node.phase is Phase.FORWARD and not node.made_by)
    assert len(again) == 2 and all(len(node.outputs) == 1 and nodes.index(node) > forward for node in again)


@pytest.mark.parametrize(
    ("name", "mesh", "sequence"),
    [("gpt_adamw", "tp=2", True), ("gpt_adamw", "cp=2,tp=2", True), ("gpt_adamw", "sp=2", False),
     ("families/moe_adamw", "ep=2", False), ("families/llama_adamw_clip", "tp=4", True), ("cnn_sgd", "h=2", False)],
)  # fmt: skip
def test_no_pair_of_inverse_conversions_is_left(name, mesh, sequence):
    made = gopt.shard(source(name), Mesh.parse(mesh), pipeline=pipeline(sequence=sequence))
    graph = made.program.graph
    makers = graph.producers()
    inverse = {"DimSlice": "AllGather", "AllGather": "DimSlice", "AllToAll": "AllToAll"}
    calls = 0
    for node in graph.nodes:
        before = makers.get(node.inputs[0]) if node.op_type in inverse else None
        calls += node.op_type in inverse
        if before is not None and before.op_type == inverse[node.op_type]:
            same = [before.attributes.get(key) == node.attributes.get(key) for key in ("group", "axis", "sizes")]
            assert not all(same) or node.op_type == "AllToAll", node.label
            back = [before.attributes.get(f"{a}_axis") == node.attributes.get(f"{b}_axis") is not None
                    for a, b in (("split", "concat"), ("concat", "split"))]  # fmt: skip
            assert not all(back), node.label
    assert calls
