"""Options of a sharding as one record: what they mean for the passes, and which do not go together."""

from __future__ import annotations

from dataclasses import fields

import pytest

import gopt
from gopt.errors import OptionError
from gopt.parameter_server.options import SplitOptions
from gopt.passes.pipeline import build_pipeline
from gopt.steps.shard_options import ShardKeywords, ShardOptions
from gopt.verbs.run_options import RunKeywords, RunOptions
from gopt.verification.options import VerifyKeywords, VerifyOptions


def settings(**given) -> dict[str, object]:
    """Pass.option -> value, of the options that are not the default."""
    usual, made = (ShardOptions(**each).passes_to_run() for each in ({}, given))
    held = {
        each.spec.name: {field.name: getattr(each.options, field.name) for field in fields(each.options)}
        for each in usual.stages
    }
    return {
        f"{each.spec.name}.{field.name}": getattr(each.options, field.name)
        for each in made.stages
        for field in fields(each.options)
        if getattr(each.options, field.name) != held.get(each.spec.name, {}).get(field.name)
    }


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {}),
        ({"stage": 0}, {"shard.stage": 0}),
        ({"stage": 2, "partition": "flat"}, {}),
        ({"bucket_mb": 0.5}, {"shard.bucket_mb": 0.5, "fuse-collectives.cap_mb": 0.5}),
        (
            {"bucket_mb": 0.5, "passes": {"fuse-collectives": {"cap-mb": 2}}},
            {"shard.bucket_mb": 0.5, "fuse-collectives.cap_mb": 2.0},
        ),
        ({"link": "1GB/s:1us"}, {"tensor-parallel.link": "1GB/s:1us"}),
        ({"passes": {"shard": {"persist": 7}}}, {"shard.persist": 7}),
        ({"pipeline": [("shard", {"stage": 1})]}, {"shard.stage": 1}),
        ({"pipeline": [("shard", {"persist": 1})], "passes": {"shard": {"persist": 7}}}, {"shard.persist": 1}),
    ],
)
def test_what_options_mean_for_passes(given, expected):
    assert settings(**given) == expected


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"accumulate": 0}, "accumulate cannot be 0"),
        ({"stage": 1, "passes": {"shard": {"stage": 1}}}, "option stage of pass shard is given twice"),
        ({"stage": 1, "pipeline": [("shard", {"stage": 1})]}, "option stage of pass shard is given twice"),
        ({"stage": 1, "pipeline": build_pipeline()}, "a built pipeline has its options already"),
        ({"statistics": "root", "pipeline": [("shard", {})]}, "pass statistics, which is not in the pipeline"),
        ({"passes": {"shrad": {}}}, "shrad"),
    ],
)
def test_options_that_do_not_go_together(given, said):
    with pytest.raises(OptionError, match=said):
        ShardOptions(**given).passes_to_run()


def test_a_record_and_keywords_are_one():
    source = gopt.load("fixtures/mlp_adamw.onnx")
    by_keyword = gopt.shard(source, 2, stage=3, bucket_mb=0).report().to_json()
    assert gopt.shard(source, 2, ShardOptions(stage=3, bucket_mb=0)).report().to_json() == by_keyword
    assert gopt.shard(source, 2, ShardOptions(stage=1, bucket_mb=0), stage=3).report().to_json() == by_keyword
    assert gopt.shard(source, 2, stage=1).report().to_json() != by_keyword
    with pytest.raises(OptionError, match="stge"):
        gopt.shard(source, 2, stge=3)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("record", "keywords"),
    [(ShardOptions, ShardKeywords), (RunOptions, RunKeywords), (VerifyOptions, VerifyKeywords)],
)
def test_a_verb_has_a_keyword_for_each_field(record, keywords):
    assert {each.name: each.type for each in fields(record)} == {
        name: each.__forward_arg__ for name, each in keywords.__annotations__.items()
    }


def test_records_of_options_are_public():
    assert (gopt.ShardOptions, gopt.RunOptions, gopt.VerifyOptions) == (ShardOptions, RunOptions, VerifyOptions)
    assert gopt.SplitOptions is SplitOptions
