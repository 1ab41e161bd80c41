"""Rules of nodes: from the expressions of the operands to the expression of a result."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from math import prod
from typing import Any, TypeAlias

import numpy as np
import onnx

from gopt.ir.constant_folding import as_folded, constant_array, measured
from gopt.ir.graph import COMM, Node
from gopt.ir.node_kinds import draws, record_of
from gopt.ir.opset import opset_of
from gopt.ir.types import dtype_name, numpy_dtype
from gopt.operators.dims.elements import softmax_axes
from gopt.operators.dims.link import OperatorUse
from gopt.operators.kinds import CASTS, COMBINERS, COPIES, PARTS, RESHAPES, SIZES
from gopt.operators.operator import Slope
from gopt.verification.certificate.algebra import EXP, Terms, WrongLine, at_places, leaves, moved, one
from gopt.verification.certificate.lines import LEMMA, OPERATOR, operator_name
from gopt.verification.certificate.values import EXTREMES, WIDER, CheckedProgram, ValueChecker, simplest

RESHAPED, LOG = "reshape", "Log"
CONSTANTS = ("constant", "linear", "one", "lowest", "highest")


def rule_of(node: Node) -> str:
    """The rule for a node whose result is not the operator itself."""
    record = record_of(node)
    if node.domain == COMM:
        return "call"
    if node.domain not in ("", "ai.onnx"):
        return LEMMA + node.op_type
    if node.is_in(SIZES):
        return "size"
    if record.signs or record.exponents:
        return "sum" if record.signs else "product"
    if record.pieces in ("sum", "mean", "l2"):
        return "reduction"
    if record.pieces in EXTREMES or any(node.is_in(COMBINERS[how]) for how in EXTREMES):
        return "extreme"
    if node.is_in(RESHAPES | PARTS) or node.op_type in RULES:
        return RESHAPED if node.is_in(RESHAPES) else node.op_type
    return "copy" if node.is_in(COPIES) else LEMMA + node.op_type


class NodeChecker(ValueChecker):
    """The rules of nodes."""

    def node(self, program: CheckedProgram, node: Node) -> None:
        """Raise WrongLine unless the results of a node follow from the operands."""
        results = [program.values[name] for name in node.outputs if name]
        operands = [program.values[name] if name else None for name in node.inputs]
        operands += [program.values[name] for name in node.captures]
        rule = program.rules[next(filter(None, node.outputs))]
        if node.is_in(COPIES):
            before, dtype = program.widened.get(node.inputs[0]), program.graph.type_of(node.inputs[0]).dtype
            to = (
                dtype_name(node.attributes["to"])
                if "to" in node.attributes
                else program.graph.type_of(node.outputs[0]).dtype
            )
            if to in WIDER.get(dtype, ()):
                program.widened[node.outputs[0]] = before or dtype
        key = (node.encoded or id(node), rule, *operands, None, *results)
        if key in self._checked and not node.is_in(CASTS):
            return
        for name, number in zip(filter(None, node.outputs), results):
            type, shape = program.graph.type_of(name), self.forms[number].shape
            if not type.static and self.sized(number):
                raise WrongLine("a value without a type", lemma="open shape")
            if program.rules[name] != rule or (type.static and shape != type.shape):
                raise WrongLine(f"{program.rules[name]}, shape {shape}", f"{rule}, shape {type.shape}")
        if rule not in (OPERATOR, rule_of(node)):
            raise WrongLine(f"rule {rule}", f"{OPERATOR} or {rule_of(node)}")
        if rule == OPERATOR:
            self.operator(program, node, operands, results)
        elif not self._folded(program, node, operands, results):
            if rule.startswith(LEMMA):
                raise WrongLine("", "", rule.removeprefix(LEMMA))
            RULES[rule](self, program, node, operands, results)
        self._checked.add(key)

    def _folded(
        self, program: CheckedProgram, node: Node, operands: Sequence[int | None], results: Sequence[int]
    ) -> bool:
        """Return whether a node is one on constants, and the result their value."""
        if node.is_in(SIZES) or not operands or None in operands or len(results) != 1:
            return False
        folded: np.ndarray | None
        arrays = [array for number in operands if number is not None and (array := self.array(number)) is not None]
        if len(arrays) < len(operands) or self.forms[results[0]].op not in CONSTANTS:
            return False
        if node.is_in(CASTS):
            folded = arrays[0].astype(numpy_dtype(program.graph.type_of(node.outputs[0]).dtype))
        else:
            folded = as_folded(node, arrays)
        if folded is None:
            return False
        self.constant(results[0], np.asarray(folded))
        return True

    def _attributes(self, program: CheckedProgram, node: Node, operands: Sequence[int | None]) -> Callable[[Any], bool]:
        """Return whether attributes of an expression are those of a node, defaults filled in."""
        absent = tuple(index for index, operand in enumerate(operands) if operand is None)
        schema = None
        if node.domain in ("", "ai.onnx"):
            schema = onnx.defs.get_schema(node.op_type, opset_of(program.graph.header))
        usual = {
            name: onnx.helper.get_attribute_value(attribute.default_value)
            for name, attribute in (schema.attributes.items() if schema else ())
            if attribute.default_value.name
        }

        def full(attributes: Mapping[str, Any]) -> dict[str, Any]:
            return {name: _plain(value) for name, value in {**usual, **attributes}.items()}

        def fits(attributes: Any) -> bool:
            if absent:
                attributes, missing = attributes
                if missing != absent:
                    return False
            return full(dict(attributes)) == full(node.attributes)

        return fits

    def operator(
        self, program: CheckedProgram, node: Node, operands: Sequence[int | None], results: Sequence[int]
    ) -> None:
        """The operator itself, on equal operands."""
        fits, present = self._attributes(program, node, operands), [number for number in operands if number is not None]
        if record_of(node).elementwise and len(results) == 1 and not draws(node):
            if not all(self.sized(number) for number in (*present, *results)):
                form = self.forms[results[0]]
                if form.op != operator_name(node) or form.operands != tuple(present) or not fits(form.attributes):
                    raise WrongLine(str(form), operator_name(node))
                return
            shape = self.shape(results[0])
            if shape != tuple(np.broadcast_shapes(*map(self.shape, present))):
                raise WrongLine(f"shape {shape}", "that of the operands")
            rows = [self.spread(number, shape) for number in present]
            self.applied(results[0], operator_name(node), fits, rows)
            return
        for index, number in enumerate(results):
            form = self.forms[number]
            inner, drawn = form.operands, self.forms[form.operands[-1]] if form.operands else None
            if draws(node) and drawn is not None and (drawn.op, drawn.attributes) == ("draw", node.outputs[0]):
                inner = inner[:-1] if self.varies[form.operands[-1]] == frozenset(self.extents) else ()
            slot = node.outputs.index([name for name in node.outputs if name][index])
            if form.op != operator_name(node) or form.attributes[1] != slot or not fits(form.attributes[0]):
                raise WrongLine(str(form), operator_name(node))
            if len(inner) != len(present) or not all(map(self.same, inner, present)):
                raise WrongLine(f"{form.op} of {inner}", f"of {present}")


Rule: TypeAlias = "Callable[[NodeChecker, CheckedProgram, Node, Any, Sequence[int]], None]"
RULES: dict[str, Rule] = {}


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Add a rule to the table, under names of operators or of a family."""

    def add(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, function))
        return function

    return add


def _plain(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return tuple(map(_plain, value))
    value = value.SerializeToString(deterministic=True) if hasattr(value, "SerializeToString") else value
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def _use(checker: NodeChecker, program: CheckedProgram, node: Node) -> OperatorUse:
    types = [program.graph.types[name] for name in node.inputs if name]
    results = [program.graph.types.get(name) for name in node.outputs]
    return OperatorUse(node.op_type, node.attributes, tuple(types), tuple(results), lambda index: None,
                       opset_of(program.graph.header))  # fmt: skip


@rule("sum")
def _sum(
    checker: NodeChecker, program: CheckedProgram, node: Node, operands: Sequence[int], results: Sequence[int]
) -> None:
    """A sum of the operands, with signs."""
    signs = record_of(node).signs
    factors = [signs[min(index, len(signs) - 1)] for index, _ in enumerate(operands)]
    _elementwise(checker, program, node, operands, results, lambda rows: checker.added(zip(rows, factors)))


@rule("product")
def _product(
    checker: NodeChecker, program: CheckedProgram, node: Node, operands: Sequence[int], results: Sequence[int]
) -> None:
    """A product of powers of the operands."""
    exponents = record_of(node).exponents
    _elementwise(checker, program, node, operands, results, lambda rows: checker.multiplied(zip(rows, exponents)))


def _elementwise(
    checker: NodeChecker, program: CheckedProgram, node: Node, operands: Sequence[int], results: Sequence[int],
    make: Callable[..., Terms],
) -> None:  # fmt: skip
    shape = tuple(np.broadcast_shapes(*(checker.shape(number) for number in operands)))
    if not program.floating(node.outputs[0]) or checker.shape(results[0]) != shape:
        raise WrongLine("a sum or a product", "of floating numbers in the shape of the operands")
    value = checker.pointwise(shape, operands, make)
    if any(checker.forms[of].op == "counted" for _, terms in value for of, _, _ in leaves(terms)):
        raise WrongLine("", "", "counts that are not negative")
    checker.due(results[0], value, node.op_type)


@rule("extreme")
def _extreme(
    checker: NodeChecker, program: CheckedProgram, node: Node, operands: Sequence[int], results: Sequence[int]
) -> None:
    """The largest or the smallest of all elements."""
    how = record_of(node).pieces or next(how for how, ops in COMBINERS.items() if how in EXTREMES and node.is_in(ops))
    single = not record_of(node).pieces
    if any(prod(checker.shape(number)) != 1 for number in (*results, *(operands if single else ()))):
        raise WrongLine("", "", node.op_type)
    checker.extreme(
        results[0], [checker.stretches(number) for number in operands[: len(operands) if single else 1]], EXTREMES[how]
    )


@rule("Where")
def _where(
    checker: NodeChecker, program: CheckedProgram, node: Node, operands: Sequence[int], results: Sequence[int]
) -> None:
    """A choice by flags that are all alike."""
    flags = checker.array(operands[0])
    if flags is None or (flags.any() and not flags.all()):
        raise WrongLine("", "", node.op_type)
    chosen, shape = operands[1 if flags.all() else 2], checker.shape(results[0])
    if shape != tuple(np.broadcast_shapes(*(checker.shape(number) for number in operands))):
        raise WrongLine(f"shape {shape}", "that of the operands")
    checker.due(results[0], checker.spread(chosen, shape), "the chosen values")


@rule("size")
def _size(
    checker: NodeChecker, program: CheckedProgram, node: Node, operands: Sequence[int], results: Sequence[int]
) -> None:
    """The shape of the operand."""
    array = measured(node, checker.shape(operands[0]))
    if array is None:
        raise WrongLine("a size", "", "size")
    checker.constant(results[0], array)


@rule("copy")
def _copy(
    checker: NodeChecker, program: CheckedProgram, node: Node, operands: Sequence[int], results: Sequence[int]
) -> None:
    """The elements of the operand, in the type of the result."""
    source, to = (program.graph.type_of(name).dtype for name in (node.inputs[0], node.outputs[0]))
    to = dtype_name(node.attributes["to"]) if "to" in node.attributes else to
    checker.cast(results[0], checker.stretches(operands[0]), source, to, program.widened.get(node.inputs[0], ""))


@rule(RESHAPED)
def _reshaped(
    checker: NodeChecker, program: CheckedProgram, node: Node, operands: Sequence[int], results: Sequence[int]
) -> None:
    """The elements of the operand, in another shape; lengths are constants."""
    wanted = as_folded(
        node, [np.broadcast_to(np.False_, checker.shape(operands[0])), *map(checker.known, operands[1:])]
    )
    if wanted is not None and wanted.shape != checker.shape(results[0]):
        raise WrongLine(f"shape {checker.shape(results[0])}", f"shape {wanted.shape}")
    checker.due(results[0], checker.stretches(operands[0]), "the elements of the operand")


@rule("reduction")
def _reduction(
    checker: NodeChecker, program: CheckedProgram, node: Node, operands: Sequence[int], results: Sequence[int]
) -> None:
    """A sum or a mean along dimensions, also of squares."""
    shape, value = checker.shape(operands[0]), checker.stretches(operands[0])
    axes = checker.known(operands[1]).reshape(-1).tolist() if len(operands) > 1 else node.attributes.get("axes")
    if not program.floating(node.outputs[0]) or not prod(shape):
        raise WrongLine("a sum", "", "empty sum")
    if not axes:
        axes = () if node.attributes.get("noop_with_empty_axes", 0) else range(len(shape))
    if record_of(node).slope(0) is Slope.BENT:
        raise WrongLine("a sum of absolute values", "", "absolute values")
    if record_of(node).slope(0) is Slope.CURVED:
        value = [(length, checker.multiplied([(terms, 2)]) if terms else ()) for length, terms in value]
    value = checker.along(value, shape, axes) if len(axes) else value
    if record_of(node).pieces == "l2":
        return checker.applied(results[0], "Sqrt", lambda attributes: attributes == (), [value])
    if record_of(node).pieces == "mean":
        share = Fraction(1, prod(shape[axis] for axis in {axis % len(shape) for axis in axes}))
        value = [(length, checker.added([(terms, share)])) for length, terms in value]
    return checker.due(results[0], value, node.op_type)


@rule("Transpose")
def _transpose(
    checker: NodeChecker, program: CheckedProgram, node: Node, operands: Sequence[int], results: Sequence[int]
) -> None:
    shape = checker.shape(operands[0])
    order = node.attributes.get("perm") or tuple(reversed(range(len(shape))))
    if checker.shape(results[0]) != tuple(shape[dim] for dim in order):
        raise WrongLine("another shape")
    checker.due(results[0], checker.permuted(operands[0], order), "the operand's dimensions in another order")


@rule("Slice")
def _slice(
    checker: NodeChecker, program: CheckedProgram, node: Node, operands: Sequence[int], results: Sequence[int]
) -> None:
    """Ranges of dimensions."""
    shape = checker.shape(operands[0])
    rows: list[Any] = [checker.known(number).reshape(-1).tolist() for number in operands[1:]]
    rows = rows or [node.attributes.get(name) for name in ("starts", "ends", "axes")]
    starts, ends, axes, steps = (*rows, None, None)[:4]
    if any(step != 1 for step in steps or ()):
        raise WrongLine("a slice in steps", "", "steps")
    selection: list[Any] = [None] * len(shape)
    for axis, start, stop in zip(axes or range(len(starts)), starts, ends):
        selection[axis] = (slice(start, stop).indices(shape[axis])[:2],)
    checker.due(results[0], checker.taken(operands[0], selection), f"the elements {selection}")


@rule("Split")
def _split(
    checker: NodeChecker, program: CheckedProgram, node: Node, operands: Sequence[int], results: Sequence[int]
) -> None:
    shape, start = checker.shape(operands[0]), 0
    axis = node.attributes.get("axis", 0) % len(shape)
    named = checker.array(operands[1]) if len(operands) > 1 else node.attributes.get("split")
    sizes = [checker.shape(number)[axis] for number in results]
    if (named is None and (len(operands) > 1 or len(set(sizes[:-1])) > 1)) or (
        named is not None and list(named) != sizes
    ):
        raise WrongLine(f"parts of {sizes}", f"{named}")
    for number, size in zip(results, sizes):
        selection = [((start, start + size),) if dim == axis else None for dim in range(len(shape))]
        checker.due(number, checker.taken(operands[0], selection), f"the elements {selection}")
        start += size


@rule("Concat")
def _concat(
    checker: NodeChecker, program: CheckedProgram, node: Node, operands: Sequence[int], results: Sequence[int]
) -> None:
    axis = node.attributes["axis"] % len(checker.shape(results[0]))
    form = checker.forms[results[0]]
    if (
        form.op == "in a row"
        and form.attributes == axis
        and form.operands == tuple(number for number in operands if prod(checker.shape(number)))
    ):
        return
    checker.parts(
        results[0],
        [checker.stretches(number) for number in operands],
        [checker.shape(number)[axis] for number in operands],
        axis,
    )


@rule("Expand")
def _expand(
    checker: NodeChecker, program: CheckedProgram, node: Node, operands: Sequence[int], results: Sequence[int]
) -> None:
    array = checker.known(operands[1])
    shape = tuple(np.broadcast_shapes(checker.shape(operands[0]), tuple(int(size) for size in array.reshape(-1))))
    if checker.shape(results[0]) != shape:
        raise WrongLine(f"shape {checker.shape(results[0])}", f"shape {shape}")
    checker.due(results[0], checker.spread(operands[0], shape), "the operand, repeated")


@rule("ConstantOfShape")
def _fill(
    checker: NodeChecker, program: CheckedProgram, node: Node, operands: Sequence[int], results: Sequence[int]
) -> None:
    shape, value = checker.known(operands[0]), constant_array(node.attributes)
    value = np.zeros(1, np.float32) if value is None else value
    checker.constant(results[0], np.broadcast_to(value.reshape(()), tuple(int(size) for size in shape.reshape(-1))))


@rule("Constant")
def _constant(
    checker: NodeChecker, program: CheckedProgram, node: Node, operands: Sequence[int], results: Sequence[int]
) -> None:
    array = constant_array(node.attributes)
    if array is None:
        raise WrongLine("a constant", "", "texts")
    checker.constant(results[0], array)


def _exponent(checker: NodeChecker, terms: Terms, length: int) -> Terms:
    """The sum in an exponential. Raises WrongLine for any other product."""
    if len(terms) != 1 or terms[0][1] != 1:
        raise WrongLine("no exponential", "", "exponentials")
    rows = []
    for (kind, data, _), power in terms[0][0]:
        if kind != "at" or checker.forms[data[0]].op != EXP:
            raise WrongLine("no exponential", "", "exponentials")
        of, at, loops = data
        value = checker.places(
            checker.spread(checker.forms[of].operands[0], checker.shape(of)), at, loops or ((length, 0),)
        )
        if len(value) != 1:
            raise WrongLine("", "", "exponentials")
        rows.append((value[0][1], power))
    return checker.added(rows)


@rule("Exp")
def _exp(
    checker: NodeChecker, program: CheckedProgram, node: Node, operands: Sequence[int], results: Sequence[int]
) -> None:
    for length, (terms, due) in checker.aligned([checker.stretches(results[0]), checker.stretches(operands[0])]):
        if _exponent(checker, terms, length) != due:
            raise WrongLine("an exponential", "of the operand")


@rule("Softmax", "LogSoftmax")
def _softmax(
    checker: NodeChecker, program: CheckedProgram, node: Node, operands: Sequence[int], results: Sequence[int]
) -> None:
    """exp(u) / sum(exp(v)), or u - log(sum(exp(v))), where u and v are the operand less the same for a whole row."""
    shape, value = checker.shape(operands[0]), checker.stretches(operands[0])
    axes, steps = softmax_axes(_use(checker, program, node)), [prod(shape[dim + 1 :]) for dim in range(len(shape))]
    count, whole = prod(shape[axis] for axis in axes), checker.stretches(results[0])
    if len(whole) != 1 or len(value) != 1:
        raise WrongLine("", "", "softmax of ranges")
    ((length, terms),) = whole
    parts = [pair for factors, _ in terms for pair in factors if pair[0][0] == "inverse"]
    if len(terms) == 1 and len(parts) == 1 and parts[0][1] == 1:
        (((_, _, total), _),) = parts
        exponents = _exponent(
            checker, one(*(pair for pair in terms[0][0] if pair not in parts), times=terms[0][1]), length
        )
    else:
        logs = [
            term
            for term in terms
            if len(term[0]) == 1 and term[0][0][0][0] == "at" and checker.forms[term[0][0][0][1][0]].op == LOG
        ]
        logs = [term for term in logs if term[1] == -1 and term[0][0][1] == 1 and term not in value[0][1]]
        if len(logs) != 1:
            raise WrongLine(str(checker.forms[results[0]]), node.op_type)
        of, at, loops = logs[0][0][0][0][1]
        ((_, total),) = checker.places(
            checker.spread(checker.forms[of].operands[0], checker.shape(of)), at, loops or ((length, 0),)
        )
        exponents = tuple(term for term in terms if term not in logs)
    if (
        len(total) != 1
        or total[0][1] != 1
        or len(total[0][0]) != 1
        or total[0][0][0][0][0] != "sum"
        or total[0][0][0][1] != 1
    ):
        raise WrongLine(str(checker.forms[results[0]]), node.op_type)
    _, (free, start, stop), inner = total[0][0][0][0]
    if (start, stop) != (0, count):
        raise WrongLine(f"a sum of {stop - start}", f"of {count}")
    inner = inner if free else moved(inner, lambda at, loops, _: (at, tuple((count, stride) for _, stride in loops)))
    row = _exponent(checker, inner, length * count if free else count)
    row = row if free else at_places(row, 0, ((length, 0), (count, 1)))
    across = [(size, 0 if dim in axes else step) for dim, (size, step) in enumerate(zip(shape, steps))]
    rows = checker.places(value, 0, (*across, *((shape[axis], steps[axis]) for axis in axes)))
    spread = checker.places(value, 0, (*zip(shape, steps), (count, 0)))
    if len(rows) != 1 or len(spread) != 1:
        raise WrongLine("", "", "softmax of ranges")
    less, due = (
        tuple(term for term in checker.added(pair) if term[1])
        for pair in (
            [(rows[0][1], 1), (row, -1)],
            [(spread[0][1], 1), (at_places(exponents, 0, ((length, 1), (count, 0))), -1)],
        )
    )
    if less != due or not all(checker._is_finite(factors) for factors, _ in less):
        raise WrongLine(str(checker.forms[results[0]]), f"{node.op_type} of the operand")


@rule("Gemm")
def _gemm(
    checker: NodeChecker, program: CheckedProgram, node: Node, operands: Sequence[int], results: Sequence[int]
) -> None:
    """A product, and the addend apart."""
    inner = {
        of
        for _, terms in checker.stretches(results[0])
        for of, _, _ in leaves(terms)
        if checker.forms[of].op == node.op_type
    }
    attributes = {name: value for name, value in node.attributes.items() if name != "beta"}
    product = Node(node.op_type, node.inputs[:2], node.outputs, attributes=attributes)
    for number in inner:
        form = checker.forms[number]
        if (
            form.shape == checker.forms[results[0]].shape
            and form.attributes[1] == 0
            and checker._attributes(program, product, operands[:2])(form.attributes[0])
            and all(map(checker.same, form.operands, operands[:2]))
            and len(form.operands) == 2
        ):
            factors = 1, simplest(np.float32(node.attributes.get("beta", 1.0)))
            pair, shape = [number, operands[2]], checker.shape(results[0])
            value = checker.pointwise(shape, pair, lambda rows, factors=factors: checker.added(zip(rows, factors)))
            return checker.due(results[0], value, "a product and a sum")
    raise WrongLine(str(checker.forms[results[0]]), node.op_type)
