"""Scalars over all gradients (a squared norm, a finite flag): partial values on ranks, completed by one packed call.

A partial value is complete only after a call over the group. Partial values are joined (the sum of all squared norms)
before the call, everything else happens after; calls of one dependency level, dtype and kind are packed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from gopt.analysis.updates import ScalarReduction, Updates
from gopt.ir.graph import Graph
from gopt.ir.rewriter import GraphRewriter
from gopt.ir.types import TensorType
from gopt.passes.shard import emit


@dataclass(frozen=True, slots=True)
class PartialScalar:
    """``value`` is a rank's partial value of the reduction ``root``: on all ranks, neutral on ranks without a part.
    ``sign``: in a sum; ``stage``: of a pipeline."""

    root: str
    value: str
    sign: int
    stage: int | None = None


class ScalarReductions:
    """Makes partial values of reductions during the emission of buckets, and the completing calls."""

    def __init__(self, rewriter: GraphRewriter, source: Graph, updates: Updates, group: str) -> None:
        self.rewriter, self.source, self.updates, self.group = rewriter, source, updates, group
        self._flat: dict[str, str] = {}

    def flat(self, name: str) -> str:
        """A one-element value of any rank as rank 1, so that a flat operand keeps its rank."""
        if name not in self._flat:
            flat = self._flat[name] = f"gopt.shard.scalars.flat{len(self._flat)}"
            type = self.rewriter.graph.types[name]
            shape = self.constant("one", [-1])
            self.rewriter.add("Reshape", [name, shape], {flat: TensorType(type.dtype, (1,))})
        return self._flat[name]

    def constant(self, role: str, value: list[int]) -> str:
        """A small int64 constant of the pass, shared by name."""
        return self.rewriter.constant(f"gopt.shard.scalars.{role}", value)

    def partial(self, sources: list[str], value: str) -> PartialScalar:
        """``value`` as the rank's partial value of the reductions ``sources``, all feeding one reduction."""
        reduction = self.updates.scalar_reductions[self.updates.reduction_of[sources[0]]]
        guarded = f"{value}.everywhere"
        kind = "sum" if reduction.kind == "l2" else reduction.kind
        emit.select(self.rewriter, self.group, value, guarded, kind, sources)
        return PartialScalar(reduction.root, guarded, reduction.leaves[sources[0]])

    def complete(self, partials: Iterable[PartialScalar]) -> dict[str, int]:
        """Write joins and calls; returns figures for the report."""
        by_root: dict[str, dict[int | None, list[tuple[str, int]]]] = {}
        for partial in partials:
            terms = by_root.setdefault(partial.root, {}).setdefault(partial.stage, [])
            terms.append((partial.value, partial.sign))
        levels = self._levels() if by_root else {}
        packed: dict[tuple[int, str, str], list[tuple[str, ScalarReduction]]] = {}
        for root, values in by_root.items():
            reduction = self.updates.scalar_reductions[root]
            value, reduce = self._join(reduction, list(values.values()))
            dtype = self.rewriter.graph.types[value].dtype
            packed.setdefault((levels[root], dtype, reduce), []).append((value, reduction))
        for number, ((_, _, reduce), items) in enumerate(sorted(packed.items(), key=lambda item: item[0])):
            inputs = [value for value, _ in items]
            outputs = [f"gopt.shard.scalars.call{number}_{position}" for position in range(len(items))]
            emit.all_reduce(self.rewriter, self.group, inputs, outputs, reduce)
            for output, (_, reduction) in zip(outputs, items):
                self._complete(reduction, output)
        return {"scalar_calls": len(packed), "scalars": len(by_root)}

    def _join(self, reduction: ScalarReduction, stages: list[list[tuple[str, int]]]) -> tuple[str, str]:
        """One value per rank for a reduction, and the call's way to join them; values of a stage are joined before they
        meet another stage's. A flag travels as a count."""
        for node in reduction.inner:
            self.rewriter.remove(node, "joined before the call")
        types = self.rewriter.graph.types
        join = {"max": "Max", "min": "Min"}.get(reduction.kind, "Add")

        def joined(terms: list[tuple[str, int]], role: str) -> tuple[str, int]:
            (head, sign), *rest = terms
            value = head
            for position, (term, term_sign) in enumerate(rest, 1):
                name = f"{head}.{role}{position}"
                self.rewriter.add(join if term_sign == sign else "Sub", [value, term], {name: types[value]})
                value = name
            return value, sign

        if reduction.kind in ("any", "all"):
            negate = reduction.kind == "all"
            stages = [[(self._counted(value, negate=negate), sign) for value, sign in terms] for terms in stages]
        total, sign = joined([joined(terms, "joined") for terms in stages], "stage")
        if sign < 0:
            positive = f"{total}.negated"
            self.rewriter.add("Neg", [total], {positive: types[total]})
            total = positive
        return total, {"max": "max", "min": "min"}.get(reduction.kind, "sum")

    def _counted(self, flag: str, *, negate: bool) -> str:
        if negate:
            self.rewriter.add("Not", [flag], {f"{flag}.not": TensorType("bool", ())})
            flag = f"{flag}.not"
        count = f"{flag}.count"
        self.rewriter.add("Cast", [flag], {count: TensorType("float32", ())}, attributes={"to": 1})
        return count

    def _complete(self, reduction: ScalarReduction, value: str) -> None:
        """From the completed call to the value read by the source graph."""
        rewriter, types = self.rewriter, self.rewriter.graph.types
        if reduction.kind in ("any", "all"):
            zero = rewriter.constant("gopt.shard.scalars.zero", 0.0)
            rewriter.add(
                "Greater" if reduction.kind == "any" else "Equal",
                [value, zero],
                {f"{value}.flag": TensorType("bool", ())},
            )
            value = f"{value}.flag"
        elif reduction.kind == "l2":
            rewriter.add("Sqrt", [value], {f"{value}.sqrt": types[value]})
            value = f"{value}.sqrt"
        join = {"sum": "Add", "max": "Max", "min": "Min", "any": "Or", "all": "And"}  # norms are never joined
        total = value
        for position, (operand, sign) in enumerate(reduction.epilogue):
            joined = f"{total}.with{position}"
            rewriter.add(join[reduction.kind] if sign > 0 else "Sub", [value, operand], {joined: types[value]})
            value = joined
        shape = types[reduction.root].dims
        if shape:
            target = self.constant("shape" + "_".join(map(str, shape)), list(shape))
            rewriter.add("Reshape", [value, target], {reduction.root: types[reduction.root]})
        else:
            rewriter.add("Identity", [value], {reduction.root: types[reduction.root]})

    def _levels(self) -> dict[str, int]:
        """Return result -> the maximum number of reductions on a path to the result."""
        level: dict[str, int] = {}
        result: dict[str, int] = {}
        for node in self.source.nodes:
            depth = max([level[name] for name in node.reads if name in level], default=0)
            for name in node.outputs:
                if name in self.updates.scalar_reductions:
                    result[name] = depth
                    level[name] = depth + 1
                elif depth:
                    level[name] = depth
        return result
