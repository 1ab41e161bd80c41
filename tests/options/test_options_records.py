"""Options of the Python verbs that are none, or hold what no option holds: refused by name, as TypeErrors of gopt."""

from __future__ import annotations

import numpy as np
import pytest

import gopt
from gopt.errors import OptionError
from gopt.options.records import changed

STEP = "fixtures/mlp_sgd.onnx"


@pytest.mark.parametrize(
    ("kind", "name", "near"),
    [
        (gopt.ShardOptions, "stgae", "stage"),
        (gopt.ShardOptions, "zero_stgae", "stage"),
        (gopt.ShardOptions, "bucketmb", "bucket_mb"),
        (gopt.VerifyOptions, "stpes", "steps"),
        (gopt.RunOptions, "chekpoint", "checkpoint"),
    ],
)
def test_a_misspelt_keyword_says_which_is_near(kind, name, near):
    with pytest.raises(OptionError, match=f"no option '{name}'") as caught:
        changed(None, kind, {name: 1})
    assert caught.value.hints == (f"did you mean '{near}'?",)


def test_a_keyword_near_to_none_lists_them():
    with pytest.raises(OptionError) as caught:
        changed(None, gopt.VerifyOptions, {"xyzzy": 1})
    assert "steps" in caught.value.hints[0] and "deadline" in caught.value.hints[0]


@pytest.mark.parametrize("options", [{"stage": 1}, gopt.VerifyOptions(), 3, {}, 0])
def test_a_record_of_another_kind_is_refused(options):
    with pytest.raises(OptionError, match="options cannot be"):
        gopt.shard(STEP, 2, options)


@pytest.mark.parametrize(
    ("verb", "keyword", "hint"),
    [
        ("shard", "meshh", "did you mean 'mesh'?"),
        ("shard", "stagee", "did you mean 'stage'?"),
        ("plan", "memry", "did you mean 'memory'?"),
        ("load", "stat", "did you mean 'state'?"),
        ("merge", "forse", "did you mean 'force'?"),
        ("diff", "rtoll", "did you mean 'rtol'?"),
        ("split", "trainer", "write options=SplitOptions(trainers=...)"),
        ("derive", "los", "write options=DeriveOptions(loss=...)"),
        ("explain", "xyzzy", "there are folder, name"),
    ],
)
def test_a_misspelt_keyword_of_every_verb_is_refused_by_name(verb, keyword, hint):
    with pytest.raises(TypeError) as caught:
        getattr(gopt, verb)(**{keyword: 1})
    assert isinstance(caught.value, OptionError) and caught.value.__notes__ == [f"hint: {hint}"]
    assert (str(caught.value), caught.value.hints) == (f"gopt.{verb}: no option {keyword!r}", (hint,))


def test_verbs_refuse_misspelt_keywords(tmp_path):
    for call in (
        lambda: gopt.shard(STEP, 2, stgae=1),
        lambda: gopt.verify(tmp_path, stpes=1),
        lambda: gopt.run(tmp_path, "batches.npz", 1, chekpoint="x"),
    ):
        with pytest.raises(OptionError, match="no option"):
            call()


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [
        *((gopt.ShardOptions, "stage", value) for value in ("2", 1.5, True)),
        *((gopt.ShardOptions, "accumulate", value) for value in ("2", 1.5, 2.0, None, True)),
        *((gopt.ShardOptions, "only_ranks", value) for value in (0, "0", ["0"], [1.0], [], [True], iter([0]))),
        *((gopt.ShardOptions, "passes", value) for value in (None, ["shard"], {"shard": 3}, {1: {}})),
        *((gopt.ShardOptions, "pipeline", value) for value in ("shard", ["shard"], [("shard", None)], 3)),
        (gopt.ShardOptions, "bucket_mb", "1"),
        (gopt.ShardOptions, "partition", 3),
        (gopt.ShardOptions, "verify_each", "yes"),
        (gopt.ShardOptions, "after_each", 3),
        *((gopt.VerifyOptions, "steps", value) for value in ("1", 1.5, None)),
        *((gopt.VerifyOptions, "seed", value) for value in (-1, "a", None)),
        (gopt.RunOptions, "keep", "2"),
        (gopt.RunOptions, "checkpoint", 3),
        (gopt.RunOptions, "deadline", "60"),
    ],
)  # fmt: skip
def test_a_value_of_another_type_is_refused_by_name(kind, name, value):
    with pytest.raises(OptionError, match=name):
        changed(None, kind, {name: value})


def test_whole_numbers_of_numpy_become_pythons():
    made = gopt.ShardOptions(stage=np.int64(1), accumulate=np.int32(2))
    assert (type(made.stage), type(made.accumulate)) == (int, int)
    assert made == gopt.ShardOptions(stage=1, accumulate=2)
    assert gopt.shard(STEP, np.int64(2)).report() == gopt.shard(STEP, 2).report()


@pytest.mark.parametrize("mesh", [None, 2.0, True, (2,), {"shard": 2}])
def test_what_is_no_mesh_is_refused(mesh):
    with pytest.raises(OptionError, match="mesh cannot be"):
        gopt.shard(STEP, mesh)


def test_a_stage_that_is_none_lists_the_stages():
    with pytest.raises(OptionError, match="stage cannot be 9") as caught:
        gopt.shard(STEP, 2, stage=9)
    assert "0 | 1 | 2 | 3" in caught.value.hints[0]
