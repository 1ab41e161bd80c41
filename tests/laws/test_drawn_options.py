"""Options of all passes drawn together: ranks are proven and verified equal, and the certificate of the proof holds."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from option_gen import servers
from option_gen.judge import judge
from option_gen.make import Setting, outcomes, structure, wild
from products import part

import gopt
from gopt.errors import UnsupportedError

GOOD = ("right", "refused", "unconfirmed")
FOUND = [
    # A mask cut along its rows is a run of its elements.
    Setting("families/llama_adamw_clip", "dp=2,cp=2", 1, 1, None, {}),
    # Places of maxima on uneven rows have no law in the checker; a rank without rows has no places.
    Setting("cnn_sgd", "h=3", 0, 1, None, {}),
    # A term of a tied gradient is sliced on its way into the sum of a stage.
    Setting("families/t5_adamw", "pp=2,shard=2,tp=2", 1, 2, None, {}),
    # A gradient with terms that are reduced before was scaled twice.
    Setting("gpt_adamw", "sp=3,dp=2", 0, 3, None, {}),
    # A term comes from another stage in each micro-batch.
    Setting("sparse/towers_product_sgd", "pp=2,shard=2", 0, 3, "zb-v", {}),
    # The backward reads the second of two equal gathers, which no pass seemed to make.
    Setting("gpt_adamw", "shard=3,sp=2", 3, 1, None,
            {"tensor-parallel": {"regather": True}, "recompute": {"policy": "full"}}),
    # Types of results that only the outputs of a file declare were those of the first rank's file.
    Setting("families/t5_adamw", "pp=2,tp=2", 2, 2, None, {"tensor-parallel": {"sequence": True}}),
    # The update of a state ran on another stage of the member, and nothing had the new value.
    Setting("stream 19909", "pp=3", 0, 4, "zb-v", {}),
    # A gradient that the rest of the backward reads was a view under another name.
    Setting("stream 19909", "pp=3,dp=2", 0, 4, "zb-v", {}),
    # A term is transposed on another stage.
    Setting("stream 12783", "pp=2,dp=2", 0, 6, "interleaved:3", {}),
    # The loss of parts of tokens, reduced with other values, goes on to all stages.
    Setting("stream 79200", "sp=2,pp=3", 0, 3, "gpipe", {}),
    # A row of zeros that a clip scales is cut on shards.
    Setting("stream 63110", "shard=2", 3, 1, None, {}),
    # A mask in another shape was another constant.
    Setting("gpt_adamw", "sp=2,cp=2", 2, 1, None, {}),
    # The update ran on a stage with the gradient and a copy of the parameter.
    Setting("cnn_sgd", "pp=6", 0, 3, None, {}),
    # Tokens and the tokens rolled by half of them: each member has a half, and both sums are equal.
    Setting("stream 66001", "sp=2", 0, 1, None, {}),
    # A member's tokens stand in rows, or in columns of the same elements.
    Setting("stream 31706", "cp=2", 0, 1, None, {}),
    # The last of four members has a border of zeros alone.
    Setting("stream 65285", "cp=4", 0, 1, None, {}),
    # A value that is repeated along one of two dimensions.
    Setting("stream 36707", "cp=2", 0, 1, None, {}),
    # The sum of a part of the tokens, beside sums of all.
    Setting("stream 14601", "sp=2", 0, 1, None, {}),
    # The last token's row of a causal mask hides nothing.
    Setting("gpt_adamw", "cp=2,sp=4", 0, 1, None, {}),
    # Rows of a table of positions that the source takes, too.
    Setting("stream 87224", "tp=2", 0, 1, None, {"tensor-parallel": {"sizes": "ceil"}}),
    # A part of a sum in front of a factor that is made of the sum.
    Setting("stream 90508", "tp=2,cp=2", 0, 1, None, {"tensor-parallel": {"regather": True}}),
    # The sum of ranges of a term that is ranges itself was no sum in normal form.
    Setting("stream 79226", "dp=2,tp=2", 1, 1, None, {"shard": {"partition": "rows"}}),
    # A value sent on to another stage was taken for the equal sum of the backward, which one call made too.
    Setting("families/t5_adamw", "pp=2,tp=2", 0, 2, "gpipe", {"tensor-parallel": {"regather": True}}),
    # A node moved to another stage, and in the same sweep on to a third, without its operand.
    Setting("stream 15045", "pp=2", 0, 4, "interleaved:3", {}),
    # Files of a member's stages run in an order of the member's own, and the proof found no sender.
    Setting("mlp_adamw", "pp=2", 0, 2, "drawn 13 2 2", {}),
    # The loss came with a file that the member of the first two stages, or of the first alone, has not.
    Setting("mlp_adamw", "pp=2", 0, 2, "drawn 1 2 2", {}),
    Setting("mlp_adamw", "pp=2", 0, 2, "drawn 21 2 2", {}),
    # The same, on tokens in parts.
    Setting("stream 1437", "pp=2,sp=4", 1, 2, "drawn 91757 2 2", {}),
    # The check of a certificate had no value for a ConstantOfShape of no dimensions.
    Setting("structure 104", "dp=2", 0, 1, None, {}),
    # Gradients were rounded for the wire, and no rank sends any.
    Setting("structure 217", "tp=2", 0, 3, None, {"shard": {"reduce-dtype": "float32"}}),
    # A new statistic of an open batch, or behind a finite check without other ranks.
    Setting("structure 50042", "dp=2", 2, 3, None, {"statistics": {"statistics": "local"}}),
    Setting("structure 50045", "tp=4", 2, 1, None, {}),
    # The update read a statistic as the micro-steps of the only rank had moved it.
    Setting("structure 50021", "shard=1", 2, 3, None, {}),
    # A number repeated to an open size.
    Setting("structure 81634", "shard=2", 1, 1, None, {}),
    # The largest element of shares without elements.
    Setting("written 333", "pp=2,shard=3", 1, 3, None, {"shard": {"bucket-mb": 0.01}}),
    # The checker took a stored value beside an input that nobody feeds for a batch.
    Setting("mlp_sgd / unused values", "dp=2", 0, 1, None, {}),
    # In a function, the shape of a constant of an open size was not known: a gradient was another value.
    Setting("written 200091 / the step as one function", "dp=2", 0, 1, None, {}),
    # The files of stages have nodes without results beside functions.
    Setting("mlp_torchoptim_adamw / functions with optional inputs", "pp=2", 0, 2, None, {}),
    # A value of an open size times one of known size.
    Setting("optim/clip_value / split and joined", "dp=2", 0, 1, None, {}),
    # The gradient of a part of the tokens: on a rank without these tokens, all of it is zero.
    Setting("stream 14646", "cp=2,shard=2", 3, 1, None, {"tensor-parallel": {"sequence": True}}),
    # The same, for a sum along a dimension in which each rank has one place.
    Setting("stream 55115", "pp=2,sp=4", 3, 1, None, {}),
    # A part of a row of ranges that has ranges of a single value of the row.
    Setting("stream 99523", "cp=2,ep=4", 0, 1, None, {"tensor-parallel": {"regather": True}}),
    # A synchronised value that nodes of the source read in another layout, whole or in parts, also in the update.
    Setting("stream 37152", "sp=2,shard=2", 3, 1, None,
            {"tensor-parallel": {"regather": True}, "statistics": {"statistics": "sync"}}),
    Setting("stream 37111", "cp=2,dp=2", 2, 1, None,
            {"tensor-parallel": {"regather": True}, "statistics": {"statistics": "sync"}}),
    Setting("cnn_sgd", "h=2,dp=2", 2, 1, None, {"statistics": {"statistics": "sync"}}),
    # A moment in eight bits turns by one where gradients are rounded for the wire.
    Setting("written 220212", "shard=2", 2, 1, None, {"shard": {"reduce-dtype": "float16"}}),
    # The coefficient of a sum, repeated along another dimension, stood inside a product in the source alone.
    Setting("stream 410101", "sp=2,tp=2", 0, 1, None, {}),
    # A member whose tokens are left behind has one term of a sum, which does not follow the tokens.
    Setting("stream 410069", "sp=3", 0, 1, None, {}),
    # A gradient that is equal for all tokens goes through a matrix.
    Setting("stream 410023", "sp=3", 0, 1, None, {}),
]  # fmt: skip
"""Each was called wrong in verify, in the proof or in the check of its certificate, was unproven, or ended as a
defect."""


@pytest.mark.parametrize("setting", FOUND, ids=Setting.told)
def test_what_was_found_stays_right(setting, tmp_path):
    assert judge(setting, tmp_path).outcome == "right"


def test_a_sum_of_terms_that_a_stage_makes_is_scaled_once(tmp_path):
    """By ``gopt verify``, which scaled the terms inside the sum, too."""
    setting = Setting("stream 95562", "pp=2,dp=2", 0, 2, "drawn 97939 2 2", {})
    assert judge(setting, tmp_path).outcome == "unconfirmed", "a gradient is the same on every batch"


def test_rounded_gradients_beside_a_gap_of_the_proof_are_no_difference(tmp_path):
    """The rounding for the wire was taken for a counter-example of what the proof could not close."""
    setting = Setting("written 50613", "tp=2,shard=2", 0, 1, None, {"shard": {"reduce-dtype": "float32"}})
    assert judge(setting, tmp_path).outcome in ("right", "unproven")


@pytest.mark.parametrize(
    ("mesh", "shared", "other"),
    [("tp=2", "tp=2", "dp=2"), ("tp=2,shard=2", "tp=2", "shard=2,dp=2"), ("pp=2,dp=2", "pp=2", "dp=4")],
)
def test_a_statistic_that_the_update_reads_as_before_is_refused_where_ranks_share_samples(
    mesh, shared, other, tmp_path
):
    """By name; it ended as a defect, since such ranks read what the micro-steps had made of it. Both hints settle it:
    on other samples gopt verify finds the ranks equal, where the proof leaves the old values open."""
    setting = Setting("structure 50021", mesh, 2, 3, None, {})
    with pytest.raises(UnsupportedError, match="the statistic 'cov' as it was before the micro-steps") as caught:
        gopt.shard(setting.file(tmp_path), mesh, **setting.options(tmp_path))
    assert f"by MatMul 'n32': ranks along {shared} share samples" in caught.value.message
    assert caught.value.hints[0].endswith(f"--mesh {other}")
    for again, right in (
        (replace(setting, accumulate=1), ["right"]),
        (replace(setting, mesh=other), ["right", "unproven"]),
    ):
        folder = tmp_path / f"{again.mesh} {again.accumulate}"
        folder.mkdir()
        verdict = judge(again, folder)
        assert verdict.outcome in right, verdict.why


@pytest.mark.parametrize("seed", part(range(400), 8))
def test_ranks_of_drawn_options_are_right(seed, tmp_path):
    setting = Setting.draw(seed)
    verdict = judge(setting, tmp_path)
    assert verdict.outcome in outcomes(setting.step, *GOOD), verdict.why


@pytest.mark.parametrize("seed", part(range(1000, 1400), 8))
def test_ranks_of_drawn_structures_are_right(seed, tmp_path):
    setting = Setting.draw(seed, structure(seed))
    verdict = judge(setting, tmp_path)
    assert verdict.outcome in outcomes(setting.step, *GOOD), verdict.why


@pytest.mark.parametrize("seed", part(range(2000, 2400), 4))
def test_ranks_of_drawn_forms_are_those_of_the_plain_step(seed, tmp_path):
    setting = Setting.draw(seed, wild(seed))
    verdict = judge(setting, tmp_path)
    assert verdict.outcome in (*GOOD, "unproven", "unfit"), verdict.why


def test_places_of_an_open_number_are_no_window(tmp_path):
    """In functions of functions shapes are not known, and the proof ended as a defect."""
    setting = Setting("stream 200821 / functions in functions", "sp=2", 0, 1, None, {})
    assert judge(setting, tmp_path).outcome in ("right", "unproven")


def test_parts_beside_a_value_of_open_lengths_end_in_no_defect(tmp_path):
    """The proof took the dimensions of a value that has none it knows."""
    passes = {"recompute": {"policy": "selective"}}
    setting = Setting("stream 240313 / split and joined", "cp=3,dp=2", 0, 3, None, passes)
    sharded = gopt.shard(setting.file(tmp_path), setting.mesh, **setting.options(tmp_path))
    sharded.write(tmp_path / "ranks")
    assert json.loads((tmp_path / "ranks" / "report.json").read_text())["proof"]["verdict"] != "different"


@pytest.mark.parametrize(
    ("step", "words"),
    [
        ("written 220989", "--trainers 2 --servers 1 --wire float16"),
        ("structure 232640", "--trainers 2 --servers 1 --wire float16"),
        ("structure 225494", "--trainers 2 --servers 3 --pull end --wire bfloat16"),
        ("written 225780", "--trainers 1 --servers 3 --wire bfloat16"),
        ("structure 300965", "--trainers 2 --servers 1 --accumulate 2 --pull end --wire float16"),
        ("structure 301157", "--trainers 1 --servers 3 --wire float16"),
        ("written 301545", "--trainers 2 --servers 1 --slicing off --minimum 16 --wire float16"),
    ],
)
def test_halves_on_the_wire_are_no_difference(step, words, tmp_path):
    """A moment in eight bits turned by one, gradients times 4096 were infinite on the wire, in the first step or later,
    or trainers compute losses, gradients and a metric of parameters as they came over the wire."""
    split = servers.Split(Setting(step, "", 0, 1, None, {}), tuple(words.split()))
    assert servers.judge(split, tmp_path).outcome == "right"


@pytest.mark.parametrize("more", [(), ("--trainers", "2"), ("--accumulate", "2")])
def test_a_statistic_that_follows_a_check_of_gradients_is_of_one_trainer_alone(more, tmp_path):
    """Each trainer checked the gradients of its own samples, and statistics of others moved."""
    words = ("--trainers", "1", "--servers", "2", *more)
    verdict = servers.judge(servers.Split(Setting("structure 300758", "", 0, 1, None, {}), words), tmp_path)
    assert verdict.outcome == ("refused" if more else "right")
    assert not more or "stays as it was where a check of the gradients" in verdict.why


def test_settings_are_of_every_kind():
    drawn = [Setting.draw(seed) for seed in range(200)]
    assert len({each.step for each in drawn}) > 50
    assert {each.stage for each in drawn} == {0, 1, 2, 3}
    assert sum("pp=" in each.mesh for each in drawn) > 50
