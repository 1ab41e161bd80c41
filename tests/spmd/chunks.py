"""What placements mean, in numbers: a value taken apart as its placement says, and put together again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from node_models import evaluated
from onnx import helper

from gopt.records.placements import FlagCount, FlatShard, OnMember, Partial, PerMember, Placement, Replicated, Shard

Array = np.ndarray
Chunks = list[Array | None]
"""What each member has; None: nothing."""


def take_apart(whole: Array, placement: Placement, members: int, generator: np.random.Generator) -> Chunks:
    """What members hold of a value: its shards, or any terms that reduce to it."""
    if isinstance(placement, Replicated):
        return [whole] * members
    if isinstance(placement, FlagCount):
        return [np.asarray(whole * generator.integers(1, 5))] * members  # the same on all
    if isinstance(placement, OnMember):
        return [whole if member == placement.member else None for member in range(members)]
    if isinstance(placement, Shard):
        parts = [placement.part(member) for member in range(members)]
        return [np.take(whole, range(*part), axis=placement.dim) for part in parts]
    if isinstance(placement, FlatShard):
        flat = whole.reshape(-1)
        parts = [placement.part(member) for member in range(members)]
        return [flat[low - placement.start : max(low, high) - placement.start] for low, high in parts]
    if isinstance(placement, PerMember):
        flat = whole.reshape(-1)
        return [generator.permutation(flat).reshape(whole.shape) for _ in range(members)]
    present = [member for member in range(members) if placement.covers(member)]
    terms = iter(_terms(whole, placement.op, len(present), generator))
    return [next(terms) if placement.covers(member) else None for member in range(members)]


def _terms(whole: Array, op: str, count: int, generator: np.random.Generator) -> list[Array]:
    """Some values whose ``op`` is ``whole``."""
    if op in ("sum", "mean"):
        terms = [generator.standard_normal(whole.shape) for _ in range(count - 1)]
        return [*terms, (count if op == "mean" else 1) * whole - sum(terms)]
    if op in ("max", "min"):
        sign = -1 if op == "max" else 1
        terms = [whole + sign * generator.uniform(0.1, 3, whole.shape) for _ in range(count)]
    else:
        terms = [np.array(generator.integers(0, 2, whole.shape).astype(bool)) for _ in range(count)]
        terms = [term | whole if op == "all" else term & (whole > 0) for term in terms]
        terms = [term.astype(whole.dtype) for term in terms]
    terms[int(generator.integers(count))] = whole
    return terms


REDUCE = {
    "sum": np.add.reduce, "mean": np.mean, "max": np.maximum.reduce, "min": np.minimum.reduce,
    "any": np.logical_or.reduce, "all": np.logical_and.reduce,
    "count": lambda terms: np.asarray(np.add.reduce(terms) > 0),
}  # fmt: skip


def agrees(chunks: Chunks, placement: Placement, whole: Array) -> bool:
    """Whether the members' chunks are what the placement says of ``whole``."""
    members = len(chunks)
    if isinstance(placement, Partial):
        terms = np.stack([each for each in chunks if each is not None])
        there = [each is not None for each in chunks]
        want = [placement.covers(member) for member in range(members)]
        made = REDUCE[placement.op](terms) if placement.op != "mean" else terms.mean(axis=0)
        return (
            there == want
            and made.shape == whole.shape
            and _close(made, whole > 0 if placement.op == "count" else whole)
        )
    if isinstance(placement, FlagCount):
        return all(each is not None and _same(np.asarray(each > 0), whole > 0) for each in chunks)
    if isinstance(placement, PerMember):
        return all(each is not None for each in chunks)
    wanted = take_apart(whole, placement, members, np.random.default_rng(0))
    return all(_same(one, other) for one, other in zip(chunks, wanted))


def _same(one: Array | None, other: Array | None) -> bool:
    if other is None or other.size == 0:
        return one is None or one.size == 0
    return one is not None and one.size == other.size and _close(one.reshape(other.shape), other)


def _close(one: Array, other: Array) -> bool:
    return bool(np.allclose(one, other, rtol=1e-9, atol=1e-9, equal_nan=True))


def run(op_type: str, inputs: Sequence[Array], attributes: dict[str, Any]) -> Array:
    """One operator of ONNX, by onnx's own reference."""
    names = [f"x{place}" for place in range(len(inputs))]
    node = helper.make_node(op_type, names, ["y"], **attributes)
    (result,) = evaluated([node], dict(zip(names, inputs)), ["y"])
    return result
