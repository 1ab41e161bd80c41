"""Options of commands beside the keywords of Python: the same fields, the same defaults, the same refusals."""

from __future__ import annotations

from dataclasses import fields

import click
import pytest
from gopt.cli import derive, export, run
from gopt.cli.main import group, main
from gopt.cli.shard_request import ShardRequest
from gopt.cli.split import SplitRequest
from helpers import ROOT

import gopt
from gopt.errors import OptionError
from gopt.frontends.pytorch.options import ExportOptions

CONTEXT = click.Context(group)
STEP = "fixtures/mlp_sgd.onnx"
DERIVED = {"loss": "mse", "optimizer": "sgd"}
RECORDS = {
    "shard": (["x", "--ranks", "2"], lambda given: ShardRequest.of("x", given).options, gopt.ShardOptions()),
    "run": (["x", "--data", "x", "--steps", "1"], run.options_of, gopt.RunOptions()),
    "split": (
        ["x", "--trainers", "2", "--servers", "1"], lambda given: SplitRequest.of("x", given).split,
        gopt.SplitOptions(trainers=2, servers=1),
    ),
    "derive": (
        ["x", "-o", "y", "--loss", "mse", "--optimizer", "sgd"], derive.options_of,
        gopt.DeriveOptions(loss="mse", optimizer="sgd"),
    ),
    "export": (["x:y", "-o", "y"], export.options_of, ExportOptions()),
}  # fmt: skip
"""Command -> the fewest words that it takes, its record made of them, and the record with the defaults of Python."""
ELSEWHERE = {
    "export": {"schedules": "scheduler", "values": "no_values"},
    "derive": {"optimizer_options": "momentum", "schedule_options": "total_steps", "values": "no_values"},
    "run": {"tuning": "no_tuning", "startup": "no_startup"},
    "shard": {"passes": "options", "after_each": "print_after"},
    "split": {
        "cap": "bucket_mb", "compensation": "delay_compensation", "given": "server_map", "tables": "table",
        "tables_off": "no_tables",
    },
    "verify": {"confirm": "no_confirm"},
}  # fmt: skip
"""Field of a record -> the option that sets it, where they have different names."""


@pytest.mark.parametrize("name", RECORDS)
def test_a_command_without_options_asks_for_what_python_does(name):
    words, record, usual = RECORDS[name]
    context = group.get_command(CONTEXT, name).make_context(name, list(words))
    assert record(context.params) == usual


@pytest.mark.parametrize("name", [*RECORDS, "verify"])
def test_every_field_of_a_record_is_an_option_of_its_command(name):
    kind = type(RECORDS[name][2]) if name in RECORDS else gopt.VerifyOptions
    options = {each.name for each in group.get_command(CONTEXT, name).params}
    assert {ELSEWHERE.get(name, {}).get(each.name, each.name) for each in fields(kind)} <= options


REFUSED = [
    ("shard", ["--stage", "9"], lambda: gopt.shard(STEP, 2, stage=9)),
    ("shard", ["--partition", "x"], lambda: gopt.shard(STEP, 2, partition="x")),
    ("shard", ["--bucket-mb", "-1"], lambda: gopt.shard(STEP, 2, bucket_mb=-1)),
    ("shard", ["--bucket-mb", "nan"], lambda: gopt.shard(STEP, 2, bucket_mb=float("nan"))),
    ("shard", ["--statistics", "x"], lambda: gopt.shard(STEP, 2, statistics="x")),
    ("shard", ["--loss-reduction", "x"], lambda: gopt.shard(STEP, 2, loss_reduction="x")),
    ("shard", ["--accumulate", "0"], lambda: gopt.shard(STEP, 2, accumulate=0)),
    ("shard", ["--link", "x"], lambda: gopt.shard(STEP, 2, link="x")),
    ("shard", ["--only-ranks", "2"], lambda: gopt.shard(STEP, 2, only_ranks=[2])),
    ("shard", ["--pipeline", "x"], lambda: gopt.shard(STEP, 2, pipeline=[("x", {})])),
    ("shard", ["-O", "shard.x=1"], lambda: gopt.shard(STEP, 2, passes={"shard": {"x": "1"}})),
    ("shard", ["--jobs", "0"], lambda: gopt.shard(STEP, 2).write("x", jobs=0)),
    ("run", ["--every", "0"], lambda: gopt.RunOptions(every=0 - 1, checkpoint="x")),
    ("run", ["--keep", "0"], lambda: gopt.RunOptions(keep=0)),
    ("run", ["--shuffle", "-1"], lambda: gopt.RunOptions(shuffle=-1)),
    ("run", ["--deadline", "0"], lambda: gopt.RunOptions(deadline=0.0)),
    ("run", ["--deadline", "nan"], lambda: gopt.RunOptions(deadline=float("nan"))),
    ("run", ["--nan", "x"], lambda: gopt.RunOptions(nan="x")),
    ("run", ["--stop", "x"], lambda: gopt.RunOptions(stop="x")),
    ("run", ["--on-trainer-loss", "x"], lambda: gopt.RunOptions(on_trainer_loss="x")),
    ("run", ["--staleness", "-1"], lambda: gopt.RunOptions(staleness=-1)),
    ("run", ["--trainers", "0"], lambda: gopt.RunOptions(trainers=0)),
    ("run", ["--resume"], lambda: gopt.RunOptions(resume=True)),
    ("verify", ["--steps", "0"], lambda: gopt.VerifyOptions(steps=0)),
    ("verify", ["--seed", "-1"], lambda: gopt.VerifyOptions(seed=-1)),
    ("verify", ["--deadline", "0"], lambda: gopt.VerifyOptions(deadline=0.0)),
    ("derive", ["--clip-norm", "-1"], lambda: gopt.DeriveOptions(**DERIVED, clip_norm=-1.0)),
    ("derive", ["--lr", "nan"], lambda: gopt.DeriveOptions(**DERIVED, lr=float("nan"))),
    ("derive", ["--loss-scale", "x"], lambda: gopt.DeriveOptions(**DERIVED, loss_scale="x")),
    ("derive", ["--dim", "n=0"], lambda: gopt.DeriveOptions(**DERIVED, dims={"n": 0})),
    ("derive", ["--batchnorm", "x"], lambda: gopt.DeriveOptions(**DERIVED, batchnorm="x")),
    ("derive", ["--seed", "-1"], lambda: gopt.DeriveOptions(**DERIVED, seed=-1)),
    ("split", ["--minimum", "0"], lambda: gopt.SplitOptions(trainers=2, servers=1, minimum=0)),
    ("split", ["--mode", "x"], lambda: gopt.SplitOptions(trainers=2, servers=1, mode="x")),
    ("split", ["--every", "2"], lambda: gopt.SplitOptions(trainers=2, servers=1, every=2)),
    ("split", ["--table-memory", "0"], lambda: gopt.SplitOptions(trainers=2, servers=1, table_memory=0)),
    ("split", ["--delay-compensation", "nan"],
     lambda: gopt.SplitOptions(trainers=2, servers=1, mode="async", compensation=float("nan"))),
    ("plan", ["--bucket-mb", "-1"], lambda: gopt.plan(STEP, 2, bucket_mb=-1)),
    ("plan", ["--memory", "x"], lambda: gopt.plan(STEP, 2, memory="x")),
    ("plan", ["--memory", "-1B"], lambda: gopt.plan(STEP, 2, memory=-1)),
    ("plan", ["--link", "x"], lambda: gopt.plan(STEP, 2, link="x")),
    ("diff", ["--rtol", "-1"], lambda: gopt.diff(STEP, STEP, rtol=-1.0)),
    ("diff", ["--atol", "nan"], lambda: gopt.diff(STEP, STEP, atol=float("nan"))),
]  # fmt: skip
WORDS = {
    "shard": [STEP, "--ranks", "2"], "run": ["x", "--data", "x", "--steps", "1"], "verify": ["x"],
    "derive": RECORDS["derive"][0], "split": RECORDS["split"][0], "plan": [STEP, "--ranks", "2"],
    "diff": [STEP, STEP],
}  # fmt: skip


@pytest.mark.parametrize(("name", "words", "python"), REFUSED, ids=lambda each: None if callable(each) else str(each))
def test_what_a_command_refuses_python_refuses(name, words, python, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / STEP).parent.mkdir()
    (tmp_path / STEP).symlink_to(ROOT / STEP)
    assert main([name, *WORDS[name], *words]) == 2
    with pytest.raises(OptionError):
        python()
