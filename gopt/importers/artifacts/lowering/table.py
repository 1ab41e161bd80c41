"""The table of operators ONNX Runtime training writes: a new one needs one record here and one function.

The function takes the operator's inputs in order ('' for an absent one) and the attributes, and returns its results.
Every record is compared with the kernel's own numbers in ``tests/importers/artifacts/lowering``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from onnx import NodeProto

from gopt.errors import UnsupportedError
from gopt.importers.artifacts.lowering import activations as act
from gopt.importers.artifacts.lowering import arithmetic, indexing, losses, windows
from gopt.importers.artifacts.lowering import normalisation as norm
from gopt.importers.artifacts.lowering.builder import Builder
from gopt.ir.attributes import attribute_value
from gopt.ir.external_data import show

MICROSOFT = "com.microsoft"


@dataclass(frozen=True, slots=True)
class Lowering:
    """One operator. ``attributes``: their defaults; one that is not listed is refused. ``ignored``: of no effect."""

    op_type: str
    body: Callable[..., Any]
    attributes: Mapping[str, Any] = field(default_factory=dict)
    domain: str = MICROSOFT
    ignored: frozenset[str] = frozenset()

    def nodes(self, b: Builder, node: NodeProto) -> list[NodeProto]:
        """The standard nodes in its place; raises UnsupportedError and InputError in the node's name."""
        attributes = {attr.name: attribute_value(attr) for attr in node.attribute if attr.name not in self.ignored}
        unknown = attributes.keys() - self.attributes.keys()
        if unknown:
            raise UnsupportedError(
                f"{self.op_type} {show(node.name)} has the attribute {show(min(unknown))}, which gopt does not know",
                f"gopt knows {', '.join(sorted(self.attributes)) or 'none'}: generate the artifacts without it",
            )
        return b.lower(node, self.body, {**self.attributes, **attributes})


_WINDOW: dict[str, Any] = {"kernel_shape": [], "strides": [], "dilations": [], "pads": [], "auto_pad": "NOTSET"}
_LAYER: dict[str, Any] = {"axis": -1, "epsilon": 1e-5, "stash_type": 1}
_LOSS: dict[str, Any] = {"reduction": "mean"}
_AXIS: dict[str, Any] = {"axis": 0}
_LAST: dict[str, Any] = {"axis": -1}
_SUM: dict[str, Any] = {"keepdims": 1, "noop_with_empty_axes": 0}
_MATMUL: dict[str, Any] = {"alpha": 1.0, "transA": 0, "transB": 0, "transBatchA": 0, "transBatchB": 0}

_ROWS = (
    Lowering("ReluGrad", act.relu_grad),
    Lowering("LeakyReluGrad", act.leaky_relu_grad, {"alpha": 0.01}),
    Lowering("SigmoidGrad", act.sigmoid_grad),
    Lowering("TanhGrad", act.tanh_grad),
    Lowering("Gelu", act.gelu),
    Lowering("GeluGrad", act.gelu_grad),
    Lowering("BiasGelu", act.bias_gelu),
    Lowering("BiasGeluGrad_dX", act.bias_gelu_grad),
    Lowering("FastGelu", act.fast_gelu),
    Lowering("FastGeluGrad", act.fast_gelu_grad),
    Lowering("BiasFastGeluGrad_dX", act.bias_fast_gelu_grad),
    Lowering("QuickGelu", act.quick_gelu, {"alpha": 1.702}),
    Lowering("QuickGeluGrad", act.quick_gelu_grad, {"alpha": 1.702}),
    Lowering("SoftmaxGrad", act.softmax_grad, {"axis": 1}),
    Lowering("SoftmaxGrad_13", act.softmax_grad_13, _LAST),
    Lowering("LogSoftmaxGrad", act.log_softmax_grad, {"axis": 1}),
    Lowering("LogSoftmaxGrad_13", act.log_softmax_grad_13, _LAST),
    Lowering("LayerNormalizationGrad", norm.layer_norm_grad, _LAYER),
    Lowering("SimplifiedLayerNormalization", norm.simplified_layer_norm, _LAYER, domain=""),
    Lowering("SimplifiedLayerNormalizationGrad", norm.simplified_layer_norm_grad, _LAYER),
    Lowering("BatchNormInternal", norm.batch_norm, {"epsilon": 1e-5, "momentum": 0.9, "training_mode": 0}),
    Lowering("BatchNormalizationGrad", norm.batch_norm_grad, {"epsilon": 1e-5}),
    Lowering("ConvGrad", windows.conv_grad, {**_WINDOW, "group": 1}),
    Lowering("MaxPoolGrad", windows.max_pool_grad, domain="",
             ignored=frozenset({*_WINDOW, "ceil_mode", "storage_order"})),
    Lowering("AveragePoolGrad", windows.average_pool_grad,
             {**_WINDOW, "ceil_mode": 0, "count_include_pad": 0}, domain=""),
    Lowering("SoftmaxCrossEntropyLossGrad", losses.cross_entropy_grad, {**_LOSS, "ignore_index": None}),
    Lowering("SoftmaxCrossEntropyLossInternal", losses.cross_entropy, {**_LOSS, "output_type": 0}),
    Lowering("SoftmaxCrossEntropyLossInternalGrad", losses.cross_entropy_internal_grad, {**_LOSS, "output_type": 0}),
    Lowering("GatherGrad", indexing.gather_grad, _AXIS),
    Lowering("GatherElementsGrad", indexing.gather_elements_grad, _AXIS),
    Lowering("GatherNDGrad", indexing.gather_nd_grad, {"batch_dims": 0}),
    Lowering("SliceGrad", indexing.slice_grad),
    Lowering("FusedMatMul", arithmetic.fused_matmul, _MATMUL),
    Lowering("Scale", arithmetic.scale, {"scale_down": 0}),
    Lowering("DivGrad", arithmetic.div_grad),
    Lowering("ReduceSumTraining", arithmetic.reduce_sum, _SUM),
    Lowering("ConcatTraining", arithmetic.concat, _AXIS),
    Lowering("SplitTraining", arithmetic.split, _AXIS),
    Lowering("PassThrough", arithmetic.identity),
    Lowering("BitmaskDropout", arithmetic.dropout, {"seed": None}),
    Lowering("DropoutGrad", arithmetic.dropout_grad),
    Lowering("BitmaskDropoutGrad", arithmetic.dropout_grad),
)  # fmt: skip

LOWERINGS = {(row.domain, row.op_type): row for row in _ROWS}
"""(domain, operator) -> its record."""
