"""``gopt explain``: the story of a name, for sharded folders and splits."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import onnx
import pytest
from gopt.cli.main import main
from helpers import FIXTURES, source

import gopt
from gopt.offline.explain import Story, explain
from gopt.offline.explain.folder_story import choice_text
from gopt.offline.folder_contents import folder_records


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("explain") / "out"
    gopt.shard(gopt.load(FIXTURES / "mlp_adamw.onnx"), 2).write(out)
    return out


def told(story: Story, about: str) -> str:
    return "\n".join(fact.text for fact in story.facts if fact.about == about)


def test_a_parameter(folder):
    story = explain(folder, "fc1.weight")
    assert story.kind == "parameter" and told(story, "held") == "whole on every rank, as fc1.weight"
    assert told(story, "bucket").startswith("b0: tensor 3 of 4") and "beside fc2.bias and fc1.bias" in told(
        story, "bucket"
    )
    assert "ReduceScatter over shard" in told(story, "sent") and "AllGather over shard" in told(story, "received")
    assert told(story, "update").startswith("15 operators removed from ranks 0-1")
    assert told(story, "optimizer") == "its states are fc1.weight.exp_avg, fc1.weight.exp_avg_sq"
    assert explain(folder, "fc1.weight_out").facts[0] == story.facts[0]


def test_a_sharded_state_names_the_elements_of_each_rank(folder):
    story = explain(folder, "fc1.weight.exp_avg")
    assert story.kind == "optimizer state"
    held = told(story, "held").splitlines()
    assert [line.split(", as ")[1] for line in held] == ["gopt.shard.b0.c0.state1"] * 2
    stops = [int(line.split()[3]) for line in held]
    assert held[0].startswith("elements 0 to ") and held[1].startswith(
        f"elements {stops[0] + 1} to 2047 of 2048 on rank 1"
    )
    assert "gopt.shard.b0.c0.state1 float32" in told(story, "now")


def test_a_copy_on_a_stage_is_told(tmp_path):
    gopt.shard(FIXTURES / "gpt_adamw.onnx", "pp=2", accumulate=2, schedule="1f1b").write(tmp_path / "ranks")
    held = told(explain(tmp_path / "ranks", "wte.weight"), "held").splitlines()
    assert held == ["whole on rank 0, as wte.weight", "whole (a copy) on rank 1, as gopt.stages.wte.weight.stage1"]


def test_a_removed_operator_and_what_stands_for_it(folder):
    story = explain(folder, "node_mul_2")
    assert "update of fc1.weight, from ranks 0-1 by shard" in told(story, "removed")
    now = next(fact for fact in story.facts if fact.about == "now").names[0]
    back = explain(folder, now)
    assert "node_mul_2" in told(back, "stands for") and back.kind == "added"
    for rank in range(2):
        graph = onnx.load(str(folder / f"rank_000{rank}.onnx"), load_external_data=False).graph
        assert any(now in node.output for node in graph.node)


def test_a_bucket_a_gradient_an_input_and_the_loss(folder):
    bucket = explain(folder, "b0")
    assert bucket.kind == "bucket" and "fc1.bias" in told(bucket, "tensors")
    assert "ReduceScatter" in told(bucket, "gradients") and "AllGather" in told(bucket, "parameters")
    assert "of parameter fc1.weight" in told(explain(folder, "mm_2"), "gradient")
    assert "an input of the step" in told(explain(folder, "lr"), "value")
    assert told(explain(folder, "loss"), "now") == "every rank has it"


def test_a_split(tmp_path):
    assert (
        main(
            ["split", str(FIXTURES / "mlp_adamw.onnx"), "--trainers", "2", "--servers", "2", "-o", str(tmp_path / "o")]
        )
        == 0
    )
    story = explain(tmp_path / "o", "fc1.weight")
    assert "server" in told(story, "key") and "Push" in told(story, "sent") and "Pull" in told(story, "received")
    key = next(fact for fact in story.facts if fact.about == "key").names[0]
    assert "fc1.weight[" in told(explain(tmp_path / "o", key), "pieces")
    assert "servers run the update" in told(explain(tmp_path / "o", "node_mul_2"), "removed")


def test_the_command(folder, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["explain", str(folder), "fc1.weight"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "fc1.weight" and all(len(line) <= 80 for line in lines)
    assert main(["explain", str(folder), "fc1.weight", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["format"] == "gopt-explanation/1" and record["facts"][0]["about"] == "parameter"
    assert main(["explain", str(folder), "fc1.wieght"]) == 2
    assert "did you mean 'fc1.weight'" in capsys.readouterr().err
    assert main(["explain", str(folder / "nowhere"), "x"]) == 3 and "nowhere" in capsys.readouterr().err


def test_a_statistic_says_how_ranks_combine_it(tmp_path):
    for given, said in (("auto", "over ranks by mean"), ("root", "every rank takes the first rank's value")):
        gopt.shard(source("cnn_sgd"), 2, statistics=given).write(tmp_path / given)
        assert told(explain(tmp_path / given, "bn1.running_mean"), "combined").startswith(said)


def test_a_folder_says_what_auto_chose_and_what_each_pass_did(tmp_path, capsys):
    model = str(FIXTURES / "mlp_adamw.onnx")
    assert (
        main(["shard", model, "--mesh", "pp=2,shard=2", "--auto", "--device", "h100", "-o", str(tmp_path / "out")]) == 0
    )
    story, report = explain(tmp_path / "out"), json.loads((tmp_path / "out/report.json").read_text())
    choice = report["choice"]
    assert (story.name, story.kind) == ("out", "folder") and told(story, "mesh") == "pp=2,shard=2, 4 ranks"
    chosen = told(story, "chosen")
    assert chosen.startswith(f"of {choice['weighed']} choices on h100: stage {choice['stage']}")
    assert choice["schedule"] in chosen and chosen.endswith(choice["why"])
    entry = folder_records(tmp_path / "out")[1].choice
    for name, value in {"recompute": "full", "offload": "states"}.items():
        assert f"{name} {value}" in choice_text(replace(entry, **{name: value}))
    assert "compute" in told(story, "step") and " 0 " not in told(story, "step")
    for record in report["pipeline"]:
        removed = sum(group["count"] for group in report["removed_ops"] if group["pass"] == record["name"])
        text = told(story, record["name"])
        assert (f"{removed:,} operator" in text and "of the source removed" in text) == (removed > 0), record["name"]
        assert record.get("note", "") in text and text
    assert told(story, "stages").startswith("parameters of pipeline stages: 0 has ")
    assert told(story, "proof").startswith("proven: 14 of 14") == ("proof" in report)
    assert told(story, "note").splitlines() == report["notes"]
    assert main(["explain", str(tmp_path / "out")]) == 0
    assert "choices on h100" in capsys.readouterr().out
    assert main(["inspect", str(tmp_path / "out")]) == 0
    assert "parameters of pipeline stages: 0 has " in capsys.readouterr().out


def test_a_folder_without_a_choice_and_a_split_say_so_by_silence(folder, tmp_path):
    story = explain(folder)
    assert not told(story, "chosen") and told(story, "mesh") == "shard=2, 2 ranks"
    assert "60 operators of the source removed" in told(story, "shard")
    model = str(FIXTURES / "mlp_adamw.onnx")
    assert main(["split", model, "--trainers", "2", "--servers", "1", "-o", str(tmp_path / "split")]) == 0
    assert told(explain(tmp_path / "split"), "source").startswith("mlp_adamw.onnx: 111 nodes")
