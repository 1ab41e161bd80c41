"""From a node to the expressions of the results: by the record of the operator, in the forms with laws."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from fractions import Fraction
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import onnx

from gopt.ir.constant_folding import as_folded, constant_array, measured
from gopt.ir.graph import Graph, Node
from gopt.ir.node_kinds import draws, record_of
from gopt.ir.types import FLOATS, TensorType, dtype_name, numpy_dtype
from gopt.operators.dims.elements import softmax_axes
from gopt.operators.dims.link import DimFactor, OperatorUse
from gopt.operators.kinds import CASTS, COMBINERS, COPIES, NORM_REDUCTIONS, RESHAPES, SIZES
from gopt.operators.operator import Operator, Slope
from gopt.verification.proof.boxes import Box, Expressions
from gopt.verification.proof.constants import SMALL, ConstantTable, simplest
from gopt.verification.proof.expressions import (
    EXP,
    EXTREMES,
    PARTED,
    TAKE,
    VIEW,
    Part,
    Shape,
    broadcast,
    elements,
)
from gopt.verification.proof.selections import Runs, length

EXACT = {
    "bfloat16": frozenset({"float32", "float64"}),
    "float16": frozenset({"float32", "float64"}),
    "float32": frozenset({"float64"}),
}  # fmt: skip
"""Type -> types with all values of the type: a cast to them rounds nothing."""
_JOINED = {op: EXTREMES[how] for how, ops in COMBINERS.items() if how in EXTREMES for op in ops}
"""Operator of two extremes -> the form of the result."""
Arrays = Sequence[Any]
"""The values of operands that are constants; None for all others."""


class NodeReader:
    """Reads the nodes of a graph into ``expressions``; ``varying``: the axes along which batches and draws vary."""

    def __init__(self, expressions: Expressions, graph: Graph, varying: frozenset[str], table: ConstantTable) -> None:
        self.expressions, self.graph, self.varying, self.table = expressions, graph, varying, table
        self._widened: dict[str, str] = {}
        """Value behind a cast to a wider type -> the type before: the cast back rounds nothing."""

    def results(self, node: Node, operands: Sequence[int | None], shapes: Sequence[Shape] = ()) -> list[int]:
        """The expressions of all results; ``operands``: None for an absent operand. ``shapes``: of the results, those
        of the graph by default."""
        shapes = shapes or [self.graph.type_of(name).shape if name else None for name in node.outputs]
        present = [operand for operand in operands if operand is not None]
        front = len(present) == len(operands) or None not in operands[: len(present)]
        if front and node.domain in ("", "ai.onnx") and not node.captures:
            terms = self._of_terms(node, present, shapes) if len(node.outputs) == 1 else None
            if terms is not None:
                return [terms]
            if len(node.outputs) == 1:
                number = self._lawful(node, present, shapes[0])
                if number is not None:
                    return [number]
            elif node.op_type == "Split":
                parts = self.split(node, present, shapes)
                if parts is not None:
                    return parts
            parts = self._of_parts(node, present, shapes)
            if parts is not None:
                return parts
        if draws(node):
            present.append(self.expressions.leaf("draw", node.outputs[0], (), frozenset(self.expressions.extents)))
        return self._plain(node, operands, present, shapes)

    def _of_terms(self, node: Node, operands: Sequence[int], shapes: Sequence[Shape]) -> int | None:
        """A linear operator on some of the terms of sums: the same terms of the operator on the sums; None for any
        other node."""
        record = record_of(node)
        for place, operand in enumerate(operands):
            if record.slope(place) is not Slope.LINEAR or node.is_in(CASTS):
                continue
            addends = self.expressions.addends(operand)
            if addends is None:
                continue
            rest = [*operands[:place], *operands[place + 1 :]]
            if self.expressions.depend(rest, {core for _, _, core, _ in addends}):
                return None
            terms: dict[int, Fraction | int] = {}
            for factor, whole, core, parts in addends:
                (number,) = self.results(node, [*operands[:place], whole, *operands[place + 1 :]], shapes)
                try:
                    for part in parts:
                        number = self.expressions.parted(number, core, *part)
                except ValueError:
                    return None
                terms[number] = terms.get(number, 0) + factor
            scaled = [self.expressions.scaled(number, factor) for number, factor in terms.items()]
            return scaled[0] if len(scaled) == 1 else self.expressions.elementwise(self.expressions.added, scaled)
        return None

    def _of_parts(self, node: Node, operands: Sequence[int], shapes: Sequence[Shape]) -> list[int] | None:
        """The results where operands are parts: the same parts of the results on whole operands, by the indices of the
        operator; None if they are no such parts."""
        boxes = [self.expressions.box(operand) for operand in operands]
        record = record_of(node)
        if all(box is None for box in boxes) or record.dims is None or record.elementwise or draws(node):
            return None
        use = self._use(node, operands, shapes)
        if use is None:
            return None
        factors = list(record.dims(use))
        for wholes in self._wholes(node, operands, boxes):
            results = self._of_factors(node, operands, boxes, wholes, factors, shapes)
            if results is not None:
                return results
        return None

    def _wholes(self, node: Node, operands: Sequence[int], boxes: Sequence[Box | None]) -> Iterator[list[int]]:
        """The whole operands that a node on parts may stand for: those of the parts, or of a node of the source."""
        yield [operand if box is None else box[0] for operand, box in zip(operands, boxes)]
        attributes = frozen(node), 0
        for place, box in enumerate(boxes):
            for number in self.expressions.readers(node.op_type, box[0]) if box is not None else ():
                expression = self.expressions.all[number]
                same = len(expression.operands) == len(operands) and expression.attributes == attributes
                if same and box is not None and expression.operands[place] == box[0]:
                    yield list(expression.operands)

    def _of_factors(
        self, node: Node, operands: Sequence[int], boxes: Sequence[Box | None], wholes: list[int],
        factors: Sequence[DimFactor], shapes: Sequence[Shape],
    ) -> list[int] | None:  # fmt: skip
        """The results on whole operands, cut as the operands are along the indices of an operator."""
        expressions, selected = self.expressions, {}
        for place, (box, whole) in enumerate(zip(boxes, wholes)):
            if box is not None and box[0] == whole:
                for dim, runs in enumerate(box[1]):
                    if runs is not None:
                        selected[place, dim] = int((expressions.shape(whole) or ())[dim] or 0), runs
        sizes = [list(shape or ()) for shape in shapes]
        chosen: list[list[Runs | None]] = [[None] * len(shape) for shape in sizes]
        cut: list[list[Runs | None]] = [[None] * len(expressions.shape(whole) or ()) for whole in wholes]
        partial: list[tuple[str, Part]] = []
        for factor in factors:
            places = [(place, where) for place, where in enumerate(factor.operands) if where is not None]
            here = {selected.pop((place, where)) for place, where in places if (place, where) in selected}  # type: ignore[arg-type]
            if not here:
                continue
            if len(here) > 1 or factor.masked or factor.reduce not in ("", "sum", *EXTREMES):
                return None
            ((size, runs),) = here
            for place, where in places:
                if not isinstance(where, int) or where >= len(cut[place]):
                    return None
                moved = expressions.resized(wholes[place], where, size, runs)
                if moved is None:
                    return None
                wholes[place], cut[place][where] = moved, runs
            for index, where in enumerate(factor.results):
                if isinstance(where, int):
                    sizes[index][where], chosen[index][where] = size, runs
                elif where is not None or not factor.reduce:
                    return None
            if factor.reduce:
                partial.append((factor.reduce, (factor.operands, size, runs)))
        taken = [expressions.take(whole, tuple(selection)) for whole, selection in zip(wholes, cut)]
        if selected or taken != list(operands) or (len(partial) > 1 and {how for how, _ in partial} != {"sum"}):
            return None
        results = self.results(node, wholes, [tuple(shape) for shape in sizes])
        for index, (how, part) in ((index, row) for index in range(len(results)) for row in partial):
            made = expressions.parted if how == "sum" else expressions.parted_extreme
            try:
                results[index] = made(results[index], self._core(results[index]), *part)
            except ValueError:
                return None
        return [expressions.take(number, tuple(selection)) for number, selection in zip(results, chosen)]

    def _core(self, number: int) -> int:
        """The operator under views and parts."""
        op, _, operands, _ = self.expressions.all[number]
        return self._core(operands[0]) if op in (VIEW, TAKE, PARTED) else number

    def _use(self, node: Node, operands: Sequence[int], shapes: Sequence[Shape]) -> OperatorUse | None:
        """The node for rules of dimensions, with the sizes of these operands; None for an unknown size."""
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
            lambda index: self.table.array(operands[index]), opset,
        )  # fmt: skip

    def _lawful(self, node: Node, operands: Sequence[int], shape: Shape) -> int | None:
        """The result of an operator with a law; None for any other node. ``shape``: of the result."""
        if node.is_in(SIZES):
            return self._measured(node, operands[0])
        arrays = [self.table.array(operand) for operand in operands]
        if operands and all(array is not None for array in arrays):
            folded = self._folded(node, arrays)
            part = self.expressions.sealed and (node.op_type == "Slice" or any(map(self.expressions.box, operands)))
            number = None if folded is None else self.table.known(folded) if part else self.table.number(folded)
            if number is not None:
                return number
        if elements(shape) is None:
            shape = None
        record = record_of(node)
        decided = (*((record.shape,) if record.shape is not None else ()), *record.lengths)
        if any(index < len(arrays) and arrays[index] is None for index in decided):
            return None
        if record.signs and self._floating(node):
            return self._sum(record, operands)
        if record.exponents and self._floating(node):
            return self._product(record, operands)
        if record.pieces:
            return self._reduced(node, record, operands, arrays, shape)
        rule = _RULES.get(node.op_type)
        return None if rule is None else rule(self, node, operands, arrays, shape)

    def _plain(
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

            return [expressions.elementwise(make, present)]
        results = []
        for index, shape in enumerate(shapes):
            results.append(expressions.apply(op, (key, index), present, shape))
            self.table.origins.setdefault(results[-1], (self.graph, node, index))
        return results

    def _folded(self, node: Node, arrays: Arrays) -> np.ndarray | None:
        if node.is_in(CASTS):
            return np.asarray(arrays[0].astype(numpy_dtype(self._type(node).dtype)))
        if not all(array.dtype.kind in "iub" for array in arrays):
            return None
        folded = as_folded(node, arrays)
        return folded if folded is not None and folded.size <= SMALL else None

    def _measured(self, node: Node, operand: int) -> int | None:
        shape = self.expressions.shape(operand)
        if elements(shape) is None:
            return None
        sizes = measured(node, tuple(shape or ()))  # type: ignore[arg-type]
        return None if sizes is None else self.table.number(sizes)

    def _type(self, node: Node) -> TensorType:
        return self.graph.type_of(node.outputs[0])

    def _floating(self, node: Node) -> bool:
        return self._type(node).dtype in FLOATS

    # --- by the facts of the record ---

    def _sum(self, record: Operator, operands: Sequence[int]) -> int:
        signs = [record.signs[min(index, len(record.signs) - 1)] for index, _ in enumerate(operands)]
        return self.expressions.elementwise(lambda values: self.expressions.added(values, signs), operands)

    def _product(self, record: Operator, operands: Sequence[int]) -> int:
        return self.expressions.elementwise(lambda values: self.expressions.product(values, record.exponents), operands)

    def _reduced(
        self, node: Node, record: Operator, operands: Sequence[int], arrays: Arrays, after: Shape
    ) -> int | None:
        """A reduction over all elements."""
        expressions, number, before = self.expressions, operands[0], self.expressions.shape(operands[0])
        count, extreme = expressions.elements(number), EXTREMES.get(record.pieces or "")
        if len(arrays) > 1 and arrays[1] is None:
            return None
        if after is None or before is None or not count or not (extreme or self._floating(node)):
            return None
        axes = self._axes(node, arrays, len(before))
        if axes is None:
            return None
        if extreme:
            return expressions.extreme(extreme, [number], after) if elements(after) == 1 else None
        if node.is_in(NORM_REDUCTIONS):
            if record.slope(0) is Slope.BENT:
                number = applied(expressions, "Abs", (), [number])
            else:
                number = expressions.elementwise(lambda values: expressions.product(values, (2,)), [number])
        if node.op_type == "ReduceLogSumExp":
            number = self.expressions.exp(number)
        total = expressions.view(expressions.summed(number, axes), after)
        if record.pieces == "mean":
            return expressions.scaled(total, Fraction(elements(after) or 1, count))
        if node.op_type in ("ReduceLogSum", "ReduceLogSumExp"):
            return self.expressions.log(total)
        return applied(expressions, "Sqrt", (), [total]) if record.pieces == "l2" else total

    @staticmethod
    def _axes(node: Node, arrays: Arrays, rank: int) -> tuple[int, ...] | None:
        """The dimensions that a reduction is over; None for a copy."""
        named = node.attributes.get("axes") if len(arrays) < 2 else arrays[1].reshape(-1).tolist()
        if not named and node.attributes.get("noop_with_empty_axes", 0):
            return None
        return tuple(sorted(int(axis) % rank for axis in named)) if named else tuple(range(rank))

    # --- exponentials and logarithms ---

    def exponential(self, node: Node, operands: Sequence[int], arrays: Arrays, shape: Shape) -> int | None:
        return self.expressions.exp(operands[0]) if self._floating(node) else None

    def logarithm(self, node: Node, operands: Sequence[int], arrays: Arrays, shape: Shape) -> int | None:
        return self.expressions.log(operands[0]) if self._floating(node) else None

    def softmax(self, node: Node, operands: Sequence[int], arrays: Arrays, shape: Shape) -> int | None:
        """exp(x) / sum(exp(x)), or the logarithm."""
        use = self._use(node, operands, [shape])
        if use is None or not self._floating(node):
            return None
        powers = self.expressions.exp(operands[0])
        total = self.expressions.summed(powers, softmax_axes(use))
        if node.op_type == "LogSoftmax":
            return self.expressions.elementwise(
                lambda pair: self.expressions.added(pair, (1, -1)), [operands[0], self.expressions.log(total)]
            )
        return self.expressions.elementwise(lambda pair: self.expressions.product(pair, (1, -1)), [powers, total])

    # --- by the operator ---

    def gemm(self, node: Node, operands: Sequence[int], arrays: Arrays, shape: Shape) -> int | None:
        """A product, and the addend apart."""
        if len(operands) < 3 or not self._floating(node):
            return None
        attributes = {name: value for name, value in node.attributes.items() if name != "beta"}
        product = Node(node.op_type, node.inputs[:2], node.outputs, attributes=attributes)
        (number,) = self.results(product, operands[:2], [shape])
        added = self.expressions.scaled(operands[2], simplest(np.float32(node.attributes.get("beta", 1.0))))
        return self.expressions.elementwise(self.expressions.added, [number, added])

    def constant(self, node: Node, operands: Sequence[int], arrays: Arrays, shape: Shape) -> int | None:
        value = constant_array(node.attributes)
        return None if value is None else self.table.number(value)

    def cast(self, node: Node, operands: Sequence[int], arrays: Arrays, shape: Shape) -> int | None:
        source, to = self.graph.type_of(node.inputs[0]).dtype, self._type(node).dtype
        if "to" in node.attributes:
            to = dtype_name(node.attributes["to"])
        if "undefined" in (source, to) and node.is_in(CASTS):
            return None
        if to in EXACT.get(source, ()):
            self._widened[node.outputs[0]] = self._widened.get(node.inputs[0], source)
        if self._widened.get(node.inputs[0]) == to:
            return operands[0]
        return as_type(self.expressions, operands[0], source, to)

    def reshape(self, node: Node, operands: Sequence[int], arrays: Arrays, shape: Shape) -> int | None:
        decided = all(array is not None for array in arrays[1:])
        if shape is None or not decided or elements(shape) != self.expressions.elements(operands[0]):
            return None
        return self.expressions.view(operands[0], shape)

    def expand(self, node: Node, operands: Sequence[int], arrays: Arrays, shape: Shape) -> int | None:
        number = operands[0]
        fits = shape is not None and broadcast((shape, self.expressions.shape(number))) == shape
        if shape is None or not fits or not self._floating(node):
            return None
        box, before = self.expressions.box(number), self.expressions.shape(number) or ()
        front = len(shape) - len(before)
        if box is None or any(runs and old != new for runs, old, new in zip(box[1], before, shape[front:])):
            return self.expressions.linear({number: 1}, shape)
        whole, selection = box
        sizes, chosen = list(shape), [None] * front + list(selection)
        for dim, runs in enumerate(selection, front):
            if runs is not None:
                sizes[dim] = (self.expressions.shape(whole) or ())[dim - front]
        return self.expressions.take(self.expressions.linear({whole: 1}, tuple(sizes)), tuple(chosen))

    def transpose(self, node: Node, operands: Sequence[int], arrays: Arrays, shape: Shape) -> int | None:
        """Two transposes are a single transpose; a transpose of dimensions of length 1 alone is a view."""
        if shape is None:
            return None
        perm = tuple(node.attributes.get("perm") or reversed(range(len(shape))))
        return self._permuted(operands[0], perm)

    def _permuted(self, number: int, perm: tuple[int, ...]) -> int:
        box = self.expressions.box(number)
        if box is not None:
            return self.expressions.take(self._permuted(box[0], perm), tuple(box[1][dim] for dim in perm))
        expression = self.expressions.all[number]
        if expression.op == "permuted" and isinstance(expression.attributes, tuple):
            perm = tuple(expression.attributes[dim] for dim in perm)
            number = expression.operands[0]
        sizes = self.expressions.shape(number) or ()
        shape = tuple(sizes[dim] for dim in perm)
        moved = [dim for dim in perm if sizes[dim] != 1]
        if moved == sorted(moved):
            return self.expressions.view(number, shape)
        value = self.expressions.uniform(number)
        if value is not None:
            return self.expressions.constant(value, shape)
        return self.expressions.apply("permuted", perm, [number], shape)

    def slice(self, node: Node, operands: Sequence[int], arrays: Arrays, shape: Shape) -> int | None:
        """Ranges of dimensions, in steps of 1."""
        before = self.expressions.shape(operands[0])
        if elements(before) is None or before is None:
            return None
        bounds = [None if array is None else array.reshape(-1).tolist() for array in arrays[1:]]
        if len(arrays) < 3:
            bounds = [node.attributes.get(name) for name in ("starts", "ends", "axes")]
        starts, ends, axes, steps = (*bounds, None, None)[:4]
        known = starts is not None and ends is not None and None not in bounds[: len(arrays) - 1]
        if not known or any(step != 1 for step in steps or ()):
            return None
        selection: list[Runs | None] = [None] * len(before)
        for axis, start, stop in zip(axes or range(len(starts)), starts, ends):
            low, high, _ = slice(start, stop).indices(before[axis])
            selection[axis] = ((low, max(low, high)),) if low < high else ()
        return self.expressions.take(operands[0], tuple(selection))

    def split(self, node: Node, operands: Sequence[int], shapes: Sequence[Shape]) -> list[int] | None:
        """Neighbouring ranges of a dimension."""
        before = self.expressions.shape(operands[0])
        if elements(before) is None or before is None or any(elements(shape) is None for shape in shapes):
            return None
        axis, start, results = node.attributes.get("axis", 0) % len(before), 0, []
        for shape in shapes:
            stop = start + (shape or ())[axis]
            selection = tuple(((start, stop),) if dim == axis else None for dim in range(len(before)))
            results.append(self.expressions.take(operands[0], selection))
            start = stop
        return results if start == before[axis] else None

    def _length(self, number: int) -> int | None:
        """The length of a value of rank 1, or None."""
        shape = self.expressions.shape(number)
        return shape[0] if shape is not None and len(shape) == 1 and isinstance(shape[0], int) else None

    def concat(self, node: Node, operands: Sequence[int], arrays: Arrays, shape: Shape) -> int | None:
        if all(self._length(operand) is not None for operand in operands):
            return self.expressions.flat(piece for operand in operands for piece in self.expressions.pieces(operand))
        return None if shape is None else self.expressions.concatenated(operands, node.attributes["axis"] % len(shape))

    def extreme(self, node: Node, operands: Sequence[int], arrays: Arrays, shape: Shape) -> int | None:
        """The largest or smallest of numbers, or of flags."""
        for operand in operands:
            if self.expressions.elements(operand) != 1 or self.expressions.ranged(operand):
                return None
        return self.expressions.extreme(_JOINED[node.op_type], operands, shape)

    def where(self, node: Node, operands: Sequence[int], arrays: Arrays, shape: Shape) -> int | None:
        """What a rank has of choices along a dimension, and zeros for the rest; or a count."""
        flag, value, otherwise = operands
        if arrays[0] is not None and shape is not None and (arrays[0].all() or not arrays[0].any()):
            chosen = value if arrays[0].all() else otherwise
            if self.expressions.shape(chosen) == shape or self.expressions.uniform(chosen) is not None:
                return self.expressions.linear({chosen: 1}, shape) if self._floating(node) else chosen
        if self.expressions.uniform(otherwise) == 0:
            chosen = self._chosen_rows(flag, value, shape)
            if chosen is not None:
                return chosen
        return self._counted(operands, shape)

    def _chosen_rows(self, flag: int, value: int, shape: Shape) -> int | None:
        """The terms of a Gather of whole data that are zero outside the rank's part; None for any other value."""
        expressions, masks = self.expressions, self.table.masks
        root = expressions.root(value)
        gathered = expressions.all[root]
        if gathered.op not in ("Gather", "GatherElements") or root not in self.table.origins:
            return None
        data, place = gathered.operands
        box = expressions.box(data)
        graph, node, _ = self.table.origins[root]
        if box is None or elements(gathered.shape) is None:
            return None
        whole, selection = box
        sizes = expressions.shape(whole) or ()
        axis = node.attributes.get("axis", 0) % len(sizes)
        chosen = masks.chosen(flag, place, int(sizes[axis] or 0))
        if chosen is None or chosen[1] != selection[axis]:
            return None
        index, runs = expressions.view(chosen[0], expressions.shape(place)), chosen[1]
        behind = 0 if gathered.op == "GatherElements" else len(sizes) - axis - 1
        aligned = (*(expressions.shape(index) or ()), *[1] * behind)
        if expressions.shape(flag) != (
            expressions.shape(value) if elements(aligned) == elements(gathered.shape) else aligned
        ):
            return None
        rest = tuple(None if dim == axis else part for dim, part in enumerate(selection))
        reader = NodeReader(expressions, graph, self.varying, self.table)
        (number,) = reader.results(node, [expressions.take(whole, rest), index], [gathered.shape])
        part = expressions.parted(number, self._core(number), (axis, None), int(sizes[axis] or 0), runs)
        return expressions.view(part, shape)

    def gather(self, node: Node, operands: Sequence[int], arrays: Arrays, shape: Shape) -> int | None:
        """Constant places of a part, as places of the whole value."""
        box = self.expressions.box(operands[0])
        if box is None or arrays[1] is None or node.op_type != "Gather":
            return None
        (whole, selection), places = box, arrays[1]
        axis = node.attributes.get("axis", 0) % len(selection)
        runs = selection[axis]
        if runs is None:
            return None
        positions = np.array([at for start, stop in runs for at in range(start, stop)], places.dtype)
        if not positions.size or (places >= positions.size).any() or (places < -positions.size).any():
            return None
        rest = tuple(None if dim == axis else part for dim, part in enumerate(selection))
        index = self.table.number(np.asarray(positions[places]))
        (number,) = self.results(node, [self.expressions.take(whole, rest), index], [shape])
        return number

    def scatter(self, node: Node, operands: Sequence[int], arrays: Arrays, shape: Shape) -> int | None:
        """The rank's part of what is added to whole data, where updates of other positions are zeros."""
        expressions = self.expressions
        data, place, updates = operands
        written = self._written(node, operands, arrays, shape)
        if written is not None:
            return written
        flag, added, otherwise = (*expressions.all[expressions.root(updates)].operands, 0, 0, 0)[:3]
        masked = expressions.all[expressions.root(updates)].op == "Where" and expressions.uniform(otherwise) == 0
        if not masked or node.attributes.get("reduction") != "add" or elements(shape) is None or not expressions.sealed:
            return None
        rank, box = len(shape or ()), expressions.box(data)
        axis = node.attributes.get("axis", 0) % rank
        for size in dict.fromkeys([expressions.shape(box[0])[axis]] if box else self._scattered(node, axis)):  # type: ignore[index]
            chosen = self.table.masks.chosen(flag, place, size)
            if chosen is None or expressions.elements(flag) not in (
                expressions.elements(added),
                expressions.elements(place),
            ):
                continue
            runs = chosen[1]
            whole = box[0] if box is not None and box[1][axis] == runs else expressions.resized(data, axis, size, runs)
            if whole is None or length(runs, size) != (shape or ())[axis]:
                continue
            index = expressions.view(chosen[0], expressions.shape(place))
            sizes = expressions.shape(whole)
            terms = expressions.view(added, expressions.shape(updates))
            (number,) = self.results(node, [whole, index, terms], [sizes])
            return expressions.take(number, tuple(runs if dim == axis else None for dim in range(rank)))
        return None

    def _written(self, node: Node, operands: Sequence[int], arrays: Arrays, shape: Shape) -> int | None:
        """Rows that are written in order into zeros: zeros, the rows, zeros."""
        data, _, updates = operands
        if self.expressions.uniform(updates) == 0 and node.attributes.get("reduction") == "add":
            return data
        zeros = self.expressions.uniform(data) == 0 and elements(shape) is not None and shape
        if node.op_type != "ScatterND" or not zeros or arrays[1] is None or arrays[1].shape[-1] != 1:
            return None
        places, size, rest = arrays[1].reshape(-1), int(shape[0] or 0), shape[1:]  # type: ignore[index]
        flags = np.ones(places.size, bool)
        masked = self.expressions.all[self.expressions.root(updates)]
        if masked.op == "Where" and self.expressions.uniform(masked.operands[2]) == 0:
            flag = self.table.array(masked.operands[0])
            if flag is None or flag.size != places.size:
                return None
            flags, updates = (
                flag.reshape(-1),
                self.expressions.view(masked.operands[1], self.expressions.shape(updates)),
            )
        rows = np.full(size, -1)
        if ((places < 0) | (places >= size))[flags].any() or np.unique(places[flags]).size != flags.sum():
            return None
        rows[places[flags]] = np.flatnonzero(flags)
        ends = [0, *(np.flatnonzero((np.diff(rows) != 1) & ((rows[1:] >= 0) | (rows[:-1] >= 0))) + 1).tolist(), size]
        updates, parts = self.expressions.view(updates, (places.size, *rest)), []
        for start, stop in pairwise(ends):
            first = int(rows[start])
            selection = ((first, first + stop - start),), *[None] * len(rest)
            zero = self.expressions.constant(0, (stop - start, *rest))
            parts.append(zero if first < 0 else self.expressions.take(updates, selection))
        return self.expressions.concatenated(parts, 0)

    def _scattered(self, node: Node, axis: int) -> Iterator[int]:
        """The lengths of a dimension to which the source adds in this way."""
        for number in self.expressions.of_source(node.op_type):
            shape = self.expressions.shape(number)
            if elements(shape) is not None and axis < len(shape or ()):
                yield int((shape or ())[axis] or 0)

    def _counted(self, operands: Sequence[int], shape: Shape) -> int | None:
        """A count kept from zero, with 1 in place of zero; a multiple of a count, with 0 where the count is zero."""
        expressions = self.expressions
        flag, constant, otherwise = operands
        op, _, compared, _ = expressions.all[expressions.root(flag)]
        value = expressions.uniform(constant)
        if op != _EQUAL or value not in (0, 1):
            return None
        counts = [operand for operand in compared if expressions.uniform(operand) != 0]
        if len(counts) != 1 or expressions.elements(counts[0]) != 1 or expressions.shape(otherwise) != shape:
            return None
        if not expressions.is_count(counts[0]):
            return None
        if value == 1:
            return (
                expressions.counted(otherwise) if expressions.root(otherwise) == expressions.root(counts[0]) else None
            )
        return otherwise if expressions.has_factor(otherwise, expressions.root(counts[0])) else None

    def fill(self, node: Node, operands: Sequence[int], arrays: Arrays, shape: Shape) -> int | None:
        if arrays[0] is None:
            return None
        sizes = tuple(int(size) for size in arrays[0].reshape(-1))
        value = constant_array(node.attributes)
        return self.table.filled(np.zeros(1, np.float32) if value is None else value, sizes)


_EQUAL = "Equal"
_RULES: Mapping[str, Callable[[NodeReader, Node, Sequence[int], Arrays, Shape], int | None]] = {
    **dict.fromkeys(COPIES, NodeReader.cast),
    **dict.fromkeys(RESHAPES, NodeReader.reshape),
    **dict.fromkeys(_JOINED, NodeReader.extreme),
    "Gemm": NodeReader.gemm,
    "Softmax": NodeReader.softmax,
    "LogSoftmax": NodeReader.softmax,
    "Gather": NodeReader.gather,
    "ScatterElements": NodeReader.scatter,
    "ScatterND": NodeReader.scatter,
    EXP: NodeReader.exponential,
    "Log": NodeReader.logarithm,
    "Constant": NodeReader.constant,
    "Expand": NodeReader.expand,
    "Transpose": NodeReader.transpose,
    "Slice": NodeReader.slice,
    "Concat": NodeReader.concat,
    "Where": NodeReader.where,
    "ConstantOfShape": NodeReader.fill,
}


def applied(expressions: Expressions, op: str, attributes: Hashable, operands: Sequence[int]) -> int:
    """An elementwise operator without laws."""

    def make(values: Sequence[int]) -> int:
        shape = broadcast(expressions.shape(value) for value in values)
        return expressions.apply(op, attributes, values, shape)

    return expressions.elementwise(make, operands)


def as_type(expressions: Expressions, number: int, source: str, to: str) -> int:
    """An expression in another type: a cast to a wider type changes nothing, any other cast rounds."""
    if to == source or to in EXACT.get(source, ()):
        return number
    if to == "bool" and expressions.elements(number) == 1 and (flag := expressions.any_set(number)) is not None:
        return expressions.view(flag, expressions.shape(number))
    if not (to in FLOATS and source in FLOATS):
        return applied(expressions, "cast", (source, to), [number])
    value = expressions.uniform(number)
    if value is not None:
        with np.errstate(all="ignore"):
            rounded = np.asarray(float(value)).astype(numpy_dtype(to)).reshape(1)
        if np.isfinite(np.float64(rounded[0])):
            return expressions.constant(simplest(rounded[0]), expressions.shape(number))
    if expressions.all[expressions.root(number)][:2] == ("round", to):
        return number
    return applied(expressions, "round", to, [number])


def frozen(node: Node) -> Hashable:
    """The attributes of a node, for comparing: without those that say what holds anyway."""
    defaults = _defaults(node.op_type) if node.domain in ("", "ai.onnx") else {}
    pairs = ((name, _frozen(value)) for name, value in node.attributes.items())
    return tuple(sorted(pair for pair in pairs if defaults.get(pair[0]) != pair))


@cache
def _defaults(op_type: str) -> dict[str, tuple[str, Hashable]]:
    """The defaults of attributes that all versions of an operator agree on."""
    schemas = [schema for schema in onnx.defs.get_all_schemas_with_history() if schema.name == op_type]
    result: dict[str, tuple[str, Hashable]] = {}
    for schema in schemas:
        for name, attribute in schema.attributes.items():
            value = onnx.helper.get_attribute_value(attribute.default_value) if attribute.default_value.name else None
            pair = name, _frozen(value.decode() if isinstance(value, bytes) else value)
            if result.setdefault(name, pair) != pair:
                result[name] = name, object()
    return {name: pair for name, pair in result.items() if pair[1] is not None}


def _frozen(value: Any) -> Hashable:
    if isinstance(value, (list, tuple)):
        return tuple(map(_frozen, value))
    hashable: Hashable = value.SerializeToString(deterministic=True) if hasattr(value, "SerializeToString") else value
    return hashable
