"""Turns local gradients into the values read by the update: cast for the wire, reduced, summed over micro-steps.

With one micro-step: gradient -> wire type -> call -> gradient type. With several, whole accumulators hold local sums
and the call waits for the update (stages 0 and 1); or each micro-step reduces inside the sharding group, accumulators
hold the owners' shards, and only the reduction over the outer data axes waits (stage 2 and up)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from gopt.analysis.loss_reduction import LossRule
from gopt.ir.rewriter import GraphRewriter
from gopt.ir.types import TensorType, dtype_code
from gopt.passes.shard import emit
from gopt.passes.shard.loss_weights import LossWeights
from gopt.records.placements import FULLY_REPLICATED, FlatShard, OnMember, Sharding
from gopt.spmd.program import Accumulator, SpmdProgram


@dataclass(slots=True)
class ReducedGradients:
    """Values that replace gradients for readers in the update.

    ``values``: gradient -> the reduced value of its shape. ``unrounded``: a value cast back to the gradient's type ->
    the same before the cast, for readers that would widen the value again."""

    values: dict[str, str] = field(default_factory=dict)
    unrounded: dict[str, str] = field(default_factory=dict)

    def add(self, gradient: str, value: ReducedValue) -> None:
        self.values[gradient] = value.name
        if value.unrounded:
            self.unrounded[value.name] = value.unrounded

    def update(self, gradients: ReducedGradients) -> None:
        self.values.update(gradients.values)
        self.unrounded.update(gradients.unrounded)


@dataclass(frozen=True, slots=True)
class ReducedValue:
    """A reduced gradient, or the shard of a bucket of gradients; ``unrounded``: before the cast back to the gradient's
    type, or ''."""

    name: str
    unrounded: str = ""


@dataclass(slots=True)
class GradientReduction:
    """Writes reductions of gradients; ``scattered``: whether accumulators hold shards."""

    program: SpmdProgram
    rewriter: GraphRewriter
    groups: emit.Groups
    scattered: bool
    weights: LossWeights

    @property
    def micro(self) -> bool:
        """Whether gradients are summed over micro-steps."""
        return self.program.micro_steps > 1

    def to_shard(self, bucket: str, gradients: Sequence[str], cuts: Sequence[int]) -> ReducedValue:
        """The mean gradient of a bucket, 1-D, with a shard on each member."""
        dtype = self._dtype(gradients[0])
        shard = emit.named(bucket, "gradient")
        operands = [self._given(bucket, position, name) for position, name in enumerate(gradients)]
        scattered = emit.named(bucket, "scattered")
        emit.reduce_scatter(self.rewriter, self.groups.shard, operands, cuts, scattered, self.weights.reduce)
        value = scattered
        if self.micro and self.scattered:
            along = Sharding.along(self.groups.shard, FlatShard.whole(tuple(cuts)))
            value = self._sum(shard, value, emit.flat(accumulated_dtype(dtype), cuts[-1]), along, gradients[0])
        return self._finish(value, shard, dtype, self.groups.outer, FULLY_REPLICATED)

    def everywhere(self, bucket: str, gradients: Sequence[str]) -> ReducedGradients:
        """The mean gradients on every rank, one call each: calls without cuts can still be packed."""
        reduced = ReducedGradients()
        for position, name in enumerate(gradients):
            operand = self._given(bucket, position, name, local=True)
            result = emit.named(bucket, f"gradient{position}")
            value = self._finish(operand, result, self._dtype(name), self.groups.data, FULLY_REPLICATED)
            reduced.add(name, value)
        return reduced

    def to_owners(self, bucket: str, gradients: Sequence[str], owners: Sequence[int]) -> ReducedGradients:
        """The mean of each gradient on the owner alone, one call each."""
        reduced = ReducedGradients()
        for position, (name, owner) in enumerate(zip(gradients, owners)):
            operand = self._given(bucket, position, name)
            value, result = emit.named(bucket, f"owned{position}"), emit.named(bucket, f"gradient{position}")
            on_owner = Sharding.along(self.groups.shard, OnMember(owner))
            emit.reduce(self.rewriter, self.groups.shard, owner, operand, value, self.weights.reduce)
            if self.micro and self.scattered:
                type = TensorType(accumulated_dtype(self._dtype(name)), self.rewriter.graph.types[name].shape)
                value = self._sum(result, value, type, on_owner, name)
            reduced.add(name, self._finish(value, result, self._dtype(name), self.groups.outer, on_owner))
        return reduced

    def _given(self, bucket: str, position: int, name: str, *, local: bool = False) -> str:
        """Return a rank's operand of the call for a gradient: the gradient, or the mean over the micro-steps."""
        root, value = emit.named(bucket, f"local{position}"), name
        if self.micro and (local or not self.scattered):
            type = self.rewriter.graph.types[name]
            value = self._sum(
                root, name, TensorType(accumulated_dtype(type.dtype), type.shape), FULLY_REPLICATED, name, local=True
            )
        else:
            value = self.weights.to_call(name, root)
        if name in self.weights.summed:
            value = self.weights.times_all(value, root)
        return self._on_wire(value, f"{root}_wire", FULLY_REPLICATED)

    def _finish(self, value: str, result: str, dtype: str, group: str | None, sharding: Sharding) -> ReducedValue:
        """Reduce the rest over ``group``, and cast back to the gradient's type."""
        if group is not None:
            whole = f"{result}_mean"
            wire_value = self._on_wire(value, f"{result}_wire", sharding)
            emit.all_reduce(self.rewriter, group, [wire_value], [whole], self.weights.reduce, sharding)
            value = whole
        back = self._as(value, dtype, result, sharding)
        return ReducedValue(back, value if back != value else "")

    def _on_wire(self, value: str, name: str, sharding: Sharding) -> str:
        return self._as(value, self.program.reduce_dtype or self._dtype(value), name, sharding)

    def _sum(
        self, root: str, value: str, type: TensorType, held_as: Sharding, gradient: str, *, local: bool = False
    ) -> str:  # fmt: skip
        """Add a micro-step's value of ``gradient`` to an accumulator of ``type``; returns the accumulated mean, read by
        the update.

        ``local``: nothing was reduced over ranks yet."""
        rewriter = self.rewriter
        sharding = FULLY_REPLICATED if held_as.flat is not None else held_as  # every rank has its part, if it is empty
        accumulator = Accumulator(
            f"{root}_sum", f"{root}_sum_out", f"{root}_sum_next", type, held_as, self.program.split_along(gradient)
        )
        rewriter.graph.types[accumulator.input] = type
        term = self._as(value, type.dtype, f"{root}_term", sharding)
        term = self.weights.own_term(term, root) if local else self.weights.reduced_term(term, root, sharding)
        rewriter.add("Add", [accumulator.input, term], {accumulator.added: type}, sharding=sharding)
        rewriter.zeros(accumulator.input, accumulator.output, f"{root}_sizes", sharding)
        self.program.accumulators.append(accumulator)
        if self.weights.rule is LossRule.SUM:
            return accumulator.input
        rewriter.add(
            "Div", [accumulator.input, self._count(type.dtype, local)], {f"{root}_each": type}, sharding=sharding
        )
        return f"{root}_each"

    def _count(self, dtype: str, local: bool) -> str:
        """Return a scalar of type ``dtype`` that divides a sum over micro-steps: the number of micro-steps, or the sum
        of weights."""
        if self.weights.weighted:
            return self.weights.own_total(dtype) if local else self.weights.reduced_total(dtype)
        rewriter, name = self.rewriter, f"gopt.shard.micro_steps.{dtype}"
        if name not in rewriter.graph.types:
            count = rewriter.constant(f"{name}.count", float(self.program.micro_steps))
            rewriter.add("Cast", [count], {name: TensorType(dtype, ())}, attributes={"to": dtype_code(dtype)})
        return name

    def _as(self, value: str, dtype: str, name: str, sharding: Sharding) -> str:
        """A value in another type; the value itself if the type is equal."""
        type = self.rewriter.graph.types[value]
        if type.dtype == dtype:
            return value
        outputs = {name: TensorType(dtype, type.shape)}
        producers = self.rewriter.latest([value])
        self.rewriter.add(
            "Cast", [value], outputs, attributes={"to": dtype_code(dtype)}, sharding=sharding, after=producers
        )
        return name

    def _dtype(self, name: str) -> str:
        return self.rewriter.graph.types[name].dtype


def accumulated_dtype(dtype: str) -> str:
    """The type of sums of gradients over micro-steps: float32, or float64 for float64."""
    return "float64" if dtype == "float64" else "float32"
