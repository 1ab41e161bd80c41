"""The table of opaque optimizer operators: a new operator needs a record here and a body."""

from __future__ import annotations

from typing import Any

from gopt.ir.opaque import ort_optimizers, preview_optimizers
from gopt.ir.opaque.operator_schema import Arrangement, OperatorSchema, SchemaSlot

MICROSOFT = "com.microsoft"
PREVIEW = "ai.onnx.preview.training"

_PAIRS = {
    "weight": "new_weight", "moment_1": "new_moment_1", "moment_2": "new_moment_2",
    "narrow_weight": "new_narrow_weight",
}  # fmt: skip


def _each(*names: str, optional: bool = False) -> tuple[SchemaSlot, ...]:
    return tuple(SchemaSlot(name, each=True, optional=optional) for name in names)


def _one(*names: str, optional: bool = False) -> tuple[SchemaSlot, ...]:
    return tuple(SchemaSlot(name, optional=optional) for name in names)


_LAMB: dict[str, Any] = {
    "alpha": 0.9, "beta": 0.999, "lambda": 0.0, "epsilon": 1e-6, "max_norm_clip": 1.0,
    "ratio_min": float("-inf"), "ratio_max": float("inf"), "do_bias_correction": 1,
}  # fmt: skip

_ROWS = (
    OperatorSchema(
        MICROSOFT, "SGDOptimizer", Arrangement.SINGLE,
        (*_one("rate"), *_each("weight", "gradient")),
        _each("new_weight", "new_gradient"),
        ort_optimizers.sgd, _PAIRS,
    ),
    OperatorSchema(
        MICROSOFT, "SGDOptimizerV2", Arrangement.SEQUENCE,
        (*_one("rate"), *_each("weight", "gradient"), *_one("update_signal", optional=True)),
        (*_one("updated_flag"), *_each("new_weight")),
        ort_optimizers.sgd, _PAIRS,
    ),
    OperatorSchema(
        MICROSOFT, "AdamOptimizer", Arrangement.SINGLE,
        (
            *_one("rate", "count"), *_each("weight", "gradient", "moment_1", "moment_2"),
            *_each("narrow_weight", optional=True),
            *_one("loss_scale", "gradient_norm", "update_signal", optional=True),
        ),
        (
            *_one("new_count"),
            *_each("new_moment_1", "new_moment_2", "new_weight", "new_gradient", "new_narrow_weight"),
        ),
        ort_optimizers.adam, _PAIRS,
        {
            "alpha": 0.9, "beta": 0.999, "lambda": 0.0, "epsilon": 1e-8, "max_norm_clip": 1.0,
            "do_bias_correction": 1, "weight_decay_mode": 0,
        },
    ),
    OperatorSchema(
        MICROSOFT, "AdamWOptimizer", Arrangement.SEQUENCE,
        (
            *_one("rate", "count"), *_each("weight", "gradient", "moment_1", "moment_2"),
            *_one("update_signal", optional=True),
        ),
        (*_one("updated_flag"), *_each("new_weight", "new_moment_1", "new_moment_2")),
        ort_optimizers.adamw, _PAIRS,
        {"alpha": 0.9, "beta": 0.999, "epsilon": 1e-8, "weight_decay": 1e-2, "correct_bias": 1, "adam_mode": 0},
    ),
    OperatorSchema(
        MICROSOFT, "LambOptimizer", Arrangement.GROUPED,
        (
            *_one("update_signal", "loss_scale", "gradient_norm", optional=True), *_one("rate"),
            *_one("count", optional=True), *_each("weight", "gradient", "moment_1", "moment_2"),
            *_each("narrow_weight", optional=True),
        ),
        (
            *_one("new_count"),
            *_each("new_weight", "new_gradient", "new_moment_1", "new_moment_2", "new_narrow_weight"),
        ),
        ort_optimizers.lamb, _PAIRS, _LAMB, frozenset({"alpha", "beta", "lambda", "epsilon", "max_norm_clip"}),
    ),
    OperatorSchema(
        PREVIEW, "Adam", Arrangement.VARIADIC,
        (*_one("rate", "count"), *_each("weight", "gradient", "moment_1", "moment_2")),
        _each("new_weight", "new_moment_1", "new_moment_2"),
        preview_optimizers.adam, _PAIRS,
        {"alpha": 0.9, "beta": 0.999, "epsilon": 1e-6, "norm_coefficient": 0.0, "norm_coefficient_post": 0.0},
    ),
    OperatorSchema(
        PREVIEW, "Momentum", Arrangement.VARIADIC,
        (*_one("rate", "count"), *_each("weight", "gradient", "moment_1")),
        _each("new_weight", "new_moment_1"),
        preview_optimizers.momentum, _PAIRS,
        required=frozenset({"alpha", "beta", "mode", "norm_coefficient"}),
    ),
    OperatorSchema(
        PREVIEW, "Adagrad", Arrangement.VARIADIC,
        (*_one("rate", "count"), *_each("weight", "gradient", "moment_1")),
        _each("new_weight", "new_moment_1"),
        preview_optimizers.adagrad, _PAIRS,
        {"epsilon": 1e-6, "decay_factor": 0.0, "norm_coefficient": 0.0},
    ),
)  # fmt: skip

OPERATORS = {(row.domain, row.op_type): row for row in _ROWS}
"""(domain, operator) -> its record."""
