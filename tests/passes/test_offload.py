"""The pass ``offload``: files of ranks stay the same, the peak on the device falls, and names are checked."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import ROOT, last_reads, source
from products import part

import gopt
from gopt.api import Sharded
from gopt.artifact.manifest_check import read_manifest
from gopt.artifact.manifest_entries import InputKind
from gopt.artifact.report_check import read_report
from gopt.errors import InputError, OptionError, UnsupportedError
from gopt.ir.host_copies import TO_DEVICE, TO_HOST, FileNodes, with_copies
from gopt.ir.load import load
from gopt.records.pass_facts import OffloadFacts
from gopt.spmd.step_memory import held, held_on_host, stage_runs

pytestmark = pytest.mark.usefixtures("unchecked")

ALL = {"offload": {"least": "1B"}}


def sharded(name: str, what: str | None, mesh: str = "shard=2", **options: Any) -> Sharded:
    return gopt.shard(source(name), mesh, offload=what, passes=ALL if what else {}, verify_each=True, **options)


def facts(result: Sharded) -> OffloadFacts:
    found = result.program.passes[-1].result.facts
    assert isinstance(found, OffloadFacts)
    return found


FIXTURES = (
    "gpt_adamw", "gpt_adamw_clip_sched_fp16", "families/llama_adamw_clip", "mlp_mom_clip_sched", "cnn_mom_fp16",
    "mlp_lamb", "mlp_muon", "mlp_adamw_fp16_scaler",
)  # fmt: skip
MESHES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("dp=2", {"stage": 0}),
    ("shard=2", {"stage": 1, "partition": "whole"}),
    ("shard=2", {"stage": 2, "accumulate": 2}),
    ("dp=2,shard=2", {"stage": 3, "recompute": "selective"}),
    ("pp=2", {}),
    ("pp=2,shard=2", {"stage": 2, "accumulate": 2, "schedule": "1f1b", "recompute": "full"}),
    ("pp=2", {"accumulate": 2, "schedule": "zb-h1"}),
)
CASES = list(product(FIXTURES, MESHES, ("states", "activations", "states,activations")))


@pytest.mark.parametrize(("fixture", "mesh", "what"), part(CASES, 14))
def test_files_of_ranks_stay_the_same_and_the_manifest_is_true(fixture, mesh, what, tmp_path):
    axes, options = mesh
    try:
        sharded(fixture, None, axes, **options).write(tmp_path / "plain")
    except UnsupportedError:  # such as too few layers for stages
        pytest.skip("without offload it is refused as well")
    result = sharded(fixture, what, axes, **options)
    result.write(tmp_path / "host")
    manifest, _ = read_manifest(tmp_path / "host")
    plain, _ = read_manifest(tmp_path / "plain")
    for rank in manifest.ranks:
        for file in rank.files.values():
            assert (tmp_path / "host" / file).read_bytes() == (tmp_path / "plain" / file).read_bytes()
    assert manifest.host == result.program.host and manifest.digest() == plain.digest()
    assert (manifest.to_json() | {"host": 0, "files": 0, "seal": 0}) == (
        plain.to_json() | {"host": 0, "files": 0, "seal": 0}
    )
    states = {state.input for rank in manifest.ranks for state in manifest.states_of(rank)}
    assert states.issuperset(manifest.host.states)
    graphs = [load(tmp_path / "host" / file, own=True) for rank in manifest.ranks for file in rank.files.values()]
    made = {name for graph in graphs for node in graph.nodes for name in node.outputs}
    assert made.issuperset(manifest.host.activations)
    assert ("states" in what) is bool(manifest.host.states) or "pp" in axes
    assert ("activations" in what) is bool(manifest.host.activations)
    early = 1.01 * facts(result).live_bytes_before  # a copy back starts before its reader, which a small step may see
    assert facts(result).live_bytes - facts(result).state_bytes <= early
    report = read_report(tmp_path / "host", manifest)
    assert max(rank.nbytes.host for rank in report.ranks) == facts(result).state_bytes


@pytest.mark.slow
@pytest.mark.parametrize(("fixture", "mesh", "what"), CASES)
def test_all_files_of_ranks_stay_the_same(fixture, mesh, what, tmp_path):
    test_files_of_ranks_stay_the_same_and_the_manifest_is_true(fixture, mesh, what, tmp_path)


@pytest.mark.parametrize(
    ("name", "mesh", "options"),
    [("gpt_adamw", "shard=2", {"stage": 3}), ("mlp_mom_clip_sched", "pp=2", {"accumulate": 2, "schedule": "1f1b"})],
)
def test_every_state_equals_the_sources_and_merges(name, mesh, options, tmp_path):
    result = sharded(name, "states,activations", mesh, **options)
    assert gopt.verify(result, steps=2).equal
    result.write(tmp_path / "ranks")
    assert gopt.prove(tmp_path / "ranks").proven
    sharded(name, None, mesh, **options).write(tmp_path / "plain")
    for folder in ("ranks", "plain"):
        gopt.merge(tmp_path / folder, tmp_path / f"{folder}.onnx")
    assert (tmp_path / "ranks.onnx").read_bytes() == (tmp_path / "plain.onnx").read_bytes()


def test_states_on_the_host_are_left_out_of_the_device():
    result = sharded("gpt_adamw", "states")
    assert held(result.program)["optimizer_states"] == [0, 0]
    assert held_on_host(result.program) == [facts(result).state_bytes] * 2
    report = result.report()
    assert report.before_after is not None and report.before_after.largest.host == facts(result).state_bytes
    gradients = facts(result).state_bytes // 2  # two moments of each element
    assert (facts(result).to_device, facts(result).to_host) == (gradients, gradients + 4)  # and a factor of the clock


def test_activations_are_moved_once_for_each_micro_batch_and_the_peak_falls():
    once, twice = (sharded("gpt_adamw", "activations", accumulate=count) for count in (1, 2))
    assert facts(once).to_host == facts(once).to_device == facts(once).activation_bytes
    assert facts(twice).to_host == 2 * facts(twice).activation_bytes
    assert facts(once).live_bytes <= 0.7 * facts(once).live_bytes_before


def test_with_recompute_fewer_values_are_moved():
    plain, again = (sharded("gpt_adamw", "activations", recompute=policy) for policy in (None, "full"))
    assert facts(again).activation_bytes < facts(plain).activation_bytes / 2
    assert facts(again).live_bytes <= facts(again).live_bytes_before


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
def test_a_schedule_saves_nothing_on_the_device_that_is_on_the_host(schedule):
    options: dict[str, Any] = {"accumulate": 4, "schedule": schedule}
    plain, moved = (sharded("gpt_adamw", what, "pp=2", **options) for what in (None, "activations"))
    saved = [[run.saved for run in stage_runs(result.program)] for result in (plain, moved)]
    share = 4 if schedule != "zb-h1" else 1  # what weights read of the backward is saved as well
    assert all(now < before / share for now, before in zip(saved[1], saved[0]))


def test_a_bound_moves_as_few_values_as_it_takes(tmp_path):
    everything = facts(sharded("gpt_adamw", "activations"))
    bound = (everything.live_bytes + everything.live_bytes_before) // 2
    some = facts(sharded("gpt_adamw", f"{bound}B"))
    assert some.live_bytes <= bound and 0 < some.activations < everything.activations
    assert sharded("gpt_adamw", "1GiB").program.passes[-1].record.note.endswith("nothing is moved to the host")
    with pytest.raises(UnsupportedError, match="bytes alive on its device, and 100 may be"):
        sharded("gpt_adamw", "100B")


def test_patterns_name_states_and_values():
    first = sharded("mlp_adamw", "states", "dp=2").program.host.states[0]
    assert sharded("mlp_adamw", first, "dp=2").program.host.states == (first,)
    value = sharded("mlp_adamw", "activations", "dp=2").program.host.activations[0]
    both = sharded("mlp_adamw", f"{first};{value}", "dp=2").program.host
    assert (both.states, both.activations) == ((first,), (value,))


def test_small_values_stay_on_the_device():
    small = gopt.shard(source("mlp_sgd"), "dp=2", offload="states")
    assert small.program.passes[-1].record.note == "no value has 1KiB or more: nothing is moved to the host"


def test_a_name_that_matches_nothing_is_refused_with_the_nearest():
    value = sharded("mlp_adamw", "activations").program.host.activations[0]
    with pytest.raises(OptionError, match="is not states, activations, bytes or a value") as caught:
        sharded("mlp_adamw", f"{value}x")
    assert value in str(caught.value.hints)


def test_a_parameter_that_the_forward_reads_is_refused():
    name = source("mlp_adamw").training.parameters[0].tensor
    with pytest.raises(UnsupportedError, match="cannot be on the host"):
        sharded("mlp_adamw", name, "dp=2")


def test_a_manifest_with_another_value_on_the_host_is_refused(tmp_path):
    gopt.shard(source("mlp_adamw"), "shard=2", offload="states", passes=ALL).write(tmp_path / "ranks")
    path = tmp_path / "ranks" / "manifest.json"
    for key, name, what in (
        ("states", "nobody", "is not a state of a rank"), ("activations", "nobody", "has no value"),
        ("activations", None, "is listed twice"),
    ):  # fmt: skip
        document = json.loads(path.read_text())
        document.pop("seal"), document.pop("files")
        document["host"][key] = [name or document["host"]["states"][0]]
        (tmp_path / "bad").mkdir(exist_ok=True)
        for file in path.parent.iterdir():
            (tmp_path / "bad" / file.name).write_bytes(file.read_bytes())
        (tmp_path / "bad" / "manifest.json").write_text(json.dumps(document))
        with pytest.raises(InputError, match=what):
            gopt.verify(tmp_path / "bad", steps=1)


@pytest.mark.parametrize("what", ["states", "activations", "states,activations"])
def test_the_planned_peak_is_that_of_the_rank_with_its_copies(what, tmp_path):
    result = sharded("gpt_adamw", what)
    result.write(tmp_path / "ranks")
    manifest, _ = read_manifest(tmp_path / "ranks")
    rank = manifest.ranks[0]
    graph = load(tmp_path / "ranks" / rank.files["step"], own=True)
    states = {s.input: s.output for s in manifest.states_of(rank) if s.input in manifest.host.states}
    step = with_copies(
        FileNodes(graph.nodes, graph.inputs, graph.outputs), states, manifest.host.activations,
        lambda name: graph.type_of(name).nbytes,
    )  # fmt: skip
    peak = most_alive(step, graph, {state.output for state in manifest.states_of(rank)})
    assert abs(facts(result).live_bytes - peak) <= 0.05 * peak


def most_alive(step, graph, updated) -> int:
    """The most bytes on the device while nodes run one by one, each value freed behind its last reader."""
    owner, last = last_reads(step.nodes)
    alive, most = {}, 0
    for place, node in enumerate(step.nodes):
        for name in node.outputs:
            if name and name not in owner and name not in step.on_host and name not in updated:
                alive[name] = graph.type_of(step.original.get(name, name)).nbytes
        most = max(most, sum(alive.values()))
        for name in [name for name in alive if last.get(name, place) <= place and name not in graph.outputs]:
            del alive[name]
    assert any(node.op_type in (TO_HOST, TO_DEVICE) for node in step.nodes)
    return most


def test_inspect_explain_and_diff_say_where_values_are(tmp_path: Path, capsys):
    from gopt.cli.main import main

    gopt.shard(source("gpt_adamw"), "shard=2", offload="states,activations", passes=ALL).write(tmp_path / "host")
    gopt.shard(source("gpt_adamw"), "shard=2").write(tmp_path / "plain")
    host = read_manifest(tmp_path / "host")[0].host

    def said(*words: str) -> str:
        main([*words])
        return " ".join(capsys.readouterr().out.split())

    shown = said("inspect", str(tmp_path / "host"))
    assert f"on the host: {len(host.states)} states: {host.states[0]}" in shown
    assert f"on the host: {len(host.activations)} values of the forward" in shown and "copied in a step" in shown
    assert "moved to the memory of the host" in said("explain", str(tmp_path / "host"), host.activations[0])
    states = read_manifest(tmp_path / "host")[0].states
    moment = next(state.tensor for state in states if state.kind == "optimizer_state")
    assert "(in the memory of the host)" in said("explain", str(tmp_path / "host"), moment)
    difference = said("diff", str(tmp_path / "plain"), str(tmp_path / "host"))
    assert "states on the host" in difference and "activations on the host" in difference


def test_the_command_line_and_a_configuration_take_the_same_words(tmp_path: Path, capsys):
    from gopt.cli.main import main

    model, config = str(ROOT / "fixtures/gpt_adamw.onnx"), tmp_path / "gopt.toml"
    config.write_text('[pass.offload]\nwhat = "states"\n')
    for words in (["--offload", "states"], ["--config", str(config)], ["-O", "offload.what=states"]):
        assert main(["shard", model, "--ranks", "2", "--dry-run", *words]) == 0
        assert "on the host: 30.2 KiB of states of a rank, updated there by" in " ".join(
            capsys.readouterr().out.split()
        )
    assert main(["shard", model, "--ranks", "2", "--dry-run", "--offload", "nobody"]) == 2
    assert "nobody" in capsys.readouterr().err


def test_a_run_on_cpus_says_that_nothing_is_moved(tmp_path: Path, capsys):
    from gopt.cli.main import main

    gopt.shard(source("mlp_adamw"), "shard=2", offload="states", passes=ALL).write(tmp_path / "ranks")
    manifest = read_manifest(tmp_path / "ranks")[0]
    draw = np.random.default_rng(0)
    arrays = {
        entry.name: draw.integers(0, 2, (2 * entry.type.dims[0], *entry.type.dims[1:])).astype(entry.dtype)
        for entry in manifest.inputs_of(InputKind.BATCH)
    }  # fmt: skip
    np.savez(tmp_path / "data.npz", **arrays)
    hyper = [word for entry in manifest.inputs_of(InputKind.HYPER) for word in ("--set", f"{entry.name}=0.1")]
    words = ["run", str(tmp_path / "ranks"), "--data", str(tmp_path / "data.npz"), "--steps", "1", *hyper]
    assert main(words) == 0
    shown = capsys.readouterr()
    assert "--offload places" in shown.err + shown.out and "on CPUs all are" in " ".join(
        (shown.err + shown.out).split()
    )


def test_another_number_of_ranks_keeps_the_states(tmp_path: Path):
    sharded("gpt_adamw", "states").write(tmp_path / "two")
    gopt.reshard(tmp_path / "two", 4).write(tmp_path / "four")
    assert gopt.verify(tmp_path / "four", steps=1, confirm=False).equal
    assert read_manifest(tmp_path / "four")[0].host.states
