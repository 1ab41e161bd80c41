"""Stages of a pipeline: each computes and holds its part, and the step is the source's."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest
import specs
from gopt.cli.main import main
from helpers import FIXTURES, Builder, accept, calls, edit_file, edit_rank, source
from onnx import ModelProto, numpy_helper
from option_gen.make import written
from products import part
from steps_gen.__main__ import setting, tried
from steps_gen.judge import GOOD
from steps_gen.plan import draw

import gopt
from gopt.analysis.gradient_terms import gradient_terms
from gopt.analysis.training import Phase
from gopt.errors import InvariantError, OptionError, UnsupportedError
from gopt.lower.phases import phases
from gopt.passes.pipeline_stages.choose import _best_cuts, parameter_stages
from gopt.records.mesh import PIPELINE
from gopt.records.placements import OnMember, Sharding
from gopt.schedules.builders import build_schedule
from gopt.schedules.schedule_file import to_text
from gopt.spmd.stage_plan import transfers
from gopt.spmd.verifier import infer_shardings

FIXTURE_NAMES = ("mlp_adamw", "gpt_adamw_clip_sched_fp16", "cnn_sgd", "emb_adamw", "mlp_lamb", "mlp_adamw_fp16_scaler")
CASES = [
    (fixture, mesh, options)
    for fixture in FIXTURE_NAMES
    for mesh, options in (
        ("pp=2", {}),
        ("pp=3", {"accumulate": 3}),
        ("dp=2,pp=2", {"stage": 0, "accumulate": 2}),
        ("shard=2,pp=2", {"stage": 1}),
        ("pp=2,shard=2", {"stage": 2, "accumulate": 2}),
        ("shard=2,pp=2", {"stage": 3, "accumulate": 2}),
        ("tp=2,pp=2", {}),
        ("pp=2", {"accumulate": 4, "schedule": "gpipe"}),
        ("pp=2", {"accumulate": 3, "schedule": "interleaved:2"}),
        ("shard=2,pp=2", {"stage": 2, "accumulate": 4, "schedule": "zb-h1"}),
        ("pp=2,shard=2", {"stage": 3, "accumulate": 2, "schedule": "zb-v"}),
    )
]


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(("fixture", "mesh", "options"), part(CASES, 8))
def test_ranks_on_stages_compute_the_step(fixture, mesh, options, tmp_path):
    gopt.shard(source(fixture), mesh, **options).write(tmp_path / "ranks")
    result = gopt.verify(tmp_path / "ranks", steps=2, confirm=False)
    assert result.equal, result.reason()
    assert gopt.prove(tmp_path / "ranks").proven


@pytest.mark.slow
@pytest.mark.parametrize(("fixture", "mesh", "options"), CASES)
def test_all_ranks_on_stages_compute_the_step(fixture, mesh, options, tmp_path):
    test_ranks_on_stages_compute_the_step(fixture, mesh, options, tmp_path)


@pytest.mark.parametrize("seed", part(range(60), 6))
def test_drawn_steps_on_stages_are_right_or_refused(seed):
    drawn = setting(seed)
    stages = 2 + seed % 2
    mesh = f"{drawn.mesh},pp={stages}" if seed % 3 else f"pp={stages},{drawn.mesh}"
    micro = drawn.micro if seed % 4 else max(drawn.micro, 2)
    verdict = tried(draw(seed), replace(drawn, mesh=mesh, micro=micro))
    assert verdict.outcome in GOOD, f"{draw(seed).told()} on {mesh}: {verdict}"


@pytest.mark.usefixtures("unchecked")
def test_a_statistic_of_the_first_rank_stays_on_its_stage(tmp_path):
    stages = {"pipeline": {"stages": "conv*+bn*|fc*"}}
    gopt.shard(source("cnn_sgd"), "dp=2,pp=2", statistics="root", passes=stages).write(tmp_path / "ranks")
    result = gopt.verify(tmp_path / "ranks", steps=2, confirm=False)
    assert result.equal, result.reason()


def test_a_rank_has_the_gradients_of_its_stage():
    report = gopt.shard(source("gpt_adamw"), "pp=2").report()
    for rank in report.ranks:
        assert rank.nbytes.gradients == rank.nbytes.parameters


@pytest.mark.parametrize(
    ("mesh", "sharing"), [("pp=2", "not shared"), ("tp=2", "not shared"), ("dp=2", "replicated"), ("shard=2", "split")]
)
def test_buckets_say_who_updates(mesh, sharing, tmp_path, monkeypatch, capsys):
    """Without a data axis no rank repeats the update of another: its parameters are those of its stage, or parts."""
    monkeypatch.chdir(tmp_path)
    options = ["--mesh", mesh, "--micro-batches", "2", "--no-prove", "-o", "out"]
    assert main(["shard", str(FIXTURES / "mlp_adamw.onnx"), *options]) == 0
    table = capsys.readouterr().out.partition("Buckets")[2]
    assert table.splitlines()[2].startswith(f"b0    {sharing} ")
    assert main(["explain", "out", "b0"]) == 0
    assert f"update {sharing};" in " ".join(capsys.readouterr().out.split())


def test_the_output_names_stages(tmp_path, capsys):
    """What each stage holds, the messages beside the calls, and where a value of another stage is made."""
    folder = str(tmp_path / "ranks")
    main(["shard", str(FIXTURES / "gpt_adamw.onnx"), "--mesh", "pp=2", "--micro-batches", "2", "-o", folder])
    shown = capsys.readouterr().out
    assert "parameters of pipeline stages: 0 has 14 of 4,432 elements, 1 has 14 of 3,312 elements" in shown
    assert "beside 8 sends and receives of a rank" in shown
    main(["explain", folder, "add_2"])
    assert "from rank 1 by stage-transfers: pipeline stage 0 runs it" in capsys.readouterr().out
    main(["explain", folder, "gopt.stages.add_2.stage1"])
    assert "values that another pipeline stage reads" in capsys.readouterr().out


SCHEDULES = ("gpipe", "1f1b", "interleaved:2", "zb-h1", "zb-v")


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_trains_as_ranks_with_all_layers_do(schedule, tmp_path):
    """The same losses as two ranks of dp, step after step."""
    training = source("gpt_adamw").training
    generator = np.random.default_rng(4)
    arrays = {}
    for name in training.batch:
        type = training.graph.types[name]
        arrays[name] = generator.integers(0, 16, (32, *type.dims[1:])).astype(type.dtype)
    losses = {}
    for name, mesh, options in (("plain", "dp=2", {}), ("stages", "dp=2,pp=2", {"schedule": schedule})):
        gopt.shard(source("gpt_adamw"), mesh, accumulate=2, **options).write(tmp_path / name)
        losses[name] = gopt.run(tmp_path / name, arrays, 3, settings={"lr": 1e-2}).losses
    assert losses["plain"] == pytest.approx(losses["stages"], rel=1e-5)
    assert losses["plain"][0] != losses["plain"][2]


@pytest.mark.usefixtures("unchecked")
def test_a_schedule_of_the_user_is_taken_and_checked(tmp_path):
    file = tmp_path / "mine.txt"
    file.write_text(to_text(build_schedule("gpipe", 2, 3)).replace("name gpipe", "name mine"))
    gopt.shard(source("mlp_adamw"), "pp=2", accumulate=3, schedule=str(file)).write(tmp_path / "ranks")
    assert (tmp_path / "ranks" / "schedule.txt").read_text() == file.read_text()
    lines = file.read_text().splitlines()
    backward = next(line for line in lines if "backward" in line)
    file.write_text("\n".join(line for line in lines if line != backward))
    with pytest.raises(OptionError, match="backward of stage 0, micro-batch 0"):
        gopt.shard(source("mlp_adamw"), "pp=2", accumulate=3, schedule=str(file))
    file.write_text(to_text(build_schedule("gpipe", 2, 3)))
    with pytest.raises(OptionError, match="is for 3 micro-batches, and there are 4"):
        gopt.shard(source("mlp_adamw"), "pp=2", accumulate=4, schedule=str(file))
    with pytest.raises(OptionError, match="orders micro-batches, and a step has one"):
        gopt.shard(source("mlp_adamw"), "pp=2", schedule="1f1b")
    with pytest.raises(OptionError, match="has no axis pp"):
        gopt.shard(source("mlp_adamw"), 2, accumulate=2, schedule="1f1b")


def test_a_folder_of_stages_is_replaced_and_a_foreign_schedule_is_not(tmp_path):
    folder = tmp_path / "ranks"
    for schedule in ("interleaved:2", "zb-h1"):
        gopt.shard(source("mlp_adamw"), "pp=2", accumulate=2, schedule=schedule).write(folder, force=True)
    gopt.shard(source("mlp_adamw"), "pp=2").write(folder, force=True)
    assert not (folder / "schedule.txt").exists()
    (folder / "schedule.txt").write_text("mine")
    with pytest.raises(OptionError, match=r"holds 'schedule\.txt', which gopt did not write"):
        gopt.shard(source("mlp_adamw"), "pp=2").write(folder, force=True)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("fixture", "mesh", "options"),
    [
        ("families/llama_adamw_clip", "pp=2,tp=2", {}),
        ("families/t5_adamw", "pp=2,cp=2", {}),
        ("families/vit_mom", "pp=2,sp=2", {}),
        ("families/moe_adamw", "ep=2,pp=2", {"accumulate": 2}),
        ("cnn_sgd", "pp=2,h=2", {}),
        ("cnn_sgd", "dp=2,pp=2", {"statistics": "root"}),
        ("cnn_sgd", "dp=2,pp=2", {"statistics": "local", "accumulate": 2}),
    ],
)
def test_uneven_parts_and_every_rule_of_statistics_stand_on_stages(fixture, mesh, options, tmp_path):
    test_ranks_on_stages_compute_the_step(fixture, mesh, options, tmp_path)


@pytest.mark.parametrize(
    ("mesh", "options"),
    [("pp=2", {}), ("pp=2,shard=2", {"stage": 2}), ("dp=2,pp=2", {"accumulate": 3, "schedule": "zb-h1"})],
)
def test_norms_of_a_stage_travel_in_one_message(mesh, options, tmp_path):
    golden = Path(__file__).parents[1] / "golden/stage-transfers/one_message.txt"
    text = golden.read_text().partition("=== source\n")[2].partition("\n=== ")[0]
    step = specs.save(onnx.parser.parse_model('<ir_version: 10, opset_import: ["" : 20]>\n' + text), tmp_path)
    gopt.shard(step, mesh, passes={"pipeline": {"stages": "w[01]|w2"}}, **options).write(tmp_path / "ranks")
    assert gopt.verify(tmp_path / "ranks", steps=2, confirm=False).equal
    assert gopt.prove(tmp_path / "ranks").verdict.value == "proven"


TIED = [
    (fixture, mesh, options)
    for fixture in ("gpt_adamw", "families/t5_adamw")
    for mesh, options in (
        ("pp=2", {"schedule": "gpipe"}),
        ("pp=2", {"schedule": "interleaved:2"}),
        ("pp=2", {"schedule": "zb-v"}),
        ("pp=3", {}),
        ("shard=2,pp=2", {"stage": 1}),
        ("pp=2,shard=2", {"stage": 2}),
        ("pp=2,tp=2", {"schedule": "zb-h1"}),
        ("dp=2,pp=2", {"stage": 0}),
    )
]


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(("fixture", "mesh", "options"), part(TIED, 5))
def test_a_tied_parameter_is_sent_once_a_step(fixture, mesh, options, tmp_path):
    """The last stage reads its own copy, which the update renews; no micro-batch sends or saves it. The last stage sums
    its part of the gradient over micro-batches, and sends the sum; at stage 2 each micro-batch reduces the gradient."""
    tied = {"gpt_adamw": "wte.weight", "families/t5_adamw": "table.weight"}[fixture]
    sharded = gopt.shard(source(fixture), mesh, accumulate=3, **options)
    types = sharded.program.graph.types
    sent = {
        phase.name: sum(
            types[node.first_output] == types[tied]
            for node in phase.graph.nodes if transfers(node) and node.phase is not Phase.BACKWARD
        )
        for phase in phases(sharded.program)
    }  # fmt: skip
    copies = [state for state in sharded.program.states if state.copy]
    assert len(copies) == (0 if "zb-v" in options.values() else 1), "with zb-v one member has both stages"
    sums = [item for item in sharded.program.accumulators if item.input.endswith(".sum")]
    assert sent.pop("update") == len(copies) + len(sums) and not any(sent.values())
    assert not any(name.endswith(tied) for phase in phases(sharded.program) for name in phase.saved)
    gradient = sharded.program.training.gradients[tied]
    terms = {name for name, of in gradient_terms(sharded.program.training).items() if of == gradient}
    in_micro = [node.inputs[0] for node in sharded.program.graph.nodes if transfers(node) and terms & {*node.inputs}]
    assert (len(in_micro), len(sums)) == ((1, 0) if options.get("stage") == 2 else (0, len(copies)))
    sharded.write(tmp_path / "ranks")
    result = gopt.verify(tmp_path / "ranks", steps=3, confirm=False)
    assert result.equal, result.reason()
    assert gopt.prove(tmp_path / "ranks").proven


@pytest.mark.parametrize("fixture", ["sparse/towers_product_sgd", "sparse/towers_adam"])
@pytest.mark.parametrize(
    ("mesh", "options", "sent"),
    [
        ("pp=2", {"schedule": "zb-v"}, [(772, 0), (384, 2 * 2048)]),
        ("pp=3", {"schedule": "1f1b"}, [(384, 0), (192, 2048), (200, 2048)]),
        ("pp=2,shard=2", {"schedule": "zb-v", "stage": 1}, [(772, 0)] * 2 + [(384, 2 * 2048)] * 2),
        ("pp=2,shard=2", {"schedule": "zb-v", "stage": 2}, [(772, 0)] * 2 + [(384 + 2 * 2048, 0)] * 2),
    ],
)
def test_a_stage_without_a_term_of_its_gradient_sums_no_micro_batches(fixture, mesh, options, sent, tmp_path):
    """Two later stages have a term each of the gradient of a table of 2,048 bytes. ``sent``: bytes that a rank sends
    for each micro-batch (activations of 192 bytes, the loss), and for each update: a sum of each term, but not at
    stage 2, where micro-batches reduce gradients."""
    for count in (2, 4):
        report = gopt.shard(source(fixture), mesh, accumulate=count, prove=False, **options).report()
        told = [sum(call.bytes_sent for call in rank.communication if call.op == "Send") for rank in report.ranks]
        assert told == [count * each + once for each, once in sent], count
    sharded = gopt.shard(source(fixture), mesh, accumulate=3, prove=False, **options)
    table = sharded.program.graph.type_of("items")
    assert (table.nbytes, sum(item.type == table for item in sharded.program.accumulators)) == (
        2048, 2 if options.get("stage") != 2 else 0
    )  # fmt: skip
    sharded.write(tmp_path / "ranks")
    result = gopt.verify(tmp_path / "ranks", steps=3, confirm=False)
    assert result.equal, result.reason()
    assert gopt.prove(tmp_path / "ranks", certificate=tmp_path / "step.cert").proven
    assert main(["prove", str(tmp_path / "ranks"), "--check", str(tmp_path / "step.cert")]) == 0


@pytest.mark.usefixtures("unchecked")
def test_a_copy_of_a_tied_parameter_is_no_further_state(tmp_path):
    """A merged model and other meshes have the parameter once, and a trained value comes back in both copies."""
    before, after, back = tmp_path / "before", tmp_path / "after", tmp_path / "back"
    gopt.shard(source("gpt_adamw"), "pp=2", accumulate=2).write(before)
    gopt.reshard(before, "shard=2").write(after)
    gopt.reshard(after, "pp=2").write(back)
    wanted = values(before, tmp_path / "before.onnx")
    assert not any(name.startswith("gopt.") for name in wanted)
    for folder in (after, back):
        found = values(folder, tmp_path / f"{folder.name}.onnx")
        assert all(np.array_equal(found[name], wanted[name]) for name in wanted)
    assert gopt.verify(back, steps=2, confirm=False).equal


@pytest.mark.rest
def test_states_go_from_any_stages_to_any_mesh_and_back(tmp_path):
    """By the names of the source: bytes are equal on every mesh."""
    before = tmp_path / "before"
    gopt.shard(source("gpt_adamw"), "pp=2", accumulate=2, schedule="interleaved:2").write(before)
    wanted = values(before, tmp_path / "before.onnx")
    for mesh in ("shard=2", "pp=3", "pp=2,shard=2", "tp=2", "dp=2"):
        after, back = tmp_path / mesh, tmp_path / f"{mesh} back"
        gopt.reshard(before, mesh).write(after)
        gopt.reshard(after, "pp=2").write(back)
        for folder in (after, back):
            found = values(folder, tmp_path / f"{folder.name}.onnx")
            assert found.keys() == wanted.keys()
            assert all(np.array_equal(found[name], wanted[name]) for name in wanted)


def values(folder, model):
    gopt.merge(folder, model)
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in onnx.load(model).graph.initializer}


# --- where parameters go ---


def test_the_forward_is_cut_with_the_least_cost_of_the_largest_stage():
    rng = np.random.default_rng(5)
    for _ in range(200):
        runs, stages = int(rng.integers(2, 9)), int(rng.integers(2, 5))
        if stages > runs:
            continue
        costs, crossing = rng.integers(1, 50, runs), [int(n) for n in rng.integers(0, 100, runs)]
        before = [0, *np.cumsum(costs).tolist()]
        cuts = _best_cuts(before, crossing, stages)
        assert len(cuts) == stages - 1 and cuts == sorted(set(cuts))
        largest = {
            chosen: max(before[stop] - before[start] for start, stop in itertools.pairwise((0, *chosen, runs)))
            for chosen in itertools.combinations(range(1, runs), stages - 1)
        }
        limit = max(int(min(largest.values()) * 1.05), min(largest.values()))
        allowed = [chosen for chosen, cost in largest.items() if cost <= limit]
        assert tuple(cuts) in allowed
        assert sum(crossing[c] for c in cuts) == min(sum(crossing[c] for c in cut) for cut in allowed)


def test_states_follow_their_parameter_and_scalars_are_everywhere():
    training = source("gpt_adamw").training
    stages = parameter_stages(training, 2, "")
    for state in training.states:
        if state.of is not None:
            assert stages[state.tensor] == stages[state.of]
    assert {stages[state.tensor] for state in training.parameters} == {0, 1}


def test_patterns_say_what_a_stage_has():
    sharded = gopt.shard(
        source("gpt_adamw"), "pp=3", passes={"pipeline": {"stages": "w?e*|blocks.0.*|blocks.1.*+ln_f*"}}
    )
    states = sharded.program.stages.states
    assert [states[name] for name in ("wte.weight", "blocks.0.up.weight", "blocks.1.up.bias", "ln_f.bias")] == [
        0,
        1,
        2,
        2,
    ]


@pytest.mark.parametrize(
    ("mesh", "stages", "error", "text"),
    [
        ("pp=2", "fc1*|fc2*|fc3*", OptionError, "patterns for 3 stages"),
        ("pp=2", "fc1*|fd*", OptionError, "'fd.' matches no parameter"),
        ("pp=2", "fc1*+fc2*|fc1.weight", OptionError, "stage 1 has no parameter"),
        ("pp=2", "fc2*|fc1*", OptionError, "behind parameters of stage 1"),
        ("pp=99", "", UnsupportedError, "too few parameters for 99 pipeline stages"),
    ],
)
def test_what_is_no_pipeline_is_refused_by_name(mesh, stages, error, text):
    with pytest.raises(error, match=text):
        gopt.shard(source("mlp_adamw"), mesh, passes={"pipeline": {"stages": stages}})


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
@pytest.mark.parametrize("name", ["c08_scale_ema", "moco"])
def test_a_statistic_that_the_forward_reads_and_the_backward_moves_is_refused(name, schedule):
    with pytest.raises(UnsupportedError, match="of a micro-batch read the running statistic"):
        gopt.shard(FIXTURES / "cases" / "roles" / f"{name}.onnx", "pp=2", accumulate=2, schedule=schedule)


def test_a_statistic_is_refused_where_forwards_have_another_order_than_micro_batches(tmp_path):
    with pytest.raises(UnsupportedError, match=r"in the order \[1, 0, 2\], and the running statistic"):
        gopt.shard(source("cnn_sgd"), "pp=2", accumulate=3, schedule=written("drawn 21 2 3", tmp_path))


def test_a_statistic_that_one_action_reads_and_moves_is_right_on_stages(tmp_path):
    step = FIXTURES / "cases" / "roles" / "sumloss_unread.onnx"
    gopt.shard(step, "pp=2", accumulate=2, schedule="1f1b").write(tmp_path / "out")
    assert gopt.verify(tmp_path / "out").equal


def test_options_without_the_axis_are_refused():
    with pytest.raises(OptionError, match="has no axis pp"):
        gopt.shard(source("mlp_adamw"), 2, passes={"pipeline": {"stages": "fc1*|fc2*"}})


def test_a_value_is_drawn_on_one_stage(tmp_path):
    """Members of the axis see the same samples, and would draw apart."""
    b = Builder()
    x, w, v = b.input("x", (4, 6)), b.parameter("w", (6, 6)), b.parameter("v", (6, 6))
    h = b.op("MatMul", x, w)
    mask = b.op("RandomUniformLike", h, seed=3.0)
    kept = b.op("Mul", h, mask)
    out = b.op("MatMul", kept, v)
    b.output("loss", b.op("ReduceSum", b.op("Mul", out, out), keepdims=0), ())
    back = b.op("MatMul", b.op("Add", out, out), b.op("Transpose", v, perm=[1, 0]))
    dv = b.op("MatMul", b.op("Transpose", kept, perm=[1, 0]), b.op("Add", out, out))
    dw = b.op("MatMul", b.op("Transpose", x, perm=[1, 0]), b.op("Mul", back, mask))
    for name, gradient in (("w", dw), ("v", dv)):
        b.output(f"{name}_out", b.op("Sub", name, b.op("Mul", gradient, b.const(0.01))), (6, 6))
    program = gopt.shard(b.save(tmp_path / "step.onnx"), "pp=2").program
    (drawing,) = (node for node in program.graph.nodes if node.op_type == "RandomUniformLike")
    assert drawing.sharding.on(PIPELINE) == OnMember(0)


@pytest.mark.usefixtures("unchecked")
def test_numbers_drawn_from_nothing_are_sent_to_readers(tmp_path):
    gopt.shard(source("real/dropout_mlp_random"), "pp=2", accumulate=2).write(tmp_path / "ranks")
    assert gopt.verify(tmp_path / "ranks", steps=2, confirm=False).equal
    assert gopt.prove(tmp_path / "ranks").proven


def test_a_second_draw_of_the_same_name_is_not_taken_for_the_first(tmp_path):
    """The backward of a stage draws its mask again, or the other stage does, under the name of the forward's draw."""
    folder = tmp_path / "ranks"
    gopt.shard(source("real/dropout_mlp_random"), "pp=2", accumulate=2, prove=False).write(folder)
    forward = onnx.load(folder / "rank_0000.forward.onnx", load_external_data=False).graph
    (drawing,) = (node for node in forward.node if node.op_type == "RandomUniform")
    (mask,) = (node for node in forward.node if drawing.output[0] in node.input)

    def draw_again(model: ModelProto) -> None:
        graph = model.graph
        for node in graph.node:
            node.input[:] = ["again" if name == mask.output[0] else name for name in node.input]
        for copied in (mask, drawing):
            graph.node.insert(0, copied)
        graph.node[1].output[0] = "again"
        known = {tensor.name for tensor in graph.initializer}
        graph.initializer.extend(t for t in forward.initializer if t.name in mask.input and t.name not in known)

    edit_file(folder / "rank_0000.backward.onnx", draw_again)
    with pytest.raises(UnsupportedError, match="draws 'draw_0' in forward and again in backward"):
        gopt.prove(folder)

    gopt.shard(source("real/dropout_mlp_random"), "pp=2", accumulate=2, prove=False).write(folder, force=True)

    def draw_too(model: ModelProto) -> None:
        for node in model.graph.node:
            node.input[:] = ["draw_0" if name == "draw_1" else name for name in node.input]
            node.output[:] = ["draw_0" if name == "draw_1" else name for name in node.output]

    edit_file(folder / "rank_0001.forward.onnx", draw_too)
    assert not gopt.prove(folder).proven


# --- planted errors ---


def lost_send(model: ModelProto) -> None:
    model.graph.node.remove(calls(model, "Send")[0])


def exchanged_tags(model: ModelProto) -> None:
    one, two = calls(model, "Send")[:2]
    tags = [next(a for a in node.attribute if a.name == "tag") for node in (one, two)]
    tags[0].i, tags[1].i = tags[1].i, tags[0].i


def wrong_peer(model: ModelProto) -> None:
    next(a for a in calls(model, "Recv")[0].attribute if a.name == "peer").i = 1


@pytest.mark.parametrize(
    ("rank", "edit", "text"),
    [
        (0, lost_send, "never sends"),
        (1, exchanged_tags, "as rank 1 sends"),
        (2, wrong_peer, "another rank along pp"),
    ],
)
def test_a_planted_error_is_named(rank, edit, text, tmp_path):
    folder = tmp_path / "ranks"
    gopt.shard(source("gpt_adamw"), "dp=2,pp=2").write(folder)
    edit_rank(folder, rank, edit)
    accept(folder)
    proof = gopt.prove(folder)
    assert not proof.proven and text in str(proof.to_json())


def lost_micro_batch(model: ModelProto) -> None:
    """The sum of gradients stays as it was."""
    name = next(out.name for out in model.graph.output if out.name.endswith("_sum_out"))
    node = next(node for node in model.graph.node if name in node.output)
    del node.input[:], node.attribute[:]
    node.op_type = "Identity"
    node.input.append(name.removesuffix("_out"))


def norm_of_one_stage(model: ModelProto) -> None:
    """Squares of another stage are received, and left out."""
    received = {node.output[0] for node in calls(model, "Recv")}
    node = next(node for node in model.graph.node if node.op_type == "Add" and received & {*node.input})
    kept = [name for name in node.input if name not in received]
    del node.input[:]
    node.input.extend(kept * 2 if len(kept) == 1 else kept)
    node.op_type = "Max"


@pytest.mark.parametrize(
    ("mesh", "options", "file", "edit"),
    [
        ("shard=2,pp=2", {"accumulate": 2}, "rank_0000.backward.onnx", lost_micro_batch),
        ("shard=2,pp=2", {"accumulate": 2}, "rank_0003.update.onnx", norm_of_one_stage),
        ("pp=2", {"accumulate": 2, "schedule": "zb-h1"}, "rank_0001.update.onnx", norm_of_one_stage),
    ],
)
def test_a_step_with_a_planted_error_is_different(mesh, options, file, edit, tmp_path):
    folder = tmp_path / "ranks"
    gopt.shard(source("gpt_adamw_clip_sched_fp16"), mesh, **options).write(folder)
    edit_file(folder / file, edit)
    accept(folder)
    assert gopt.prove(folder).verdict.value == "different"


def lost_share(model: ModelProto) -> None:
    """The sum that another stage sent is left out of the gradient of the tied parameter."""
    (node,) = (node for node in model.graph.node if "".join(node.output).endswith(".sum.total"))
    del node.input[1:]
    node.op_type = "Identity"


def share_of_no_micro_batch(model: ModelProto) -> None:
    """The sum of the tied gradient on the other stage stays as it was."""
    name = next(out.name for out in model.graph.output if out.name.endswith(".sum_out"))
    (node,) = (node for node in model.graph.node if name in node.output)
    del node.input[1:]
    node.op_type = "Identity"


def share_counted_twice(model: ModelProto) -> None:
    """Each micro-batch adds its term of the tied gradient two times."""
    name = next(out.name for out in model.graph.output if out.name.endswith(".sum_out"))
    (node,) = (node for node in model.graph.node if name in node.output)
    (term,) = (read for read in node.input if not read.endswith(".sum"))
    node.input.append(term)
    node.op_type = "Sum"


@pytest.mark.parametrize("fixture", ["gpt_adamw", "families/t5_adamw"])
@pytest.mark.parametrize(
    ("file", "edit"),
    [
        ("rank_0000.update.onnx", lost_share),
        ("rank_0002.backward.onnx", share_of_no_micro_batch),
        ("rank_0002.backward.onnx", share_counted_twice),
    ],
)
def test_a_lost_share_of_a_tied_gradient_is_named(fixture, file, edit, tmp_path):
    folder, tied = tmp_path / "ranks", {"gpt_adamw": "wte.weight", "families/t5_adamw": "table.weight"}[fixture]
    gopt.shard(source(fixture), "pp=2,dp=2", accumulate=2).write(folder)
    edit_file(folder / file, edit)
    accept(folder)
    proof, checked = gopt.prove(folder), gopt.verify(folder, steps=1, confirm=False)
    assert proof.verdict.value == "different" and tied in str(proof.to_json())
    assert not checked.equal and tied in checked.reason()


@pytest.mark.parametrize(
    ("file", "edit"), [("rank_0000.update.onnx", lost_share), ("rank_0001.backward.onnx", share_of_no_micro_batch)]
)
def test_a_lost_term_of_a_gradient_without_an_own_sum_is_named(file, edit, tmp_path):
    folder = tmp_path / "ranks"
    gopt.shard(source("sparse/towers_adam"), "pp=3", accumulate=2).write(folder)
    edit_file(folder / file, edit)
    accept(folder)
    proof, checked = gopt.prove(folder), gopt.verify(folder, steps=1, confirm=False)
    assert proof.verdict.value == "different" and "items" in str(proof.to_json())
    assert not checked.equal and "items" in checked.reason()


def test_a_tied_gradient_sent_before_the_last_micro_batch_is_named(tmp_path):
    """Each backward sends what was summed before it, and the update nothing."""
    folder = tmp_path / "ranks"
    gopt.shard(source("gpt_adamw"), "pp=2", accumulate=2).write(folder)
    update = onnx.load(folder / "rank_0001.update.onnx", load_external_data=False)
    (sent,) = (node for node in calls(update, "Send") if any(name.endswith(".sum") for name in node.input))
    edit_file(folder / "rank_0001.update.onnx", lambda model: model.graph.node.remove(sent))
    edit_file(folder / "rank_0001.backward.onnx", lambda model: model.graph.node.insert(0, sent))
    accept(folder)
    proof = gopt.prove(folder)
    assert not proof.proven and "gopt.stages" in str(proof.to_json()), proof.to_json()


def test_exchanged_micro_batches_are_named(tmp_path):
    folder = tmp_path / "ranks"
    gopt.shard(source("mlp_adamw"), "pp=2", accumulate=3, schedule="gpipe").write(folder)
    file = folder / "schedule.txt"
    lines = file.read_text().splitlines()
    first, second = (
        n for n, line in enumerate(lines) if line.split()[:2] == ["1", "forward"] and line.split()[3] != "2"
    )
    lines[first], lines[second] = lines[second], lines[first]
    file.write_text("\n".join(lines))
    accept(folder)
    arrays = {name: np.zeros((24, *type.dims[1:]), type.dtype) for name, type in batch_types("mlp_adamw").items()}
    with pytest.raises(OptionError, match="micro-batch"):
        gopt.run(folder, arrays, 1, settings={"lr": 1e-2})


def batch_types(name):
    training = source(name).training
    return {key: training.graph.types[key] for key in training.batch}


def test_a_node_on_a_wrong_stage_is_named_by_the_verifier():
    program = gopt.shard(source("mlp_adamw"), "pp=2").program
    node = next(n for n in program.graph.nodes if n.sharding.on(PIPELINE) == OnMember(1) and n.op_type == "Gemm")
    node.sharding = Sharding.along(PIPELINE, OnMember(0))
    with pytest.raises(InvariantError, match="which is on member 1 alone along pp"):
        infer_shardings(program)


# --- stages of the file ---


def staged(tmp_path, stage_of):
    """The MLP with a pipeline stage at each node that reads a parameter of a layer."""
    model = specs.model(two=2)
    for node in model.graph.node:
        stages = {stage for name, stage in stage_of.items() if any(read.startswith(name) for read in node.input)}
        if len(stages) == 1:
            node.device_configurations.add(configuration_id="two").pipeline_stage = stages.pop()
    path = tmp_path / "step.onnx"
    onnx.save(model, path)
    return path


def test_stages_of_the_file_count_where_no_pattern_does(tmp_path):
    path = staged(tmp_path, {"fc1": 0, "fc2": 1})
    states = gopt.shard(path, "pp=2").program.stages.states
    assert [states[name] for name in ("fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias")] == [0, 0, 1, 1]
    moved = gopt.shard(path, "pp=2", passes={"pipeline": {"stages": "fc1.weight|fc1.bias+fc2*"}}).program.stages.states
    assert moved["fc1.bias"] == 1
    with pytest.raises(OptionError, match="names 2 pipeline stages, and the step is cut into 3"):
        gopt.shard(path, "pp=3")


def test_stages_of_the_file_that_go_back_are_refused(tmp_path):
    with pytest.raises(OptionError, match="behind parameters of stage 1"):
        gopt.shard(staged(tmp_path, {"fc1": 1, "fc2": 0}), "pp=2")
