"""Operators with a wrong or missing (zero) derivative in onnx-ad: refused by name.

An operator is refused between a parameter and the scalar, and passes elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from onnx import GraphProto, ModelProto, NodeProto, TensorProto

from gopt.autodiff.operators import ForwardOperator, between, bodies
from gopt.errors import UnsupportedError
from gopt.ir.nodes import nested, reads
from gopt.ir.types import FLOATS, TensorType, dtype_name
from gopt.operators.kinds import (
    CASTS,
    EXTREME_REDUCTIONS,
    NORM_REDUCTIONS,
    ROUNDED,
    RUNNING_PRODUCTS,
    SCATTERS,
    SEQUENCES,
    TYPED,
)
from gopt.text.sanitize import show


@dataclass(frozen=True, slots=True)
class Refusal:
    """``why``: ends the sentence "NODE cannot be differentiated by VALUE: ..."; ``operands``: the operands meant, all
    by default; ``applies``: whether a node is meant; ``steps``: the result may be whole numbers, cast back to floats
    later."""

    why: str
    operands: tuple[int, ...] = ()
    applies: Callable[[ForwardOperator], bool] = lambda operator: True
    steps: bool = False


def refuse(model: ModelProto, scalar: str, inputs: Sequence[str], types: Mapping[str, TensorType]) -> None:
    """Raise UnsupportedError for the first operator in REFUSALS between ``inputs`` and ``scalar``."""
    if not any(node.op_type in REFUSALS or _is_foreign(node) for node in nested(model.graph.node)):
        return
    ways = {False: between(model, inputs, scalar, types), True: between(model, inputs, scalar, {})}
    for stepwise, (behind, ahead) in ways.items():
        for node, dependent in _between(model.graph.node, behind, ahead):
            refusal = _FOREIGN if _is_foreign(node) else REFUSALS.get(node.op_type)
            if refusal is not None and refusal.steps == stepwise and refusal.applies(ForwardOperator.of(node, types)):
                _check(node, refusal, dependent)


def _is_foreign(node: NodeProto) -> bool:
    """Return whether a node is not an operator of ONNX; onnx-ad ignores the domain."""
    return node.domain not in ("", "ai.onnx") and (node.domain, node.op_type) not in _SAME


def _check(node: NodeProto, refusal: Refusal, dependent: set[str]) -> None:
    operands = refusal.operands or range(len(node.input))
    wrong = [node.input[index] for index in operands if index < len(node.input) and node.input[index] in dependent]
    if wrong:
        raise UnsupportedError(
            f"{node.op_type} {show(node.output[0])} cannot be differentiated by {show(wrong[0])}: {refusal.why}",
            "--freeze the parameters before that operator, or replace it in the model",
        )


def _between(nodes: Sequence[NodeProto], behind: set[str], ahead: set[str]) -> Iterator[tuple[NodeProto, set[str]]]:
    """Return nodes leading from one set to the other, also in bodies, with the values depending on the first set. A
    body counts whole, and all its inputs are dependent if an operand is."""
    for node in nodes:
        if behind.isdisjoint(reads(node)) or ahead.isdisjoint(node.output):
            continue
        yield node, behind
        for body in bodies([node]) if node.attribute else ():
            inside = _inside(body, node, behind)
            yield from ((inner, inside) for inner in body.node if not inside.isdisjoint(reads(inner)))


def _inside(body: GraphProto, node: NodeProto, behind: set[str]) -> set[str]:
    names = set(behind)
    if not behind.isdisjoint(node.input):
        names.update(value.name for value in body.input)
    for inner in body.node:
        if not names.isdisjoint(reads(inner)):
            names.update(inner.output)
    return names - {""}


def _to_narrow(operator: ForwardOperator) -> bool:
    """Return whether a Cast goes from a float to one of 8 bits or fewer."""
    dtype = dtype_name(operator.attributes.get("to", TensorProto.FLOAT))
    if operator.node.op_type in TYPED:
        dtype = operator.dtype(operator.node.input[1])
    return operator.dtype(operator.node.input[0]) in FLOATS and dtype.startswith("float") and dtype not in FLOATS


def _no_axes(operator: ForwardOperator) -> bool:
    """Return whether a reduction has an empty list of axes: onnx-ad reads no axes, but all axes may be meant."""
    axes = operator.types.get(operator.node.input[1]) if len(operator.node.input) > 1 else None
    if operator.attributes.get("noop_with_empty_axes", 0):
        return operator.node.op_type in NORM_REDUCTIONS and (axes is None or axes.shape == (0,))
    return axes is not None and axes.shape == (0,)


def _one_flat_sample(operator: ForwardOperator) -> bool:
    kind = operator.types.get(operator.node.input[0])
    return kind is not None and kind.shape == (1, 2, 3)


def _divides(operator: ForwardOperator) -> bool:
    """Return whether onnx-ad divides by the elements of a product, perhaps zero. With known shapes,
    ``gopt.autodiff.rewrites`` leaves such operators only in bodies of control flow."""
    kind = operator.types.get(operator.node.input[0])
    few = kind is not None and kind.shape is not None and (not kind.shape or 0 in kind.shape)
    axes = operator.types.get(operator.node.input[1]) if len(operator.node.input) > 1 else None
    none = axes.shape == (0,) if axes is not None else len(operator.node.input) < 2 or not operator.node.input[1]
    return not few and not (none and operator.attributes.get("noop_with_empty_axes", 0))


def _is_no_sum(operator: ForwardOperator) -> bool:
    return operator.attributes.get("reduction", "none") not in ("none", "add")


_SAME = frozenset({("com.microsoft", "Gelu")})
"""Operators of other domains that compute what ONNX's of the same name does."""
_FOREIGN = Refusal("it is not an operator of ONNX")
_ROUNDS = "it rounds, and the file does not say how to differentiate rounding"
_SEQUENCE = "onnx-ad has no derivative of sequences and optionals"

REFUSALS: Mapping[str, Refusal] = {
    "Det": Refusal("its derivative needs an inverse, which is not an operator of ONNX"),
    "OneHot": Refusal("onnx-ad treats its values as constants", (2,)),
    "Pad": Refusal("onnx-ad treats the value that it pads with as a constant", (2,)),
    "BatchNormalization": Refusal("running statistics are constants", (3, 4)),
    "Resize": Refusal("the region and the scales are constants", (1, 2)),
    "RoiAlign": Refusal("the boxes are constants", (1,)),
    **dict.fromkeys(("Bernoulli", "Multinomial"), Refusal("it draws samples", steps=True)),
    **dict.fromkeys(ROUNDED, Refusal(_ROUNDS, steps=True)),
    **dict.fromkeys(CASTS, Refusal(_ROUNDS, (0,), _to_narrow, True)),
    "BitCast": Refusal("it reads bits", steps=True),
    **dict.fromkeys(
        NORM_REDUCTIONS | EXTREME_REDUCTIONS | {"ReduceMean"} | {"ReduceLogSumExp"},
        Refusal("its list of axes is empty", (0,), _no_axes),
    ),
    **dict.fromkeys(
        RUNNING_PRODUCTS,
        Refusal("onnx-ad divides by elements that may be zero, and gopt writes it out where shapes and axes are known, "
                "outside of control flow", (0,), _divides),
    ),
    "SpaceToDepth": Refusal("onnx-ad assumes mode DCR", (0,), lambda use: use.attributes.get("mode") == "CRD"),
    **dict.fromkeys(SCATTERS - {"Scatter"}, Refusal("of its reductions only none and add are linear", (), _is_no_sum)),
    "RotaryEmbedding": Refusal(
        "it slices in steps", (), lambda operator: bool(operator.attributes.get("interleaved", 0)),
    ),
    **dict.fromkeys(SEQUENCES | {"SequenceMap"}, Refusal(_SEQUENCE)),
    "AffineGrid": Refusal("its definition drops a batch of one sample", (0,), _one_flat_sample),
    "MaxRoiPool": Refusal("onnx-ad has no rule for it"),
}  # fmt: skip
"""By operator."""
