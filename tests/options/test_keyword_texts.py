"""Messages of Python name keywords; those of commands, and commands that a message names, keep their options."""

from __future__ import annotations

import re

import pytest
from helpers import FIXTURES

import gopt
from gopt.errors import GoptError
from gopt.options.keyword_texts import keyword_text

STEP = str(FIXTURES / "mlp_sgd.onnx")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("--resume needs --checkpoint", "resume needs checkpoint"),
        ("say --loss-reduction sum", 'say loss_reduction="sum"'),
        ("take --stage 3, or more ranks", "take stage=3, or more ranks"),
        ("give --params NAME=VALUE.", 'give roles=RoleMap(params={"NAME": "VALUE"}).'),
        ("name the pairs: --states a=b,c=d", 'name the pairs: roles=RoleMap(states={"a": "b", "c": "d"})'),
        ("if it is fed, say --batch w0", 'if it is fed, say roles=RoleMap(batch=["w0"])'),
        ("--loss nope: the model has no output 'nope'", "roles=RoleMap(loss=\"nope\"): the model has no output 'nope'"),
        ("--ranks 4 and --mesh dp=2 (4 ranks) disagree", 'mesh=4 and mesh="dp=2" (4 ranks) disagree'),
        ("choose another folder with -o, or replace it with --force",
         "choose another folder, or replace it with force=True"),
        ("gopt inspect MODEL --text lists the inputs", "gopt inspect MODEL --text lists the inputs"),
        ("leave out --stage; gopt plan M --ranks 2 shows all", "leave out stage; gopt plan M --ranks 2 shows all"),
        ("a--b and -- are no options", "a--b and -- are no options"),
    ],
)  # fmt: skip
def test_options_become_keywords(text, said):
    assert keyword_text(text) == said


def test_a_role_that_is_a_keyword_stays_one():
    assert keyword_text("--loss mse: the model has it", {"loss"}) == 'loss="mse": the model has it'


@pytest.mark.parametrize(
    "call",
    [
        lambda: gopt.shard(STEP, 2, accumulate=0), lambda: gopt.shard(STEP, 2, statistics="mean,sum"),
        lambda: gopt.shard(STEP, 2, only_ranks=[5]), lambda: gopt.run("x", {}, 1, resume=True),
        lambda: gopt.load(STEP, roles=gopt.api.RoleMap(loss="nope")), lambda: gopt.shard("none.onnx", 2),
        lambda: gopt.shard(STEP, 2, loss_reduction="weighted:nope"), lambda: gopt.plan(STEP, 2, memory="x"),
        lambda: gopt.split(STEP, gopt.SplitOptions(trainers=2, servers=1, every=2)),
    ],
)  # fmt: skip
def test_errors_of_verbs_name_no_option(call):
    with pytest.raises(GoptError) as caught:
        call()
    shown = "\n".join([str(caught.value), *getattr(caught.value, "__notes__", [])])
    assert not re.search(r"(?<!\w)--[a-z]", re.sub(r"gopt [a-z].*", "", shown)), shown


def test_a_record_keeps_what_a_command_prints():
    with pytest.raises(GoptError, match=r"^accumulate cannot be 0") as caught:
        gopt.ShardOptions(accumulate=0)
    assert caught.value.message == "--accumulate cannot be 0"
