"""What placements cost: as much as the split that is then written."""

from __future__ import annotations

import json

import pytest
from gopt.cli.main import main
from helpers import FIXTURES, source

from gopt import api
from gopt.artifact.server_entries import Mode, PullAt
from gopt.offline.plan_split import rank_splits, split_choices, weigh
from gopt.parameter_server.options import SplitOptions
from gopt.parameter_server.slicing import Slicing


def options(**given: object) -> SplitOptions:
    return SplitOptions(**{"trainers": 2, "servers": 3, "minimum": 16, **given})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("mlp_adamw", {}), ("mlp_adamw", {"mode": Mode.ASYNC}), ("mlp_adamw_fp16_scaler", {"wire": "float16"}),
        ("emb_adamw", {"pull": PullAt.END}), ("mlp_lamb", {"servers": 5}), ("cnn_sgd", {"slicing": Slicing.OFF}),
        ("mlp_mom_clip_sched", {"accumulate": 2}), ("sparse/dlrm_adagrad", {"tables": {"*": "columns"}}),
    ],
)  # fmt: skip
def test_the_plan_is_what_the_report_says(name: str, given: dict[str, object]) -> None:
    asked = options(**given)
    found = weigh(source(name).training, asked)
    report = api.split(source(name), asked).report()
    facts, servers = report.pipeline[0].facts, report.ranks[2:]
    assert list(found.pieces) == facts["pieces_by_server"]
    assert list(found.pushed) == facts["pushed_by_server"] and list(found.pulled) == facts["pulled_by_server"]
    assert list(found.parameters) == [each.nbytes.parameters for each in servers]
    assert list(found.optimizer_states) == [each.nbytes.optimizer_states for each in servers]
    assert found.messages == report.ranks[0].communication[0].calls


def test_what_fits_comes_first_and_then_what_was_asked() -> None:
    found = list(split_choices(source("mlp_adamw").training, options(servers=2)))
    assert {each.options.servers for each in found} == {1, 2, 4}
    ranked = rank_splits(found, 2, None)
    assert [row.choice.options.servers == 2 for row in ranked] == sorted(
        (row.choice.options.servers == 2 for row in ranked), reverse=True
    )
    assert ranked[0].choice.balance < 1.1
    tight = rank_splits(found, 2, max(ranked[0].choice.held) - 1)
    assert tight[0].fits and tight[0].choice.options.servers == 4 and "does not fit" in tight[-1].why


def test_the_command_writes_nothing_and_names_the_best(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["plan", str(FIXTURES / "mlp_adamw.onnx"), "--trainers", "2", "--servers", "2", "--minimum", "16"]
    assert main(command) == 0
    assert (
        "best: gopt split MODEL --trainers 2 --servers 2 --slicing balanced --placement bytes"
        in capsys.readouterr().out
    )
    assert main([*command, "--json", "--memory", "1KB"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["servers"] == 2 and not record["choices"][0]["fits"]
    assert main([*command, "--memory", "1KB"]) == 0
    assert "nothing fits" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--trainers", "2"], "the number of servers is missing"),
        (["--trainers", "2", "--servers", "2", "--mesh", "dp=2"], "--trainers cannot be combined with --mesh"),
        (["--ranks", "2", "--wire", "float16"], "--wire needs --trainers"),
    ],
)
def test_options_of_ranks_and_servers_do_not_mix(
    given: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", str(FIXTURES / "mlp_adamw.onnx"), *given]) == 2
    assert message in capsys.readouterr().err
