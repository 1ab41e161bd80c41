"""Weights of gradients: none, or a value of each rank's forward (``--loss-reduction``).

A weighted mean is the plain mean of gradients multiplied by w / mean(w) before. Over micro-steps: a rank's own sums are
of w g, divided in the update by the mean over ranks of the sum of w; sums of already reduced gradients are of m g, m
being the mean of w over the ranks in the micro-step, divided by the sum of m."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from gopt.analysis.loss_reduction import LossRule
from gopt.ir.rewriter import GraphRewriter
from gopt.ir.types import TensorType, dtype_code, scalar_of
from gopt.passes.shard import emit
from gopt.records.placements import FULLY_REPLICATED, Sharding
from gopt.spmd.program import Accumulator, SpmdProgram


@dataclass
class LossWeights:
    """``data``: the group of ranks with different data, None for a single rank."""

    program: SpmdProgram
    rewriter: GraphRewriter
    data: str | None

    @property
    def rule(self) -> LossRule:
        return self.program.loss_reduction.rule

    @property
    def reduce(self) -> str:
        """The reduction of calls of gradients."""
        return "sum" if self.rule is LossRule.SUM else "mean"

    @cached_property
    def summed(self) -> frozenset[str]:
        """Gradients to be summed, although calls take means."""
        return self.program.loss_reduction.summed_gradients(self.program.training)

    def times_all(self, value: str, root: str) -> str:
        """A value times the number of terms of a mean: ranks of different data, times micro-steps."""
        type = self.rewriter.graph.types[value]
        count = self.program.micro_steps * (self.program.mesh.size(self.data) if self.data is not None else 1)
        terms = self.rewriter.constant(_named(f"terms.{type.dtype}"), scalar_of(count, type.dtype))
        self._add("Mul", [value, terms], f"{root}_summed", type, after=[value])
        return f"{root}_summed"

    @property
    def weighted(self) -> bool:
        return self.rule is LossRule.WEIGHTED

    def to_call(self, gradient: str, root: str) -> str:
        """A rank's gradient times w / mean(w); zeros where w is zero, whatever the gradient is there."""
        if not self.weighted:
            return gradient
        return self._times(gradient, self._share(), root, FULLY_REPLICATED)

    def own_term(self, term: str, root: str) -> str:
        """The term of a micro-step in a rank's own sum."""
        return self._times(term, self._own(), root, FULLY_REPLICATED) if self.weighted else term

    def reduced_term(self, term: str, root: str, sharding: Sharding) -> str:
        """The term of a micro-step in a sum of reduced gradients."""
        if not self.weighted:
            return term
        type = self.rewriter.graph.types[term]
        factor = self._as(self._mean(), type.dtype)
        self._add("Mul", [term, factor], f"{root}_weighed", type, sharding=sharding, after=[term, factor])
        return f"{root}_weighed"

    def own_total(self, dtype: str) -> str:
        """The divisor, in the update, of a rank's own sums: the mean over ranks of their summed weights."""
        return self._divisor(self._over_ranks(self._summed("own", self._own()), "own_total"), dtype)

    def reduced_total(self, dtype: str) -> str:
        """The divisor, in the update, of sums of reduced gradients."""
        return self._divisor(self._summed("mean", self._mean()), dtype)

    # --- scalars ----------------------------------------------------------------------------------------------------

    def _type(self) -> TensorType:
        types = self.rewriter.graph.types
        wide = any(types[name].dtype == "float64" for name in self.program.training.gradients.values())
        return TensorType("float64" if wide else "float32", ())

    def _own(self) -> str:
        """The rank's weight, as a floating scalar."""
        value, scalar = self.program.loss_reduction.value, self._type()
        type = self.rewriter.graph.types[value]
        if type.shape:
            value = self._once("scalar", "Squeeze", [value], TensorType(type.dtype, ()))
        return self._as(value, scalar.dtype)

    def _mean(self) -> str:
        return self._over_ranks(self._own(), "mean")

    def _over_ranks(self, value: str, role: str) -> str:
        """The mean of a scalar over the ranks."""
        name = _named(role)
        if self.data is None:
            return value
        if name not in self.rewriter.graph.types:
            emit.all_reduce(self.rewriter, self.data, [value], [name], "mean")
        return name

    def _share(self) -> str:
        """w / mean(w)."""
        return self._once("share", "Div", [self._own(), self._divisor(self._mean(), self._type().dtype)], self._type())

    def _divisor(self, value: str, dtype: str) -> str:
        """A weight to divide by: 1 where all weights are zero."""
        type, root = self.rewriter.graph.types[value], value.removeprefix(_named(""))
        none = self._once(f"{root}.none", "Equal", [value, self._constant(0.0)], TensorType("bool", ()))
        safe = self._once(f"{root}.divisor", "Where", [none, self._constant(1.0), value], type)
        return self._as(safe, dtype)

    def _summed(self, role: str, value: str) -> str:
        """A scalar summed over the micro-steps, as read by the update."""
        type = self._type()
        accumulator = Accumulator(
            _named(f"{role}_sum"), _named(f"{role}_sum_out"), _named(f"{role}_sum_next"), type,
            reduced=role == "mean",
        )  # fmt: skip
        if accumulator.input not in self.rewriter.graph.types:
            self.rewriter.graph.types[accumulator.input] = type
            self._add("Add", [accumulator.input, value], accumulator.added, type)
            self.rewriter.constant(accumulator.output, scalar_of(0.0, type.dtype))
            self.program.accumulators.append(accumulator)
        return accumulator.input

    def _constant(self, value: float) -> str:
        return self.rewriter.constant(_named(f"const{value:g}"), scalar_of(value, self._type().dtype))

    def _as(self, value: str, dtype: str) -> str:
        """A scalar in another type; the scalar itself if the type is equal."""
        type = self.rewriter.graph.types[value]
        if type.dtype == dtype:
            return value
        root = value.removeprefix(_named(""))
        return self._once(f"{root}.{dtype}", "Cast", [value], TensorType(dtype, type.shape), to=dtype_code(dtype))

    def _once(self, role: str, op_type: str, inputs: list[str], type: TensorType, **attributes: Any) -> str:
        name = _named(role)
        if name not in self.rewriter.graph.types:
            self._add(op_type, inputs, name, type, after=inputs, **attributes)
        return name

    def _times(self, value: str, factor: str, root: str, sharding: Sharding) -> str:
        """``value`` times ``factor``, and zeros where the rank's weight is zero: 0 / 0 weighs nothing."""
        type = self.rewriter.graph.types[value]
        factor = self._as(factor, type.dtype)
        none = self._once("own.none", "Equal", [self._own(), self._constant(0.0)], TensorType("bool", ()))
        zero = self.rewriter.constant(_named(f"zero.{type.dtype}"), scalar_of(0.0, type.dtype))
        self._add("Mul", [value, factor], f"{root}_times", type, sharding=sharding, after=[value, factor])
        inputs = [none, zero, f"{root}_times"]
        self._add("Where", inputs, f"{root}_weighed", type, sharding=sharding, after=inputs)
        return f"{root}_weighed"

    def _add(
        self, op_type: str, inputs: list[str], output: str, type: TensorType, *, sharding: Sharding = FULLY_REPLICATED,
        after: list[str] | None = None, **attributes: Any,
    ) -> None:  # fmt: skip
        due = self.rewriter.latest(after) if after else None
        self.rewriter.add(op_type, inputs, {output: type}, attributes=attributes, sharding=sharding, after=due)


def _named(role: str) -> str:
    return f"gopt.shard.weights.{role}"
