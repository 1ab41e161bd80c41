"""Uses of operators: odd sizes, broadcasts, single elements, attributes, operator sets."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from onnx.defs import SchemaError, get_schema

from gopt.operators.kinds import ALL_REDUCTIONS, ELEMENTWISE

Array = np.ndarray


@dataclass(frozen=True)
class Case:
    """One use of an operator. ``links``: what strategies there are, as ``described`` writes them; ``results``: how many
    it makes; ``runtime``: whether onnxruntime runs it, or else onnx's reference."""

    inputs: tuple[Array | None, ...]
    links: str = ""
    results: int = 1
    opset: int = 20
    attributes: dict[str, Any] = field(default_factory=dict)
    runtime: bool = True


_GENERATOR = np.random.default_rng(12)


def x(*shape: int, dtype: str = "float32") -> Array:
    """Numbers between 0.1 and 0.9, so that every function of them is defined."""
    return _GENERATOR.uniform(0.1, 0.9, shape).astype(dtype)


def signed(*shape: int, dtype: str = "float32") -> Array:
    return _GENERATOR.standard_normal(shape).astype(dtype)


def whole(*shape: int, top: int = 9, dtype: str = "int64") -> Array:
    return _GENERATOR.integers(0, top, shape).astype(dtype)


def flags(*shape: int) -> Array:
    return np.asarray(_GENERATOR.uniform(size=shape) > 0.5)


def ints(*values: int) -> Array:
    return np.array(values, np.int64)


def case(*inputs: Array | None, opset: int = 20, results: int = 1, runtime: bool = True, **attributes: Any) -> Case:
    return Case(inputs, results=results, opset=opset, attributes=attributes, runtime=runtime)


# --- element by element -----------------------------------------------------------------------------------------------

NUMERIC = ("Add", "Sub", "Mul", "Div", "Pow", "Max", "Min", "Sum", "Mean", "Greater", "GreaterOrEqual", "Less",
           "LessOrEqual", "Equal")  # fmt: skip
LOGICAL = ("And", "Or", "Xor")
BITS = ("BitwiseAnd", "BitwiseOr", "BitwiseXor")


def binary(op_type: str) -> list[Case]:
    make = flags if op_type in LOGICAL else whole if op_type in (*BITS, "Mod") else x
    if op_type == "Mod":
        return [case(whole(3, 5), whole(5) + 1)]
    found = [
        case(make(7, 13), make(13)),
        case(make(3, 1, 5), make(2, 1)),
        case(make(33), make()),
        case(make(1), make(1)),
    ]
    return found + ([case(make(2, 3), make(3), make(2, 1))] if op_type in ("Max", "Min", "Sum", "Mean") else [])


def unary(op_type: str) -> list[Case]:
    attributes = {"Cast": {"to": 7}, "Shrink": {"lambd": 0.3}, "ThresholdedRelu": {"alpha": 0.4}}.get(op_type, {})
    make = {"Not": flags, "BitwiseNot": whole}.get(op_type, x)
    shift = 1.0 if op_type == "Acosh" else 0
    value = make(7, 1, 13)
    return [case(value + shift if shift else value, opset=24 if op_type == "Swish" else 20, **attributes)]


ELEMENTS: dict[str, list[Case]] = {
    **{op_type: unary(op_type) for op_type in sorted(ELEMENTWISE)},
    **{op_type: binary(op_type) for op_type in (*NUMERIC, *LOGICAL, *BITS, "Mod")},
    "BitShift": [case(whole(3, 5, dtype="uint8"), whole(5, top=3, dtype="uint8"), direction="LEFT")],
    "CastLike": [case(x(3, 5), whole(2))],
    "Clip": [case(x(7, 13), x(), None), case(x(7, 13), opset=10, min=0.3)],
    "PRelu": [case(signed(3, 5, 7), x(5, 1)), case(signed(1, 5), x(5))],
    "Where": [case(flags(3, 1), x(5), x(2, 3, 1)), case(flags(1), x(3, 5), x(5))],
    "Dropout": [
        case(x(7, 5), None, np.array(False), results=2), case(x(7, 5), results=2),
        case(x(7, 5), np.array(0.0, np.float32), np.array(True), results=2), case(x(7, 5), opset=10, ratio=0.3),
    ],
    "QuantizeLinear": [
        case(x(3, 5), np.array(0.1, np.float32), np.array(3, np.uint8)),
        case(x(3, 5), x(5), whole(5, dtype="uint8")), case(x(4, 3, 5), x(3), axis=-2),
        case(x(6), x(3), opset=21, axis=0, block_size=2, runtime=False),
    ],
    "DequantizeLinear": [
        case(whole(3, 5, dtype="uint8"), x(5), whole(5, dtype="uint8")),
        case(whole(4, 6, dtype="uint8"), x(2, 6), opset=21, axis=0, block_size=2, runtime=False),
    ],
}  # fmt: skip

# --- along one dimension ----------------------------------------------------------------------------------------------


def reduction(op_type: str) -> list[Case]:
    old = 12 if op_type == "ReduceSum" else 17
    found = [
        case(x(7, 5, 6), ints(1)), case(x(7, 5, 6), ints(-1, 0), keepdims=0), case(x(4, 6), None),
        case(x(4, 6), opset=old, axes=[-2], keepdims=0), case(x(4, 6), ints(), noop_with_empty_axes=1, keepdims=0),
        case(x(1, 5), ints(0)), case(x(6), ints(0), keepdims=0),
    ]  # fmt: skip
    if op_type in ("ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin"):
        found.append(case(whole(4, 6), ints(1)))
    return found


SOFTMAX = [
    case(signed(3, 5, 7)), case(signed(3, 5, 7), axis=1), case(signed(3, 5, 7), opset=11),
    case(signed(3, 5, 7), opset=12, axis=-1), case(signed(3, 5, 7), opset=11, axis=0),
    case(signed(5), opset=12, axis=0),
]  # fmt: skip
NORM = [case(signed(3, 5, 8), x(8)), case(signed(3, 5, 8), x(5, 8), axis=-2), case(signed(6, 1, 8), x(8), axis=1)]
ALONG: dict[str, list[Case]] = {
    **{op_type: reduction(op_type) for op_type in (
        "ReduceSum", "ReduceSumSquare", "ReduceL1", "ReduceL2", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceProd",
        "ReduceLogSum", "ReduceLogSumExp",
    )},
    "ArgMax": [case(x(7, 5), axis=1), case(x(7, 5, 3), keepdims=0), case(x(7, 5, 3), axis=-2, keepdims=0)],
    "ArgMin": [case(x(7, 5), axis=1, keepdims=0)],
    "Softmax": SOFTMAX, "LogSoftmax": SOFTMAX, "Hardmax": SOFTMAX,
    "TopK": [case(x(7, 5), ints(3), results=2), case(x(7, 5, 3), ints(2), results=2, axis=0, largest=0),
             case(x(7, 5), results=2, opset=9, k=2)],
    "LpNormalization": [case(x(7, 5)), case(x(7, 5), axis=0, p=1)],
    "LayerNormalization": [
        *NORM, case(signed(3, 5, 8), x(8), x(8), results=3), case(signed(3, 5, 8), x(5, 8), x(3, 5, 8)),
        case(signed(3, 1, 5, 8), x(8), x(1, 1, 8), axis=-1),
    ],
    "RMSNormalization": [case(*each.inputs, opset=23, **each.attributes) for each in NORM],
    "SimplifiedLayerNormalization": [case(*each.inputs, **each.attributes) for each in NORM],
    "CumSum": [case(x(7, 5), np.array(0)), case(x(7, 5), ints(-1), exclusive=1, reverse=1)],
    "OneHot": [case(whole(7, 5), ints(9), x(2)), case(whole(7, 5), ints(9), x(2), axis=0),
               case(whole(7, 5), np.array(9), x(2), axis=-2)],
    "ReverseSequence": [case(x(4, 6, 3), ints(1, 4, 2, 3, 1, 2)),
                        case(x(4, 6, 3), ints(1, 4, 2, 6), batch_axis=0, time_axis=1)],
    "Trilu": [case(x(6, 3, 3)), case(x(4, 6, 3, 5), np.array(1), upper=0)],
}  # fmt: skip

# --- over channels and places -----------------------------------------------------------------------------------------

POOLED = [case(x(6, 5, 7, 7), kernel_shape=[2, 2], strides=[2, 2])]
LOSS = [(x(6, 5), whole(6, top=5)), (x(6, 5, 3), whole(6, 3, top=5))]


def losses(*, log: bool) -> list[Case]:
    results, found = 2 if log else 1, []
    for scores, labels in LOSS:
        some = np.where(labels == 2, -1, labels)
        for reduction in ("none", "sum", "mean"):
            for opset in (12, 20):
                found.append(case(scores, labels, opset=opset, results=results, reduction=reduction))
            found.append(case(scores, labels, x(5), results=results, reduction=reduction))
            found.append(case(scores, some, x(5), results=results, reduction=reduction, ignore_index=-1))
            found.append(case(scores, some, results=results, reduction=reduction, ignore_index=-1))
    return [*found, case(x(6, 5), whole(6, top=5), reduction="none")]


PLACES: dict[str, list[Case]] = {
    "MaxPool": [
        *POOLED, case(x(6, 5, 7, 7), kernel_shape=[2, 2], results=2),
        case(signed(2, 3, 7, 13), kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1], results=2),
        case(signed(1, 2, 9, 4, 5), kernel_shape=[3, 2, 1], strides=[2, 1, 1], pads=[1, 0, 0, 1, 1, 0], results=2),
        case(signed(2, 2, 33), kernel_shape=[5], strides=[3], dilations=[2], pads=[2, 2], ceil_mode=1),
        case(signed(2, 2, 14), kernel_shape=[3], strides=[2], auto_pad="SAME_LOWER"),
        case(signed(2, 2, 6), kernel_shape=[2], strides=[2], results=2, storage_order=1),
        case(whole(2, 2, 9, top=200, dtype="uint8"), kernel_shape=[3], pads=[1, 1]),
    ],
    "AveragePool": [
        *POOLED, case(x(6, 5, 7), kernel_shape=[3], pads=[1, 1], count_include_pad=1),
        case(x(2, 3, 13, 7), kernel_shape=[3, 3], strides=[2, 1], pads=[0, 1, 0, 1]),
        case(x(2, 3, 12), kernel_shape=[4], strides=[3], ceil_mode=1, count_include_pad=1, pads=[1, 2]),
    ],
    "LpPool": [*POOLED, case(x(2, 3, 13), kernel_shape=[3], strides=[2], pads=[1, 1], p=3)],
    "GlobalAveragePool": [case(x(6, 5, 7, 7))],
    "GlobalMaxPool": [case(x(6, 5, 7))],
    "GlobalLpPool": [case(x(6, 5, 7, 7))],
    "BatchNormalization": [
        case(x(6, 5, 4), x(5), x(5), x(5), x(5)), case(x(6, 5), x(5), x(5), x(5), x(5), opset=13),
        case(x(6, 5, 4), x(5), x(5), x(5), x(5), results=3, training_mode=1, opset=15),
    ],
    "InstanceNormalization": [case(x(6, 5, 4), x(5), x(5))],
    "GroupNormalization": [
        case(x(4, 6, 5), x(6), x(6), opset=21, num_groups=3), case(x(4, 8, 5), x(4), x(4), opset=18, num_groups=4),
    ],
    "MeanVarianceNormalization": [case(x(4, 6, 3, 3)), case(x(4, 6, 3), axes=[-1])],
    "LRN": [case(x(4, 6, 3, 5), size=3)],
    "DepthToSpace": [case(x(4, 12, 2, 3), blocksize=2), case(x(2, 24, 3, 2), blocksize=2, mode="CRD")],
    "SpaceToDepth": [case(x(4, 6, 6, 4), blocksize=2)],
    "Resize": [
        case(x(4, 6, 3, 5), None, np.array([1, 1, 2, 2], np.float32)),
        case(x(4, 6, 3, 5), None, None, ints(4, 6, 5, 7), mode="linear"),
        case(x(4, 6, 3, 5), None, None, ints(6, 7), axes=[2, 3]),
        case(x(4, 6, 3, 5), np.array([1, 1, 2, 2], np.float32), opset=10),
        case(x(4, 6, 3, 5), np.array([], np.float32), np.array([1, 1, 1.2, 1], np.float32), opset=13),
        case(x(2, 2, 4, 4), None, None, ints(2, 2, 8, 7), keep_aspect_ratio_policy="not_larger"),
        case(x(1, 2, 7, 4), None, None, ints(21, 8), axes=[2, 3], nearest_mode="round_prefer_ceil"),
        case(x(1, 2, 6), None, np.array([1, 1, 4], np.float32), coordinate_transformation_mode="asymmetric",
             nearest_mode="floor"),
        case(x(1, 2, 6), None, np.array([1, 1, 2], np.float32), nearest_mode="floor"),
        case(x(1, 2, 6), None, np.array([1, 1, 4], np.float32), coordinate_transformation_mode="asymmetric"),
    ],
    "SoftmaxCrossEntropyLoss": losses(log=True), "NegativeLogLikelihoodLoss": losses(log=False),
}  # fmt: skip

# --- products ---------------------------------------------------------------------------------------------------------


def attention(*, opset: int, causal: int = 0, keys: int = 2, flat: bool = False, mask: Array | None = None) -> Case:
    if flat:
        q, k, v = x(2, 3, 24), x(2, 5, 6 * keys), x(2, 5, 4 * keys)
        return case(q, k, v, mask, opset=opset, is_causal=causal, q_num_heads=4, kv_num_heads=keys)
    return case(x(2, 4, 3, 6), x(2, keys, 5, 6), x(2, keys, 5, 4), mask, opset=opset, is_causal=causal)


PRODUCTS: dict[str, list[Case]] = {
    "MatMul": [
        case(x(6, 3, 4), x(4, 2)),
        case(x(3, 4), x(6, 4, 2)),
        case(x(33, 7), x(7, 13)), case(x(2, 1, 3, 4), x(5, 4, 6)), case(x(6, 3, 4), x(6, 4, 2)), case(x(6), x(6, 3)),
        case(x(2, 3, 6), x(6)), case(x(6), x(6)), case(x(1, 3, 4), x(1, 4, 2)), case(whole(4, 6), whole(6, 3)),
    ],
    "Gemm": [
        case(x(5, 7), x(7, 13)), case(x(7, 5), x(13, 7), transA=1, transB=1, alpha=0.5), case(x(5, 6), x(6, 4), x(4)),
        case(x(5, 6), x(6, 4), x(5, 1), beta=0.3), case(x(5, 6), x(6, 4), x(5, 4)), case(x(5, 6), x(6, 4), x()),
        case(x(1, 6), x(6, 4), x(1, 4)), case(x(5, 6), x(6, 4), None),
    ],
    "Einsum": [
        case(x(4, 6), x(6, 3), equation="ij,jk->ik"), case(x(4, 6), x(6, 3), equation="ij, jk"),
        case(x(2, 3, 4, 5), x(2, 3, 6, 5), equation="bhid,bhjd->bhij"), case(x(4, 6), equation="ij->j"),
        case(x(4, 6), x(6), x(4), equation="ij,j,i->"), case(x(4, 4), equation="ii->i"),
        case(x(2, 4, 6), x(2, 6, 3), equation="...ij,...jk->...ik"), case(x(4, 1), x(6, 3), equation="ij,jk->ik"),
    ],
    "Conv": [
        case(x(2, 6, 5, 5), x(4, 6, 3, 3)), case(x(2, 6, 5), x(4, 6, 3), x(4)),
        case(x(2, 6, 5, 5), x(6, 1, 3, 3), x(6), group=6), case(x(2, 6, 5), x(9, 2, 3), group=3),
        case(x(3, 4, 5), x(8, 1, 2), group=4), case(signed(1, 2, 33), signed(3, 2, 7), strides=[2], pads=[3, 3]),
        case(signed(1, 2, 13, 7), signed(2, 2, 3, 1), x(2), strides=[1, 2], dilations=[2, 1], pads=[2, 0, 1, 0]),
        case(signed(1, 2, 12), signed(3, 2, 4), strides=[3], auto_pad="SAME_UPPER"),
        case(signed(1, 2, 9, 4, 3), signed(2, 2, 3, 1, 1), auto_pad="VALID", strides=[2, 1, 1]),
        case(signed(1, 4, 8), signed(4, 1, 5), group=4, pads=[4, 4]),
    ],
    "ConvTranspose": [
        case(x(2, 6, 5, 5), x(6, 4, 3, 3)), case(x(2, 6, 5), x(6, 4, 3), x(4)),
        case(x(2, 6, 5), x(6, 2, 3), x(6), group=3), case(x(2, 6, 5), x(6, 1, 3), group=6),
        case(signed(1, 2, 9, 4), signed(2, 3, 3, 2), strides=[2, 1], pads=[1, 0, 1, 1], output_padding=[1, 0]),
        case(signed(1, 2, 13), signed(2, 3, 5), dilations=[2], pads=[4, 4]),
        case(signed(1, 2, 6), signed(2, 3, 1), strides=[3], output_padding=[2]),
        case(signed(1, 2, 6), signed(2, 3, 3), strides=[2], auto_pad="SAME_UPPER"),
    ],
    "Attention": [
        attention(opset=23), attention(opset=23, causal=1, keys=4), attention(opset=23, keys=1),
        attention(opset=23, flat=True), attention(opset=23, flat=True, keys=1, mask=x(3, 5)),
        attention(opset=23, mask=x(2, 4, 3, 5)), attention(opset=23, mask=x(4, 3, 5)),
        attention(opset=23, mask=x(1, 1, 3, 5)),
        attention(opset=24, keys=4, flat=True, mask=flags(2, 1, 3, 5)),
        case(x(2, 4, 3, 6), x(2, 2, 5, 6), x(2, 2, 5, 4), x(3, 9), x(2, 2, 4, 6), x(2, 2, 4, 4), opset=23, results=4),
        case(x(2, 3, 24), x(2, 5, 12), x(2, 5, 8), None, x(2, 2, 4, 6), x(2, 2, 4, 4), opset=23, results=3,
             q_num_heads=4, kv_num_heads=2, is_causal=1),
    ],
    "RotaryEmbedding": [
        case(x(2, 6, 3, 8), x(9, 4), x(9, 4), whole(2, 3), opset=23),
        case(x(2, 6, 3, 8), x(2, 3, 4), x(2, 3, 4), opset=23, interleaved=1),
        case(x(2, 3, 48), x(2, 3, 4), x(2, 3, 4), opset=23, num_heads=6),
        case(x(2, 3, 32), x(9, 2), x(9, 2), whole(2, 3), opset=23, num_heads=4, rotary_embedding_dim=4),
    ],
}  # fmt: skip

# --- elements moved ---------------------------------------------------------------------------------------------------


def reshape(before: tuple[int, ...], *shape: int, opset: int = 20, **attributes: Any) -> Case:
    return case(x(*before), ints(*shape), opset=opset, **attributes)


MOVES: dict[str, list[Case]] = {
    "Reshape": [
        reshape((4, 6, 5), 4, 30), reshape((4, 30), 4, 6, 5), reshape((2, 3, 24), 2, 3, 4, 6), reshape((24,), 2, 3, 4),
        reshape((2, 3, 4, 6), 6, 24), reshape((6, 24), 2, 3, -1), reshape((4, 6), 0, -1, opset=13),
        reshape((4, 6), 4, 1, 6),
        reshape((1, 6), 6), reshape((6, 4), 3, 8), reshape((12, 2), 2, 12), reshape((33, 65), 65, 33),
        reshape((4, 6), 24, allowzero=1), reshape((7, 13), 91), reshape((1,), 1, 1), reshape((4, 1, 6), 24, opset=11),
        reshape((0, 6), 0, 3, 2, allowzero=1),
    ],
    "Flatten": [
        case(x(4, 6, 5)), case(x(4, 6, 5), axis=0), case(x(4, 6, 5), axis=-1), case(x(1, 6)),
        case(x(6, 1, 1), axis=3),
    ],
    "Squeeze": [
        case(x(4, 1, 6), ints(1)), case(x(2, 1, 6)), case(x(1, 6, 1), ints(-1, 0)),
        case(x(4, 1, 6), opset=11, axes=[1]),
        case(x(2, 1, 6), opset=11),
    ],
    "Unsqueeze": [
        case(x(4, 6), ints(1)), case(x(4, 6), ints(-1, 0)), case(x(4, 6), opset=11, axes=[0]),
        case(x(1), ints(0)),
    ],
    "Transpose": [case(x(4, 6, 5)), case(x(4, 6, 5), perm=[1, 0, 2]), case(x(2, 7, 13, 1), perm=[0, 2, 1, 3])],
    "Expand": [
        case(x(1, 5), ints(4, 5)), case(x(6), ints(4, 1)), case(x(3, 1, 5), ints(2, 3, 4, 1)), case(x(1), ints(1)),
        case(x(), ints(6)),
    ],
    "Tile": [case(x(4, 6), ints(3, 1)), case(x(4, 6), ints(2, 2)), case(x(1, 5), ints(6, 1))],
    "Slice": [
        case(x(4, 6, 5), ints(1), ints(4), ints(1)), case(x(4, 6), ints(-6, 0), ints(99, 2), ints(1, 0)),
        case(x(4, 6), ints(0, 1), ints(4, 6), None, ints(1, 2)), case(x(4, 6), ints(-1), ints(-99), ints(1), ints(-1)),
        case(x(4, 6), opset=9, starts=[1], ends=[3], axes=[1]), case(x(33), ints(-31), ints(31), ints(0), ints(3)),
        case(x(5, 18), ints(6), ints(12), ints(-1)), case(x(12, 7), ints(-3), ints(99), ints(0), ints(1)),
        case(x(6, 9), ints(2, 3), ints(4, 6)), case(x(18, 2), ints(5), ints(11), ints(0)),
        case(x(6, 4), ints(0), ints(6), ints(0), ints(2)),
    ],
    "Pad": [
        case(x(4, 6), ints(0, 1, 0, 2)), case(x(4, 6), ints(1, 0, -1, 0)), case(x(4, 6), ints(1, 1), x(), ints(-1)),
        case(x(4, 6), opset=10, pads=[0, 1, 0, 1]), case(x(13), ints(3, -2)),
        case(x(6), ints(1, 0), np.array(2, np.float32)), case(x(4, 6), ints(0, 2, 0, 1), mode="reflect"),
        case(x(4, 6, 5), ints(0, 1, 0, 2), x(), ints(-3, 1)),
    ],
    "Concat": [
        case(x(4, 6), x(4, 6), axis=1), case(x(4, 6), x(4, 3), axis=-1), case(x(4, 6), x(4, 6), x(4, 6), axis=0),
        case(x(4, 6), axis=0), case(x(1, 6), x(1, 6), axis=0),
    ],
    "Split": [
        case(x(4, 6), results=3, num_outputs=3, axis=1), case(x(4, 6), ints(2, 4), results=2, axis=-1),
        case(x(4, 6), ints(3, 3), results=2, axis=1), case(x(4, 6), results=2, opset=13),
        case(x(4, 6), results=2, opset=11, split=[3, 3], axis=1), case(x(4, 6), results=2, opset=11),
        case(x(4, 7), results=3, num_outputs=3, axis=1), case(x(12, 2), results=2, num_outputs=2, axis=0),
    ],
}  # fmt: skip

# --- elements chosen --------------------------------------------------------------------------------------------------


def places(length: int, *shape: int) -> Array:
    """Indices, some from the end."""
    return np.asarray(_GENERATOR.integers(-length, length, shape))


def scattered(reduction: str, **attributes: Any) -> Case:
    """Indices that meet one another, unless the later would win."""
    at = np.stack([_GENERATOR.permutation(7)[:4] for _ in range(5)], 1) if reduction == "none" else places(7, 4, 5)
    at = np.where(at % 2, at - 7, at) if reduction == "none" else at
    return case(x(7, 5), at, x(4, 5), axis=0, reduction=reduction, **attributes)


CHOICES: dict[str, list[Case]] = {
    "Gather": [
        case(x(7, 5), places(7, 3)), case(x(4, 6, 5), places(6, 2, 3), axis=1), case(x(7, 5), np.array(-2)),
        case(x(33), places(33, 6), axis=-1), case(x(7, 5), places(7, 4).astype(np.int32)), case(whole(7), places(7, 2)),
    ],
    "GatherElements": [
        case(x(7, 5), places(7, 4, 5)), case(x(7, 5), places(5, 7, 3), axis=1), case(x(7, 6), places(7, 4, 3)),
    ],
    "GatherND": [
        case(x(6, 5), places(5, 4, 2)), case(x(6, 4, 5), places(4, 6, 3, 1), batch_dims=1),
        case(x(7, 5), places(7, 4, 1)),
        case(x(4, 6, 5, 2), places(5, 4, 6, 1), batch_dims=2),
    ],
    "ScatterElements": [
        *(scattered(each) for each in ("none", "add", "mul", "max", "min")),
        case(x(4, 9), np.stack([_GENERATOR.permutation(9)[:3] for _ in range(4)]), x(4, 3), axis=-1),
        case(x(7, 5), places(7, 4, 3), x(4, 3), reduction="add"), case(x(7), ints(2, 2, 2), x(3)),
        case(whole(7, 2), places(7, 6, 2), whole(6, 2), reduction="max", opset=18),
        case(x(7), ints(3, -1), x(2), opset=13),
    ],
    "ScatterND": [
        case(x(7, 5), ints(6, 0, -5)[:, None], x(3, 5)),
        case(x(7, 6, 4), ints(0, 6, 6)[:, None], x(3, 6, 4), reduction="add"),
        case(x(7, 6, 4), places(6, 5, 2), x(5, 4), reduction="mul"),
        case(x(9), places(9, 2, 6, 1), x(2, 6), reduction="min"),
        case(x(9), ints(4, 4, 4)[:, None], x(3)), case(whole(9), places(9, 6, 1), whole(6), reduction="max"),
        case(x(7, 5), ints(3, 1)[:, None], x(2, 5), opset=11),
        case(x(18, 5), ints(*range(6, 12))[:, None], x(6, 5)),
        case(x(6), ints(3, 4, 5)[:, None], x(3), reduction="add"),
        case(x(12, 2), ints(1, 2, 3)[:, None], x(3, 2)), case(x(6), ints(1, 0)[:, None], x(2)),
        case(x(4, 3), ints(0, 2)[:, None], x(2, 3)), case(x(6, 3), ints(0, 1, 2)[:, None], x(3, 3)),
        case(x(8, 2), ints(3, 4, 5)[:, None], x(3, 2)),
    ],
}  # fmt: skip

CASES: dict[str, list[Case]] = {**ELEMENTS, **ALONG, **PLACES, **PRODUCTS, **MOVES, **CHOICES}
"""Operator of the table -> uses of it."""

# --- what has no links, and drawn uses --------------------------------------------------------------------------------


def recurrent(op_type: str, gates: int, *, peepholes: bool = False, **attributes: Any) -> list[Case]:
    """Layers over time: in each direction, with and without biases, lengths and starts."""
    states = 2 if op_type == "LSTM" else 1
    found = []
    for direction in ("forward", "reverse", "bidirectional"):
        ways = 1 + (direction == "bidirectional")
        w, r, b = signed(ways, gates * 4, 3), signed(ways, gates * 4, 4), signed(ways, 2 * gates * 4)
        how = {**attributes, "hidden_size": 4, "direction": direction, "results": 1 + states}
        rest = [signed(ways, 2, 4) for _ in range(states)]
        more = [signed(ways, 12)] if peepholes else []
        found.append(case(signed(5, 2, 3), w, r, b, None, *rest, *more, **how))
        if not peepholes:
            found.append(case(signed(5, 2, 3), w, r, **how))
            found.append(case(signed(5, 2, 3), w, r, b, np.array([5, 2], np.int32), *rest, clip=0.5, **how))
            turned = [np.ascontiguousarray(each.swapaxes(0, 1)) for each in rest]
            found.append(case(signed(2, 5, 3), w, r, b, None, *turned, layout=1, **how))
    return found


BEYOND: dict[str, list[Case]] = {
    "Cast": [case(x(5, 4), to=11)],
    "CastLike": [case(x(5, 4), x(2))],
    "LRN": [case(x(4, 6, 3, 2), size=3, alpha=1.0)],
    "ScatterND": [case(x(7, 5), ints(3, 3)[:, None], x(2, 5), reduction="mul")],
    "CenterCropPad": [case(x(5, 4), ints(3, 6)), case(x(5, 4, 3), ints(7), axes=[-2])],
    "Compress": [case(x(5, 4), np.array([1, 0, 1], bool), axis=-2), case(x(3, 2), np.array([0, 1, 1, 0, 1], bool))],
    "ConstantOfShape": [case(ints(2, 3)), case(ints())],
    "Clip": [case(x(5, 4), None, x()), case(whole(5), np.array(3), None, opset=13)],
        "Range": [
        case(np.array(0.5), np.array(3.1), np.array(0.7)), case(np.array(2.5), np.array(-1.0), np.array(-0.5)),
        case(np.array(1), np.array(9), np.array(3)), case(np.array(5), np.array(-2), np.array(-2))],
    "Shape": [case(x(2, 3)), case(x(2, 3, 4), start=-2, end=3)],
    "Size": [case(x(2, 3)), case(x())],
    "Upsample": [case(x(1, 2, 3, 4), np.array([1, 1, 2, 2], np.float32), opset=9)],
    "RNN": recurrent("RNN", 1), "GRU": [*recurrent("GRU", 3), *recurrent("GRU", 3, linear_before_reset=1)],
    "LSTM": [*recurrent("LSTM", 4), *recurrent("LSTM", 4, peepholes=True)],
    "STFT": [
        case(x(2, 16, 1), np.array(4), x(8)), case(x(2, 15, 1), np.array(3), None, np.array(6)),
        case(x(2, 16, 1), np.array(5), x(8), np.array(8), onesided=0), case(x(2, 16, 2), np.array(4), x(8), onesided=0),
    ],
    "CausalConvWithState": [
        case(signed(2, 3, 7), signed(3, 1, 4), results=2, opset=27),
        case(signed(2, 3, 7), signed(3, 1, 4), x(3), signed(2, 3, 3), results=2, opset=27, activation="silu"),
    ],
    "LinearAttention": [
        case(signed(2, 5, 8), signed(2, 5, 4), signed(2, 5, 6), opset=27, results=2, update_rule="linear",
             q_num_heads=4, kv_num_heads=2),
        case(signed(2, 5, 8), signed(2, 5, 8), signed(2, 5, 6), signed(2, 2, 4, 3), -x(2, 5, 2), x(2, 5, 2), opset=27,
             results=2, q_num_heads=2, kv_num_heads=2),
        case(signed(2, 5, 8), signed(2, 5, 8), signed(2, 5, 6), None, -x(2, 5, 8), opset=27, results=2,
             update_rule="gated", q_num_heads=2, kv_num_heads=2, scale=0.3),
        case(signed(2, 5, 8), signed(2, 5, 8), signed(2, 5, 6), None, None, x(2, 5, 1), opset=27, results=2,
             update_rule="delta", q_num_heads=2, kv_num_heads=2),
    ],
    "MatMulInteger": [
        case(whole(3, 4, dtype="uint8"), whole(4, 2, dtype="uint8")),
        case(whole(3, 4, dtype="uint8"), whole(4, 2, dtype="int8"), np.array(2, np.uint8), np.array([1, 3], np.int8)),
    ],
    **{
        f"{name}Window": [case(np.array(9)), case(np.array(8), periodic=0, output_datatype=11)]
        for name in ("Blackman", "Hamming", "Hann")
    },
    "GridSample": [
        case(x(2, 3, 5, 4), signed(2, 3, 6, 2) / 2, mode=mode, padding_mode=pad, align_corners=ends)
        for mode, pad, ends in (("linear", "zeros", 0), ("nearest", "border", 1), ("cubic", "reflection", 0))
    ],
    "EyeLike": [case(x(3, 5)), case(x(4, 3), k=-1, dtype=7), case(whole(3, 4), k=2)],
    "TensorScatter": [
        case(x(2, 6, 3), signed(2, 2, 3), ints(1, 4), opset=24), case(x(2, 3, 6, 2), signed(2, 3, 4, 2), opset=24),
        case(x(2, 6, 3), signed(2, 4, 3), ints(1, 4), opset=24, mode="circular"),
    ],
    "Det": [case(signed(3, 3)), case(signed(2, 4, 4))],
    "SwiGLU": [case(signed(3, 4), signed(3, 4), opset=28), case(signed(5), signed(5), opset=28, alpha=1.7)],
    "BitCast": [case(x(3, 4), opset=26, to=6), case(whole(5), opset=26, to=11)],
    "DynamicQuantizeLinear": [case(signed(4, 3), results=3), case(x(5), results=3)],
}  # fmt: skip


def drawn(op_type: str, seed: int) -> Case | None:
    """A use of an elementwise operator or a reduction, of rank 0 to 5 and any operator set from 7 on that has it; None
    for others, and where this set does not have it."""
    generator = np.random.default_rng([seed, *op_type.encode()])
    opset = int(generator.integers(7, 25))
    try:
        since = get_schema(op_type, opset).since_version
    except SchemaError:
        return None
    shape = [int(size) for size in generator.integers(1, 4, generator.integers(0, 6))]
    if op_type in ALL_REDUCTIONS:
        return _drawn_reduction(op_type, generator, since, opset, shape)
    first = CASES[op_type][0] if op_type in ELEMENTWISE else None
    if first is None or (opset != first.opset and op_type in OWN_FORM):
        return None
    inputs = [_like(generator, each, shape) for each in first.inputs]
    return Case(tuple(inputs), opset=opset, attributes=first.attributes)


OWN_FORM = frozenset({"Clip", "BitShift", "Swish", "PRelu"})
"""Elementwise operators whose operands are not alike, or differ between operator sets."""


def _like(generator: np.random.Generator, value: Array | None, shape: list[int]) -> Array | None:
    """Numbers as an operand has, in a shape that broadcasts against ``shape``."""
    if value is None:
        return None
    own = [1 if generator.random() < 0.3 else size for size in shape][int(generator.integers(0, len(shape) + 1)) :]
    return np.asarray(generator.choice(value.reshape(-1), own))


def _drawn_reduction(op_type: str, generator: np.random.Generator, since: int, opset: int, shape: list[int]) -> Case:
    rank, attributes = len(shape), {"keepdims": int(generator.integers(2))}
    axes = [int(each) for each in generator.permutation(rank)[: generator.integers(0, rank + 1)]]
    axes = [axis - rank if opset >= 11 and generator.random() < 0.5 else axis for axis in axes]
    value, named = x(*shape), generator.random() < 0.8
    if since < 13 or (since < 18 and op_type != "ReduceSum"):
        return case(value, opset=opset, **({"axes": axes} if named and axes else {}), **attributes)
    if generator.random() < 0.3:
        attributes["noop_with_empty_axes"] = 1
    return case(value, ints(*axes) if named else None, opset=opset, **attributes)


def forms(op_type: str, count: int = 6) -> list[Case]:
    """The uses of an operator: those above, and some that are drawn."""
    more = (drawn(op_type, seed) for seed in range(count))
    return [*CASES.get(op_type, ()), *BEYOND.get(op_type, ()), *(each for each in more if each is not None)]
