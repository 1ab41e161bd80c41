"""Every body in the table against an independent formula: one node, its arithmetic and nothing else."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from formulas import FORMULAS
from helpers import run_graph
from onnx import helper

from gopt.errors import InputError
from gopt.ir.load import load
from gopt.ir.opaque.expand import expand
from gopt.ir.opaque.operator_schema import Arrangement, OperatorSchema
from gopt.ir.opaque.table import MICROSOFT, OPERATORS, PREVIEW

SHAPES = ((3, 4), (5,))
OPTIONS: dict[str, list[dict[str, Any]]] = {
    "AdamOptimizer": [
        {}, {"weight_decay_mode": 1, "lambda": 0.1}, {"lambda": 0.1, "do_bias_correction": 0, "alpha": 0.7},
        {"weight_decay_mode": 1, "do_bias_correction": 0}, {"max_norm_clip": 0.25, "epsilon": 1e-3},
    ],
    "LambOptimizer": [
        {}, {"lambda": [0.1, 0.02], "alpha": [0.9, 0.8], "epsilon": [1e-6, 1e-3]},
        {"ratio_min": 0.5, "ratio_max": 2.0, "do_bias_correction": 0}, {"max_norm_clip": [0.25, 3.0]},
    ],
    "AdamWOptimizer": [
        {}, {"adam_mode": 1}, {"correct_bias": 0, "weight_decay": 0.1}, {"adam_mode": 1, "correct_bias": 0},
    ],
    "Adam": [{}, {"norm_coefficient": 0.1, "norm_coefficient_post": 0.01}],
    "Momentum": [
        {"alpha": 0.9, "beta": 0.5, "mode": mode, "norm_coefficient": 0.1} for mode in ("standard", "nesterov")
    ],
    "Adagrad": [{}, {"decay_factor": 0.1, "norm_coefficient": 0.01}],
}  # fmt: skip
CASES = [
    (operator, options, count)
    for operator in OPERATORS.values()
    for options in OPTIONS.get(operator.op_type, [{}])
    for count in (1, 7)
]
FULL = {"loss_scale": 8.0, "gradient_norm": 20.0, "update_signal": True}


def build(operator: OperatorSchema, options: dict[str, Any], present: set[str], path: Any) -> Any:
    """A file that holds one node, its operands as inputs and its results as outputs."""
    weights = 1 if operator.arrangement is Arrangement.SINGLE else len(SHAPES)
    sequence = operator.arrangement is Arrangement.SEQUENCE
    nodes, inputs, outputs = [], [], []
    scalar_types = {"count": 7, "update_signal": 9}
    scalars = {}
    for slot in operator.inputs:
        if not slot.each and (not slot.optional or slot.name in present):
            scalars[slot.name] = slot.name
            inputs.append(helper.make_tensor_value_info(slot.name, scalar_types.get(slot.name, 1), [1]))
    tables: list[dict[str, str]] = [{} for _ in range(weights)]
    news: list[dict[str, str]] = [{} for _ in range(weights)]
    for place in range(weights):
        for slot in operator.inputs:
            if slot.each and (not slot.optional or slot.name in present):
                tables[place][slot.name] = f"{slot.name}{place}"
                kind = 10 if slot.name == "narrow_weight" else 1
                inputs.append(helper.make_tensor_value_info(f"{slot.name}{place}", kind, SHAPES[place]))
        for slot in operator.outputs:
            if slot.each and (slot.name != "new_narrow_weight" or "narrow_weight" in present):
                news[place][slot.name] = f"{slot.name}{place}"
                kind = 10 if slot.name == "new_narrow_weight" else 1
                outputs.append(helper.make_tensor_value_info(f"{slot.name}{place}", kind, SHAPES[place]))
    results = {slot.name: slot.name for slot in operator.outputs if not slot.each}
    if "count" not in scalars:
        results.pop("new_count", None)
    for name in results:
        outputs.append(helper.make_tensor_value_info(name, 7 if name == "new_count" else 9, [1]))
    given, made, after = tables, news, []
    if sequence:
        given = [{slot: f"all_{slot}" for slot in tables[0]}]
        made = [{slot: f"all_{slot}" for slot in news[0]}]
        for slot, name in given[0].items():
            nodes.append(helper.make_node("SequenceConstruct", [table[slot] for table in tables], [name]))
        for slot, name in made[0].items():
            for place, table in enumerate(news):
                nodes_at = f"{slot}_at{place}"
                after.append(helper.make_node("Constant", [], [nodes_at], value_int=place))
                after.append(helper.make_node("SequenceAt", [name, nodes_at], [table[slot]]))
    names = operator.arrange(operator.inputs, scalars, given)
    shown = operator.arrange(operator.outputs, results, made)
    nodes.append(helper.make_node(operator.op_type, names, shown, domain=operator.domain, name="it", **options))
    graph = helper.make_graph([*nodes, *after], "one", inputs, outputs)
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid(operator.domain, 1)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=10), path)
    return tables, news, results


def settled(operator: OperatorSchema, options: dict[str, Any], place: int) -> dict[str, Any]:
    values = operator.resolve_attributes("it", options, len(SHAPES))
    return {key: value[place] if key in operator.lists else value for key, value in values.items()}


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize(
    ("operator", "options", "count"), CASES, ids=lambda each: getattr(each, "op_type", str(each)).replace(" ", "")
)
def test_a_body_is_its_formula(operator, options, count, full, tmp_path):
    optional = {slot.name for slot in operator.inputs if slot.optional}
    if full and not optional:
        pytest.skip("nothing is optional")
    present = optional if full else set()
    if operator.op_type == "LambOptimizer" and not full and count == 7:
        present = {"count"}
    tables, news, results = build(operator, options, present, tmp_path / "one.onnx")
    generator = np.random.default_rng(count)
    graph = load(tmp_path / "one.onnx")
    feeds: dict[str, Any] = {}
    scalars: dict[str, Any] = {"rate": 0.01, "count": count} | {k: v for k, v in FULL.items() if k in present}
    for name, type in graph.inputs.items():
        if name in scalars:
            feeds[name] = np.full(type.dims, scalars[name], {"int64": np.int64, "bool": bool}.get(type.dtype, "f4"))
        else:
            value = generator.standard_normal(type.dims)
            value = np.abs(value) * 0.1 if "moment" in name else value
            feeds[name] = value.astype(np.float16 if "narrow" in name else np.float32)
    expanded = expand(graph)
    assert {node.domain for node in expanded.nodes} == {""}
    made = run_graph(graph, feeds)
    if "count" not in feeds:
        scalars.pop("count")
    formula = FORMULAS[operator.domain, operator.op_type]
    for place, (table, new) in enumerate(zip(tables, news)):
        old = {slot: feeds[name].astype(np.float64) for slot, name in table.items()}
        wanted = formula(old, scalars, settled(operator, options, place))
        for slot, name in new.items():
            if slot == "new_narrow_weight":
                assert np.array_equal(made[name], made[new["new_weight"]].astype(np.float16))
                continue
            before = old.get(slot.removeprefix("new_"), 0.0)
            change = np.abs(wanted[slot] - before)
            assert np.all(np.abs(made[name] - wanted[slot]) <= 2e-6 + 2e-5 * change), slot
            if slot != "new_gradient":
                assert change.max() > 1e-4
    for name in results:
        assert made[name].shape == (1,)
        assert made[name].item() == (scalars["count"] + 1 if name == "new_count" else True)


@pytest.mark.parametrize(
    "operator", [each for each in OPERATORS.values() if any(slot.name == "update_signal" for slot in each.inputs)],
    ids=lambda each: each.op_type,
)  # fmt: skip
def test_a_signal_that_is_off_changes_nothing(operator, tmp_path):
    present = {slot.name for slot in operator.inputs if slot.optional}
    tables, news, results = build(operator, {}, present, tmp_path / "one.onnx")
    graph = load(tmp_path / "one.onnx")
    feeds = {}
    for place, (name, type) in enumerate(graph.inputs.items()):
        dtype = {"int64": np.int64, "bool": bool, "float16": np.float16}.get(type.dtype, np.float32)
        feeds[name] = np.full(type.dims, False if dtype is bool else 0.25 * (place + 4), dtype)
    made = run_graph(graph, feeds)
    for table, new in zip(tables, news):
        for slot, name in new.items():
            old = table[slot.removeprefix("new_")]
            assert np.array_equal(made[name], feeds[old]), slot
    for name in results:
        assert made[name].item() == (feeds["count"].item() if name == "new_count" else False)


@pytest.mark.parametrize(
    "operator", [each for each in OPERATORS.values() if each.domain != "com.microsoft"], ids=lambda each: each.op_type
)
def test_onnx_itself_agrees(operator, tmp_path):
    """onnx's reference evaluator runs its own optimizers, function or not."""
    from onnx.reference import ReferenceEvaluator

    options = OPTIONS[operator.op_type][-1]
    build(operator, options, set(), tmp_path / "one.onnx")
    graph = load(tmp_path / "one.onnx")
    generator = np.random.default_rng(0)
    feeds = {
        name: np.full(type.dims, 3, np.int64) if name == "count" else generator.random(type.dims).astype("f4")
        for name, type in graph.inputs.items()
    }
    wanted = ReferenceEvaluator(onnx.load(tmp_path / "one.onnx")).run(None, feeds)
    for value, made in zip(wanted, run_graph(graph, feeds).values()):
        np.testing.assert_allclose(made, value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("key", "given", "message"),
    [
        ((MICROSOFT, "AdamWOptimizer"), {"alpha": "x"}, "AdamWOptimizer 'o': alpha is 'x', and must be a number"),
        ((MICROSOFT, "AdamWOptimizer"), {"adam_mode": 1.5}, "adam_mode is 1.5, and must be a whole number"),
        ((MICROSOFT, "AdamWOptimizer"), {"beta": [0.9]}, r"beta is \[0.9\], and must be a number"),
        ((MICROSOFT, "LambOptimizer"), {"alpha": ["x"]}, r"alpha is \['x'\], and must be a number"),
        ((PREVIEW, "Momentum"), {"alpha": 0.9, "beta": 1.0, "norm_coefficient": 0.0, "mode": 1}, "mode is 1, and must"),
    ],
)
def test_attributes_of_another_type_are_refused(key, given, message):
    with pytest.raises(InputError, match=message) as caught:
        OPERATORS[key].resolve_attributes("o", given, 1)
    assert caught.value.hints
