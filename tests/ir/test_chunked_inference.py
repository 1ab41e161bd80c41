"""Types of a graph that is checked in chunks, beside those of the same graph checked as a whole."""

from pathlib import Path

import onnx
import pytest
from onnx import helper

from gopt.errors import GoptError
from gopt.ir import chunked_inference
from gopt.ir.inference import add_types
from gopt.ir.load import load

FIXTURES = Path(__file__).parents[2] / "fixtures"
WHOLE = 10**9
SMALL = ("cnn_mom_fp16", "emb_adamw", "gpt_adamw_clip_sched_fp16", "mlp_adamw_accum", "mlp_adamw_external", "mlp_muon")


@pytest.fixture
def chunks_of(monkeypatch):
    """Sets the nodes of a chunk, and lists what chunks found: types, or None where the whole had to be looked at."""

    def set_nodes(count):
        monkeypatch.setattr(chunked_inference, "CHUNK_NODES", count)
        monkeypatch.setattr(chunked_inference, "WHOLE_NODES", count)
        found.clear()
        return found

    found = []
    real = chunked_inference.types_by_chunk
    monkeypatch.setitem(add_types.__globals__, "types_by_chunk", lambda *args: found.append(real(*args)) or found[-1])
    return set_nodes


def loaded(path):
    """Types of all values, inputs and outputs; or the refusal."""
    try:
        graph = load(path)
    except GoptError as error:
        return str(error), error.hints
    return graph.types, graph.inputs, graph.outputs


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("count", [1, 7])
def test_chunks_find_the_types_of_the_whole(name, count, chunks_of):
    path = FIXTURES / f"{name}.onnx"
    assert chunks_of(WHOLE) == []
    whole = loaded(path)
    found = chunks_of(count)
    assert loaded(path) == whole
    assert found and None not in found


def _wrong_operator(body):
    body.node[9].op_type = "Nope"


def _lost_attribute(body):
    node = next(node for node in body.node if node.op_type == "Cast")
    del node.attribute[:]


def _extra_operand(body):
    node = next(node for node in body.node if node.op_type == "Sqrt")
    node.input.append(node.input[0])


def _wrong_shape(body):
    node = next(node for node in body.node if node.op_type == "MatMul")
    node.input[1] = body.input[0].name


def _wrong_declaration(body):
    del body.value_info[:]
    body.value_info.append(helper.make_tensor_value_info(body.node[5].output[0], onnx.TensorProto.FLOAT, [2, 3, 5, 7]))


def _wrong_output(body):
    body.output[1].type.tensor_type.shape.dim.add().dim_value = 7


def _unknown_domain(body):
    body.node[9].domain = "no.such"


def _nameless_graph(body):
    body.name = ""


DEFECTS = [
    _wrong_operator, _lost_attribute, _extra_operand, _wrong_shape, _wrong_declaration, _wrong_output, _unknown_domain,
    _nameless_graph,
]  # fmt: skip


@pytest.mark.parametrize("plant", DEFECTS)
def test_chunks_refuse_what_the_whole_refuses_in_the_same_words(plant, tmp_path, chunks_of):
    model = onnx.load(FIXTURES / "gpt_adamw.onnx")
    plant(model.graph)
    path = tmp_path / "step.onnx"
    onnx.save(model, path)
    chunks_of(WHOLE)
    whole = loaded(path)
    assert isinstance(whole[0], str)
    found = chunks_of(20)
    assert loaded(path) == whole
    assert found == [None]


def test_open_shapes_are_looked_at_as_a_whole(tmp_path, chunks_of):
    """Names that onnx gives to unknown dimensions would mean another one in each chunk."""
    model = onnx.parser.parse_model(
        """
        <ir_version: 10, opset_import: ["" : 20]>
        step (float[N,2] x, float[M,2] y) => (float[P,2] z) { a = Relu(x)  b = Compress<axis = 0>(a, c)
        d = Relu(y)  z = Concat<axis = 0>(b, d) }""".replace("float[M,2] y)", "float[M,2] y, bool[N] c)")
    )
    path = tmp_path / "open.onnx"
    onnx.save(model, path)
    chunks_of(WHOLE)
    whole = loaded(path)
    found = chunks_of(1)
    assert loaded(path) == whole
    assert found == [None]


def test_a_graph_with_bodies_is_looked_at_as_a_whole(tmp_path, chunks_of):
    model = onnx.parser.parse_model("""
        <ir_version: 10, opset_import: ["" : 20]>
        step (float[2] x, bool c) => (float[2] z) {
            a = Relu(x)
            z = If(c) <then_branch = yes () => (float[2] p) { p = Neg(a) },
                       else_branch = no () => (float[2] q) { q = Abs(a) }>
        }""")
    path = tmp_path / "bodies.onnx"
    onnx.save(model, path)
    chunks_of(WHOLE)
    whole = loaded(path)
    assert chunks_of(1) == []
    assert loaded(path) == whole


def test_constants_of_earlier_chunks_are_known_by_value(tmp_path, chunks_of):
    model = onnx.parser.parse_model("""
        <ir_version: 10, opset_import: ["" : 20]>
        step (float[2,3] x) => (float[6] z) {
            six = Constant<value_int = 6>()
            axes = Constant<value = int64[1] {0}>()
            shape = Unsqueeze(six, axes)
            a = Relu(x)
            flat = Reshape(a, shape)
            z = Relu(flat)
        }""")
    path = tmp_path / "shape.onnx"
    onnx.save(model, path)
    found = chunks_of(1)
    assert load(path).types["flat"].dims == (6,)
    assert None not in found


ALIKE = """
    <ir_version: 10, opset_import: ["" : 20]>
    step (float[2,3] x) => (float[6] p, float[3,2] q, float[1,6] r, float[4] s, float[6] t)
    <int64[2] tall = {3, 2}, int64[2] flat = {1, 6}> {
        six = Constant<value_ints = [6]>()
        one = Constant<value_ints = [-1]>()
        a = Reshape(x, six)
        p = Reshape(x, one)
        q = Reshape(x, tall)
        r = Reshape(x, flat)
        b = Slice(a, zero, four)
        s = Relu(b)
        t = Relu(a)
    }""".replace("flat = {1, 6}>", "flat = {1, 6}, int64[1] zero = {0}, int64[1] four = {4}>")


def test_nodes_that_read_other_shapes_are_not_alike(tmp_path, chunks_of):
    path = tmp_path / "alike.onnx"
    onnx.save(onnx.parser.parse_model(ALIKE), path)
    chunks_of(WHOLE)
    whole = loaded(path)
    found = chunks_of(1)
    assert loaded(path) == whole
    assert found and None not in found


def test_onnx_is_asked_once_of_nodes_that_are_alike(tmp_path, chunks_of, monkeypatch):
    body = "\n".join(f"v{place + 1} = Relu(v{place})" for place in range(50))
    text = f'<ir_version: 10, opset_import: ["" : 20]> step (float[2,3] v0) => (float[2,3] v50) {{ {body} }}'
    path = tmp_path / "chain.onnx"
    onnx.save(onnx.parser.parse_model(text), path)
    asked, real = [], chunked_inference._Chunks.infer
    monkeypatch.setattr(
        chunked_inference._Chunks, "infer", lambda self, nodes, *rest: asked.extend(nodes) or real(self, nodes, *rest)
    )
    chunks_of(1)
    assert {str(kind) for kind in load(path).types.values()} == {"float32[2,3]"}
    assert [node.outputs for node in asked] == [["v1"], ["v50"]]  # of a value, an output


def test_a_chunk_that_onnx_refuses_further_on_is_still_refused(tmp_path, chunks_of):
    model = onnx.parser.parse_model(ALIKE)
    model.graph.node[-1].op_type = "Nope"
    path = tmp_path / "alike.onnx"
    onnx.save(model, path)
    found = chunks_of(1)
    assert "Nope" in loaded(path)[0]
    assert found == [None]
