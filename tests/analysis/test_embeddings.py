"""Tables and their sparse gradients, found in whole steps: what is found is the gradient, and nothing else is found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import onnx
import pytest
from helpers import FIXTURES, run_graph
from onnx import ModelProto, helper
from steps_gen.edits import KINDS, Edited, behind, products_split, renamed, shuffled

import gopt
from gopt.analysis.embeddings import EmbeddingTable, find_embeddings
from gopt.analysis.training import Phase, TrainingGraph

SPARSE = sorted(path.stem for path in (FIXTURES / "sparse").glob("*.onnx"))
SOME = ["dlrm_adagrad", "nce_sgd", "towers_adam", "towers_product_sgd", "tree_softmax_momentum"]


@cache
def step(name: str) -> TrainingGraph:
    folder = FIXTURES / "sparse" if name in SPARSE else FIXTURES
    return gopt.load(folder / f"{name}.onnx").training


def found(training: TrainingGraph) -> dict[str, EmbeddingTable]:
    return {table.parameter: table for table in find_embeddings(training)}


def model_of(name: str) -> ModelProto:
    return onnx.load(FIXTURES / "sparse" / f"{name}.onnx")


def load(model: ModelProto, folder: Path) -> TrainingGraph:
    path = folder / "edited.onnx"
    onnx.save(model, path)
    return gopt.load(path).training


# --- what is found ----------------------------------------------------------------------------------------------------

TABLES = {
    "dlrm_sgd": {"table0": 1, "table1": 1, "table2": 1},
    "dlrm_adagrad": {"table0": 1, "table1": 1, "table2": 1},
    "dlrm_adam": {"table0": 1, "table1": 1, "table2": 1},
    "nce_sgd": {"words": 1, "classes.weight": 2, "classes.bias": 2},
    "sampled_softmax_adagrad": {"words": 1, "classes.weight": 2, "classes.bias": 2},
    "towers_adam": {"items": 2},
    "towers_product_sgd": {"items": 2},
    "tree_softmax_momentum": {"words": 1, "nodes.weight": 1, "nodes.bias": 1},
}
"""Step -> its tables and how often each is looked up."""


@pytest.mark.parametrize("name", SPARSE)
def test_every_table_is_found(name):
    tables = found(step(name))
    assert {table.parameter: len(table.lookups) for table in tables.values()} == TABLES[name]
    for table in tables.values():
        assert table.sparse and table.prefetchable and len(table.terms) == len(table.lookups)
        assert {term.ids for term in table.terms} == {lookup.ids for lookup in table.lookups}
        shape = step(name).graph.types[table.parameter].dims
        assert (table.rows, table.width) == (shape[0], shape[1] if len(shape) > 1 else 1)


def test_padding_is_found():
    assert found(step("dlrm_adam"))["table2"].padding == (0,) and found(step("towers_adam"))["items"].padding == (0,)
    assert found(step("dlrm_adam"))["table0"].padding == ()
    real = gopt.load(FIXTURES / "real" / "tagger_padding.onnx").training
    assert [(table.parameter, table.padding) for table in find_embeddings(real)] == [("words.weight", (0,))]


def test_tables_as_torch_writes_them():
    [table] = find_embeddings(step("emb_adamw"))
    assert table.sparse and (table.rows, table.width, table.lookups[0].ids, table.terms[0].ids) == (40, 16, "x", "x")
    [tied, places] = find_embeddings(step("gpt_adamw"))
    assert tied.why_not == "Transpose node_permute_14 reads all of it"
    assert "its row numbers are constants" in places.why_not and not places.terms and places.update is None


def test_a_parameter_that_is_read_whole_is_no_table():
    assert find_embeddings(step("mlp_adamw")) == ()


# --- the terms are the gradient ---------------------------------------------------------------------------------------


def values_of(training: TrainingGraph, names: list[str], seed: int = 0) -> dict[str, np.ndarray]:
    """What a step makes of a drawn batch, with ids that come several times, and some from the end."""
    graph, generator = training.graph, np.random.default_rng(seed)
    tables = find_embeddings(training)
    rows = min(table.rows for table in tables)
    feeds = {}
    for name, type in graph.inputs.items():
        if name not in graph.initializers:
            low = -rows if len(type.dims) == 1 and name == "sample" else 0
            whole = generator.integers(low, 8, type.dims) if type.dtype == "int64" else None
            feeds[name] = generator.random(type.dims).astype(np.float32) if whole is None else whole
    shown = replace(graph, outputs={**graph.outputs, **{name: graph.types[name] for name in names}})
    return {**feeds, **run_graph(shown, feeds)}


@pytest.mark.parametrize("name", [*SPARSE, "emb_adamw"])
def test_rows_added_at_ids_are_the_gradient(name):
    training = step(name)
    tables = find_embeddings(training)
    names = {name for table in tables for term in table.terms for name in (term.ids, term.rows, term.dense)}
    names |= {table.gradient for table in tables}
    names -= training.graph.inputs.keys()
    values = values_of(training, sorted(names))
    for table in tables:
        total = np.zeros(table.rows * table.width, np.float32).reshape(table.rows, table.width)
        for term in table.terms:
            ids, rows = values[term.ids].reshape(-1), values[term.rows].reshape(-1, table.width)
            dense = np.zeros_like(total)
            np.add.at(dense, ids, rows)
            assert np.allclose(dense, values[term.dense].reshape(dense.shape), rtol=1e-6, atol=1e-8)
            assert all(not rows[ids == id].any() for id in term.padding)
            total += dense
        gradient = values[table.gradient].reshape(total.shape)
        assert np.allclose(total, gradient, rtol=1e-5, atol=1e-8) and total.any()


@pytest.mark.parametrize("name", SPARSE)
def test_rows_without_a_gradient_move_where_that_is_said(name):
    training = step(name)
    state_of = training.state_of()
    values = values_of(training, [])
    for table in find_embeddings(training):
        assert table.update is not None and table.update.by_row
        for state in table.update.states:
            old, new = training.graph.initializers[state].numpy(), values[state_of[state].updated]
            untouched = np.arange(table.rows // 2, table.rows) if table.parameter.startswith(("table", "items")) else []
            moved = (old[untouched] != new[untouched]).any()
            assert not len(untouched) or moved == (state in table.update.moved)


# --- what changes nothing changes nothing ---------------------------------------------------------------------------


def told(training: TrainingGraph, edit: Edited) -> list[object]:
    """What is found, by the plain model's names."""
    old = {new: name for name, new in edit.names.items()}

    def first(name: str) -> str:
        name = old.get(name, name)
        return edit.stands_for.get(name, name)

    return [
        (
            first(table.parameter), table.why_not, sorted(first(lookup.ids) for lookup in table.lookups),
            [(first(term.ids), first(term.rows), term.onto, term.padding) for term in table.terms],
            table.update and [first(name) for name in table.update.moved], table.prefetchable,
        )
        for table in find_embeddings(training)
    ]  # fmt: skip


def inner_values(training: TrainingGraph) -> list[str]:
    """Tables, ids, rows, and all that is made of rows on the way to a gradient."""
    names: dict[str, None] = {}
    for table in find_embeddings(training):
        names |= dict.fromkeys([table.parameter, *(lookup.ids for lookup in table.lookups)])
        for term in table.terms:
            names |= dict.fromkeys([term.rows, term.dense, *(n for node in term.nodes for n in node.inputs if n)])
    return [name for name in names if name not in training.graph.initializers or name in training.graph.inputs]


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "mul-one"])
@pytest.mark.parametrize("name", SOME)
def test_nodes_that_change_nothing_change_nothing(name, kind, tmp_path):
    plain, model = step(name), model_of(name)
    update = {node.name for node in plain.graph.nodes if node.phase is Phase.UPDATE}
    edit = behind(model, kind, inner_values(plain), {node.name for node in model.graph.node} - update)
    assert told(load(edit.model, tmp_path), edit) == told(plain, Edited(model, {}, edit.stands_for))


@pytest.mark.parametrize("change", [renamed, shuffled, products_split])
@pytest.mark.parametrize("name", SOME)
def test_names_and_order_change_nothing(name, change, tmp_path):
    edit = change(model_of(name))
    plain = told(step(name), Edited(model_of(name)))
    if change is shuffled:
        assert sorted(map(repr, told(load(edit.model, tmp_path), edit))) == sorted(map(repr, plain))
    else:
        assert told(load(edit.model, tmp_path), edit) == plain


# --- near misses ------------------------------------------------------------------------------------------------------


def edited(name: str, edit: Callable[[ModelProto], None], folder: Path) -> dict[str, EmbeddingTable]:
    model = model_of(name)
    edit(model)
    onnx.checker.check_model(model, full_check=True)
    return found(load(model, folder))


def nodes(model: ModelProto, op_type: str, of: str = "") -> list[onnx.NodeProto]:
    return [node for node in model.graph.node if node.op_type == op_type and (not of or of in node.input)]


def test_a_scatter_without_addition_is_no_sum(tmp_path):
    def edit(model):
        for node in nodes(model, "ScatterND"):
            del node.attribute[:]

    tables = edited("dlrm_sgd", edit, tmp_path)
    assert all("writes rows over each other" in table.why_not for table in tables.values()) and tables


def test_a_scatter_into_something_is_no_sum(tmp_path):
    """Rows are added to a share of the table."""

    def edit(model):
        scatter = nodes(model, "ScatterND")[0]
        model.graph.initializer.append(onnx.numpy_helper.from_array(np.float32(0.01), "share"))
        place = list(model.graph.node).index(scatter)
        model.graph.node.insert(place, helper.make_node("Mul", ["table2", "share"], ["given"], name="given"))
        model.graph.node[place + 1].input[0] = "given"

    tables = edited("dlrm_sgd", edit, tmp_path)
    assert not tables["table2"].sparse and tables["table0"].sparse


def whole_read(model: ModelProto, op_type: str) -> None:
    """Let a sum over all of ``table1`` be ``seen``."""
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.ones((8, 1), np.float32), "ones"))
    reads = ["table1", "ones"] if op_type == "MatMul" else ["table1"]
    model.graph.node.insert(0, helper.make_node(op_type, reads, ["part"], name="part"))
    model.graph.node.insert(1, helper.make_node("ReduceSum", ["part"], ["seen"], name="seen", keepdims=0))


@pytest.mark.parametrize("op_type", ["MatMul", "ReduceSumSquare", "Transpose", "Abs"])
def test_a_table_of_which_the_loss_reads_all_is_none(op_type, tmp_path):
    def edit(model):
        whole_read(model, op_type)
        [loss] = [node for node in model.graph.node if "loss" in node.output]
        loss.CopyFrom(helper.make_node("Add", [loss.input[0], "seen"], ["loss"], name="loss"))

    tables = edited("dlrm_sgd", edit, tmp_path)
    assert tables["table1"].why_not == f"{op_type} part reads all of it" and tables["table0"].sparse


def test_a_metric_of_a_table_belongs_to_its_update(tmp_path):
    def shown(op_type):
        def edit(model):
            whole_read(model, op_type)
            model.graph.output.append(helper.make_tensor_value_info("seen", 1, ()))

        return edited("dlrm_sgd", edit, tmp_path)["table1"].update

    assert shown("ReduceSumSquare").reductions == ("part",) and shown("ReduceSumSquare").by_row
    product = shown("MatMul")
    assert not product.by_row and not product.lazy_is_dense and product.why == "MatMul part takes more than one row"


def test_other_ids_behind_than_in_front_are_none(tmp_path):
    """The ids of another table."""

    def edit(model):
        first, second = (nodes(model, "Gather", name)[0].input[1] for name in ("table0", "table1"))
        nodes(model, "Clip", first)[0].input[0] = second

    tables = edited("dlrm_sgd", edit, tmp_path)
    assert "adds to other rows" in tables["table0"].why_not and tables["table1"].sparse


def test_a_gradient_that_is_shown_is_dense(tmp_path):
    def edit(model):
        scatter = nodes(model, "ScatterND")[0]
        model.graph.output.append(helper.make_tensor_value_info(scatter.output[0], 1, (24, 8)))

    assert "contains all of its gradient" in edited("dlrm_sgd", edit, tmp_path)["table2"].why_not
