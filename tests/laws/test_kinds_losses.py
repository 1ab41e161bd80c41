"""Steps with several losses: drawn structures, and reported steps (fixtures/cases/losses)."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
from gopt.cli.main import main
from helpers import FIXTURES
from products import part
from whole_gen.judge import Verdict, drawn, judged
from whole_gen.kinds import load_all
from whole_gen.writer import Writer

import gopt
from gopt.parameter_server.options import SplitOptions

CASES = FIXTURES / "cases" / "losses"
OWN = sorted(name for name, step in load_all().items() if step.__module__.endswith("kinds_losses"))


def found_of(name: str, seed: int) -> tuple[Verdict, Writer]:
    def make(samples: int, scale: int) -> Writer:
        w = Writer(seed, samples, scale)
        load_all()[name](w)
        return w

    w = make(4, 1)
    return judged(make, drawn(seed, w=w), seed, verify=seed % 4 == 0), w


@pytest.mark.parametrize("name, seed", part([(name, seed) for name in OWN for seed in range(30)], 6))
def test_ranks_hold_what_the_source_makes_of_the_whole_batch(name, seed):
    found, w = found_of(name, seed)
    due = found.kind == "refused" and w.refusal and re.search(w.refusal, found.text)
    assert found.kind == "right" or due, found


@pytest.mark.parametrize("stage", part(range(4), 1))
@pytest.mark.parametrize("name, losses", [("gan_out_d", ("loss", "loss_g")), ("two_nets_sgd", ("loss", "critic_loss"))])
def test_networks_side_by_side(name, losses, stage, tmp_path, capsys):
    """They were refused; with one loss named, the other network was taken for statistics."""
    source = gopt.load(CASES / f"{name}.onnx")
    assert source.training.losses == losses and len(source.training.gradients) == 4
    sharded = gopt.shard(source, 3, stage=stage)
    result = gopt.verify(sharded, steps=2)
    assert result.outcome == "equal"
    sharded.write(tmp_path / "ranks")
    manifest = json.loads((tmp_path / "ranks/manifest.json").read_text())
    assert (manifest["loss"], *manifest["more_losses"]) == losses
    assert main(["inspect", str(CASES / f"{name}.onnx"), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["loss"], shown["more_losses"]) == (losses[0], list(losses[1:]))


@pytest.mark.parametrize("given", [[], ["--loss", "{}"], ["--loss", "loss_g"], ["--loss", "{},loss_g"]])
@pytest.mark.parametrize("name, first", [("gan_seq", "loss"), ("c07_gan_after", "loss_d")])
def test_networks_in_sequence(name, first, given, tmp_path, capsys):
    """One refusal with the true cause, whatever is named."""
    call = ["shard", str(CASES / f"{name}.onnx"), "--ranks", "2", "-o", str(tmp_path / "out")]
    assert main([*call, *(each.format(first) for each in given)]) == 4
    said = capsys.readouterr().err
    assert re.search(r"the forward of 'loss_g' reads the new value of 'd.?w0' at .*'g.?w0' is updated behind it", said)
    assert not (tmp_path / "out").exists()


def test_a_loss_that_is_left_out_is_named(tmp_path, capsys):
    call = ["shard", str(CASES / "gan_out_d.onnx"), "--ranks", "2", "-o", str(tmp_path / "out")]
    assert main([*call, "--loss", "loss"]) == 4
    hint = re.search(r"name all losses: (--loss \S+),", capsys.readouterr().err)
    assert hint is not None and main([*call, *hint.group(1).split()]) == 0


def test_a_split_of_two_networks(tmp_path):
    """Trainers and servers hold what ranks with all-reduces hold, and a run shows both losses."""
    source = gopt.load(CASES / "two_nets_sgd.onnx")
    split = gopt.split(source, SplitOptions(trainers=2, servers=2, minimum=4))
    assert gopt.verify(split).outcome == "equal"
    random = np.random.default_rng(5)
    types = source.training.graph.types
    data = {name: random.standard_normal((12, *types[name].dims[1:])).astype("f4") for name in source.training.batch}
    runs = [gopt.run(made, data, 3, settings={"lr": "0.3"}) for made in (gopt.shard(source, 2, stage=2), split)]
    for one, other in zip(*(run.steps for run in runs), strict=True):
        assert one.more_losses.keys() == other.more_losses.keys() == {"critic_loss"}
        np.testing.assert_allclose(one.losses, other.losses, rtol=1e-5)
        np.testing.assert_allclose(one.more_losses["critic_loss"], other.more_losses["critic_loss"], rtol=1e-5)
        assert one.to_json()["more_losses"]["critic_loss"] == list(one.more_losses["critic_loss"])
