"""A step of two parameters of three elements in one bucket, and what the check of buckets says of its nodes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from small_steps import node, program

from gopt.errors import InvariantError
from gopt.ir.graph import SPMD, Node
from gopt.ir.types import TensorType
from gopt.records.placements import FlatShard, Sharding
from gopt.spmd.bucket_order import check_bucket_order
from gopt.spmd.program import BucketSlice

CUTS, IN_A, IN_B = (0, 4, 6), BucketSlice("a", 0, 3), BucketSlice("b", 3, 3)
BUCKET = {"group": "shard", "cuts": list(CUTS)}
CUT = {"starts": [0, 3], "sizes": [3, 3]}
SIZES = {"lr": 1, "tiny": 1, "none": 0, "both": 6, "two": 2}
"""Elements of values, by the first word of their names; a bucket's have six, all others three."""


def part(start: int = 0, stop: int = 6) -> Sharding:
    return Sharding.along("shard", FlatShard(CUTS, start, stop))


def made(text: str, **attributes: Any) -> Node:
    """A node of a pass; a layout operator where it has ``sharding`` or joins."""
    sharding = attributes.pop("sharding", None)
    each = node(text, "plant", **attributes)
    if sharding is not None or each.op_type in ("LocalSlice", "ShardSlice", "LocalConcat"):
        each.domain, each.sharding = SPMD, sharding or part()
    return each


SCATTER, GATHER = "U ReduceScatter da db -> bucket.g", "U AllGather bucket.q -> a_new b_new"
SHAPES = {**BUCKET, "shapes": ["3", "3"]}


def update(gathered: str = GATHER, **shapes: Any) -> list[Node]:
    """A step of stage 2: gradients in a bucket, parameters cut, one subtraction, new parameters gathered."""
    return [
        made(SCATTER, **BUCKET),
        made("U LocalSlice a b -> bucket.p", **CUT),
        made("U Sub bucket.p bucket.g -> bucket.q"),
        made(gathered, **(shapes or SHAPES)),
    ]


def held(name: str, *slices: BucketSlice, flat: bool = True, copy: bool = False) -> Any:
    sharding = part() if flat else Sharding()
    return SimpleNamespace(input=name, output=f"{name}_new", copy=copy, slices=slices, sharding=sharding)


HELD_A, HELD_B = held("a", IN_A, flat=False), held("b", BucketSlice("b", 0, 3), flat=False)


def step_of(source: list[Node] | None = None, **more: Any) -> Any:
    nodes = source or [
        node("F MatMul x a -> h"),
        node("B Abs h -> da"),
        node("B Neg h -> db"),
        node("B Cast da -> da16"),
        node("U Sub a da -> a_new"),
        node("U Sub b db -> b_new"),
    ]
    roles: dict[str, Any] = {"states": {"a": "a_new", "b": "b_new"}, "gradients": {"a": "da", "b": "db"}}
    step = program(nodes, **{"statistics": {"run": "run_new"}, **roles, **more})
    step.states = [HELD_A, HELD_B]
    return step


def said(step: Any, nodes: list[Node], live: list[Node] | None = None) -> str:
    step.graph.nodes = nodes
    names = {name for each in nodes for name in (*each.inputs, *each.outputs)} | set(step.training.graph.types)
    for name in names:
        word = name.split(".")[0].split("_")[0]
        step.graph.types[name] = TensorType("float32", (SIZES.get(word, 6 if word == "bucket" else 3),))
    step.mesh = SimpleNamespace(axes=(("dp", 1), ("shard", 2)))
    step.live_nodes = lambda: {id(each) for each in (nodes if live is None else live)}
    try:
        check_bucket_order(step)
    except InvariantError as error:
        return f"{error.message} ({' '.join(error.hints)})"
    return ""
