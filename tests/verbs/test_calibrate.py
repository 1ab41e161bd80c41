"""``gopt plan --calibrate``: a device file from a trace, which ``--device`` reads."""

from __future__ import annotations

import json
from dataclasses import replace
from statistics import quantiles

import numpy as np
import pytest
from gopt.cli.main import main
from helpers import FIXTURES

from gopt.collectives.table import COLLECTIVES
from gopt.spmd.traffic import calls_of

MODEL = str(FIXTURES / "mlp_adamw.onnx")


@pytest.fixture(scope="module")
def traced(tmp_path_factory):
    """A folder of two ranks, and the trace of a run."""
    folder = tmp_path_factory.mktemp("traced")
    import gopt

    training = gopt.load(MODEL).training
    generator = np.random.default_rng(0)
    batch = {}
    for name in training.batch:
        type = training.graph.types[name]
        shape = (4 * type.dims[0], *type.dims[1:])
        drawn = generator.integers(0, 2, shape) if type.dtype.startswith("int") else generator.standard_normal(shape)
        batch[name] = np.asarray(drawn, type.dtype)
    np.savez(folder / "batch.npz", **batch)
    gopt.shard(MODEL, "shard=2", stage=1).write(folder / "ranks")
    data = ["--data", str(folder / "batch.npz"), "--steps", "12"]
    rates = ["--set", "lr=1e-3"] if "lr" in training.graph.inputs else []
    assert main(["run", str(folder / "ranks"), *data, *rates, "--trace", str(folder / "trace.json")]) == 0
    return folder


def test_a_trace_becomes_a_device(traced, tmp_path, capsys):
    target = tmp_path / "mine.json"
    assert main(["plan", str(traced / "ranks"), "--calibrate", str(traced / "trace.json"), "-o", str(target)]) == 0
    device = json.loads(target.read_text())
    assert device["name"] == "mine" and device["step"] > 0 and device["link"]
    assert 0 < device["launch"] < 1e-3 and device["flops"]["float32"] > 1e6
    capsys.readouterr()
    assert main(["plan", MODEL, "--mesh", "shard=2", "--device", str(target), "--json"]) == 0
    row = next(row for row in json.loads(capsys.readouterr().out)["choices"] if row["stage"] == 1)
    told = row["step"]["compute"] + row["step"]["fixed"] - device["run"] - device["step"]
    assert 0.5 * computed(traced / "trace.json") < told < 2 * computed(traced / "trace.json")


def computed(trace) -> float:
    """Seconds of a step's events of rank 0 without calls, the lower quartile of each behind the first steps."""
    events = json.loads(trace.read_text())["traceEvents"]
    own = sorted((e for e in events if e["ph"] == "X" and (e["pid"], e["tid"]) == (0, 0)), key=lambda e: e["ts"])
    count = len(own) // 12
    return sum(quantiles((own[at + turn * count]["dur"] for turn in range(5, 12)), n=4)[0] for at in range(count)) / 1e6


@pytest.mark.parametrize(
    ("more", "code"), [(["--mesh", "shard=2"], 2), (["-o", "device.toml"], 2), (["--device", "cqu"], 2)]
)
def test_what_calibration_does_not_take(more, code, traced, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["plan", str(traced / "ranks"), "--calibrate", str(traced / "trace.json"), *more]) == code
    assert not list(tmp_path.iterdir())


def test_a_trace_of_another_folder_is_refused(traced, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["shard", MODEL, "--mesh", "tp=2", "-o", "other"]) == 0
    assert main(["plan", "other", "--calibrate", str(traced / "trace.json")]) == 3
    assert "is not a trace of these files" in capsys.readouterr().err
    assert main(["shard", MODEL, "--mesh", "pp=2", "-o", "stages"]) == 0
    assert main(["plan", "stages", "--calibrate", str(traced / "trace.json")]) == 3
    assert main(["plan", MODEL, "-o", "x.json", "--ranks", "2"]) == 2


@pytest.mark.parametrize("name", ["mlp_adamw", "gpt_adamw", "cnn_sgd"])
@pytest.mark.parametrize(("mesh", "stage"), [("dp=2", 0), ("shard=2", 2), ("tp=2", 0)])
def test_a_calibration_measures_the_work_that_a_plan_counts(name, mesh, stage, tmp_path):
    """The engine folds transposes into products and inlines calls: the work of the file stays the work of the row."""
    import gopt
    from gopt.artifact.manifest_check import read_manifest
    from gopt.ir.load import load
    from gopt.offline.device import DEVICES
    from gopt.runtime.calibration import planned_run

    model, device = FIXTURES / f"{name}.onnx", DEVICES["cpu"]
    gopt.shard(model, mesh, stage=stage).write(tmp_path / "ranks")
    manifest, axes = read_manifest(tmp_path / "ranks")
    entry = manifest.ranks[0]
    graph = load(tmp_path / "ranks" / entry.files["step"], own=True)
    run = planned_run(graph, manifest.next_inputs(entry), axes, 0, device)
    rows = gopt.plan(str(model), mesh, device=device).choices
    row = next(row for row in rows if (row.choice.settings.stage, row.choice.settings.partition) == (stage, "flat"))
    works = sum(work.seconds(device) for segment in run.segments for work in segment.works)
    starts = sum(segment.starts for segment in run.segments) * device.segment
    told = row.choice.time.compute + row.choice.time.fixed - device.run - device.step
    assert works + starts == pytest.approx(told, rel=0.05)
    calls = calls_of(gopt.shard(model, mesh, stage=stage).program)
    assert [(call.rounds, call.sent) for call in run.calls] == [
        (COLLECTIVES[call.node.op_type].rounds, call.sent) for call in calls
    ]
    assert {call.added / call.sent for call in run.calls} == {
        {"AllReduce": 0.5, "ReduceScatter": 1.0, "AllGather": 0.0}[call.node.op_type] for call in calls
    }


def test_figures_behind_a_made_up_trace_come_back(tmp_path):
    """Two micro-steps and an update, each event of the length that a device takes, with known gaps between events."""
    import gopt
    from gopt.artifact.manifest_check import read_manifest
    from gopt.ir.load import load
    from gopt.offline.device import DEVICES
    from gopt.records.topology import Link
    from gopt.runtime.calibration import planned_run

    true = replace(DEVICES["cpu"], link="0.5GB/s:80us", adding=1e8, call=10e-6, run=70e-6, step=300e-6)
    gopt.shard(MODEL, "shard=2", stage=2, accumulate=2).write(tmp_path / "ranks")
    manifest, mesh = read_manifest(tmp_path / "ranks")
    entry, link = manifest.ranks[0], Link.parse(true.link)
    planned = {}
    for phase in manifest.schedule:
        graph = load(tmp_path / "ranks" / entry.files[phase], own=True)
        planned[phase] = planned_run(graph, manifest.next_inputs(entry), mesh, 0, true)
    runs = [planned[phase] for phase, count in manifest.schedule.items() for _ in range(count)]
    gap = true.call * sum(len(run.calls) for run in runs) / sum(run.events - 1 for run in runs)
    now, events = 0.0, []
    for _ in range(12):
        for run in runs:
            done = [(title, 0, sum(work.seconds(true) for work in segment.works) + segment.starts * true.segment)
                    for title, segment in zip(run.titles, run.segments)]  # fmt: skip
            done += [("call", 1, link.seconds(call.rounds, call.members, call.sent) + call.added / true.adding)
                     for call in run.calls]  # fmt: skip
            for name, thread, seconds in done:
                events.append({"name": name, "ph": "X", "pid": 0, "tid": thread, "ts": 1e6 * now, "dur": 1e6 * seconds})
                now += seconds + gap
            now += true.run - gap
        now += true.step
    (tmp_path / "trace.json").write_text(json.dumps({"traceEvents": events}))
    found = gopt.calibrate(tmp_path / "ranks", tmp_path / "trace.json")
    assert (found.call, found.run, found.step) == pytest.approx((true.call, true.run, true.step), rel=0.01)
    told = Link.parse(found.link)
    for call in [call for run in runs for call in run.calls]:
        seconds = told.seconds(call.rounds, call.members, call.sent) + call.added / found.adding
        due = link.seconds(call.rounds, call.members, call.sent) + call.added / true.adding
        assert seconds == pytest.approx(due, rel=0.05)
    assert found.flops["float32"] == pytest.approx(true.flops["float32"], rel=0.01)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_trace_of_pipeline_stages_settles_messages_and_runs(traced, tmp_path, rank):
    import gopt

    gopt.shard(MODEL, "pp=2", accumulate=4, schedule="gpipe").write(tmp_path / "stages")
    data = ["--data", str(traced / "batch.npz"), "--steps", "12", "--set", "lr=1e-3"]
    assert main(["run", str(tmp_path / "stages"), *data, "--trace", str(tmp_path / "stages.json")]) == 0
    known = gopt.calibrate(traced / "ranks", traced / "trace.json", name="known")
    staged = gopt.calibrate(tmp_path / "stages", tmp_path / "stages.json", rank=rank, name="staged", device=known)
    assert (staged.link, staged.call) == (known.link, known.call), "the ranks make no calls of a group"
    assert staged.message != known.message and 0 < staged.message < 1e-2
    assert 0 < staged.run < 1e-2 and staged.segment != known.segment
    with pytest.raises(gopt.InputError, match="is not a trace of these files"):
        gopt.calibrate(tmp_path / "stages", traced / "trace.json")
