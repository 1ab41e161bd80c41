"""Scalars over all gradients (a squared norm, a finite flag): each rank adds its share, one packed call completes them.

A share is complete only after a call over the group. Joins of shares (the sum of all squared norms) happen before the
call, everything else after it; calls of one dependency level, dtype and kind are packed into one.
"""

from __future__ import annotations

from gopt.analysis.updates import Tree, Updates
from gopt.errors import UnsupportedError
from gopt.graph.edit import Draft
from gopt.graph.model import Graph
from gopt.graph.types import TensorType
from gopt.passes.shard import emit


class ScalarReductions:
    """Collects the shares of every tree while buckets are emitted, then writes the calls."""

    def __init__(self, draft: Draft, source: Graph, updates: Updates, group: str) -> None:
        self.draft, self.source, self.updates, self.group = draft, source, updates, group
        self._shares: dict[str, list[str]] = {}
        self._flat: dict[str, str] = {}

    def flat(self, name: str) -> str:
        """A one-element value of any rank as rank 1, so that it does not lift the rank of a flat operand."""
        if name not in self._flat:
            made = self._flat[name] = f"gopt.shard.scalars.flat{len(self._flat)}"
            type = self.draft.graph.types[name]
            shape = self.constant("one", [-1])
            self.draft.add("Reshape", [name, shape], {made: TensorType(type.dtype, (1,))})
        return self._flat[name]

    def constant(self, role: str, value: list[int]) -> str:
        """A small int64 constant of the pass, shared by name."""
        name = f"gopt.shard.scalars.{role}"
        if name not in self.draft.graph.types:
            made = {name: TensorType("int64", (len(value),))}
            self.draft.add("Constant", [], made, attributes={"value_ints": value})
        return name

    def share(self, sources: list[str], value: str) -> None:
        """Note ``value`` as this rank's share of the reductions ``sources``, which all feed one tree."""
        tree = self.updates.trees[self.updates.tree_of[sources[0]]]
        guarded = f"{value}.everywhere"
        emit.select(self.draft, value, guarded, "sum" if tree.kind == "l2" else tree.kind)
        self._shares.setdefault(tree.root, []).append(guarded)

    def finish(self) -> dict[str, object]:
        """Write joins and calls; returns figures for the report."""
        levels = self._levels()
        packed: dict[tuple[int, str, str], list[tuple[str, Tree]]] = {}
        for root, shares in self._shares.items():
            tree = self.updates.trees[root]
            value, reduce = self._join(tree, shares)
            dtype = self.draft.graph.types[value].dtype
            packed.setdefault((levels[root], dtype, reduce), []).append((value, tree))
        for number, ((_, _, reduce), items) in enumerate(sorted(packed.items(), key=lambda item: item[0])):
            inputs = [value for value, _ in items]
            outputs = [f"gopt.shard.scalars.call{number}_{place}" for place in range(len(items))]
            emit.all_reduce(self.draft, self.group, inputs, outputs, reduce)
            for output, (_, tree) in zip(outputs, items):
                self._complete(tree, output)
        return {"scalar_calls": len(packed), "scalars": len(self._shares)}

    def _join(self, tree: Tree, shares: list[str]) -> tuple[str, str]:
        """One value per rank for a tree, and how the call joins them. A flag travels as a count."""
        for node in tree.inner:
            self.draft.remove(node, "joined before the call")
        types = self.draft.graph.types
        if tree.kind in ("any", "all"):
            shares = [self._counted(share, negate=tree.kind == "all") for share in shares]
        value = shares[0]
        join = {"max": "Max", "min": "Min"}.get(tree.kind, "Add")
        for place, share in enumerate(shares[1:], 1):
            joined = f"{shares[0]}.joined{place}"
            self.draft.add(join, [value, share], {joined: types[value]})
            value = joined
        return value, {"max": "max", "min": "min"}.get(tree.kind, "sum")

    def _counted(self, share: str, *, negate: bool) -> str:
        if negate:
            self.draft.add("Not", [share], {f"{share}.not": TensorType("bool", ())})
            share = f"{share}.not"
        count = f"{share}.count"
        self.draft.add("Cast", [share], {count: TensorType("float32", ())}, attributes={"to": 1})
        return count

    def _complete(self, tree: Tree, value: str) -> None:
        """From the completed call to the value the source graph reads under its own name."""
        draft, types = self.draft, self.draft.graph.types
        if tree.kind in ("any", "all"):
            zero = "gopt.shard.scalars.zero"
            if zero not in types:
                draft.add("Constant", [], {zero: TensorType("float32", ())}, attributes={"value_float": 0.0})
            draft.add(
                "Greater" if tree.kind == "any" else "Equal", [value, zero], {f"{value}.flag": TensorType("bool", ())}
            )
            value = f"{value}.flag"
        elif tree.kind == "l2":
            draft.add("Sqrt", [value], {f"{value}.sqrt": types[value]})
            value = f"{value}.sqrt"
        join = {"sum": "Add", "max": "Max", "min": "Min", "any": "Or", "all": "And"}.get(tree.kind)
        for place, extra in enumerate(tree.extras):
            if join is None:
                raise UnsupportedError(f"scalar {extra!r} cannot be joined to a norm")
            draft.add(join, [value, extra], {f"{value}.with{place}": types[value]})
            value = f"{value}.with{place}"
        shape = types[tree.root].dims
        if shape:
            target = self.constant("shape" + "_".join(map(str, shape)), list(shape))
            draft.add("Reshape", [value, target], {tree.root: types[tree.root]})
        else:
            draft.add("Identity", [value], {tree.root: types[tree.root]})

    def _levels(self) -> dict[str, int]:
        """How many calls stand before each tree's own, at least."""
        level: dict[str, int] = {}
        result: dict[str, int] = {}
        for node in self.source.nodes:
            depth = max((level.get(name, 0) for name in node.reads), default=0)
            for name in node.outputs:
                level[name] = depth
                if name in self.updates.trees:
                    result[name] = depth
                    level[name] = depth + 1
        return result
