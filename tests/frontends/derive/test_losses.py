"""Attached losses and their gradients beside NumPy's, and NumPy's beside PyTorch's where it is installed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from derive_cases import DerivedRun
from onnx import helper, numpy_helper

from gopt.frontends.derive.derive import derive
from gopt.frontends.derive.losses import LOSSES
from gopt.frontends.derive.options import DeriveOptions

RANDOM = np.random.default_rng(4)
IGNORED = -100
CROSS_ENTROPIES = {
    "plain": ((6, 5), None, {}),
    "ignores": ((6, 5), None, {"ignore_index": IGNORED}),
    "ignores a class": ((6, 5), None, {"ignore_index": 2}),
    "smooth": ((6, 5), None, {"label_smoothing": 0.2}),
    "both": ((6, 5), None, {"ignore_index": IGNORED, "label_smoothing": 0.1}),
    "tokens": ((2, 3, 5), -1, {"ignore_index": IGNORED, "label_smoothing": 0.1}),
    "images": ((2, 5, 3), 1, {"ignore_index": IGNORED, "label_smoothing": 0.1}),
}


def with_offsets(
    shape: tuple[int, ...], dtype: type = np.float32, last: tuple[str, dict[str, int]] | None = None
) -> onnx.ModelProto:
    """x + w: the gradient by w is that by the prediction. ``last``: an operator behind it, with attributes."""
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    nodes = [helper.make_node("Add", ["x", "w"], ["y"])]
    if last:
        nodes.append(helper.make_node(last[0], ["y"], ["z"], **last[1]))
    graph = helper.make_graph(
        nodes, "offsets", [helper.make_tensor_value_info("x", kind, shape)],
        [helper.make_tensor_value_info("z" if last else "y", kind, shape)],
        [numpy_helper.from_array((RANDOM.standard_normal(shape) * 0.5).astype(dtype), "w")],
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


def stepped(
    model: onnx.ModelProto, folder: Path, feeds: dict[str, np.ndarray], **options: object
) -> tuple[float, np.ndarray]:
    """The loss, and the gradient by w: what a step of SGD with a rate of one takes from it."""
    onnx.save(model, folder / "m.onnx")
    derive(folder / "m.onnx", folder / "s.onnx", DeriveOptions(optimizer="sgd", lr=1.0, **options))
    run = DerivedRun(folder / "s.onnx")
    before = run.states["w"]
    return run.step(**feeds), before - run.states["w"]


def drawn(shape: tuple[int, ...], axis: int | None, ignored: int | None) -> tuple[np.ndarray, np.ndarray]:
    place = (1 if axis is None else axis) % len(shape)
    labels = RANDOM.integers(0, shape[place], shape[:place] + shape[place + 1 :])
    if ignored is not None:
        labels.reshape(-1)[[0, 3]] = ignored
    return RANDOM.standard_normal(shape).astype(np.float32), labels


def cross_entropy(logits: np.ndarray, labels: np.ndarray, axis: int | None, ignore_index: int | None = None,
                  label_smoothing: float = 0.0) -> tuple[float, np.ndarray]:  # fmt: skip
    """The loss and its gradient by the logits, in float64."""
    place = (1 if axis is None else axis) % logits.ndim
    rows = np.moveaxis(logits.astype(np.float64), place, -1)
    flat, marks = rows.reshape(-1, rows.shape[-1]), labels.reshape(-1)
    counted = np.ones(len(marks), bool) if ignore_index is None else marks != ignore_index
    wanted = np.full(flat.shape, label_smoothing / flat.shape[1])
    wanted[np.arange(len(marks)), np.where(counted, marks, 0)] += 1 - label_smoothing
    shares = np.exp(flat) / np.exp(flat).sum(1, keepdims=True)
    loss = -(wanted * np.log(shares)).sum(1)[counted].mean()
    slopes = np.where(counted[:, None], shares - wanted, 0) / counted.sum()
    return float(loss), np.moveaxis(slopes.reshape(rows.shape), -1, place)


@pytest.mark.parametrize("name", CROSS_ENTROPIES)
def test_cross_entropy_and_its_gradient(name: str, tmp_path: Path):
    shape, axis, options = CROSS_ENTROPIES[name]
    x, labels = drawn(shape, axis, options.get("ignore_index"))
    model = with_offsets(shape)
    loss, slopes = stepped(model, tmp_path, {"x": x, "label": labels}, loss="cross-entropy", class_axis=axis, **options)
    w = numpy_helper.to_array(model.graph.initializer[0])
    wanted, gradient = cross_entropy(x + w, labels, axis, **options)
    assert loss == pytest.approx(wanted, rel=1e-5)
    np.testing.assert_allclose(slopes, gradient, rtol=1e-4, atol=1e-6)


def test_binary_cross_entropy_and_its_gradient(tmp_path: Path):
    model, x = with_offsets((4, 3)), RANDOM.standard_normal((4, 3)).astype(np.float32) * 30
    target = RANDOM.random((4, 3)).astype(np.float32)
    loss, slopes = stepped(model, tmp_path, {"x": x, "target": target}, loss="binary-cross-entropy")
    logits = (x + numpy_helper.to_array(model.graph.initializer[0])).astype(np.float64)
    shares = 1 / (1 + np.exp(-logits))
    wanted = (np.logaddexp(0, logits) - target * logits).mean()
    assert loss == pytest.approx(wanted, rel=1e-5)
    np.testing.assert_allclose(slopes, (shares - target) / 12, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("label", [-1, -100, 5])
def test_a_label_that_is_no_class_ends_the_run(label: int, tmp_path: Path):
    """-1 would count from the last class."""
    feeds = {"x": np.zeros((6, 5), np.float32), "label": np.array([0, 1, label, 2, 3, 4])}
    with pytest.raises(Exception, match="out of data bounds"):
        stepped(with_offsets((6, 5)), tmp_path, feeds, loss="cross-entropy")


def test_many_samples_in_half_precision_are_counted(tmp_path: Path):
    """float16 holds no number above 65504."""
    count = 66_000
    model = with_offsets((count, 2), np.float16)
    model.graph.initializer[0].CopyFrom(numpy_helper.from_array(np.zeros(2, np.float16), "w"))
    feeds = {"x": np.zeros((count, 2), np.float16), "label": np.zeros(count, np.int64)}
    feeds["label"][:100] = IGNORED
    loss, _ = stepped(model, tmp_path, feeds, loss="cross-entropy", ignore_index=IGNORED)
    assert loss == pytest.approx(np.log(2), rel=1e-3)


@pytest.mark.torch
@pytest.mark.parametrize("name", CROSS_ENTROPIES)
def test_numpys_cross_entropy_is_pytorchs(name: str):
    torch = pytest.importorskip("torch")
    shape, axis, options = CROSS_ENTROPIES[name]
    x, labels = drawn(shape, axis, options.get("ignore_index"))
    place = (1 if axis is None else axis) % len(shape)
    logits = torch.tensor(x.astype(np.float64), requires_grad=True)
    loss = torch.nn.functional.cross_entropy(logits.movedim(place, 1), torch.tensor(labels), **options)
    loss.backward()
    wanted, slopes = cross_entropy(x, labels, axis, **options)
    assert float(loss.detach()) == pytest.approx(wanted, rel=1e-9)
    np.testing.assert_allclose(logits.grad.numpy(), slopes, rtol=1e-6, atol=1e-12)


def test_every_loss_is_compared():
    assert set(LOSSES) == {"cross-entropy", "binary-cross-entropy", "mse"}  # mse: with every optimizer
