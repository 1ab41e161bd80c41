"""From a node to the expressions of the results: by the record of the operator, in the forms with laws."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from typing import cast

import numpy as np

from gopt.ir.constant_folding import as_folded, measured
from gopt.ir.graph import Graph, Node
from gopt.ir.node_kinds import draws, record_of
from gopt.ir.types import FLOATS, TensorType, numpy_dtype
from gopt.operators.dims.link import DimFactor, DimFactors, OperatorUse
from gopt.operators.fits import misfit
from gopt.operators.kinds import CASTS, CONVOLUTIONS, COPIES, PARTS, RESHAPES, RESIZES, SIZES
from gopt.operators.operator import Operator, Slope
from gopt.verification.proof import choice_laws, move_laws, norm_laws, place_laws, sum_laws, window_laws
from gopt.verification.proof.attributes import frozen
from gopt.verification.proof.boxes import Box
from gopt.verification.proof.constants import Arrays, ConstantTable
from gopt.verification.proof.exponentials import Expressions
from gopt.verification.proof.forms import (
    EXP,
    EXTREMES,
    FLAT,
    PARTED,
    TAKE,
    VIEW,
    Part,
    Shape,
    UnknownSize,
    broadcast,
    elements,
)
from gopt.verification.proof.selections import Runs
from gopt.verification.proof.stored_values import SMALL


class NodeReader:
    """Reads the nodes of a graph into ``expressions``; ``drawn``: the axes along which members draw apart; ``split``:
    whether members may have parts of a sample."""

    def __init__(
        self, expressions: Expressions, graph: Graph, drawn: frozenset[str], table: ConstantTable, *,
        split: bool = False,
    ) -> None:  # fmt: skip
        self.expressions, self.graph, self.drawn, self.table, self.split = expressions, graph, drawn, table, split
        self.widened: MutableMapping[str, str] = {}
        """Value behind a cast to a wider type -> the type before: the cast back rounds nothing."""
        self.values: Mapping[str, int] = {}
        """The values of the graph so far."""

    @cached_property
    def producers(self) -> Mapping[str, Node]:
        """Value -> the node that makes it."""
        return self.graph.producers()

    @cached_property
    def users(self) -> Mapping[str, Sequence[Node]]:
        """Value -> the nodes that read it."""
        return self.graph.users()

    def follow(self, widened: MutableMapping[str, str]) -> None:
        """Know the casts that a reader of the same nodes has read."""
        if isinstance(self.widened, ChainMap):
            self.widened.maps[1] = widened  # also for those that follow this one
        else:
            self.widened = ChainMap(self.widened, widened)

    def casts(self, done: Collection[str]) -> dict[str, str]:
        """The casts to a wider type, of some values."""
        return {name: self.widened[name] for name in self.widened if name in done}

    def of_graph(self, graph: Graph) -> NodeReader:
        """A reader of the nodes of another graph."""
        return NodeReader(self.expressions, graph, self.drawn, self.table, split=self.split)

    def results(self, node: Node, operands: Sequence[int | None], shapes: Sequence[Shape] = ()) -> list[int]:
        """The expressions of all results; ``operands``: None for an absent operand. ``shapes``: of the results, by
        default of the graph."""
        shapes = shapes or [self.graph.type_of(name).shape if name else None for name in node.outputs]
        present = [operand for operand in operands if operand is not None]
        front = len(present) == len(operands) or None not in operands[: len(present)]
        if front and node.domain in ("", "ai.onnx") and not node.captures:
            with suppress(UnknownSize):
                results = self._by_laws(node, present, shapes)
                if results is not None:
                    return results
        if draws(node):
            present.append(self.expressions.leaf("draw", node.outputs[0], (), self.drawn))
        return self.plain(node, operands, present, shapes)

    def _by_laws(self, node: Node, operands: Sequence[int], shapes: Sequence[Shape]) -> list[int] | None:
        """The results by any law, or None. Raises UnknownSize."""
        results = norm_laws.results(self, node, operands, shapes) if self.split else None
        if results is None:
            results = self._by_law(node, operands, shapes)
        if results is None:
            results = self._of_repeated(node, operands, shapes)
        if results is None:
            results = window_laws.results(self, node, operands, shapes)
        if results is None:
            results = self._of_parts(node, operands, shapes)
        return move_laws.unpadded(self, node, operands) if results is None else results

    def _by_law(self, node: Node, operands: Sequence[int], shapes: Sequence[Shape]) -> list[int] | None:
        """The results of an operator with a law."""
        if len(node.outputs) > 1:
            return move_laws.split(self, node, operands, shapes) if node.is_in(PARTS) else None
        number = self._of_terms(node, operands, shapes)
        if number is None:
            number = self._lawful(node, operands, shapes[0])
        return None if number is None else [number]

    def _of_terms(self, node: Node, operands: Sequence[int], shapes: Sequence[Shape]) -> int | None:
        """A linear operator on some of the terms of sums: the same terms of the operator on the sums."""
        if not self.expressions.joinable(operands):
            return None
        record = record_of(node)
        for slot, operand in enumerate(operands):
            addends = self.expressions.addends(operand)
            if addends is None or record.slope(slot) is not Slope.LINEAR:
                continue
            if node.is_in(COPIES | RESIZES) or not self.floating(node):
                continue
            rest = [*operands[:slot], *operands[slot + 1 :]]
            if self.expressions.depend(rest, {core for _, _, core, _ in addends}):
                return None
            terms: list[int] = []
            for factor, whole, core, parts in addends:
                scaled = self.expressions.scaled(whole, factor)
                (number,) = self.results(node, [*operands[:slot], scaled, *operands[slot + 1 :]], shapes)
                try:
                    for part in parts:
                        number = self.expressions.parted(number, core, *part)
                except ValueError:
                    return None
                terms.append(number)
            return terms[0] if len(terms) == 1 else self.expressions.elementwise(self.expressions.added, terms)
        return None

    def _of_repeated(self, node: Node, operands: Sequence[int], shapes: Sequence[Shape]) -> list[int] | None:
        """The results where no operand follows an index of the results: of one position, again and again."""
        expressions, record = self.expressions, record_of(node)
        if record.dims is None or record.elementwise or draws(node) or not self.floating(node):
            return None
        free = [expressions.repeats(operand) for operand in operands]
        use = self.use(node, operands, shapes) if any(map(any, free)) else None
        sizes, single = [list(shape or ()) for shape in shapes], list(operands)
        for factor in record.dims(use) if use is not None else ():
            slots = [(slot, dim) for slot, dim in enumerate(factor.operands) if dim is not None]
            plain = not factor.masked and not factor.reduce and all(isinstance(dim, int) for dim in factor.results)
            if not plain or not slots or not all(isinstance(dim, int) and free[slot][dim] for slot, dim in slots):
                continue
            for slot, dim in slots:
                single[slot] = expressions.once(single[slot], cast(int, dim))
            for row, position in zip(sizes, factor.results):
                row[cast(int, position)] = 1
        if single == list(operands):
            return None
        results = self.results(node, single, [tuple(row) for row in sizes])
        return list(map(expressions.expanded, results, shapes))

    def _of_parts(self, node: Node, operands: Sequence[int], shapes: Sequence[Shape]) -> list[int] | None:
        """The results where operands are parts: the same parts of the results on whole operands, by the indices of the
        operator."""
        boxes = [self.expressions.box(operand) for operand in operands]
        record = record_of(node)
        if record.dims is None or record.elementwise or draws(node) or not self._are_parts(node, operands, boxes):
            return None
        use = self.use(node, operands, shapes)
        if use is None:
            return None
        dims, factors = record.dims, list(record.dims(use))

        def of_choices(choices: Iterable[Sequence[Box | None]]) -> list[int] | None:
            """The first results that are parts of the source's; else the results by ``boxes``."""
            fallback = None
            for chosen in choices:
                parts = [operand if box is None else self.expressions.take(*box)
                         for operand, box in zip(operands, chosen)]  # fmt: skip
                for wholes in self._wholes(node, operands, chosen):
                    results = self._of_factors(node, parts, chosen, wholes, dims, factors, shapes)
                    if results is not None and self._in_source(results):
                        return results
                    fallback = fallback or (results if chosen is boxes else None)
            return fallback

        results = of_choices(self._choices(operands, boxes))
        if self.table.widened or (results is not None and self._in_source(results)):
            return results
        self.table.widened = True
        try:
            around = of_choices(self._choices_around(operands, boxes))
        finally:
            self.table.widened = False
        return results if around is None else around

    def _in_source(self, numbers: Sequence[int]) -> bool:
        return all(self.core(number) < self.expressions.of_ranks for number in numbers)

    def part_in_source(self, node: Node, operands: Sequence[int], shape: Shape) -> int | None:
        """The result for parts as a part of an expression of the source; None for any other result."""
        results = self._of_parts(node, operands, [shape])
        return results[0] if results is not None and self._in_source(results) else None

    def _are_parts(self, node: Node, operands: Sequence[int], boxes: Sequence[Box | None]) -> bool:
        """Return whether some operands are parts, also of the source's that the operator does not read there."""
        if any(boxes) or not self.expressions.sealed:
            return any(boxes)
        parts = (operand for operand in operands if self.expressions.raw(operand))
        return any(not self.expressions.readers(node.op_type, operand) for operand in parts)

    def _choices(self, operands: Sequence[int], boxes: Sequence[Box | None]) -> Iterator[Sequence[Box | None]]:
        """The boxes of operands, and boxes in which one is of a whole value of another shape, or under the source's
        part."""
        yield from [boxes] if any(boxes) else []
        for slot, box in enumerate(boxes):
            operand = operands[slot]
            for reshaped in (*self.expressions.boxes(operand), *self.expressions.raw(operand).items()):
                if reshaped != box:
                    yield [*boxes[:slot], reshaped, *boxes[slot + 1 :]]

    def _choices_around(self, operands: Sequence[int], boxes: Sequence[Box | None]) -> Iterator[Sequence[Box | None]]:
        """Boxes in which one is of a value of the source around a part."""
        for slot, operand in enumerate(operands):
            for around in self.expressions.surroundings(operand):
                yield [*boxes[:slot], around, *boxes[slot + 1 :]]

    def _wholes(self, node: Node, operands: Sequence[int], boxes: Sequence[Box | None]) -> Iterator[list[int]]:
        """Possible whole operands for a node on parts: of the parts, or of a node of the source."""
        yield [operand if box is None else box[0] for operand, box in zip(operands, boxes)]
        attributes = frozen(node), 0
        for slot, box in enumerate(boxes):
            for number in self.expressions.readers(node.op_type, box[0]) if box is not None else ():
                expression = self.expressions.all[number]
                alike = len(expression.operands) == len(operands) and expression.attributes == attributes
                if alike and box is not None and expression.operands[slot] == box[0]:
                    yield list(expression.operands)

    def _of_factors(
        self, node: Node, operands: Sequence[int], boxes: Sequence[Box | None], wholes: list[int],
        dims: DimFactors, factors: Sequence[DimFactor], shapes: Sequence[Shape],
    ) -> list[int] | None:  # fmt: skip
        """The results on whole operands, cut as the operands are along the indices of an operator."""
        expressions, selected = self.expressions, {}
        for slot, (box, whole) in enumerate(zip(boxes, wholes)):
            if box is not None and box[0] == whole:
                for dim, runs in enumerate(box[1]):
                    if runs is not None:
                        selected[slot, dim] = int((expressions.shape(whole) or ())[dim] or 0), runs
        sizes = [list(shape or ()) for shape in shapes]
        chosen: list[list[Runs | None]] = [[None] * len(shape) for shape in sizes]
        cut: list[list[Runs | None]] = [[None] * len(expressions.shape(whole) or ()) for whole in wholes]
        partial: list[tuple[str, Part, tuple[object, ...]]] = []
        spread: list[DimFactor] = []
        for factor in factors:
            slots = [(slot, where) for slot, where in enumerate(factor.operands) if where is not None]
            matched = {selected.pop(pair) for pair in list(selected) if pair in slots}
            if not matched:
                continue
            if len(matched) > 1 or factor.masked or factor.reduce not in ("", "sum", *EXTREMES):
                return None
            ((size, runs),) = matched
            for slot, where in slots:
                if not isinstance(where, int) or where >= len(cut[slot]):
                    return None
                before = (expressions.shape(wholes[slot]) or ())[where]
                moved = wholes[slot] if before == size else expressions.resized(wholes[slot], where, size, runs)
                if moved is not None:
                    wholes[slot], cut[slot][where] = moved, runs
                elif before == 1:
                    row = (*factor.operands[:slot], None, *factor.operands[slot + 1 :])
                    factor = replace(factor, operands=row, filled=True)
                    spread.append(factor)
                else:
                    return None
            for index, out in enumerate(factor.results):
                if isinstance(out, int):
                    sizes[index][out], chosen[index][out] = size, runs
                elif out is not None or not factor.reduce:
                    return None
            if factor.reduce:
                partial.append((factor.reduce, (factor.operands, size, runs), factor.results))
        cut_again = [expressions.take(whole, tuple(selection)) for whole, selection in zip(wholes, cut)]
        if selected or not all(map(expressions.alike, cut_again, operands)) or len({how for how, _, _ in partial}) > 1:
            return None
        if spread:  # a part of length 1 beside a dimension of length 1: an index of the part alone, if of its whole
            use = self.use(node, wholes, [tuple(shape) for shape in sizes])
            of_wholes = {replace(factor, filled=True) for factor in dims(use)} if use is not None else set()
            if not of_wholes.issuperset(spread):
                return None
        results = self.results(node, wholes, [tuple(shape) for shape in sizes])
        for index, (how, part, where_made) in ((index, row) for index in range(len(results)) for row in partial):
            if where_made[index] is not None:
                continue
            core = self.core(results[index])
            try:
                results[index] = (
                    expressions.parted(results[index], core, *part)
                    if how == "sum"
                    else expressions.parted_extreme(EXTREMES[how], results[index], core, part)
                )
            except ValueError:
                return None
        return [expressions.take(number, tuple(selection)) for number, selection in zip(results, chosen)]

    def core(self, number: int) -> int:
        """The operator under views and parts."""
        op, _, operands, _ = self.expressions.all[number]
        single = op in (VIEW, TAKE, PARTED) or (op == FLAT and len(set(operands)) == 1)
        return self.core(operands[0]) if single else number

    def use(self, node: Node, operands: Sequence[int], shapes: Sequence[Shape]) -> OperatorUse | None:
        """The node for rules of dimensions, with the sizes of given operands."""
        names = [name for name in node.inputs if name]
        types = [TensorType(self.graph.type_of(name).dtype, self.expressions.shape(operand))
                 for name, operand in zip(names, operands)]  # fmt: skip
        results = [TensorType(self.graph.type_of(name).dtype, shape) if name else None
                   for name, shape in zip(node.outputs, shapes)]  # fmt: skip
        if not all(type is None or type.static for type in (*types, *results)):
            return None
        opset = next((entry.version for entry in self.graph.header.opset_import if entry.domain in ("", "ai.onnx")), 1)
        return OperatorUse(
            node.op_type, node.attributes, tuple(types), tuple(results),
            lambda index: self.table.setting(operands[index]), opset,
        )  # fmt: skip

    def misfit(self, node: Node, operands: Sequence[int | None]) -> str:
        """The shapes of operands, or a constant index, in contradiction to the operator; '' if all fit."""
        shapes = [number if number is None else self.expressions.shape(number) for number in operands]
        named = record_of(node).indices is not None and len(operands) > 1 and operands[1] is not None
        index = self.table.array(operands[1]) if named else None  # type: ignore[arg-type]
        return misfit(node.op_type, node.attributes, shapes, index) if node.domain in ("", "ai.onnx") else ""

    def _lawful(self, node: Node, operands: Sequence[int], shape: Shape) -> int | None:
        """The result of an operator with a law. ``shape``: of the result."""
        if node.is_in(SIZES):
            return self._measured(node, operands[0])
        arrays = [self.table.array(operand) for operand in operands]
        if operands and all(array is not None for array in arrays):
            folded = self._folded(node, arrays) if (elements(shape) or 0) <= SMALL else None
            part = self.expressions.sealed and (node.is_in(PARTS) or any(map(self.expressions.box, operands)))
            number = None if folded is None else self.expressions.from_array(folded)
            if number is not None and (number < self.expressions.of_ranks or not part):
                return number
        if elements(shape) is None:
            shape = None
        record = record_of(node)
        if shape is not None and self._without_terms(record, operands):
            return self.expressions.constant(0, shape) if self.floating(node) else None
        if record.shape is not None or record.lengths:
            decided = (*((record.shape,) if record.shape is not None else ()), *record.lengths)
            if any(index < len(arrays) and arrays[index] is None for index in decided):
                return None
        if record.signs and self.floating(node):
            return self._sum(record, operands)
        if record.exponents and self.floating(node):
            return self._product(record, operands)
        rule = RULES.get(node.op_type)
        try:
            if record.pieces:
                return sum_laws.reduced(self, node, record, operands, arrays, shape)
            return None if rule is None else rule(self, node, operands, arrays, shape)
        except UnknownSize:
            return None

    def _without_terms(self, record: Operator, operands: Sequence[int]) -> bool:
        """Return whether the result is a sum without terms, or of products of numbers and zeros."""
        expressions = self.expressions
        if not operands or not (record.work or record.pieces == "sum"):
            return False
        linear = all(record.slope(slot) is Slope.LINEAR for slot, _ in enumerate(operands))
        if expressions.elements(operands[0]) == 0:
            return linear or len(operands) < 3  # a third operand may be added
        zeros = (operand for operand in operands if expressions.uniform(operand) == 0)
        return linear and all(map(expressions.finite.__getitem__, operands)) and any(zeros)

    def plain(
        self, node: Node, operands: Sequence[int | None], present: Sequence[int], shapes: Sequence[Shape]
    ) -> list[int]:
        """An operator without a law, applied to the operands."""
        expressions, attributes = self.expressions, frozen(node)
        absent = tuple(index for index, operand in enumerate(operands) if operand is None)
        key: Hashable = (attributes, absent) if absent else attributes
        op = f"{node.domain}.{node.op_type}" if node.domain not in ("", "ai.onnx") else node.op_type
        if len(node.outputs) == 1 and record_of(node).elementwise and not draws(node):

            def make(values: Sequence[int]) -> int:
                number = expressions.apply(op, key, values, broadcast(expressions.shape(value) for value in values))
                self.table.origins.setdefault(number, (self.graph, node, 0))
                return number

            shape = broadcast(expressions.shape(operand) for operand in present)
            if present and self.floating(node) and elements(shape) and not any(map(expressions.ranged, present)):
                return [expressions.linear({make(list(map(expressions.narrow, present))): 1}, shape)]
            return [expressions.elementwise(make, present)]
        results = []
        for index, shape in enumerate(shapes):
            results.append(expressions.apply(op, (key, index), present, shape))
            self.table.origins.setdefault(results[-1], (self.graph, node, index))
        return results

    def _folded(self, node: Node, arrays: Arrays) -> np.ndarray | None:
        if node.is_in(CASTS):
            to = self.type_of(node).dtype
            return None if to == "undefined" else np.asarray(arrays[0].astype(numpy_dtype(to)))
        if not all(array.dtype.kind in "iub" for array in arrays):
            return None
        folded = as_folded(node, arrays)
        return folded if folded is not None and folded.size <= SMALL else None

    def _measured(self, node: Node, operand: int) -> int | None:
        shape = self.expressions.shape(operand)
        if elements(shape) is None:
            return None
        sizes = measured(node, tuple(shape or ()))  # type: ignore[arg-type]
        return None if sizes is None else self.expressions.from_array(sizes)

    def type_of(self, node: Node) -> TensorType:
        return self.graph.type_of(node.outputs[0])

    def floating(self, node: Node) -> bool:
        return self.type_of(node).dtype in FLOATS

    # --- by the facts of the record ---

    def _sum(self, record: Operator, operands: Sequence[int]) -> int:
        signs = [record.sign(index) for index, _ in enumerate(operands)]
        return self.expressions.elementwise(lambda values: self.expressions.added(values, signs), operands)

    def _product(self, record: Operator, operands: Sequence[int]) -> int:
        return self.expressions.elementwise(lambda values: self.expressions.product(values, record.exponents), operands)


RULES: Mapping[str, Callable[[NodeReader, Node, Sequence[int], Arrays, Shape], int | None]] = {
    **dict.fromkeys(COPIES, move_laws.cast),
    **dict.fromkeys(RESHAPES, move_laws.reshape),
    **dict.fromkeys(sum_laws.JOINED, sum_laws.extreme),
    "Add": place_laws.added,
    "Sub": place_laws.subtracted,
    "Mul": place_laws.multiplied,
    "Div": place_laws.divided,
    "Less": place_laws.below,
    "Gemm": sum_laws.gemm,
    **dict.fromkeys(CONVOLUTIONS, sum_laws.convolution),
    window_laws.SPREADING: window_laws.transposed,
    window_laws.MEAN: window_laws.mean,
    "Softmax": sum_laws.softmax,
    "LogSoftmax": sum_laws.log_softmax,
    "Gather": choice_laws.gather,
    "ScatterElements": choice_laws.scatter,
    "ScatterND": choice_laws.scatter,
    sum_laws.RUNNING: sum_laws.running,
    EXP: sum_laws.exponential,
    "Log": sum_laws.logarithm,
    "Constant": move_laws.constant,
    "Expand": move_laws.expand,
    "Transpose": move_laws.transpose,
    "Slice": move_laws.taken,
    "Concat": move_laws.concat,
    "Tile": move_laws.tile,
    "Pad": move_laws.pad,
    "Where": choice_laws.where,
    "ConstantOfShape": move_laws.fill,
}
