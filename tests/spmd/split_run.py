"""One operator run whole, and run split by a strategy: operands cut, each member's part computed, results joined."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from node_models import info, once
from onnx import helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from operator_forms import Array, Case
from placement_numbers import cut, joined, type_of

from gopt.ir.graph import SPMD, Graph, Node
from gopt.ir.tensor import Tensor
from gopt.lower.layout_operators import LOWERED, LoweringContext
from gopt.records.placements import PARTS, Partial, Placement, Replicated, Shard, Sharding, Window, WindowTerms
from gopt.spmd.links import OperatorUse, Strategy
from gopt.tensor_parallel.localise import localise
from gopt.tensor_parallel.propagate import MASKED
from gopt.tensor_parallel.window_nodes import pool_member

AXIS = "tp"
REFERENCE = frozenset({"Swish", "HardSwish", "CastLike"})
"""Operators that onnx's reference runs: the runtime has them not, or not for every type."""
HELD = frozenset({"Resize"})
"""Operators whose operands but the first the graph must hold."""


@dataclass
class Split:
    """An operator and its operands; ``whole``: its results, by a run on whole operands."""

    op_type: str
    case: Case

    def __post_init__(self) -> None:
        self.inputs = [f"x{place}" if each is not None else "" for place, each in enumerate(self.case.inputs)]
        self.outputs = [f"y{place}" for place in range(self.case.results)]
        self.values = {name: each for name, each in zip(self.inputs, self.case.inputs) if each is not None}
        self.whole = self.run([self.node()], self.values)

    def node(self) -> Node:
        return Node(self.op_type, self.inputs, self.outputs, attributes=dict(self.case.attributes))

    def operator(self, *, constants: bool = True) -> OperatorUse:
        """As rules see it; ``constants``: whether the graph holds the operands."""
        types = [type_of(each) if each is not None else None for each in self.case.inputs]
        results = [type_of(each) for each in self.whole]
        known = self.case.inputs if constants else [None] * len(types)
        opset = self.case.opset
        return OperatorUse(
            self.op_type, self.case.attributes, tuple(types), tuple(results), lambda at: known[at], opset
        )

    def run(self, nodes: Sequence[Node], values: dict[str, Array]) -> list[Array]:
        """What nodes make of values."""
        held = {name: each for name, each in values.items() if self.op_type in HELD and name != "x0"}
        known = sorted((name, each) for name, each in values.items() if name not in held)
        infos = [info(name, each, [None] * each.ndim) for name, each in known]
        graph = helper.make_graph(
            [node.to_proto() for node in nodes], "part", infos,
            [helper.make_empty_tensor_value_info(name) for name in self.outputs],
            [numpy_helper.from_array(each, name) for name, each in sorted(held.items())],
        )  # fmt: skip
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", self.case.opset)], ir_version=10)
        text = model.SerializeToString(deterministic=True)
        runs = self.case.runtime and self.op_type not in REFERENCE
        found = once(text).run(None, dict(known)) if runs else evaluator(text).run(None, dict(known))
        return [np.asarray(each) for each in found]

    def member(self, strategy: Strategy, member: int) -> list[Array]:
        """What a member makes of its parts."""
        header = helper.make_model(helper.make_graph([], "one", [], []))
        header.opset_import[0].version = self.case.opset
        placed = dict(zip([*self.inputs, *self.outputs], [*strategy.operands, *strategy.results]))
        logical = {name: type_of(each) for name, each in zip(self.outputs, self.whole)}
        logical |= {name: type_of(each) for name, each in self.values.items()}
        node = self.masked(strategy) if strategy.masked else self.node()
        held = {
            name: Tensor(logical[name], array=each) for name, each in self.values.items()
            if isinstance(placed[name], Replicated)
        }  # fmt: skip
        graph = Graph("part", [node], {}, {}, held, logical, header)
        shardings = {name: Sharding.along(AXIS, each) for name, each in placed.items() if isinstance(each, PARTS)}
        localise(graph, shardings, {AXIS: member})
        values = {name: cut(each, placed[name], member) for name, each in self.values.items()}
        values |= {name: each.numpy() for name, each in graph.initializers.items()}
        nodes: Sequence[Node] = graph.nodes
        if strategy.masked:
            lowered = LOWERED[node.op_type](node, LoweringContext({AXIS: member}, frozenset(), graph.types))
            nodes, values = lowered.nodes(), values | lowered.constants
            if lowered.alias:
                return [values[lowered.alias]]
        made = self.run(nodes, {name: each for name, each in values.items() if any(name in n.inputs for n in nodes)})
        for name, each in zip(self.outputs, made):
            assert each.shape == graph.types[name].dims, f"a part of {each.shape}, not {graph.types[name].dims}"
        return made

    def masked(self, strategy: Strategy) -> Node:
        """The operator that lets a member choose from its own part, as propagation writes it."""
        if self.op_type == "MaxPool":
            node = self.node()
            pool_member(node, strategy, AXIS, self.values["x0"].shape)
            return node
        shard = next(each for each in strategy.operands if isinstance(each, Shard))
        own = {key: value for key, value in self.case.attributes.items() if key in ("axis", "reduction")}
        attributes = {"axis": 0, **own, "group": AXIS, "sizes": list(shard.sizes)}
        return Node(MASKED[self.op_type], self.inputs, self.outputs, domain=SPMD, attributes=attributes)

    def check(self, strategy: Strategy) -> None:
        """Assert that members' parts are what the strategy says of the whole."""
        count = members(strategy)
        made = [self.member(strategy, member) for member in range(count)]
        for parts, placement, whole in zip(zip(*made), strategy.results, self.whole):
            for each in joined(parts, placement):
                assert each.dtype == whole.dtype
                assert each.shape == whole.shape
                assert close(each, whole), f"{placement}: {each} is not {whole}"


@cache
def evaluator(model: bytes) -> ReferenceEvaluator:
    return ReferenceEvaluator(model)


def members(strategy: Strategy) -> int:
    return next(len(each.sizes) for each in (*strategy.operands, *strategy.results) if isinstance(each, Shard))


def close(one: Array, other: Array) -> bool:
    """Moves are exact, sums are not."""
    if one.dtype.kind not in "fc":
        return bool((one == other).all())
    wide, same = one.astype(np.float64), other.astype(np.float64)
    tolerance = 1e-2 if one.dtype == np.float16 else 1e-5
    return bool(np.allclose(wide, same, rtol=tolerance, atol=tolerance, equal_nan=True))


def shards(length: int, dim: int) -> Iterator[Shard]:
    """Ways to share out a dimension: even, uneven, empty parts, whole units of it, several runs."""
    for runs in (1, 2, 3):
        if length % runs or not length:
            continue
        run = length // runs
        for unit in (each for each in range(1, run + 1) if run % each == 0):
            count = run // unit
            shares = {(count, 0), (0, count, 0), (1, 0, count - 1), (count - count // 2, count // 2)}
            shares |= {(count // 3 + 2, count - count // 3 - 2)} if count > 5 else set()
            for share in sorted(shares):
                if sum(share) == count and min(share) >= 0:
                    yield Shard(dim, tuple(unit * each for each in share), runs)


def described(strategy: Strategy) -> str:
    """``0 - > 1 sum``: operand 0 is split along dimension 0, and members' results are summed."""

    def one(placement: Placement) -> str:
        if isinstance(placement, Partial):
            return placement.op
        if isinstance(placement, (Window, WindowTerms)):
            return f"{'terms' if isinstance(placement, WindowTerms) else 'window'}{placement.dim}"
        return str(placement.dim) if isinstance(placement, Shard) else "-"

    rows = (" ".join(one(each) for each in row) for row in (strategy.operands, strategy.results))
    return " > ".join(rows) + (" masked" if strategy.masked else "")
