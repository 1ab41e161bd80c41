"""Random networks with random elementwise updates: the ranks are equal to the source, or gopt refuses in one line."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import onnx
import pytest
from helpers import FIXTURES, calls, folder_bytes, op_counts, rank_path
from hypothesis import event, given, settings
from hypothesis import strategies as st
from products import spread
from recipes import CHECKS, DIRECTIONS, NORMS, Recipe, build

import gopt
from gopt.errors import GoptError, UnsupportedError
from gopt.passes.pipeline import build_pipeline
from gopt.records.mesh import Mesh
from gopt.verification.verify import Verifier

recipes = st.builds(
    Recipe,
    widths=st.lists(st.sampled_from([1, 2, 3, 4, 7, 17]), min_size=2, max_size=4).map(tuple),
    batch=st.sampled_from([1, 4]),
    bias=st.booleans(),
    tied=st.booleans(),
    half=st.sampled_from([False, False, False, True]),
    loss_scale=st.booleans(),
    frozen=st.sampled_from([-1, -1, -1, 0, 1]),
    passed_on=st.booleans(),
    norm=st.sampled_from(NORMS),
    check=st.sampled_from(["none", *CHECKS]),
    direction=st.lists(st.sampled_from(DIRECTIONS), min_size=1, max_size=2).map(tuple),
    clip_value=st.booleans(),
    decay=st.sampled_from(["none", "coupled", "decoupled"]),
    mask=st.booleans(),
    ema=st.booleans(),
    own_constants=st.booleans(),
    schedule=st.booleans(),
    accumulate=st.sampled_from([False, False, True]),
    lr_input=st.booleans(),
    second_clip=st.sampled_from([False, False, True]),
    metric=st.booleans(),
    trust=st.sampled_from([False, False, True]),
    rows=st.sampled_from([False, False, True]),
    dynamic=st.booleans(),
)


def shard_and_compare(recipe: Recipe, ranks: int | Mesh, stage: int, micro_steps: int = 1, **options: Any) -> str:
    """'equal' or why gopt refused; anything else raises."""
    with TemporaryDirectory() as folder:
        path = Path(folder, "step.onnx")
        path.write_bytes(build(recipe).SerializeToString())
        try:
            source = gopt.load(path)
            pipeline = build_pipeline(defaults={"shard": {"stage": stage, **options}}, verify_each=True)
            sharded = gopt.shard(source, ranks, accumulate=micro_steps, pipeline=pipeline)
        except UnsupportedError as error:
            return error.message
        sharded.write(Path(folder, "out"))
        result = Verifier(Path(folder, "out")).run(steps=2)
        bad = {name: each for name, each in result.worst.items() if not each.error_over_tolerance <= 1}
        assert not bad, f"not equal: {bad}"
        unconfirmed = [each for each in result.gradients if not each.holds]
        assert not unconfirmed, f"no gradient: {unconfirmed}"
    return "equal"


ranks = st.integers(2, 5)
caps = st.sampled_from([None, None, 0.0, 0.0002])
wide = recipes.filter(lambda recipe: min(recipe.widths) > 1)


@st.composite
def choices(draw: Any) -> dict[str, Any]:
    """Options of the shard pass that go together."""
    stage = draw(st.integers(0, 3))
    options: dict[str, Any] = {"stage": stage, "bucket-mb": draw(caps)}
    if stage:
        kind = options["partition"] = draw(st.sampled_from(["flat", "flat", "rows", "whole"]))
        options["owners"] = draw(st.sampled_from(["largest-first", "round-robin", "in-order", "hash"]))
        if kind == "rows":
            options["rule"] = draw(st.sampled_from(["balanced", "ceil"]))
            options["min-piece"] = draw(st.sampled_from([None, 1, 4]))
        if kind == "whole":
            options["style"] = draw(st.sampled_from(["gather", "broadcast"]))
    if stage == 3:
        options["persist"] = draw(st.sampled_from([0, 0, 6]))
        options["reshard-after-forward"] = draw(st.booleans())
    return options


@pytest.mark.rest
@settings(max_examples=12)
@given(wide, ranks, choices(), st.sampled_from([1, 1, 3]))
def test_a_random_update_is_equal_on_all_ranks(recipe, count, options, micro_steps):
    """Where no tensor has one element alone, nothing is refused."""
    if recipe.accumulate:
        micro_steps = 1
    assert shard_and_compare(recipe, count, micro_steps=micro_steps, **options) == "equal"


@pytest.mark.rest
@settings(max_examples=8)
@given(recipes, ranks, choices())
def test_tensors_of_one_element_are_equal_or_refused(recipe, count, options):
    answer = shard_and_compare(recipe, count, **options)
    event(answer)
    assert answer == "equal" or "'" in answer, "a refusal names a value"


@pytest.mark.slow
@pytest.mark.parametrize("turn", range(30))
@settings(max_examples=50, derandomize=False)
@given(recipe=recipes, count=ranks, options=choices(), micro_steps=st.sampled_from([1, 1, 3]))
def test_many_random_updates(turn, recipe, count, options, micro_steps):
    """In turns, which run beside one another."""
    shard_and_compare(recipe, count, micro_steps=1 if recipe.accumulate else micro_steps, **options)


@pytest.mark.parametrize(("norm", "stage"), spread(NORMS, [1, 2]))
def test_every_spelling_of_a_norm(norm, stage):
    assert shard_and_compare(Recipe(norm=norm, widths=(3, 5, 2)), 3, stage) == "equal"


@pytest.mark.parametrize("check", CHECKS)
def test_every_spelling_of_a_finite_check(check):
    assert shard_and_compare(Recipe(check=check, norm="mulsum-sum", loss_scale=True, dynamic=True), 3, 2) == "equal"


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_every_rule(direction):
    assert shard_and_compare(Recipe(direction=(direction,), ema=True), 2, 2) == "equal"


ODD = {
    "two rules in one bucket": Recipe(direction=("adam", "momentum")),
    "a row in two pieces": Recipe(widths=(3, 17, 17)),
    "tied weights": Recipe(widths=(4, 4, 4, 4), tied=True, norm="sumsquare-chain"),
    "a frozen parameter": Recipe(frozen=0),
    "a frozen parameter with an output": Recipe(frozen=1, passed_on=True, norm="l2-stack"),
    "halves": Recipe(half=True, loss_scale=True, check="isinf-any", norm="pow-concat"),
    "masks": Recipe(mask=True, own_constants=True),
    "accumulation": Recipe(accumulate=True, norm="mulsum-sum", check="times-zero"),
    "trust ratios": Recipe(trust=True, second_clip=True),
    "rows": Recipe(rows=True, norm="l2-stack", second_clip=True, metric=True),
    "weights of one column": Recipe(widths=(7, 1, 3), bias=True),
    "a bias of one element": Recipe(widths=(3, 4, 1)),
    "a weight of one element": Recipe(widths=(1, 1, 3), bias=False),
}


@pytest.mark.parametrize(("what", "stage"), spread(ODD, range(4)))
def test_odd_shapes_and_parts(what, stage):
    assert shard_and_compare(ODD[what], 3, stage) == "equal"


@pytest.mark.parametrize(("mesh", "stage", "what"), spread(["dp=3", "dp=2,shard=2", "shard=2,dp=2"], range(4), ODD))
def test_meshes(what, mesh, stage):
    assert shard_and_compare(ODD[what], Mesh.parse(mesh), stage) == "equal"


# --- what is the same, and what stays -------------------------------------------------------------------------------


def written(recipe: Recipe, folder: Path, count: int, **options: Any) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / "step.onnx"
    path.write_bytes(build(recipe).SerializeToString())
    gopt.shard(gopt.load(path), count, **options).write(folder / "out")
    return folder / "out"


RICH = Recipe(widths=(3, 5, 5), tied=True, half=True, loss_scale=True, check="isinf-any", norm="l2-stack", rows=True)


def test_a_second_run_writes_the_same_bytes(tmp_path):
    first, second = (written(RICH, tmp_path / name, 3) for name in ("a", "b"))
    assert folder_bytes(first) == folder_bytes(second)


WRITTEN = """
import sys
import gopt
fixtures, out = sys.argv[1:]
for number, (name, mesh, options) in enumerate((
    ("gpt_adamw_clip_sched_fp16", "shard=3", {}),
    ("gpt_adamw", "shard=2,pp=2", {"accumulate": 3, "stage": 3}),
    ("gpt_adamw", "pp=2", {"accumulate": 4, "schedule": "zb-h1"}),
    ("cnn_sgd", "dp=2,pp=3", {"accumulate": 2, "schedule": "gpipe"}),
    ("mlp_lamb", "pp=2,shard=2", {"accumulate": 4, "schedule": "interleaved:2"}),
    ("families/llama_adamw_clip", "tp=2,pp=2", {}),
    ("families/moe_adamw", "ep=2,shard=2", {"partition": "whole"}),
    ("families/t5_adamw", "cp=2,dp=2", {"accumulate": 2}),
    ("cnn_sgd", "h=2", {}),
    ("gpt_adamw", "shard=2", {"recompute": "selective", "stage": 3}),
    ("gpt_adamw", "dp=2", {"recompute": "100KiB"}),
    ("emb_adamw", "shard=2", {"partition": "rows"}),
)):
    gopt.shard(f"{fixtures}/{name}.onnx", mesh, prove=False, **options).write(f"{out}/{number}")
gopt.split(f"{fixtures}/emb_adamw.onnx", gopt.SplitOptions(trainers=2, servers=2)).write(f"{out}/split")
gopt.prove(f"{out}/0", certificate=f"{out}/0/certificate")
"""


@pytest.mark.rest
def test_hash_order_shows_nowhere(tmp_path):
    for seed in ("1", "2"):
        (tmp_path / seed).mkdir()
        subprocess.run(
            [sys.executable, "-c", WRITTEN, str(FIXTURES), str(tmp_path / seed)], check=True, cwd=tmp_path,
            env={**os.environ, "PYTHONHASHSEED": seed},
        )  # fmt: skip
    for folder in (tmp_path / "1").iterdir():
        assert folder_bytes(folder) == folder_bytes(tmp_path / "2" / folder.name), folder.name


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_one_rank_gives_back_the_source(tmp_path, stage):
    recipe = Recipe(norm="mulsum-sum", check="isinf-any", direction=("adam", "momentum"), ema=True)
    out = written(recipe, tmp_path, 1, stage=stage)
    source = onnx.load(tmp_path / "step.onnx")
    rank = onnx.load(rank_path(out, 0), load_external_data=False)
    assert op_counts(rank) == op_counts(source)
    assert {value.name for value in rank.graph.output} == {value.name for value in source.graph.output}
    assert not calls(rank)


@pytest.mark.parametrize("stage", [0, 2])
def test_a_second_application_is_refused(tmp_path, stage):
    out = written(Recipe(), tmp_path, 2, stage=stage)
    with pytest.raises(GoptError) as caught:
        gopt.load(rank_path(out, 0))
    assert caught.value.exit_code in (3, 4)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_more_ranks_than_elements(tmp_path, stage):
    """Ranks that own nothing issue every call all the same."""
    recipe = Recipe(widths=(2, 2), norm="sumsquare-chain", check="max-below-inf", schedule=True)
    out = written(recipe, tmp_path, 9, stage=stage)
    manifest = json.loads((out / "manifest.json").read_text())
    owned = [sum(len(state["pieces"]) for state in rank["state"]) for rank in manifest["ranks"]]
    assert 0 in owned
    made = [
        [(node.op_type, len(node.input), len(node.output)) for node in calls(onnx.load(path, load_external_data=False))]
        for path in (rank_path(out, rank) for rank in range(9))
    ]
    assert all(each == made[0] for each in made) and len(made[0]) >= 4
    assert Verifier(out).run(steps=2, confirm=False).equal


@settings(max_examples=25)
@given(wide, st.integers(2, 6), st.integers(1, 2))
def test_pieces_tile_every_sharded_state(recipe, count, stage):
    with TemporaryDirectory() as folder:
        out = written(recipe, Path(folder), count, stage=stage)
        manifest = json.loads((out / "manifest.json").read_text())
    shapes = {state["tensor"]: int(np.prod(state["shape"])) for state in manifest["states"]}
    common = {
        piece["tensor"]
        for state in manifest["common"]["state"] if not state.get("copy")
        for piece in state["pieces"]
    }  # fmt: skip
    held: dict[str, list[tuple[int, int]]] = {}
    for rank in manifest["ranks"]:
        for state in rank["state"]:
            if not state.get("copy"):
                for piece in state["pieces"]:
                    held.setdefault(piece["tensor"], []).append((piece["start"], piece["stop"]))
    assert not common & set(held)
    assert common | set(held) == set(shapes)
    for tensor, ranges in held.items():
        ends = sorted(ranges)
        assert ends[0][0] == 0 and ends[-1][1] == shapes[tensor]
        assert all(left[1] == right[0] for left, right in itertools.pairwise(ends))


# --- once wrong, and still wrong ----------------------------------------------------------------------------------

MENDED = {
    "one element in adagrad": Recipe(widths=(3, 2, 1), direction=("adagrad",)),
    "one element under a clip": Recipe(widths=(2, 1, 2), direction=("gradient",), norm="sumsquare-chain"),
    "a mean over a row that is all": Recipe(widths=(1, 17), rows=True),
    "means of tensors of unequal size": Recipe(widths=(3, 5, 2), norm="mean-square"),
    "adam under a mask": Recipe(widths=(3, 5), mask=True),
    "a value clip under a mask": Recipe(clip_value=True, direction=("gradient",), mask=True),
    "a frozen weight whose gradient of one element is dead": Recipe(
        widths=(2, 1, 2), batch=1, bias=False, frozen=0, direction=("gradient",)
    ),
    "a batch of one element": Recipe(widths=(7, 1, 3), batch=1, direction=("gradient",)),
}


@pytest.mark.parametrize(("what", "stage"), spread(MENDED, [0, 1, 2, 3], keep=2))
def test_mended_defects(what, stage):
    assert shard_and_compare(MENDED[what], 3, stage) == "equal"
