"""The halo on a rank: strips for others, and values joined from own places and strips.

The places of each member are known (``gopt.spmd.halo``); here slices, joins and sums are written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod

import numpy as np
from onnx import numpy_helper

from gopt.ir.graph import Node
from gopt.ir.types import LOW_PRECISION, dtype_code, numpy_dtype
from gopt.lower.lowered import Lowered, LoweringContext, bounds, make, stand_in
from gopt.spmd.halo import Halo, HaloPiece
from gopt.tensor_parallel.builder import inner


def lowest(dtype: str) -> np.ndarray:
    """Return the lowest number of a type, as a scalar: -infinity if the type has it."""
    kind = numpy_dtype(dtype)
    return np.array([float("-inf") if kind.kind == "f" else np.iinfo(kind).min], kind)


@dataclass(slots=True)
class _HaloNodes:
    """The nodes of a member."""

    node: Node
    context: LoweringContext
    halo: Halo
    member: int
    nodes: list[Node] = field(default_factory=list)
    constants: dict[str, np.ndarray] = field(default_factory=dict)

    @classmethod
    def of(cls, node: Node, context: LoweringContext) -> _HaloNodes:
        return cls(node, context, Halo.of(node.attributes), context.coordinates[node.attributes["group"]])

    @property
    def output(self) -> str:
        return self.node.outputs[0]

    @property
    def axis(self) -> int:
        return int(self.node.attributes["axis"])

    def constant(self, role: str, value: Sequence[int]) -> str:
        name = inner(self.output, role)
        self.constants[name] = np.array(value, np.int64)
        return name

    def add(self, op_type: str, inputs: Sequence[str], output: str, **attributes: object) -> str:
        self.nodes.append(make(self.node, op_type, inputs, output, **attributes))
        return output

    def slice(self, piece: HaloPiece, role: str) -> str:
        """Return some places of the member's value, or of the joined strips."""
        name = inner(self.output, role)
        cut = bounds(name, piece.at, piece.at + piece.stop - piece.start)
        self.constants |= cut
        return self.add("Slice", [self.node.inputs[piece.strips], *cut, self.constant("axis", [self.axis])], name)

    def filled(self, count: int, role: str, value: np.ndarray) -> str:
        """Return a constant block of ``count`` places held by no member."""
        dims = list(self.context.types[self.node.inputs[0]].dims)
        dims[self.axis] = count
        shape = self.constant(f"{role}.shape", dims)
        return self.add("ConstantOfShape", [shape], inner(self.output, role), value=numpy_helper.from_array(value))

    def zeros(self, count: int, role: str) -> str:
        return self.filled(count, role, np.zeros(1, numpy_dtype(self.context.types[self.node.inputs[0]].dtype)))

    def joined(self, parts: Sequence[str]) -> Lowered:
        """Return the result: parts joined in order."""
        if not parts:
            parts = [self.zeros(0, "none")]
        self.add(
            "Concat" if len(parts) > 1 else "Identity",
            parts,
            self.output,
            **({"axis": self.axis} if len(parts) > 1 else {}),
        )
        shape = tuple((node.op_type, *node.inputs, *node.outputs) for node in self.nodes)
        return Lowered(shape, lambda: self.nodes, self.constants)


def strips(node: Node, context: LoweringContext) -> Lowered:
    """Return a member's strips for other members."""
    halo_nodes = _HaloNodes.of(node, context)
    pieces = halo_nodes.halo.strip_pieces(halo_nodes.member)
    if not pieces:
        pieces = [HaloPiece(0, 0, 0)]
    return halo_nodes.joined([halo_nodes.slice(piece, f"strip{number}") for number, piece in enumerate(pieces)])


def join(node: Node, context: LoweringContext) -> Lowered:
    """Return a member's window: own places, places of strips, and padding beyond the dimension."""
    halo_nodes = _HaloNodes.of(node, context)
    halo, member = halo_nodes.halo, halo_nodes.member
    runs = [pieces[0] for _, pieces in halo.runs(member)]
    before, behind = halo.border(member)
    size = context.types[node.inputs[0]].dims[halo_nodes.axis]
    if not before and not behind and len(runs) == 1 and runs[0] == HaloPiece(runs[0].start, runs[0].start + size, 0):
        return halo_nodes.joined(node.inputs[:1])  # not an alias: it may be a result of the step
    dtype = context.types[node.inputs[0]].dtype
    value = lowest(dtype) if node.attributes["border"] == "lowest" else np.zeros(1, numpy_dtype(dtype))
    parts = [halo_nodes.filled(before, "before", value)] if before else []
    parts += [halo_nodes.slice(piece, f"run{number}") for number, piece in enumerate(runs)]
    parts += [halo_nodes.filled(behind, "behind", value)] if behind else []
    return halo_nodes.joined(parts)


def total(node: Node, context: LoweringContext) -> Lowered:
    """Return a member's part: the sum of all terms for its places, in float32 for halves."""
    halo = _HaloNodes.of(node, context)
    parts = []
    for number, ((start, stop), pieces) in enumerate(halo.halo.runs(halo.member)):
        terms = [halo.slice(piece, f"run{number}.{position}") for position, piece in enumerate(pieces)]
        if not terms:
            parts.append(halo.zeros(stop - start, f"run{number}"))
        else:
            parts.append(terms[0] if len(terms) == 1 else _sum(halo, terms, inner(halo.output, f"sum{number}")))
    return halo.joined(parts)


def _sum(halo: _HaloNodes, terms: list[str], name: str) -> str:
    dtype = halo.context.types[halo.node.inputs[0]].dtype
    if dtype not in LOW_PRECISION:
        return halo.add("Sum", terms, name)
    wide = [halo.add("Cast", [term], f"{term}.wide", to=dtype_code("float32")) for term in terms]
    return halo.add("Cast", [halo.add("Sum", wide, f"{name}.wide")], name, to=dtype_code(dtype))


def member_pool(node: Node, context: LoweringContext) -> Lowered:
    """A pool over a window, and the places of the maxima, counted through the whole operand as in ONNX: a member counts
    through its shorter window with another start. Padding is chosen if nothing in the window is higher; in the whole
    operand, the window's first place is chosen then."""
    attributes = node.attributes
    member, axis = context.coordinates[attributes["group"]], int(attributes["axis"])
    start, stop = attributes["ranges"][2 * member : 2 * member + 2]
    dims = context.types[node.inputs[0]].dims
    inside = prod(dims[axis + 1 :])
    values, positions = node.outputs
    roles = "own count step offset outer begin beside from inner none row ahead there plane"
    names = {role: inner(positions, role) for role in roles.split()}
    constants = {
        names["count"]: (stop - start) * inside, names["step"]: attributes["length"] * inside,
        names["offset"]: start * inside,
    }  # fmt: skip

    if start < 0:
        constants |= {names["inner"]: inside, names["none"]: 0}
    wrapped = (
        make(node, "Mod", [names["from"], names["inner"]], names["row"]),
        make(node, "Less", [names["from"], names["none"]], names["ahead"]),
        make(node, "Where", [names["ahead"], names["row"], names["from"]], names["there"]),
    )

    def nodes() -> list[Node]:
        pool = {key: value for key, value in attributes.items() if key not in ("group", "axis", "ranges", "length")}
        return [
            stand_in(node, "MaxPool", node.inputs, values, names["own"], **pool),
            make(node, "Div", [names["own"], names["count"]], names["outer"]),
            make(node, "Mul", [names["outer"], names["count"]], names["begin"]),
            make(node, "Sub", [names["own"], names["begin"]], names["beside"]),
            make(node, "Add", [names["beside"], names["offset"]], names["from"]),
            *(wrapped if start < 0 else ()),
            make(node, "Mul", [names["outer"], names["step"]], names["plane"]),
            make(node, "Add", [names["plane"], names["there" if start < 0 else "from"]], positions),
        ]

    return Lowered(start < 0, nodes, {name: np.array(value, np.int64) for name, value in constants.items()})


def window_scatter(node: Node, context: LoweringContext) -> Lowered:
    """Updates added to zeros of the member's window, at places that count through planes of the whole."""
    attributes, (data, indices, updates), output = node.attributes, node.inputs, node.outputs[0]
    member, axis = context.coordinates[attributes["group"]], int(attributes["axis"])
    start, stop = attributes["ranges"][2 * member : 2 * member + 2]
    dims = context.types[output].dims
    inside, dtype = prod(dims[axis + 1 :]), numpy_dtype(context.types[data].dtype)
    roles = "step offset count flat shape outer begin beside moved plane own none sums"
    names = {role: inner(output, role) for role in roles.split()}
    constants = {
        names["step"]: attributes["length"] * inside, names["offset"]: start * inside,
        names["count"]: (stop - start) * inside,
    }  # fmt: skip
    shapes = {names["flat"]: (*dims[:2], prod(dims[2:])), names["shape"]: dims}

    def nodes() -> list[Node]:
        steps: list[tuple[str, list[str], str]] = [
            ("Div", [indices, names["step"]], "outer"), ("Mul", [names["outer"], names["step"]], "begin"),
            ("Sub", [indices, names["begin"]], "beside"), ("Sub", [names["beside"], names["offset"]], "moved"),
            ("Mul", [names["outer"], names["count"]], "plane"), ("Add", [names["plane"], names["moved"]], "own"),
        ]  # fmt: skip
        zero = numpy_helper.from_array(np.zeros(1, dtype))
        operands = [names["none"], names["own"], updates]
        return [
            *(make(node, kind, inputs, names[role]) for kind, inputs, role in steps),
            make(node, "ConstantOfShape", [names["flat"]], names["none"], value=zero),
            stand_in(node, "ScatterElements", operands, names["sums"], axis=2, reduction="add"),
            make(node, "Reshape", [names["sums"], names["shape"]], output),
        ]

    kind = numpy_dtype(context.types[indices].dtype)
    numbers = {name: np.array(value, kind) for name, value in constants.items()}
    return Lowered("window", nodes, numbers | {name: np.array(value, np.int64) for name, value in shapes.items()})


HALO_OPERATORS = {
    "HaloStrips": strips, "HaloJoin": join, "HaloSum": total, "MemberMaxPool": member_pool,
    "WindowScatter": window_scatter,
}  # fmt: skip
"""Operator of ``gopt.spmd`` on a window -> what it becomes on a rank."""
