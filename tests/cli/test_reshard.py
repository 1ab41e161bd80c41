"""``gopt reshard`` as a user meets it."""

from __future__ import annotations

import json

import pytest
from gopt.cli.main import main
from helpers import FIXTURES
from products import spread

import gopt
from gopt.offline.folder_contents import read_mesh
from gopt.verification.verify import Verifier


def test_reshard_from_the_command_line(tmp_path, capsys):
    gopt.shard(gopt.load(FIXTURES / "mlp_adamw.onnx"), 2).write(tmp_path / "a")
    command = ["reshard", str(tmp_path / "a"), "--mesh", "dp=2,shard=2", "--stage", "3", "-o", str(tmp_path / "b")]
    assert main(command) == 0
    assert main(command) == 2
    assert "exists already" in capsys.readouterr().err
    assert read_mesh(tmp_path / "b").axes == (("dp", 2), ("shard", 2))
    assert Verifier(tmp_path / "b").run(steps=1, confirm=False).equal
    twice = [*command, "--force", "-O", "shard.stage=1"]
    assert main(twice) == 2


@pytest.mark.parametrize(
    ("options", "first"),
    spread([
        "--mesh pp=2,shard=2 --micro-batches 4 --schedule zb-h1 --recompute selective --stage 3",
        "--mesh pp=2 --micro-batches 2 --schedule interleaved:2 --recompute 110KiB --offload states",
        "--mesh tp=2,shard=2 --accumulate 2 --recompute full --offload activations --partition rows",
    ], [["--ranks", "2"], ["--mesh", "pp=2", "--micro-batches", "2", "--recompute", "full"]]),
)  # fmt: skip
def test_ranks_made_again_are_the_ranks_that_shard_makes_with_these_options(tmp_path, first, options):
    step, words = str(FIXTURES / "gpt_adamw.onnx"), options.split()
    again, fresh = tmp_path / "again", tmp_path / "fresh"
    assert main(["shard", step, *first, "-o", str(tmp_path / "first")]) == 0
    assert main(["reshard", str(tmp_path / "first"), *words, "-o", str(again)]) == 0
    assert main(["shard", step, *words, "-o", str(fresh)]) == 0
    names = {path.name for path in fresh.iterdir()}
    assert names == {path.name for path in again.iterdir()} and len(names) > 6
    assert [name for name in sorted(names) if (again / name).read_bytes() != (fresh / name).read_bytes()] == []
    assert json.loads((again / "report.json").read_bytes())["proof"]["verdict"] == "proven"


def test_a_schedule_without_stages_is_refused_as_by_shard(tmp_path, capsys):
    step = str(FIXTURES / "mlp_adamw.onnx")
    assert main(["shard", step, "--ranks", "2", "-o", str(tmp_path / "a")]) == 0
    said = []
    for command in (["shard", step], ["reshard", str(tmp_path / "a")]):
        capsys.readouterr()
        assert main([*command, "--ranks", "2", "--schedule", "gpipe", "-o", str(tmp_path / "b")]) == 2
        said.append(capsys.readouterr().err)
    assert said[0] == said[1] and "no axis pp" in said[0]
