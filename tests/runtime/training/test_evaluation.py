"""Evaluations of a run: those of the merged checkpoint, on any ranks; the best checkpoint; the end without a better."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from gopt.cli.main import main
from recipes import Recipe, build

import gopt
from gopt.artifact.checkpoint_index import BestEntry, open_index
from gopt.errors import InputError, OptionError, RunError
from gopt.ir.load import load
from gopt.offline.inference.write import merge_inference
from gopt.offline.merge import merge
from gopt.parameter_server.options import SplitOptions
from gopt.passes.pipeline import build_pipeline
from gopt.runtime.training.evaluation import BestRule, Evaluation, KeptChoice

RECIPE = Recipe(widths=(3, 6, 4), lr_input=True)
HELD_OUT = 10
"""Samples: two batches of four and a rest of two."""
RISING = "step:0.02:4:50"
"""A learning rate with which the loss falls for four steps, and rises then."""


def step_of(folder: Path) -> Path:
    path = folder / "step.onnx"
    path.write_bytes(build(RECIPE).SerializeToString())
    return path


def evaluation_of(folder: Path, *, change: Any = None) -> Path:
    """The forward of the step with a second metric, of any number of samples."""
    path = folder / "step.eval.onnx"
    merge_inference(step_of(folder), path, outputs=["loss"], force=True)
    model = onnx.load(path)
    for each in model.graph.input:
        each.type.tensor_type.shape.dim[0].dim_param = "n"
    error = model.graph.node[-2].input[0]
    model.graph.node.append(onnx.helper.make_node("Abs", [error], ["sizes"]))
    model.graph.node.append(onnx.helper.make_node("ReduceMean", ["sizes"], ["error"], keepdims=0))
    model.graph.output.append(onnx.helper.make_tensor_value_info("error", onnx.TensorProto.FLOAT, []))
    if change is not None:
        change(model.graph)
    onnx.save(model, path)
    return path


def arrays(count: int, seed: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    x = random.standard_normal((count, 3)).astype("f4")
    return {"x": x, "y": np.tanh(x @ np.ones((3, 4), "f4")) + 0.1 * random.standard_normal((count, 4)).astype("f4")}


def sharded(folder: Path, mesh: str = "shard=2", micro_steps: int = 1, **options: Any) -> Path:
    given = {key.replace("_", "-"): value for key, value in options.items()}
    out = folder / f"{mesh}-{micro_steps}-{options.get('stage')}.ranks"
    pipeline = build_pipeline(defaults={"shard": given})
    gopt.shard(gopt.load(step_of(folder)), mesh, accumulate=micro_steps, pipeline=pipeline).write(out)
    return out


def evaluated(checkpoint: Path, folder: Path) -> dict[str, float]:
    """The metrics of a merged checkpoint on all held-out samples at once, by ONNX Runtime alone."""
    merge(checkpoint, folder / "merged.onnx", force=True)
    held = load(folder / "merged.onnx").initializers
    model = onnx.load(folder / "step.eval.onnx")
    for each in model.graph.initializer:
        each.CopyFrom(onnx.numpy_helper.from_array(np.asarray(held[each.name].numpy()), each.name))
    session = onnxruntime.InferenceSession(model.SerializeToString())
    return dict(zip(("loss", "error"), map(float, session.run(["loss", "error"], arrays(HELD_OUT, 1)))))


def options(folder: Path, **more: Any) -> dict[str, Any]:
    given = {"settings": {"lr": 0.05}, "eval": evaluation_of(folder), "eval_data": arrays(HELD_OUT, 1), "eval_every": 2}
    return given | more


def test_an_evaluation_is_that_of_the_merged_checkpoint_on_any_ranks(tmp_path):
    """Four batches a step, by one rank or several, in micro-steps: the same values behind each step."""
    found = []
    for mesh, micro_steps, stage in (("shard=1", 4, 1), ("shard=2", 2, 3), ("dp=2,tp=2", 2, 0)):
        kept = tmp_path / f"{mesh}.kept"
        folder = sharded(tmp_path, mesh, micro_steps, stage=stage)
        run = gopt.run(folder, arrays(48, 0), 3, **options(tmp_path, checkpoint=kept, every=1, keep=9))
        assert [*run.evaluations] == [2, 3]
        for step, each in run.evaluations.items():
            direct = evaluated(kept / f"step_{step:08d}", tmp_path)
            assert each.samples == HELD_OUT
            np.testing.assert_allclose([*each.values.values()], [direct["loss"], direct["error"]], rtol=2e-6)
        found.append([each.values["loss"] for each in run.evaluations.values()])
    np.testing.assert_allclose(found[1:], [found[0]] * 2, rtol=1e-5)
    assert found[0][0] > found[0][1]


def test_the_best_checkpoint_stays_and_the_run_ends_without_a_better_one(tmp_path):
    folder, kept = sharded(tmp_path, stage=3), tmp_path / "kept"
    more = {"settings": {"lr": RISING}, "eval_every": 1, "checkpoint": kept, "keep": 1, "patience": 3}
    run = gopt.run(folder, arrays(48, 0), 40, **options(tmp_path, **more, keep_best="error:min"))
    errors = {step: each.values["error"] for step, each in run.evaluations.items()}
    best = min(errors, key=lambda step: errors[step])
    assert len(run.steps) == best + 3 < 40 and run.steps[-1].evaluation.ends
    index = open_index(kept / "best")
    assert run.best == kept / "best" and (index.step, index.best.value) == (best, errors[best])
    assert index.best.metric == "error" and index.best.mode == "min"
    np.testing.assert_allclose(evaluated(kept / "best", tmp_path)["error"], errors[best], rtol=2e-6)
    assert sorted(each.name for each in kept.glob("step_*")) == [f"step_{best + 3:08d}"]


def test_a_resumed_run_knows_the_best_of_the_run_that_it_continues(tmp_path):
    def run(name: str, steps: int, **more: Any) -> Any:
        settings = {"lr": RISING}
        given = options(tmp_path, settings=settings, checkpoint=tmp_path / name, keep_best="loss", patience=4, **more)
        return gopt.run(folder, arrays(48, 0), steps, **given | {"eval_every": 1})

    folder = sharded(tmp_path)
    whole = run("a", 30)
    best = open_index(whole.best)
    run("b", best.step + 2)
    second = run("b", 30, resume=True)
    assert len(whole.steps) == best.step + 4 and [each.step for each in second.steps] == [best.step + 3, best.step + 4]
    assert open_index(second.best).best == best.best and second.steps[-1].evaluation.ends
    with pytest.raises(OptionError, match="is that by loss:min"):
        gopt.run(
            folder, arrays(48, 0), 40, **options(tmp_path, checkpoint=tmp_path / "b", keep_best="error", resume=True)
            | {"keep_best": "error:max"},
        )  # fmt: skip
    with pytest.raises(OptionError, match="holds checkpoints of an earlier run"):
        run("b", 30)


def test_held_out_samples_in_other_forms_give_the_same(tmp_path, monkeypatch):
    folder, given, held = sharded(tmp_path), options(tmp_path), arrays(HELD_OUT, 1)
    (tmp_path / "held_out_module.py").write_text(
        "import numpy as np\n"
        "def batches(part, parts):\n"
        f"    held = np.load({str(tmp_path / 'held.npz')!r})\n"
        "    for place in range(part, 4, parts):\n"
        "        yield {name: held[name][3 * place : 3 * place + 3] for name in held}\n"
    )
    np.savez(tmp_path / "held.npz", **held)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    thirds = [(held["x"][start : start + 3], held["y"][start : start + 3]) for start in range(0, HELD_OUT, 3)]
    found = []
    for data in (held, tmp_path / "held.npz", "held_out_module:batches", thirds):
        run = gopt.run(folder, arrays(48, 0), 2, **given | {"eval_data": data})
        found.append(run.evaluations[2])
    assert {each.samples for each in found} == {HELD_OUT}
    np.testing.assert_allclose([each.values["loss"] for each in found], found[0].values["loss"], rtol=1e-6)


def test_the_command_prints_and_logs_evaluations(tmp_path, capsys):
    folder, model = sharded(tmp_path), evaluation_of(tmp_path)
    np.savez(tmp_path / "data.npz", **arrays(48, 0))
    np.savez(tmp_path / "held.npz", **arrays(HELD_OUT, 1))
    command = ["run", str(folder), "--data", str(tmp_path / "data.npz"), "--steps", "40", "--set", f"lr={RISING}"]
    command += ["--eval", str(model), "--eval-data", str(tmp_path / "held.npz"), "--eval-every", "1"]
    command += ["--keep-best", "error:min", "--patience", "2", "--log", str(tmp_path / "log")]
    assert main([*command, "--checkpoint", str(tmp_path / "a")]) == 0
    said = capsys.readouterr().out
    lines = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    best = min(lines, key=lambda each: each["evaluation"]["values"]["error"])
    value = best["evaluation"]["values"]["error"]
    assert f"step {best['step']}: evaluation loss" in said and "; the best so far" in said
    assert f"best, step {best['step']}, error {value:.6g}" in " ".join(said.split())
    assert "2 evaluations without a better one" in said
    assert main([*command, "--checkpoint", str(tmp_path / "b"), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["best"]["step"] == best["step"] and told["best"]["value"] == value and told["ended"] == "patience"
    assert [each["values"] for each in told["evaluations"]] == [each["evaluation"]["values"] for each in lines]
    assert lines[0]["hyper"] == {"lr": pytest.approx(0.02)}


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("mpi4py") is None, reason="needs pip install 'gopt[mpi]'")
def test_processes_evaluate_as_threads_do(tmp_path):
    folder, model = sharded(tmp_path, stage=3), evaluation_of(tmp_path)
    np.savez(tmp_path / "data.npz", **arrays(48, 0))
    np.savez(tmp_path / "held.npz", **arrays(HELD_OUT, 1))
    command = [sys.executable, "-m", "gopt.cli", "run", str(folder), "--data", str(tmp_path / "data.npz")]
    command += [
        "--steps",
        "6",
        "--set",
        f"lr={RISING}",
        "--eval",
        str(model),
        "--eval-data",
        str(tmp_path / "held.npz"),
    ]
    command += ["--eval-every", "2", "--keep-best", "error:min", "--json"]
    found = []
    for name, how in (("a", ["--engine", "threads"]), ("b", ["--launch", "2"])):
        made = subprocess.run([*command, *how, "--checkpoint", str(tmp_path / name)], capture_output=True, check=True)
        found.append(json.loads(made.stdout))
    evaluations = [[(each["step"], each["values"], each["best"]) for each in told["evaluations"]] for told in found]
    assert evaluations[0] == evaluations[1] and found[0]["best"]["value"] == found[1]["best"]["value"]


def dropped(graph: Any) -> None:
    graph.initializer[0].name = graph.node[0].input[1] = "frozen"


def retyped(graph: Any) -> None:
    tensor = graph.initializer[1]
    tensor.CopyFrom(onnx.numpy_helper.from_array(np.zeros(1, "f4"), tensor.name))


def stateless(graph: Any) -> None:
    for each in graph.initializer:
        each.name = f"{each.name}_"
    for node in graph.node:
        node.input[:] = [f"{name}_" if name[0] in "wb" else name for name in node.input]


def without_numbers(graph: Any) -> None:
    del graph.output[:]
    graph.output.append(onnx.helper.make_tensor_value_info("sizes", onnx.TensorProto.FLOAT, ["n", 4]))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (dropped, "has no 'w0', a parameter of the step, and a constant of as many elements, 'frozen'"),
        (retyped, "'b0' is float32"),
        (stateless, "reads no state of the step"),
        (without_numbers, "no output of one number"),
    ],
)
def test_a_model_that_is_not_the_steps_is_refused_by_name(change, said, tmp_path):
    given = options(tmp_path) | {"eval": evaluation_of(tmp_path, change=change)}
    with pytest.raises(InputError, match=said):
        gopt.run(sharded(tmp_path), arrays(48, 0), 2, **given)


def test_a_step_of_training_is_no_evaluation(tmp_path):
    given = options(tmp_path) | {"eval": step_of(tmp_path)}
    with pytest.raises(InputError, match="reads 'lr', as a step of training does"):
        gopt.run(sharded(tmp_path), arrays(48, 0), 2, **given)


def test_requests_that_cannot_be(tmp_path):
    folder, given = sharded(tmp_path), options(tmp_path)
    for changes, said in (
        ({"eval_data": None}, "eval needs eval_data"),
        ({"keep_best": "accuracy"}, "the evaluation computes loss, error"),
        ({"keep_best": "error"}, "whether low or high values are better"),
        ({"keep_best": "error:low"}, "METRIC:min or METRIC:max"),
        ({"patience": 2}, "patience needs keep_best"),
        ({"eval": None}, "needs eval"),
        ({"eval_data": iter([arrays(4, 0)])}, "is a generator"),
    ):
        with pytest.raises(OptionError, match=said):
            gopt.run(folder, arrays(48, 0), 2, **given | changes)
    with pytest.raises((InputError, RunError), match="'y'"):
        gopt.run(folder, arrays(48, 0), 2, **given | {"eval_data": {"x": arrays(4, 0)["x"]}})
    with pytest.raises(OptionError, match="needs ranks of gopt shard"):
        gopt.run(
            gopt.split(gopt.load(step_of(tmp_path)), options=SplitOptions(trainers=1, servers=1)),
            arrays(48, 0),
            2,
            **given,
        )


def test_a_metric_that_is_not_finite_is_never_the_best():
    assert BestRule.parse("loss") == BestRule("loss", None) and BestRule.parse("top:5:max") == BestRule("top:5", "max")
    choice = KeptChoice(BestRule("top", "max"), 2)
    values = [float("nan"), 1.0, float("inf"), 0.5, 2.0, 2.0]
    found = [choice.judged(Evaluation({"top": value}, 1, 0.0), step) for step, value in enumerate(values)]
    assert [each.best for each in found] == [False, True, False, False, True, False]
    assert [each.ends for each in found] == [False, False, False, True, False, False] and choice.kept.value == 2.0


def test_the_best_of_a_step_that_is_made_again_stays_the_best():
    choice = KeptChoice(BestRule("loss", "min"), 2)
    choice.resume(BestEntry("loss", "min", 0.5), 5, -3)
    found = [choice.judged(Evaluation({"loss": value}, 1, 0.0), step) for step, value in ((3, 0.9), (4, 0.8), (5, 0.5))]
    assert [(each.best, each.without, each.ends) for each in found] == [(False, 0, False)] * 2 + [(True, 0, False)]
