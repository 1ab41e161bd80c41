"""A model of the forward alone, beside the same network written by hand as it is evaluated."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from gopt.cli.main import main
from helpers import FIXTURES

import gopt
from gopt.errors import InputError, OptionError, UnsupportedError
from gopt.ir.load import load
from gopt.offline.inference.batch_norm import evaluated
from gopt.offline.inference.forward_subgraph import ForwardSubgraph
from gopt.offline.inference.write import merge_inference

RNG = np.random.default_rng(3)


def ranks_of(model: Path, folder: Path, ranks: int = 2) -> Path:
    gopt.shard(gopt.load(model), ranks).write(folder)
    return folder


def trained(folder: Path, data: dict[str, np.ndarray], steps: int) -> Path:
    np.savez(folder.parent / "data.npz", **data)
    asked = ["run", str(folder), "--data", str(folder.parent / "data.npz"), "--steps", str(steps), "--set", "lr=0.05"]
    assert main([*asked, "--checkpoint", str(folder.parent / "ckpt")]) == 0
    return folder.parent / "ckpt" / f"step_{steps:08d}"


def states(path: Path) -> dict[str, np.ndarray]:
    from gopt.offline.folder_contents import read_folder

    return {name: tensor.numpy() for name, tensor in read_folder(path).graph.initializers.items()}


def ran(model: str | Path, **feeds: np.ndarray) -> list[np.ndarray]:
    onnx.checker.check_model(str(model), full_check=True)
    return onnxruntime.InferenceSession(str(model), providers=["CPUExecutionProvider"]).run(None, feeds)


CNN = """
<ir_version: 8, opset_import: ["" : 18]>
cnn (float[8,1,8,8] x, float[8,1,3,3] w1, float[8] g1, float[8] b1, float[8] m1, float[8] v1, float[16,8,3,3] w2,
     float[16] c2, float[16] g2, float[16] b2, float[16] m2, float[16] v2, float[10,256] w, float[10] b) =>
    (float[8,10] y) {
    conv1 = Conv<pads=[1,1,1,1]>(x, w1)
    norm1 = BatchNormalization<epsilon=0.00001>(conv1, g1, b1, m1, v1)
    relu1 = Relu(norm1)
    pool = MaxPool<kernel_shape=[2,2], strides=[2,2]>(relu1)
    conv2 = Conv<pads=[1,1,1,1]>(pool, w2, c2)
    relu2 = Relu(conv2)
    norm2 = BatchNormalization<epsilon=0.00001>(relu2, g2, b2, m2, v2)
    flat = Flatten(norm2)
    y = Gemm<transB=1>(flat, w, b)
}"""


def test_batch_norm_reads_the_running_statistics_of_a_checkpoint(tmp_path):
    folder = ranks_of(FIXTURES / "cnn_sgd.onnx", tmp_path / "cnn.ranks")
    data = {"x": RNG.standard_normal((64, 1, 8, 8), np.float32) * 2 + 1, "y": RNG.integers(0, 10, 64)}
    checkpoint = trained(folder, data, 4)
    found = merge_inference(checkpoint, tmp_path / "model.onnx", outputs=["addmm"])
    assert found.inputs == ("x",) and found.outputs == ("addmm",) and len(found.running) == 4
    held = states(checkpoint)
    names = [
        f"{layer}.{part}" for layer in ("bn1", "bn2") for part in ("weight", "bias", "running_mean", "running_var")
    ]
    assert np.abs(held["bn1.running_mean"]).max() > 1e-3, "statistics at their start show nothing"
    names = ["conv1.weight", *names[:4], "conv2.weight", "conv2.bias", *names[4:], "fc.weight", "fc.bias"]
    by_hand = onnx.parser.parse_model(CNN)
    onnx.save(by_hand, tmp_path / "hand.onnx")
    inputs = [each.name for each in by_hand.graph.input]
    x = data["x"][:8]
    (expected,) = ran(tmp_path / "hand.onnx", **dict(zip(inputs, [x, *(held[name] for name in names)])))
    (result,) = ran(tmp_path / "model.onnx", x=x)
    np.testing.assert_allclose(result, expected, rtol=2e-5, atol=2e-5)
    (other,) = ran(tmp_path / "model.onnx", x=np.concatenate([x[:1], x[:1] * 0, x[2:] * 9]))
    np.testing.assert_allclose(other[0], result[0], rtol=1e-5, atol=1e-5)  # a row does not depend on the others


@pytest.mark.parametrize("name", ["dropout_mlp", "dropout_mlp_random"])
def test_dropout_passes_values_on(name, tmp_path):
    folder = ranks_of(FIXTURES / "real" / f"{name}.onnx", tmp_path / "ranks")
    found = merge_inference(folder, tmp_path / "model.onnx", outputs=["v61"])
    assert found.inputs == ("x",) and set(found.dropped) == {"draw_0", "draw_1"}
    held, x = states(folder), RNG.standard_normal((8, 6), np.float32)
    expected = x
    for layer in "036":
        expected = expected @ held[f"{layer}.weight"].T + held[f"{layer}.bias"]
        expected = np.maximum(expected, 0) if layer != "6" else expected
    np.testing.assert_allclose(ran(tmp_path / "model.onnx", x=x)[0], expected, rtol=1e-5, atol=1e-6)


def changed(model: str, constant: str, factor: float, path: Path) -> Path:
    """A fixture with another value of one constant."""
    proto = onnx.load(FIXTURES / model)
    for each in proto.graph.initializer:
        if each.name == constant:
            each.CopyFrom(onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(each) * np.float32(factor), constant))
            break
    else:
        raise AssertionError(f"{model} has no {constant}")
    onnx.save(proto, path)
    return path


def test_a_mask_of_another_scale_is_no_dropout(tmp_path):
    """What stays random is refused where nodes draw; where inputs do, the model asks for them."""
    model = changed("real/dropout_mlp_random.onnx", "c39", 1.5, tmp_path / "random.onnx")
    folder = ranks_of(model, tmp_path / "random")
    with pytest.raises(UnsupportedError, match="draws random numbers"):
        merge_inference(folder, tmp_path / "m.onnx", outputs=["v61"])
    assert not (tmp_path / "m.onnx").exists()
    model = changed("real/dropout_mlp.onnx", "c39", 1.5, tmp_path / "given.onnx")
    found = merge_inference(ranks_of(model, tmp_path / "given"), tmp_path / "m.onnx", outputs=["v61"])
    assert found.inputs == ("x", "draw_0") and found.dropped == ("draw_1",)


def test_a_statistic_that_is_no_moving_average_is_refused(tmp_path):
    folder = ranks_of(changed("cnn_sgd.onnx", "val_29", 3, tmp_path / "odd.onnx"), tmp_path / "ranks")
    with pytest.raises(UnsupportedError, match=r"bn1.running_var.*of the batch's part"):
        merge_inference(folder, tmp_path / "m.onnx", outputs=["addmm"])
    assert not (tmp_path / "m.onnx").exists()


NORMS = """
<ir_version: 8, opset_import: ["" : 18]>
norms (float[4,3,2,2] x, float[3] g, float[3] b, float[3] m, float[3] v) => (float[4,3,2,2] y, float[3] m2, float[3] v2)
{
    y, m2, v2 = BatchNormalization<training_mode=1, momentum=0.9>(x, g, b, m, v)
}"""


def test_the_batch_norm_operator_is_evaluated(tmp_path):
    onnx.save(onnx.parser.parse_model(NORMS), tmp_path / "norms.onnx")
    graph = load(tmp_path / "norms.onnx")
    (node,) = evaluated(ForwardSubgraph.of(graph, ["y"], ["x"]), [("m", "m2"), ("v", "v2")])
    assert node.outputs == ["y"] and node.inputs == ["x", "g", "b", "m", "v"] and not node.attributes


ANY_SIZE = """
<ir_version: 8, opset_import: ["" : 18]>
any_size (float[n,3] x, float[3] m) => (float[n,3] y, float[3] m2)
<int64[1] axes = {0}, float one = {1.0}, float keep = {0.9}, float take = {0.1}>
{
    size = Shape<end=1>(x)
    scalar = Squeeze(size)
    count = Cast<to=1>(scalar)
    total = ReduceSum<keepdims=0>(x, axes)
    mean = Div(total, count)
    y = Sub(x, mean)
    less = Sub(count, one)
    ratio = Div(count, less)
    unbiased = Mul(mean, ratio)
    old = Mul(m, keep)
    new = Mul(unbiased, take)
    m2 = Add(old, new)
}"""


def test_the_number_of_samples_is_no_statistic_of_the_batch(tmp_path):
    onnx.save(onnx.parser.parse_model(ANY_SIZE), tmp_path / "any.onnx")
    subgraph = ForwardSubgraph.of(load(tmp_path / "any.onnx"), ["y"], ["x"])
    (node,) = evaluated(subgraph, [("m", "m2")])
    assert node.outputs == ["mean"] and node.inputs[0] == "m"


def test_what_cannot_be_written_is_said(tmp_path):
    folder = ranks_of(FIXTURES / "mlp_adamw.onnx", tmp_path / "ranks")
    with pytest.raises(OptionError, match="no output beside its loss") as raised:
        merge_inference(folder, tmp_path / "m.onnx")
    assert any("last product" in hint for hint in raised.value.hints)
    with pytest.raises(OptionError, match="computes no value 'nothing'"):
        merge_inference(folder, tmp_path / "m.onnx", outputs=["nothing"])
    gradient = next(iter(gopt.load(FIXTURES / "mlp_adamw.onnx").training.gradients.values()))
    with pytest.raises(OptionError, match="computed from gradients"):
        merge_inference(folder, tmp_path / "m.onnx", outputs=[gradient])
    bare = onnx.load(FIXTURES / "mlp_adamw.onnx")
    names = {each.name for each in bare.graph.input}
    kept = [each for each in bare.graph.initializer if each.name not in names]
    del bare.graph.initializer[:]
    bare.graph.initializer.extend(kept)
    onnx.save(bare, tmp_path / "bare.onnx")
    with pytest.raises(InputError, match="has no value"):
        merge_inference(ranks_of(tmp_path / "bare.onnx", tmp_path / "bare"), tmp_path / "m.onnx", outputs=["loss"])


def test_the_command(tmp_path, capsys):
    folder, model = ranks_of(FIXTURES / "cnn_sgd.onnx", tmp_path / "ranks"), str(tmp_path / "m.onnx")
    assert main(["merge", str(folder), "--inference", "-o", model, "--output", "addmm", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["inputs"] == ["x"] and record["outputs"] == ["addmm"] and len(record["running"]) == 4
    assert main(["merge", str(folder), "--inference", "-o", model, "--output", "addmm"]) == 2  # it exists
    assert main(["merge", str(folder), "--inference", "-o", model, "--output", "addmm", "--force"]) == 0
    assert "batch statistics are replaced by running statistics" in capsys.readouterr().out
    assert main(["merge", str(folder), "--output", "addmm", "-o", model, "--force"]) == 2
    assert main(["merge", str(folder), "--inference", "--state-dict", model]) == 2
