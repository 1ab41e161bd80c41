"""Windows of images on ranks: right folders are proven, wrong halos never, and no cast hides behind a sum of halves."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import onnx
import pytest
from helpers import FIXTURES, calls, edit_ranks
from onnx import ModelProto, NodeProto, helper, numpy_helper
from plants import attribute, replace
from products import part, spread
from verification.proof import image_steps
from verification.proof.window_draws import Windows

import gopt
from gopt.verification.proof.result import ProofVerdict


@pytest.mark.parametrize("seed", part(range(400), 12))
def test_a_drawn_step_on_images_is_never_different_and_equal_where_proven(seed: int, tmp_path: Path) -> None:
    pytest.importorskip("onnx_ad", reason="needs pip install 'gopt[derive]'")
    ranks = image_steps.sharded(seed, tmp_path)
    if ranks is None:
        pytest.skip("gopt derive or gopt shard refuses it")
    proof = gopt.prove(ranks)
    assert proof.verdict is not ProofVerdict.DIFFERENT, proof.open()
    assert not proof.proven or gopt.verify(ranks, steps=1, confirm=False).equal


# --- planted errors ---------------------------------------------------------------------------------------------------


def _made(model: ModelProto, name: str) -> NodeProto:
    return next(node for node in model.graph.node if name in node.output)


def _stored(model: ModelProto, node: NodeProto, place: int, change: Callable[[np.ndarray], np.ndarray]) -> None:
    """Another constant for an operand."""
    old = next(tensor for tensor in model.graph.initializer if tensor.name == node.input[place])
    new = f"{old.name}.planted"
    model.graph.initializer.append(numpy_helper.from_array(change(numpy_helper.to_array(old)), new))
    node.input[place] = new


def _windows(model: ModelProto) -> Iterator[NodeProto]:
    """Rows of own places, places of others and borders."""
    for node in model.graph.node:
        if node.op_type == "Concat" and node.output[0].endswith(".window"):
            yield node


def _received(model: ModelProto) -> Iterator[NodeProto]:
    """Places cut out of the joined strips."""
    for node in model.graph.node:
        if node.op_type == "Slice" and node.input[0].endswith(".joined"):
            yield node


def _zeros(node: NodeProto) -> list[NodeProto]:
    """Zeros in place of a result."""
    old = onnx.NodeProto()
    old.CopyFrom(node)
    old.output[0] += ".was"
    return [old, helper.make_node("Sub", [old.output[0]] * 2, list(node.output))]


def _inner_border(model: ModelProto) -> None:
    """Zeros for the places of a neighbour."""
    node = next(_received(model))
    replace(model, node, _zeros(node))


def _other_row(model: ModelProto) -> None:
    """A row beside the one that is wanted, of the strips of all."""
    node = next(_received(model))
    step = -1 if _constant(model, node.input[1])[0] else 1
    for place in (1, 2):
        _stored(model, node, place, lambda value: value + step)


def _constant(model: ModelProto, name: str) -> np.ndarray:
    return numpy_helper.to_array(next(tensor for tensor in model.graph.initializer if tensor.name == name))


def _own_for_received(model: ModelProto) -> None:
    """An own row for that of the neighbour."""
    for node in _windows(model):
        received = [at for at, name in enumerate(node.input) if _made(model, name) in list(_received(model))]
        own = [name for name in node.input if _made(model, name).op_type == "Slice" and name not in
               {node.input[at] for at in received}]  # fmt: skip
        if received and own:
            cut = _made(model, node.input[received[0]])
            cut.input[0] = _made(model, own[0]).input[0]
            return
    raise AssertionError("no window")


def _turned(model: ModelProto) -> None:
    """A window whose rows are in another order."""
    node = next(_windows(model))
    node.input[:] = list(reversed(node.input))


def _padded(model: ModelProto) -> None:
    """No halo: each rank pads its own places."""
    node = next(each for each in model.graph.node if each.op_type == "Conv" and each.input[0].endswith(".window"))
    window = _made(model, node.input[0])
    own = next(_made(model, name) for name in window.input if _made(model, name).op_type == "Slice"
               and not _made(model, name).input[0].endswith(".joined"))  # fmt: skip
    node.input[0] = own.input[0]
    attribute(node, "pads").ints[:] = [1, 1, 1, 1]


def _zero_border(model: ModelProto) -> None:
    """Another number than zero beside the image."""
    for node in model.graph.node:
        if node.op_type == "ConstantOfShape" and "window" in node.output[0]:
            attribute(node, "value").t.CopyFrom(numpy_helper.from_array(np.ones(1, np.float32)))
            return
    raise AssertionError("no border")


def _half_sum(model: ModelProto) -> None:
    """Terms of places that another rank has are left out."""
    node = next(each for each in model.graph.node if each.op_type == "Sum" and ".sum" in each.output[0])
    del node.input[1:]


def _reduced(how: bytes) -> Callable[[ModelProto], None]:
    def edit(model: ModelProto) -> None:
        for node in calls(model, "AllReduce"):
            if attribute(node, "reduce").s == b"sum" and attribute(node, "group").s == b"h":
                attribute(node, "reduce").s = how

    return edit


def _unreduced(model: ModelProto) -> None:
    node = calls(model, "AllReduce")[-1]
    replace(model, node, [helper.make_node("Identity", [a], [b]) for a, b in zip(node.input, node.output)])


def _places(role: str, change: int) -> Callable[[ModelProto], None]:
    """Places of maxima counted from elsewhere."""

    def edit(model: ModelProto) -> None:
        name = next(tensor.name for tensor in model.graph.initializer if tensor.name.endswith(f"places.own.{role}"))
        tensor = next(tensor for tensor in model.graph.initializer if tensor.name == name)
        tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor) + change, name))

    return edit


def _slid(key: str, value: list[int]) -> Callable[[ModelProto], None]:
    def edit(model: ModelProto) -> None:
        node = next(each for each in model.graph.node if each.op_type == "Conv")
        attribute(node, key).ints[:] = value

    return edit


WRONG: dict[str, Callable[[ModelProto], None]] = {
    "padding on an inner border": _inner_border,
    "a row of another neighbour": _other_row,
    "an own row for a neighbour's": _own_for_received,
    "a window in another order": _turned,
    "no halo": _padded,
    "another border": _zero_border,
    "terms left out": _half_sum,
    "a mean of terms": _reduced(b"mean"),
    "a maximum of terms": _reduced(b"max"),
    "terms that are not reduced": _unreduced,
    "a plane of another length": _places("step", 8),
    "columns padded on one side": _slid("pads", [0, 2, 0, 0]),
    "rows turned": _slid("dilations", [2, 1]),
}


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    home = tmp_path_factory.mktemp("clean")

    def of(name: str, mesh: str) -> Path:
        folder = home / f"{name}.{mesh}"
        if not folder.exists():
            gopt.shard(gopt.load(FIXTURES / f"{name}.onnx"), gopt.Mesh.parse(mesh)).write(folder)
        return folder

    return of


@pytest.mark.parametrize(("wrong", "mesh"), spread(WRONG, ["h=2", "h=3"]))
def test_a_wrong_halo_is_never_proven(wrong: str, mesh: str, clean: Callable[[str, str], Path], tmp_path: Path) -> None:
    right = clean("cnn_sgd", mesh)
    assert gopt.prove(right).proven
    folder = shutil.copytree(right, tmp_path / "out")
    edit_ranks(folder, WRONG[wrong])
    with suppress(gopt.GoptError):  # files that no longer fit are refused
        assert not gopt.prove(folder).proven


# --- rounding ---------------------------------------------------------------------------------------------------------


def test_sums_of_halves_in_float32_are_named(clean: Callable[[str, str], Path]) -> None:
    proof = gopt.prove(clean("cnn_mom_fp16", "h=2"))
    assert proof.proven and list(proof.roundings.values()) == [1, 1]
    assert proof.to_json()["roundings"] == proof.roundings
    assert gopt.prove(clean("cnn_sgd", "h=2")).roundings == {}


def _narrowed(made: str) -> Callable[[ModelProto], None]:
    """A cast to half precision and back in front of the node that makes a value."""

    def edit(model: ModelProto) -> None:
        node = _made(model, made)
        name = node.input[0]
        narrow = helper.make_node("Cast", [name], [f"{name}.narrow"], to=onnx.TensorProto.FLOAT16)
        back = helper.make_node("Cast", [f"{name}.narrow"], [f"{name}.back"], to=onnx.TensorProto.FLOAT)
        node.input[0] = f"{name}.back"
        replace(model, node, [narrow, back, node])

    return edit


def _twice_rounded(model: ModelProto) -> None:
    """A sum of halves, of which a term was rounded by a factor."""
    node = next(each for each in model.graph.node if each.op_type == "Sum" and ".sum" in each.output[0])
    third = helper.make_node("Constant", [], ["planted.third"], value_float=1 / 3)
    half = helper.make_node("Mul", [node.input[0], "planted.third"], ["planted.part"])
    narrow = helper.make_node("Cast", ["planted.part"], ["planted.narrow"], to=onnx.TensorProto.FLOAT16)
    back = helper.make_node("Cast", ["planted.narrow"], ["planted.back"], to=onnx.TensorProto.FLOAT)
    three = helper.make_node("Constant", [], ["planted.three"], value_float=3.0)
    whole = helper.make_node("Mul", ["planted.back", "planted.three"], ["planted.whole"])
    node.input[0] = "planted.whole"
    replace(model, node, [third, half, narrow, back, three, whole, node])


CASTS = {
    "in front of a mean": _narrowed("var"),
    "in front of a sum": _narrowed("sum_11"),
    "in front of a reduction": _narrowed("gopt.tensor-parallel.h.val_20.whole"),
    "in front of a product": _narrowed("mul_6"),
    "of a part of a term": _twice_rounded,
}


@pytest.mark.parametrize("planted", CASTS)
def test_a_cast_elsewhere_is_different(planted: str, clean: Callable[[str, str], Path], tmp_path: Path) -> None:
    folder = shutil.copytree(clean("cnn_mom_fp16", "h=2"), tmp_path / "out")
    edit_ranks(folder, CASTS[planted])
    assert gopt.prove(folder).verdict is ProofVerdict.DIFFERENT


# --- the laws by numbers ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "seed", [*range(150), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(150, 3000))]
)
def test_a_drawn_window_has_the_values_of_its_expression(seed: int, tmp_path: Path) -> None:
    try:
        _, value, expected = Windows(seed).values(tmp_path)
    except (gopt.GoptError, onnx.shape_inference.InferenceError):
        pytest.skip("no such operator")
    np.testing.assert_allclose(value, expected, 1e-9, 1e-9)
