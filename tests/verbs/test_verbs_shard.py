"""``gopt.shard`` makes what the command writes, with the choice and the notes of the command."""

from __future__ import annotations

import pytest
from gopt.cli.main import main
from helpers import FIXTURES, folder_bytes, source

import gopt
from gopt.errors import OptionError

MODEL = str(FIXTURES / "mlp_adamw.onnx")


@pytest.mark.parametrize(
    ("options", "given"),
    [
        ([], {}),
        (["--stage", "3", "--accumulate", "2"], {"stage": 3, "accumulate": 2}),
        (["-O", "shard.style=broadcast", "--partition", "whole"],
         {"partition": "whole", "passes": {"shard": {"style": "broadcast"}}}),
        (["--bucket-mb", "0", "--loss-reduction", "sum"], {"bucket_mb": 0.0, "loss_reduction": "sum"}),
        (["--auto", "--memory", "1GB"], {"auto": gopt.Auto(memory="1GB")}),
    ],
)  # fmt: skip
def test_the_same_bytes_as_the_command(options, given, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["shard", MODEL, "--ranks", "3", *options, "-o", "command", "-q"]) == 0
    gopt.shard(MODEL, 3, **given).write("python")
    assert folder_bytes(tmp_path / "command") == folder_bytes(tmp_path / "python")


def test_auto_chooses_alone():
    with pytest.raises(OptionError, match="auto chooses stage"):
        gopt.shard(source("mlp_sgd"), 2, stage=1, auto=gopt.Auto())
    choice = gopt.shard(source("mlp_sgd"), 2, auto=gopt.Auto()).choice
    assert choice is not None and choice.weighed > 1


def test_progress_counts_passes_ranks_and_files(tmp_path):
    told: list[tuple[str, int, int]] = []
    gopt.shard(MODEL, 3, advance=lambda *each: told.append(each)).write(
        tmp_path / "out", advance=lambda *each: told.append(each)
    )
    counts = [each[1:] for each in told if each[0].startswith("pass ")]
    assert counts == [(number, len(counts)) for number in range(1, len(counts) + 1)] and len(counts) > 5
    for phase in ("making ranks", "writing files of ranks"):
        assert [each[1:] for each in told if each[0] == phase] == [(1, 3), (2, 3), (3, 3)]


def test_an_explanation_of_a_value():
    sharded = gopt.shard(FIXTURES / "gpt_adamw.onnx", "tp=2")
    assert sharded.explain("loss")[0].startswith("loss, float32[]")
    with pytest.raises(OptionError, match="the step has no value 'los'"):
        sharded.explain("los")
    assert gopt.shard(MODEL, 2).explain("loss") == ["no axis of the mesh splits the computation: every value is whole"]
