"""Properties of the standard operators: which are elementwise, which reduce, which only move data."""

from __future__ import annotations

from collections.abc import Sequence

from gopt.ir.graph import Node
from gopt.ir.nodes import nested

RESHAPES = frozenset({"Reshape", "Squeeze", "Unsqueeze", "Flatten"})
"""The elements in the same order, in another shape."""
VIEWS = RESHAPES | {"Identity"}
"""The elements in the same order."""
MOVES = VIEWS | {"Transpose"}
"""Each element once, in another order."""
SPREADS = MOVES | {"Expand"}
"""Each element once or several times."""
LAYOUT = SPREADS | {"Slice"}
"""Moves elements, computes nothing: a mean over ranks passes through unchanged."""
PARTS = frozenset({"Slice", "Split"})
"""Some of the elements."""
CASTS = frozenset({"Cast", "CastLike"})
"""The elements in another type."""
SUMS = frozenset({"Add", "Sub", "Sum"})
SCALES = frozenset({"Mul", "Div"})
EXTREMES = frozenset({"Max", "Min"})
COMPARISONS = frozenset({"Equal", "Less", "LessOrEqual", "Greater", "GreaterOrEqual"})
LOGIC = frozenset({"And", "Or", "Xor", "Not"})
FLOAT_TESTS = frozenset({"IsNaN", "IsInf"})
STEPWISE = frozenset({"Sign", "Round", "Floor", "Ceil"})
"""Constant between steps: their derivative is zero."""
PRODUCTS = frozenset({"MatMul", "Gemm", "Einsum"})
CONVOLUTIONS = frozenset({"Conv", "ConvTranspose"})
CONTRACTIONS = PRODUCTS | CONVOLUTIONS
RECURRENT = frozenset({"RNN", "GRU", "LSTM"})
ATTENTION = frozenset({"Attention", "RotaryEmbedding"})
"""Heads that mix the places of a sequence, or turn with them."""
GATHERS = frozenset({"Gather", "GatherElements", "GatherND"})
SCATTERS = frozenset({"Scatter", "ScatterElements", "ScatterND"})
DEPTH_MOVES = frozenset({"DepthToSpace", "SpaceToDepth"})
POOLS = frozenset({"MaxPool", "AveragePool", "LpPool"})
GLOBAL_POOLS = frozenset({"GlobalAveragePool", "GlobalMaxPool", "GlobalLpPool"})
MEANS = frozenset({"ReduceSum", "ReduceMean"})
"""Linear reductions."""
EXTREME_REDUCTIONS = frozenset({"ReduceMax", "ReduceMin"})
NORM_REDUCTIONS = frozenset({"ReduceL1", "ReduceL2", "ReduceSumSquare"})
OTHER_REDUCTIONS = frozenset({"ReduceLogSum", "ReduceLogSumExp", "ReduceProd"})
ALL_REDUCTIONS = MEANS | EXTREME_REDUCTIONS | NORM_REDUCTIONS | OTHER_REDUCTIONS
ARG_EXTREMES = frozenset({"ArgMax", "ArgMin"})
SOFTMAXES = frozenset({"Softmax", "LogSoftmax", "Hardmax"})
CLASS_LOSSES = frozenset({"SoftmaxCrossEntropyLoss", "NegativeLogLikelihoodLoss"})
LAYER_NORMS = frozenset({"LayerNormalization", "RMSNormalization"})
"""Normalise over the last dimensions."""
PART_NORMS = frozenset({"GroupNormalization", "InstanceNormalization"})
"""Normalise over the places of each sample."""
SIZES = frozenset({"Shape", "Size"})
"""Look at a shape alone."""
SEQUENCES = frozenset({
    "SequenceConstruct", "SequenceInsert", "SequenceErase", "SequenceAt", "ConcatFromSequence", "SplitToSequence",
    "Optional", "OptionalGetElement",
})  # fmt: skip
ELEMENTWISE = frozenset({
    "Abs", "Acos", "Acosh", "Add", "And", "Asin", "Asinh", "Atan", "Atanh", "BitShift", "BitwiseAnd", "BitwiseNot",
    "BitwiseOr", "BitwiseXor", "Cast", "CastLike", "Ceil", "Celu", "Clip", "Cos", "Cosh", "Div", "Elu", "Equal",
    "Erf", "Exp", "Floor", "Gelu", "Greater", "GreaterOrEqual", "HardSigmoid", "HardSwish", "Identity", "IsInf",
    "IsNaN", "LeakyRelu", "Less", "LessOrEqual", "Log", "Max", "Mean", "Min", "Mish", "Mod", "Mul", "Neg", "Not",
    "Or", "PRelu", "Pow", "Reciprocal", "Relu", "Round", "Selu", "Shrink", "Sigmoid", "Sign", "Sin", "Sinh",
    "Softplus", "Softsign", "Sqrt", "Sub", "Sum", "Swish", "Tan", "Tanh", "ThresholdedRelu", "Where", "Xor",
})  # fmt: skip
"""Each output element depends on the operand elements at its place alone (after broadcasting)."""
LINEAR_IN_FIRST = LAYOUT | GATHERS | DEPTH_MOVES | MEANS | frozenset({
    "AveragePool", "CumSum", "GlobalAveragePool", "Neg", "ReverseSequence", "Split", "Tile", "Trilu",
})  # fmt: skip
"""Linear in the first operand; the others are places, axes and sizes."""

LINEAR = frozenset(
    [
        "Add",
        "Sub",
        "Mul",
        "Neg",
        "Cast",
        "MatMul",
        "Gemm",
        "ReduceSum",
        "ReduceMean",
        "Concat",
        "Split",
        "Pad",
        "Tile",
        "Sum",
    ]
)
"""Affine in one operand while the others are held; with the layout operators, a mean over ranks passes through."""

RANDOM = frozenset(
    ["RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike", "Multinomial", "Bernoulli", "Dropout"]
)

CONTROL_FLOW = frozenset({"If", "Loop", "Scan", "SequenceMap"})
MAY_DRAW = RANDOM | CONTROL_FLOW
"""The only operators that may be random."""

HEAVY = frozenset(
    [
        "Attention",
        "Conv",
        "ConvInteger",
        "ConvTranspose",
        "DeformConv",
        "Einsum",
        "GRU",
        "Gemm",
        "GroupQueryAttention",
        "LSTM",
        "Loop",
        "MatMul",
        "MatMulInteger",
        "MultiHeadAttention",
        "QLinearConv",
        "QLinearMatMul",
        "RNN",
        "Scan",
    ]
)
"""Contractions, whatever their domain: the work that takes long enough for a call to hide behind."""

REDUCTIONS = {
    "ReduceSum": "sum", "ReduceSumSquare": "sum", "ReduceL1": "sum", "ReduceL2": "l2", "ReduceMean": "sum",
    "ReduceMax": "max", "ReduceMin": "min",
}  # fmt: skip
"""Full reductions that can be taken piece by piece -> how the pieces' results are joined."""

COMBINERS = {"sum": ("Add", "Sum"), "max": ("Max",), "min": ("Min",), "any": ("Or",), "all": ("And",)}
"""Operators that combine partial values of one kind; their result is partial of the same kind."""


_BY_TYPE = frozenset({"Shape", "Size", "ConstantOfShape", "CastLike"})
"""Operators with an operand whose elements they do not look at, but for sizes."""


def elementwise(node: Node) -> bool:
    return node.is_in(ELEMENTWISE)


def heavy(node: Node) -> bool:
    """Return whether the node is a contraction (or a loop, which is likely to hold some)."""
    return node.op_type in HEAVY


def control_flow(node: Node) -> bool:
    return node.is_in(CONTROL_FLOW)


def random(node: Node) -> bool:
    """Return whether two runs with equal inputs may differ: the node is a generator without a seed, or an active
    dropout.

    Generators in the bodies of control flow count.
    """
    if node.op_type not in MAY_DRAW:
        return False
    if node.is_in(RANDOM):
        passes = node.is_a("Dropout") and not any(node.inputs[2:])  # without a mode nothing is dropped
        return "seed" not in node.attributes and not passes
    if not control_flow(node) or (proto := node.proto) is None:
        return False
    return any(
        inner.op_type in RANDOM and all(each.name != "seed" for each in inner.attribute) for inner in nested([proto])
    )


def draws(node: Node) -> bool:
    """Return whether the node is random, or a node inside one of its bodies."""
    if node.op_type not in MAY_DRAW:
        return False
    if not control_flow(node) or (proto := node.proto) is None:
        return random(node)
    bodies = [attribute.g for attribute in proto.attribute if attribute.HasField("g")]
    while bodies:
        body = bodies.pop()
        for each in body.node:
            names = {attribute.name for attribute in each.attribute}
            if each.domain in ("", "ai.onnx") and each.op_type in RANDOM and "seed" not in names:
                return True
            bodies += [attribute.g for attribute in each.attribute if attribute.HasField("g")]
    return False


def value_reads(node: Node) -> Sequence[str]:
    """The operands whose elements a result depends on: Shape and Size look at a shape alone, and CastLike at the type
    of its second operand."""
    if node.op_type in _BY_TYPE and node.domain in ("", "ai.onnx"):
        return node.inputs[:1] if node.op_type == "CastLike" else ()
    return node.reads


def reads_value(node: Node, name: str) -> bool:
    """Return whether a node that reads ``name`` depends on its elements."""
    return node.op_type not in _BY_TYPE or name in value_reads(node)
