"""The sweep over a graph of ranks with the same expressions, from call to call."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Hashable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from heapq import heappop, heappush
from itertools import repeat
from typing import TypeAlias

from onnx.defs import get_schema

from gopt.errors import InputError
from gopt.ir.graph import COMM, Graph, Node
from gopt.ir.node_kinds import draws, record_of
from gopt.operators.kinds import CASTS
from gopt.verification.proof.attributes import frozen
from gopt.verification.proof.boxes import Boxes
from gopt.verification.proof.equal_parts import Column, Region, Row, columns_of, common_region, is_row
from gopt.verification.proof.forms import ONE, Shape, elements
from gopt.verification.proof.operators import NodeReader
from gopt.verification.proof.repeats import Group, Repeats, WholesOfRanges, is_plain, plain_groups

RANGE = -1
"""In front of a node's operands: the results on whole operands, of a node on ranges."""
UNDEFINED = "undefined"
"""Leaves for results of calls without a value on a rank."""


@cache
def _makes_tensors(op_type: str) -> bool:
    """Return whether the results of a standard operator are tensors: a file has no types of lists."""
    return all(kind.startswith("tensor(") for result in get_schema(op_type).outputs for kind in result.types)


class UnpairedCall(Exception):
    """A call without all members of the group: the rank, the node, the actual and the expected call."""

    def __init__(self, rank: int, node: Node, actual: str, expected: str) -> None:
        super().__init__(rank, node.label, actual, expected)
        self.rank, self.node, self.actual, self.expected = rank, node.label, actual, expected


Values = dict[str, int]
"""Name of a value -> the number of its expression."""
SweptValues: TypeAlias = MutableMapping[str, int]
"""The same on a rank; most values may be shared with another."""


def common(nodes: Sequence[Node], second: Sequence[Node]) -> int:
    """The number of nodes in front that two lists share."""
    if nodes is second:
        return len(nodes)
    return next(
        (n for n, (node, other) in enumerate(zip(nodes, second)) if node is not other), min(len(nodes), len(second))
    )


class NodeOrder:
    """The positions of calls in a list of nodes, and of the producer and the other readers of each value."""

    def __init__(self, graph: Graph, wholes: WholesOfRanges) -> None:
        self.graph, self.wholes = graph, wholes
        self._names: dict[int, list[str]] = {}
        self._behind: dict[int, dict[str, list[int]]] = {}

    @cached_property
    def calls(self) -> list[int]:
        return [position for position, node in enumerate(self.graph.nodes) if node.domain == COMM]

    @cached_property
    def made(self) -> dict[str, int]:
        return {name: position for position, node in enumerate(self.graph.nodes) for name in node.outputs}

    @cached_property
    def readers(self) -> dict[str, list[int]]:
        readers: dict[str, list[int]] = {}
        for position, node in enumerate(self.graph.nodes):
            for name in node.reads if node.domain != COMM else ():
                readers.setdefault(name, []).append(position)
        return readers

    def readers_behind(self, at: int) -> dict[str, list[int]]:
        """The positions of readers from a position on."""
        if at not in self._behind:
            rows = ((name, positions[bisect_left(positions, at) :]) for name, positions in self.readers.items())
            self._behind[at] = {name: positions for name, positions in rows if positions}
        return self._behind[at]

    @cached_property
    def groups(self) -> dict[int, Group]:
        """The position of a plain node -> the group."""
        runs = (run[1:] for _, run in plain_groups(self.graph))
        groups = [Group.of(self.graph.nodes, row, self.readers, self.wholes) for run in runs for row in run]
        return {position: group for group in groups for position in group.positions}

    def names(self, front: int) -> list[str]:
        """The results of the nodes in front."""
        if front not in self._names:
            self._names[front] = [name for name, position in self.made.items() if position < front]
        return self._names[front]

    @cached_property
    def inputs(self) -> dict[str, int]:
        """The operands that no node makes, and the position of the first reader, in this order."""
        return {name: positions[0] for name, positions in self.readers.items() if name not in self.made}

    def unlike(self, sweep: RankSweep, second: RankSweep) -> str:
        """The first input that two sweeps have unlike, in the order of the nodes; "" for equal inputs."""
        return next((name for name in self.inputs if sweep.values.get(name) != second.values.get(name)), "")

    def reads(self, name: str, front: int) -> bool:
        """Return whether one of the nodes in front reads a value."""
        return any(position < front for position in self.readers.get(name, ()))


class _Followed(MutableMapping[str, int]):
    """The values of a rank: its own in front of its leader's.

    ``parts``: name -> the region in other values, and these, for values without a reader so far."""

    def __init__(self, own: Values, leaders: SweptValues, expressions: Boxes) -> None:
        self.own, self.leaders, self.expressions, self._begun = own, leaders, expressions, tuple(own)
        self.parts = dict[str, tuple[Region, Column]]()

    def __getitem__(self, name: str) -> int:
        number = self.own.get(name)
        if number is not None:
            return number
        if name in self.parts:
            region, wholes = self.parts.pop(name)
            self.own[name] = number = region.of(self.expressions, wholes)
            return number
        return self.leaders[name]

    def __setitem__(self, name: str, number: int) -> None:
        self.own[name] = number

    def __delitem__(self, name: str) -> None:
        raise TypeError("values of a rank stay")

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys((*self._begun, *self.leaders, *self.own)))

    def __len__(self) -> int:
        return len({*self.leaders, *self.own})

    def __contains__(self, name: object) -> bool:
        return name in self.own or name in self.leaders


@dataclass(slots=True, eq=False)
class RankSweep:
    """A graph and the expressions so far, of ranks with the same; ``rank``: the first, ``at``: the next node."""

    rank: int
    graph: Graph
    reader: NodeReader
    values: SweptValues
    at: int = 0
    ranks: list[int] = field(default_factory=list)
    leader: RankSweep | None = None
    """Earlier ranks with the same nodes in front: of these, this sweep reads only nodes with other operands."""
    order: NodeOrder | None = None
    front: int = 0
    """The number of the leader's nodes."""
    behind: tuple[RankSweep, NodeOrder] | None = None
    """The next leader, for the nodes behind the front."""
    fronts: dict[int, tuple[Values, dict[str, str]]] = field(default_factory=dict)
    """Number of nodes in front -> their values and casts, for followers up to there."""
    changed: list[int] = field(default_factory=list)
    """The positions of nodes with other operands than the leader's, as a heap."""
    repeats: Repeats | None = None
    """Of the source: groups of nodes again and again."""
    undefined: set[int] = field(default_factory=set)
    """The results of calls without a value on this rank."""

    def follow(self, leader: RankSweep, order: NodeOrder, behind: tuple[RankSweep, NodeOrder] | None = None) -> bool:
        """Begin with the leader's values, but for inputs, and return True, if at least half of the nodes have the same
        inputs and types; ``behind``: the next leader, from the first node on with other inputs."""
        front, count = self._common(leader, order), len(self.graph.nodes)
        if behind is not None:
            front = min(front, order.inputs.get(order.unlike(self, leader), front))
            if self._common(*behind) < count or not self._fits(*behind, count):
                return False
        if 2 * front < count or not self._fits(leader, order, front):
            return False
        self.leader, self.order, self.front, self.behind = leader, order, front, behind
        self.values = _Followed(dict(self.values), leader.values, self.reader.expressions)
        self.reader.follow(leader.reader.widened)
        self._note(self.values.own)
        return True

    def _follow_next(self) -> Node | None:
        """Follow the next leader from here on, if any; read nodes up to the next call."""
        self.alone()
        values, behind, self.behind = self.values, self.behind, None
        if behind is not None and behind[0].at >= self.at and isinstance(values, _Followed):
            self.leader, self.order = leader, order = behind
            self.front = len(self.graph.nodes)
            before, _ = leader.in_front(self.at, order)
            apart = {name: number for name, number in values.leaders.items() if before.get(name) != number}
            unlike = (name for name, number in values.own.items() if leader.values.get(name) != number)
            readers = order.readers_behind(self.at)
            names = readers.keys() & {*apart, *unlike, *values.parts}
            self.changed = sorted({position for name in names for position in readers[name]})
            values.own, values.leaders = apart | values.own, leader.values
            self.reader.follow(leader.reader.widened)
        return self.to_call()

    def _common(self, leader: RankSweep, order: NodeOrder) -> int:
        """The number of nodes in front shared with a leader, up to a result of another type."""
        front, types, due = common(self.graph.nodes, leader.graph.nodes), self.graph.types, leader.graph.types
        names = order.names(front) if types is not due else []
        if list(map(types.get, names)) == list(map(due.get, names)):
            return front
        return next(order.made[name] for name in names if types.get(name) != due.get(name))

    def _fits(self, leader: RankSweep, order: NodeOrder, front: int) -> bool:
        """Return whether the nodes in front read the same inputs."""
        return not any(order.reads(name, front) for name in self.values.keys() ^ leader.values.keys())

    def alone(self) -> None:
        """Follow no more: the values so far belong to inputs and to earlier nodes."""
        if self.leader is not None and self.order is not None and isinstance(self.values, _Followed):
            leader, self.leader = self.leader, None
            self.values.leaders, casts = leader.in_front(self.at, self.order)
            self.reader.follow(casts)

    def in_front(self, at: int, order: NodeOrder) -> tuple[Values, dict[str, str]]:
        """The values of the nodes up to a position, and the casts."""
        if at not in self.fronts:
            done = [name for name in order.names(at) if name in self.values]  # the first is named
            values = {name: self.values[name] for name in done}
            self.fronts[at] = values, self.reader.casts(values)
        return self.fronts[at]

    def _note(self, values: Mapping[str, int]) -> None:
        """Store values, and note the readers of values unlike the leader's."""
        assert self.order is not None
        for name, number in values.items():
            self._store(name, number, self.order.readers)

    def _store(self, name: str, number: int, readers: Mapping[str, Iterable[int]]) -> None:
        assert self.leader is not None and isinstance(self.values, _Followed)
        if self.leader.values.get(name) != number:
            self.values.own[name] = number
            for position in readers.get(name, ()):
                heappush(self.changed, position)

    def _follow(self) -> Node | None:
        """Read the changed nodes up to the next call, if the leader is there."""
        assert self.leader is not None and self.order is not None
        nodes, calls, leader = self.graph.nodes, self.order.calls, self.leader
        index = bisect_left(calls, self.at)
        stop = min(calls[index] if index < len(calls) else self.front, self.front)
        if leader.at < stop:  # in another group, it waits for members
            return self._follow_next()
        if self.at:
            self._note({name: self.values[name] for name in nodes[self.at - 1].outputs if name})
        done = -1
        while self.changed and self.changed[0] < stop:
            position = heappop(self.changed)
            group = self.order.groups.get(position) if position != done else None
            if group is not None and group.positions[-1] < stop and self._all_in(group):
                self._read_group(group)
            elif position != done:
                self._note(self._read(nodes[position]))
                done = position
        self.at = stop
        if stop == self.front and max(len(nodes), len(leader.graph.nodes)) > stop:
            return self._follow_next()
        return nodes[stop] if stop < len(nodes) else None

    def _all_in(self, group: Group) -> bool:
        """Return whether all changed nodes up to the end of a group are of the group, and note these as read."""
        assert self.order is not None
        positions, last = list[int](), group.positions[-1]
        while self.changed and self.changed[0] <= last:
            positions.append(heappop(self.changed))
        if all(self.order.groups.get(position) is group for position in positions):
            return True
        for position in positions:
            heappush(self.changed, position)
        return False

    def _read_group(self, group: Group) -> None:
        """Read all nodes of a group: on equal parts of values as on further parts of the same values."""
        expressions = self.reader.expressions
        part = common_region(expressions, [self.values[name] for name in group.reads])
        rows = self._rows(group, *part) if part is not None and not self.undefined else []
        if part is not None and rows and isinstance(self.values, _Followed):
            self.values.parts.update(zip(group.names, zip(repeat(part[0]), rows)))
            for name in group.readers:
                self._store(name, self.values[name], group.readers)
            return
        numbers = []
        for node in group.nodes:
            for name, number in self._read(node).items():
                self._store(name, number, group.readers)
                numbers.append(number)
        if part is not None and part[0].whole is None:
            (spans, _, _), operands = part
            rows = [expressions.all[number].operands for number in numbers if expressions.ranges(number) == spans]
            if len(rows) == len(numbers) and expressions.side_by_side([*filter(is_row, operands), *rows]):
                group.wholes[None, *operands] = rows

    def _rows(self, group: Group, region: Region, operands: Sequence[Row]) -> list[Column]:
        """The values with the results of a group as parts; [] where they are not known."""
        key = region.whole, *operands
        if key not in group.wholes:
            part = self._on_parts if region.whole is None else self._on_values
            rows = part(group, region, operands)
            if not rows:
                return rows
            group.wholes[key] = rows
        return group.wholes[key]

    def _on_values(self, group: Group, region: Region, operands: Sequence[Row]) -> list[Column]:
        """The results of a group on whole values; [] for a result of another shape."""
        ((*column,),) = columns_of(operands)
        values = dict(zip(group.reads, column))
        for node in group.nodes:
            number = self._on_wholes(node, tuple([values[name] for name in node.inputs]), region.whole)
            if number is None:
                return []
            values[node.outputs[0]] = number
        return [(values[name],) for name in group.names]

    def _on_parts(self, group: Group, region: Region, operands: Sequence[Row]) -> list[Column]:
        """The results of a group on ranges of parts of whole values."""
        expressions, parts = self.reader.expressions, list[tuple[Region, list[Column]]]()
        for column in columns_of(operands):
            part = common_region(expressions, expressions.in_common_shape(column))
            wholes = self._rows(group, *part) if part is not None and part[0].whole is not None else []
            if part is None or not wholes:
                return []
            parts.append((part[0], wholes))
        rows = [tuple([region.of(expressions, row[at]) for region, row in parts]) for at, _ in enumerate(group.names)]
        return rows if expressions.side_by_side([*filter(is_row, operands), *rows]) else []

    def to_call(self) -> Node | None:
        """Read nodes up to the next call; return the call, or None at the end of the graph."""
        if self.leader is not None:
            return self._follow()
        nodes, values = self.graph.nodes, self.values
        if self.repeats is None:
            self.repeats = Repeats(self.reader)
        runs = self.repeats.runs
        while self.at < len(nodes):
            if nodes[self.at].domain == COMM:
                return nodes[self.at]
            if self.at in runs:
                end = self.at + sum(map(len, runs[self.at]))
                values.update((node.outputs[0], ONE) for node in nodes[self.at : end])  # in the order of the file
                for row in runs[self.at]:
                    self.repeats.read([nodes[position] for position in row], values, self._read)
                self.at = end
                continue
            values.update(self._read(nodes[self.at]))
            self.at += 1
        return None

    def operands(self, node: Node, names: Iterable[str]) -> tuple[int, ...]:
        """The expressions of the operands of a node. Raises UnpairedCall for a value that the rank lacks."""
        try:
            numbers = tuple([self.values[name] for name in names])
        except KeyError as error:
            said = f"reads {error.args[0]!r}, which a later file makes"
            raise UnpairedCall(self.rank, node, said, "a value from before") from None
        if self.undefined and not self.undefined.isdisjoint(numbers):
            lacking = next(name for name, number in zip(names, numbers) if number in self.undefined)
            raise UnpairedCall(self.rank, node, f"reads {lacking!r}, which it does not have", "a value of its own")
        return numbers

    def end_call(self, numbers: Sequence[int] | None) -> None:
        """Go on behind a call; ``numbers``: the results, None for undefined ones. Raises InputError."""
        node = self.graph.nodes[self.at]
        if numbers is None:
            numbers = [self.reader.expressions.leaf(UNDEFINED, (self.rank, name), None) for name in node.outputs]
            self.undefined.update(numbers)
        try:
            self._check_shapes(node, numbers)
        except ValueError as error:
            raise self._unfit(node, error) from None
        self.values.update(zip(node.outputs, numbers))
        self.at += 1

    def _read(self, node: Node) -> dict[str, int]:
        """The results of a node."""
        operands = self.operands(node, node.reads)
        if node.encoded is None or node.op_type in CASTS:
            return dict(zip(node.outputs, self._results(node, operands)))
        memo, key = self.reader.expressions.read, (node.encoded, operands)
        if key not in memo:
            memo[key] = self._read_by_form(node, operands)
        return dict(zip(node.outputs, memo[key]))

    def _read_by_form(self, node: Node, operands: Column) -> list[int]:
        """The results of a node; of an elementwise node, as of an earlier one under other names."""
        memo, key = self.reader.expressions.read, (self._form(node), operands)
        if key in memo:
            return memo[key]
        results = self._of_parts(node, operands) or self._results(node, operands)
        if key[0] is not None:
            memo[key] = results
        return results

    def _form(self, node: Node) -> Hashable:
        """The operator, attributes and types of an elementwise node, under any names; None for any other node."""
        if not record_of(node).elementwise or draws(node) or node.captures:
            return None
        types = self.graph.types
        operands = tuple([types[name].dtype if name in types else None for name in node.inputs])
        return node.op_type, node.domain, frozen(node), operands, tuple([types.get(name) for name in node.outputs])

    def _of_parts(self, node: Node, operands: Column) -> list[int] | None:
        """The results of an elementwise node on equal parts of values that was read for other parts of the same.

        The results are noted by the values, which are alike on all ranks."""
        expressions = self.reader.expressions
        if len(node.outputs) != 1 or not record_of(node).elementwise or draws(node):
            return None
        part = common_region(expressions, operands)
        if part is None:
            return None
        region, columns = part[0], columns_of(part[1])
        if region.whole is not None:
            whole = self._on_wholes(node, columns[0], region.whole) if is_plain(self.graph, node) else None
            return None if whole is None else [region.of(expressions, [whole])]
        keys = [(node.encoded or b"", (RANGE, *column)) for column in columns]
        wholes = [expressions.read.get(key) or self._of_parts(node, column) for key, column in zip(keys, columns)]
        numbers = [row[0] for row in wholes if row]
        if None not in wholes and all(map(expressions.in_source, numbers)):
            return [region.of(expressions, numbers)]
        results = self._results(node, operands)
        if expressions.ranges(results[0]) == region.ranges:
            for key, whole in zip(keys, expressions.all[results[0]].operands):
                if expressions.elements(whole) == max(expressions.elements(number) or 0 for number in key[1][1:]):
                    expressions.read[key] = [whole]
        return results

    def _on_wholes(self, node: Node, operands: Column, shape: Shape) -> int | None:
        """The result of a plain node on values of a shape, where the source has it; None for another shape, and for
        some terms of sums."""
        expressions, key = self.reader.expressions, (node.encoded or b"", operands)
        if expressions.joinable(operands):
            return None
        if key not in expressions.read:
            self.reader.values = self.values
            expressions.read[key] = self.reader.results(node, operands, [shape])
        (whole,) = expressions.read[key]
        return whole if expressions.shape(whole) == shape and expressions.in_source(whole) else None

    def _results(self, node: Node, operands: Sequence[int]) -> list[int]:
        """The results by the laws."""
        present: Iterator[int | None] = iter(operands)
        if "" in node.inputs:
            present = iter([*(next(present) if name else None for name in node.inputs), *present])
        self.reader.values = self.values
        try:
            results = self.reader.results(node, read := [*present])
            if fault := self.reader.misfit(node, read):
                raise ValueError(fault)
            self._check_shapes(node, results)
        except (ValueError, TypeError, IndexError, ZeroDivisionError) as error:
            raise self._unfit(node, error) from None
        return results

    def _unfit(self, node: Node, error: Exception) -> InputError:
        what = f"rank {self.rank}: {node.op_type} {node.label!r} does not fit its operands: {error}"
        return InputError(what, "gopt inspect FILE --text shows the graph")

    def _check_shapes(self, node: Node, results: Sequence[int]) -> None:
        """Raise ValueError for a result of another shape than the file or the inference of types says."""
        for name, number in zip(node.outputs, results):
            type, shape = self.graph.types.get(name), self.reader.expressions.shape(number)
            if name and type is None and node.domain in ("", "ai.onnx") and _makes_tensors(node.op_type):
                raise ValueError(f"{name!r} is of no type")
            if type is None or shape == type.shape:
                continue
            if type.static and elements(shape) is not None:
                raise ValueError(f"{name!r} is of shape {list(type.dims)}, not {list(shape or ())}")
