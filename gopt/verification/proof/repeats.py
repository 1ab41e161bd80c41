"""Elementwise nodes in groups: the update of a parameter, which the laws read once for all parameters of a shape.

The laws say the same of all states and gradients of a kind and a shape: the expressions of the first group are numbered
again for further values. Where the numbers have another order, a sum could have another form: the laws read the group.
Nodes of ranks with the same operators, on ranges of the same values, make the same ranges of the results.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from gopt.ir.graph import Graph, Node
from gopt.ir.graph_index import walk
from gopt.ir.node_kinds import draws, record_of
from gopt.ir.types import FLOATS
from gopt.verification.proof.attributes import frozen
from gopt.verification.proof.equal_parts import columns_of, common_region
from gopt.verification.proof.forms import INVERSE, LINEAR, PRODUCT, REDUCED, STATE, VIEW, Shape
from gopt.verification.proof.numbering import Step
from gopt.verification.proof.operators import RULES, NodeReader

_SHORTEST = 4
"""Nodes of a group."""
_TERMS = 8
"""Operands of a sum or a product of states and gradients."""
_FORMS = frozenset({LINEAR, PRODUCT, VIEW, INVERSE})
_ORDERED = frozenset({LINEAR, PRODUCT})
ByLaw: TypeAlias = Callable[[Node], Mapping[str, int]]
"""Reads a node by the laws: the results by name."""
WholesOfRanges: TypeAlias = dict[tuple[bytes | None, ...], dict[Hashable, list[tuple[int, ...]]]]
"""Nodes of a group -> operands that are ranges of values -> the values behind the ranges of each result."""


@dataclass(frozen=True, slots=True)
class _Program:
    """The expressions of a group: positions count the values of the group, ``constants``, and ``steps``.

    ``steps``: as in the first group. ``results``: of each node the positions of result and operands."""

    constants: list[int]
    steps: list[Step]
    results: list[tuple[int, list[int]]]


class Repeats:
    """The groups of a graph; ``runs``: the position of a first node -> the groups up to the next node of no group."""

    def __init__(self, reader: NodeReader) -> None:
        self.reader, self.expressions = reader, reader.expressions
        self.runs = dict(plain_groups(reader.graph))
        self._programs: dict[Hashable, _Program | None] = {}

    def read(self, group: Sequence[Node], values: MutableMapping[str, int], by_law: ByLaw) -> None:
        """Store the results of a group: of the source, numbered as in an earlier group; of a rank, ranges of the
        source's."""
        repeated = len(group) >= _SHORTEST and not self.expressions.counts  # weighted sums have laws of their own
        if not repeated or not self._read(group, values, by_law):
            for node in group:
                values.update(by_law(node))

    def _read(self, group: Sequence[Node], values: MutableMapping[str, int], by_law: ByLaw) -> bool:
        """Store the results of a group, if known by another one."""
        form, names, shapes = self._form(group)
        if self.expressions.sealed:
            return self._in_ranges(group, form, [values.get(name) for name in names], values)
        key, numbers = self._kind([values[name] for name in names])
        if key is None:
            return False
        key = form, *shapes, *key
        program = self._programs.get(key)
        results = None if program is None else self._numbered(program, numbers)
        if program is None or results is None:
            for node in group:
                values.update(by_law(node))
            if key not in self._programs:
                self._programs[key] = self._program(group, numbers, values)
        else:
            read = self.expressions.read
            for node, (position, operands) in zip(group, program.results):
                values[node.outputs[0]] = result = results[position]
                read[node.encoded or b"", tuple([results[at] for at in operands])] = [result]
        self._note(group, form, names, shapes, values)
        return True

    def _form(self, group: Sequence[Node]) -> tuple[int, list[str], list[Shape]]:
        """The number of what a group computes of elements; the operands, and the shapes of the results."""
        outside: dict[str, int] = {}
        inside: dict[str, int] = {}
        kinds: list[Hashable] = []
        types = [self.reader.graph.types[node.outputs[0]] for node in group]
        for node, type in zip(group, types):
            read = [inside[name] if name in inside else outside.setdefault(name, len(outside)) for name in node.inputs]
            inside[node.outputs[0]] = -len(inside) - 1
            kinds.append((node.op_type, type.dtype, frozen(node) if node.attributes else (), *read))
        forms = self.expressions.forms
        return forms.setdefault(tuple(kinds), len(forms)), [*outside], [type.shape for type in types]

    def _note(
        self, group: Sequence[Node], form: int, names: Sequence[str], shapes: Sequence[Shape], values: Mapping[str, int]
    ) -> None:
        """Note the results of a group on operands of one shape, for ranges of the same operands."""
        expressions, shape, root = self.expressions, shapes[0], self.expressions.root
        numbers = [values[name] for name in names]
        if shapes.count(shape) == len(shapes) and all(
            expressions.elements(number) == 1 or expressions.shape(number) == shape for number in numbers
        ):
            results = tuple([root(values[node.outputs[0]]) for node in group])
            expressions.groups[form, *map(root, numbers)] = results

    def _in_ranges(
        self, group: Sequence[Node], form: int, numbers: Sequence[int | None], values: MutableMapping[str, int]
    ) -> bool:
        """Store ranges of the source's results for a group on ranges of the source's operands."""
        expressions, operands = self.expressions, [number for number in numbers if number is not None]
        part = common_region(expressions, operands) if len(operands) == len(numbers) else None
        if part is None or part[0].whole is not None:
            return False
        root = expressions.root
        columns = columns_of([row if isinstance(row, tuple) else root(row) for row in part[1]])
        wholes = [expressions.groups.get((form, *column)) for column in columns]
        if None in wholes:
            return False
        for node, row in zip(group, zip(*filter(None, wholes))):
            values[node.outputs[0]] = part[0].of(expressions, row)
        return True

    def _kind(self, operands: Sequence[int]) -> tuple[tuple[Hashable, ...] | None, list[int]]:
        """A key of operands with equal expressions of further values, and the values; None for values with laws."""
        positions: dict[int, int] = {}
        kinds: list[Hashable] = []
        read = [self._position(number, positions, kinds) for number in operands]
        if None in read:
            return None, []
        numbers = list(positions)
        return (*read, *kinds, *sorted(positions.values(), key=numbers.__getitem__)), numbers

    def _position(self, number: int, positions: dict[int, int], kinds: list[Hashable]) -> int | None:
        """The position of a value among the values of a group; None for a value with laws of a kind."""
        if number in positions:
            return positions[number]
        op, attributes, operands, shape = self.expressions.all[number]
        kind: Hashable = number
        if self.expressions.ranged(number):
            if self.expressions.joinable([number]) or (op in _ORDERED and len(operands) > _TERMS):
                return None
            if op in (STATE, REDUCED):
                facts = self.expressions.varies[number], self.expressions.finite[number]
                kind = op, op == REDUCED and attributes, *facts
            elif op in _FORMS and op != INVERSE:
                inner = [self._position(operand, positions, kinds) for operand in operands]
                if None in inner:
                    return None
                kind = op, attributes, *inner
            else:
                return None
        kinds.append((kind, shape))
        return positions.setdefault(number, len(positions))

    def _program(self, group: Sequence[Node], numbers: Sequence[int], values: Mapping[str, int]) -> _Program | None:
        """The expressions of a group behind the laws; None for a value with laws of a kind."""
        expressions, of_group = self.expressions, {node.op_type for node in group}
        rows, plain = expressions.all, {*_FORMS, *of_group}
        alike = (number for number in numbers if not expressions.ranged(number))
        fixed = set(walk(alike, lambda number: rows[number].operands if rows[number].op in _FORMS else ()))
        results = [values[node.outputs[0]] for node in group]
        ends = fixed.union(numbers)
        inside = sorted(
            set(walk(results, lambda number: () if number in ends else rows[number].operands)).difference(numbers)
        )
        constants = [number for number in inside if number in fixed or expressions.uniform(number) is not None]
        steps = [number for number in inside if number not in constants]
        if expressions.joinable(inside) or not all(rows[number].op in plain for number in steps):
            return None
        positions = {number: position for position, number in enumerate([*numbers, *constants, *steps])}
        return _Program(
            constants,
            [(number, [positions[at] for at in rows[number].operands],
              rows[number].op in _ORDERED and len(rows[number].operands) > 1) for number in steps],
            [(positions[result], [positions[values[name]] for name in node.inputs])
             for node, result in zip(group, results)],
        )  # fmt: skip

    def _numbered(self, program: _Program, numbers: Sequence[int]) -> list[int] | None:
        """The values of a group by position; None where a sum or a product has another order."""
        values, origins = [*numbers, *program.constants], self.reader.table.origins
        begun = len(values)
        self.expressions.repeat(program.steps, values)
        for (like, _, _), number in zip(program.steps, values[begun:]):
            if like in origins:
                origins.setdefault(number, origins[like])
        return values if len(values) == begun + len(program.steps) else None


@dataclass(slots=True, eq=False)
class Group:
    """Plain nodes with operands from one another, by position; ``names``: results, ``reads``: operands from outside,
    ``readers``: the positions of readers outside, if any.

    ``wholes``: for operands that are ranges of values, the values behind the ranges of each result."""

    positions: list[int]
    nodes: list[Node]
    names: list[str]
    reads: list[str]
    readers: dict[str, list[int]]
    wholes: dict[Hashable, list[tuple[int, ...]]]

    @classmethod
    def of(
        cls, nodes: Sequence[Node], positions: list[int], readers: Mapping[str, list[int]], wholes: WholesOfRanges
    ) -> Group:
        group = [nodes[position] for position in positions]
        names, within = [node.outputs[0] for node in group], set(positions)
        reads = [name for name in dict.fromkeys(name for node in group for name in node.inputs) if name not in names]
        behind = {name: [position for position in readers.get(name, ()) if position not in within] for name in names}
        read_on = {name: rest for name, rest in behind.items() if rest}
        return cls(
            positions, group, names, reads, read_on, wholes.setdefault(tuple(node.encoded for node in group), {})
        )


def plain_groups(graph: Graph) -> Iterator[tuple[int, list[list[int]]]]:
    """The position of a plain node, and groups of the positions of plain nodes from there to the next node of another
    kind: results of one element in front, then nodes with operands from one another."""
    begun: int | None = None
    for position, node in enumerate([*graph.nodes, None]):
        if node is not None and is_plain(graph, node):
            begun = position if begun is None else begun
        elif begun is not None:
            yield begun, _groups(graph, range(begun, position))
            begun = None


def is_plain(graph: Graph, node: Node) -> bool:
    """Return whether a node is elementwise, on floats, without a rule or a draw."""
    if len(node.outputs) != 1 or node.encoded is None or node.captures or "" in node.inputs:
        return False
    type, record = graph.type_of(node.outputs[0]), record_of(node)
    by_sums = record.signs or record.exponents or node.op_type not in RULES  # no rule for floats
    return bool(type.static and type.dtype in FLOATS and record.elementwise and by_sums and not draws(node))


def _groups(graph: Graph, positions: Sequence[int]) -> list[list[int]]:
    of: dict[str, list[int]] = {}
    single: list[int] = []
    for position in positions:
        node = graph.nodes[position]
        if graph.types[node.outputs[0]].elements == 1:
            single.append(position)
            continue
        joined: list[int] = []
        for group in map(of.get, node.inputs):
            if not joined:
                joined = group or joined
            elif group is not None and group is not joined:
                small, joined = sorted((group, joined), key=len)
                joined += small
                of.update((graph.nodes[inner].outputs[0], joined) for inner in small)
        joined.append(position)
        of[node.outputs[0]] = joined
    return [single, *map(sorted, {id(group): group for group in of.values()}.values())]
