"""Families of the standard operators: which are elementwise, which reduce, which only move data."""

from __future__ import annotations

from gopt.operators.operator import Slope
from gopt.operators.table import OPERATORS, names

RESHAPES = frozenset({"Reshape", "Squeeze", "Unsqueeze", "Flatten"})
"""The elements in the same order, in another shape."""
VIEWS = RESHAPES | {"Identity"}
"""The elements in the same order."""
MOVES = VIEWS | {"Transpose"}
"""Each element once, in another order."""
SPREADS = MOVES | {"Expand", "Tile"}
"""Each element once or several times."""
LAYOUT = SPREADS | {"Slice"}
"""Moves elements, computes nothing: a mean over ranks passes through unchanged."""
PARTS = frozenset({"Slice", "Split"})
"""Some of the elements."""
CASTS = frozenset({"Cast", "CastLike"})
"""The elements in another type."""
TYPED = names(lambda record: record.elementwise and record.by_type)
"""In the type of another operand."""
CARRIES = MOVES | CASTS
"""Each element once, in another order or type."""
COPIES = CASTS | {"Identity"}
"""The elements in place, at most in another type."""
UNMOVED = VIEWS | CASTS
"""The elements in the same order, at most in another shape or type."""
RELAYS = LAYOUT | CASTS
"""The elements in other places, or in another type."""
COUNTS = UNMOVED | {"Add", "Clip", "Max"}
"""A number in another shape or type, shifted or bounded: a count, of at least one."""
SUMS = frozenset({"Add", "Sub", "Sum"})
ADDITIONS = SUMS - {"Sub"}
VARIADIC = frozenset({"Concat", "Max", "Mean", "Min", "Sum"})
"""Of any number of operands: of one, a copy."""
SCALES = frozenset({"Mul", "Div"})
MASKS = frozenset({"Mul", "Where"})
"""Keep some elements of a value, by a flag or a factor of zero."""
QUOTIENTS = frozenset({"Div", "Reciprocal"})
EXTREMES = frozenset({"Max", "Min"})
COMPARISONS = names(lambda record: record.relation)
LOGIC = frozenset({"And", "Or", "Xor", "Not"})
FLOAT_TESTS = frozenset({"IsNaN", "IsInf"})
STEPWISE = names(lambda record: record.slope(0) is Slope.STEP)
"""Constant between steps: their derivative is zero."""
MATRIX_PRODUCTS = frozenset({"MatMul", "Gemm"})
PRODUCTS = MATRIX_PRODUCTS | {"Einsum"}
CONVOLUTIONS = frozenset({"Conv", "ConvTranspose"})
CONTRACTIONS = PRODUCTS | CONVOLUTIONS
RECURRENT = frozenset({"RNN", "GRU", "LSTM"})
ATTENTION = frozenset({"Attention", "RotaryEmbedding"})
"""Heads that mix the places of a sequence, or turn with them."""
GATHERS = frozenset({"Gather", "GatherElements", "GatherND"})
SCATTERS = frozenset({"Scatter", "ScatterElements", "ScatterND"})
WRITES = SCATTERS | {"TensorScatter"}
"""Put elements in the places of others."""
ORDERED = frozenset({"TopK"})
"""A number of the largest or smallest elements."""
AVERAGES = frozenset({"ReduceMean", "BatchNormalization", "GlobalAveragePool"})
"""Take a mean."""
POOLS = frozenset({"MaxPool", "AveragePool", "LpPool"})
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
GLOBAL_POOLS = {"GlobalAveragePool": "ReduceMean", "GlobalMaxPool": "ReduceMax"}
"""Pool of all places -> the reduction over them."""
"""Normalise over the places of each sample."""
RESIZES = frozenset({"Resize", "Upsample"})
SMOOTH_MAXIMA = frozenset({"Softmax", "LogSoftmax"})
ROUNDED = frozenset({"QuantizeLinear", "DynamicQuantizeLinear", "QLinearConv", "QLinearMatMul"})
"""Round to few bits."""
RUNNING_PRODUCTS = frozenset({"ReduceProd", "CumProd"})
SIZES = frozenset({"Shape", "Size"})
"""Look at a shape alone."""
SEQUENCES = frozenset({
    "SequenceConstruct", "SequenceInsert", "SequenceErase", "SequenceAt", "ConcatFromSequence", "SplitToSequence",
    "Optional", "OptionalGetElement",
})  # fmt: skip
ELEMENTWISE = names(lambda record: record.elementwise)
"""Each output element depends on the operand elements at its place alone (after broadcasting)."""
TERMS = names(lambda record: set(record.slopes) - {Slope.NONE} == {Slope.AFFINE} and not record.work) - {"Pad"}
"""Each operand is a term: added, joined or chosen. A Pad is linear in its data, mostly."""
LINEAR_IN_FIRST = names(lambda record: record.linear_in_first) - CASTS
"""Linear in the first operand; the others are places, axes and sizes. A cast is where its result is a float."""
UNIFORM = frozenset({"RandomUniform", "RandomUniformLike"})
NORMAL = frozenset({"RandomNormal", "RandomNormalLike"})
DRAWN_LIKE = frozenset({"RandomNormalLike", "RandomUniformLike", "Bernoulli", "Dropout"})
"""Draw in the shape of the first operand."""
RANDOM = DRAWN_LIKE | UNIFORM | NORMAL | {"Multinomial"}
CONTROL_FLOW = frozenset({"If", "Loop", "Scan", "SequenceMap"})
MAY_DRAW = RANDOM | CONTROL_FLOW
"""The only operators that may be random."""
HEAVY = CONTRACTIONS | RECURRENT | frozenset({
    "Attention", "ConvInteger", "DeformConv", "GroupQueryAttention", "Loop", "MatMulInteger", "MultiHeadAttention",
    "QLinearConv", "QLinearMatMul", "Scan",
})  # fmt: skip
"""Contractions, whatever their domain: the work that takes long enough for a call to hide behind."""
REDUCTIONS = {name: "sum" if op.pieces == "mean" else op.pieces for name, op in OPERATORS.items() if op.pieces}
"""Full reductions of pieces -> how the results of pieces are joined; of a mean, gopt divides the sums of pieces."""
COMBINERS = {
    "sum": SUMS, "mean": SUMS, "max": frozenset({"Max"}), "min": frozenset({"Min"}), "any": frozenset({"Or"}),
    "all": frozenset({"And"}), "count": ADDITIONS,
}  # fmt: skip
"""Operators that combine partial values of one kind; their result is partial of the same kind."""
