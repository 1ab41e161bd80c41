"""Every pair of knobs: each combination verifies, or is refused in one line; the full product is marked slow."""

from __future__ import annotations

import itertools
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
from products import part
from recipes import Recipe, build

import gopt
from gopt.errors import OptionError
from gopt.ir.graph import COMM
from gopt.passes import PASSES
from gopt.passes.pipeline import build_pipeline
from gopt.records.mesh import Mesh
from gopt.verification.verify import Verifier

LAYOUTS: dict[str, dict[str, Any]] = {
    "flat": {},
    "rows": {"partition": "rows"},
    "ceil": {"partition": "rows", "rule": "ceil", "min-piece": 4},
    "whole": {"partition": "whole"},
    "broadcast": {"partition": "whole", "style": "broadcast"},
}
KNOBS: dict[str, tuple[Any, ...]] = {
    "stage": (0, 1, 2, 3),
    "layout": tuple(LAYOUTS),
    "hoist": (True, False),
    "accumulate": (1, 3),
    "clip": ("none", "sumsquare-chain"),
    "dtype": ("float32", "float16", "scaled"),
    "mesh": ("shard=1", "shard=3", "dp=2", "dp=2,shard=2", "shard=2,tp=2"),
    "reduce_dtype": (None, "float32", "float16"),
    "bucket_mb": (None, 0.0),
}
Row = tuple[Any, ...]


def composes(row: Row) -> bool:
    """Nothing is cut at stage 0; all else goes together."""
    return row[0] != 0 or row[1] == "flat"


def pairs(row: Row) -> set[tuple[tuple[int, Any], tuple[int, Any]]]:
    return set(itertools.combinations(enumerate(row), 2))


def pairwise() -> list[Row]:
    """Few rows in which every two values meet that can: of a fixed pseudo-random many, always one that adds most."""
    generator = random.Random(0)
    candidates = [tuple(map(generator.choice, KNOBS.values())) for _ in range(4000)]
    adds = {row: pairs(row) for row in candidates if composes(row)}
    left = set[Any]().union(*adds.values())
    rows = []
    while left:
        rows.append(max(adds, key=lambda row: len(adds[row])))
        left -= adds[rows[-1]]
        adds = {row: found & left for row, found in adds.items()}
    return rows


def walk(folder: Path, knobs: dict[str, Any]) -> None:
    recipe = Recipe(
        widths=(3, 5, 4), norm=knobs["clip"], half=knobs["dtype"] != "float32", loss_scale=knobs["dtype"] == "scaled",
        check="isinf-any" if knobs["dtype"] == "scaled" else "none",
    )  # fmt: skip
    path = folder / "step.onnx"
    path.write_bytes(build(recipe).SerializeToString())
    names = (
        ["tensor-parallel"]
        + ["hoist-casts"] * knobs["hoist"]
        + ["shard", "statistics", "fuse-collectives", "overlap", "prune"]
    )
    options = {"stage": knobs["stage"], "bucket-mb": knobs["bucket_mb"], "reduce-dtype": knobs["reduce_dtype"]}
    options |= LAYOUTS[knobs["layout"]]
    pipeline = build_pipeline([(name, options if name == "shard" else {}) for name in names if name in PASSES])
    mesh = Mesh.parse(knobs["mesh"])
    sharded = gopt.shard(gopt.load(path), mesh, accumulate=knobs["accumulate"], pipeline=pipeline)
    sharded.write(folder / "out")
    result = Verifier(folder / "out").run(steps=2, confirm=False)
    assert result.equal, {name: each for name, each in result.worst.items() if not each.error_over_tolerance <= 1}
    if knobs["layout"] == "broadcast" and sharded.program.mesh.shard_axis:
        calls = {node.op_type for rank in sharded.ranks for node in rank.nodes if node.domain == COMM}
        assert {"Reduce", "Broadcast"} <= calls and not {"ReduceScatter", "AllGather"} & calls


@pytest.mark.parametrize(
    "row", part([pytest.param(row) for row in pairwise()], 16), ids=lambda row: "-".join(map(str, row))
)
def test_every_pair_of_knobs(row, tmp_path):
    walk(tmp_path, dict(zip(KNOBS, row)))


@pytest.mark.slow
@pytest.mark.parametrize("stage", KNOBS["stage"])
@pytest.mark.parametrize("mesh", KNOBS["mesh"])
def test_the_full_product(stage, mesh, tmp_path):
    rest = {name: values for name, values in KNOBS.items() if name not in ("stage", "mesh")}
    for number, row in enumerate(itertools.product(*rest.values())):
        knobs = {"stage": stage, "mesh": mesh, **dict(zip(rest, row))}
        if composes(tuple(knobs[name] for name in KNOBS)):
            folder = tmp_path / str(number)
            folder.mkdir()
            walk(folder, knobs)
            shutil.rmtree(folder)


def test_the_rows_cover_every_pair():
    rows = pairwise()
    met = set[Any]().union(*map(pairs, rows))
    every = itertools.combinations(enumerate(KNOBS.values()), 2)
    wanted = {((i, a), (j, b)) for (i, first), (j, second) in every for a in first for b in second}
    assert wanted - met == {((0, 0), (1, layout)) for layout in LAYOUTS if layout != "flat"}


USELESS = {
    "partition": {"stage": 0, "partition": "rows"},
    "override": {"stage": 0, "override": "w0:rows"},
    "owners": {"stage": 0, "owners": "hash"},
    "persist": {"stage": 2, "persist": 10},
    "reshard-after-forward": {"stage": 2, "reshard-after-forward": False},
    "rule": {"rule": "ceil"},
    "min-piece": {"partition": "whole", "min-piece": 4},
    "style": {"style": "broadcast"},
    "style=broadcast": {"partition": "whole", "style": "broadcast", "override": "w0:flat"},
    "nothing:rows": {"override": "nothing:rows"},
    "w0;rows": {"override": "w0;rows"},
}


@pytest.mark.parametrize("named", USELESS)
def test_what_has_no_use_is_refused_in_one_line(named, tmp_path):
    path = tmp_path / "step.onnx"
    path.write_bytes(build(Recipe()).SerializeToString())
    with pytest.raises(OptionError) as caught:
        gopt.shard(gopt.load(path), 2, pipeline=build_pipeline(defaults={"shard": USELESS[named]}))
    assert named.partition(";")[0] in caught.value.message and "\n" not in caught.value.message


def test_a_model_that_accumulates_takes_no_micro_steps(tmp_path):
    path = tmp_path / "step.onnx"
    path.write_bytes(build(Recipe(accumulate=True)).SerializeToString())
    with pytest.raises(OptionError, match="accumulates gradients itself"):
        gopt.shard(gopt.load(path), 2, accumulate=2)
