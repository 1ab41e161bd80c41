"""Chains of functions under means and sums of losses: never a false word on how the gradients combine.

Constants of the functions' derivatives often equal one over the samples or the sizes: a half of a root with two
samples, a sixth of a hard swish with six. A mean is told to be exact; a sum may be doubted where such a constant stands
in it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper, parser
from products import part

import gopt
from gopt.artifact.open_couplings import open_couplings

pytest.importorskip("onnx_ad", reason="needs pip install 'gopt[derive]'")

FUNCTIONS = (
    "Gelu", 'Gelu<approximate = "tanh">', "Celu<alpha = 2.0>", "Celu", "Mish", "HardSwish", "HardSigmoid",
    "HardSigmoid<alpha = 0.25>", "Elu", "Selu", "Softplus", "Softsign", "Tanh", "Sigmoid", "Erf", "Relu", "Sin",
    "Atan", "LeakyRelu<alpha = 0.1>", "LogSoftmax", "Softmax", "Mul", "Div", "MatMul", "LayerNormalization", "Sqrt",
)  # fmt: skip
LOSSES = {
    "square": "u = Mul({0}, {0})",
    "squared difference": "d = Sub({0}, y) u = Mul(d, d)",
    "linear": "u = Identity({0})",
    "weighted": "u = Mul({0}, y)",
    "absolute": "d = Sub({0}, y) u = Abs(d)",
    "half": "d = Sub({0}, y) g = Mul(d, d) c = Constant<value = float {{0.5}}>() u = Mul(c, g)",
    "huber": "d = Sub({0}, y) g = Mul(d, d) c = Constant<value = float {{1.0}}>() e = Add(g, c) u = Sqrt(e)",
}
REDUCTIONS = {
    "mean": "loss = ReduceMean<keepdims = 0>(u)",
    "sum": "loss = ReduceSum<keepdims = 0>(u)",
    "mean of rows": "one = Constant<value_ints = [1]>() s = ReduceSum<keepdims = 0>(u, one) "
                    "loss = ReduceMean<keepdims = 0>(s)",
    "weighted mean": "m = ReduceMean<keepdims = 0>(u) f = Constant<value = float {0.3}>() loss = Mul(m, f)",
}  # fmt: skip


def forward(seed: int, batches: Sequence[int] = (2, 3, 4, 5, 6, 8)) -> tuple[onnx.ModelProto, str]:
    """A chain of one to four functions behind a product, and how its loss is reduced over the samples."""
    generator = np.random.default_rng(seed)
    samples, width = int(generator.choice(batches)), int(generator.integers(1, 5))
    nodes, last, shapes = ["o = MatMul(x, w)"], "o", {"w": (3, width)}
    for place in range(generator.integers(1, 5)):
        function, result = str(generator.choice(FUNCTIONS)), f"h{place}"
        operands = last
        if function == "MatMul":
            operands, shapes[f"v{place}"] = f"{last}, v{place}", (width, width)
        elif function == "LayerNormalization":
            operands = f"{last}, s{place}, b{place}"
            shapes |= {f"s{place}": (width,), f"b{place}": (width,)}
        elif function in ("Mul", "Div"):
            factor = _factor(generator, samples)
            nodes.append(f"c{place} = Constant<value = float {{{factor!r}}}>()")
            operands = f"{last}, c{place}"
        elif function == "Sqrt":
            nodes.append(f"e{place} = Exp({last})")
            operands = f"e{place}"
        nodes.append(f"{result} = {function}({operands})")
        last = result
    reduction = str(generator.choice(list(REDUCTIONS)))
    nodes += [LOSSES[str(generator.choice(list(LOSSES)))].format(last), REDUCTIONS[reduction]]
    inputs = f"float[{samples},3] x, float[{samples},{width}] y"
    text = f'<ir_version: 10, opset_import: ["" : 21]> f ({inputs}) => (float loss) {{ {" ".join(nodes)} }}'
    model = parser.parse_model(text)
    for name, shape in shapes.items():
        value = generator.standard_normal(shape).astype(np.float32)
        model.graph.initializer.append(numpy_helper.from_array(value, name))
    return model, reduction


def _factor(generator: np.random.Generator, samples: int) -> float:
    """A constant of the model that neither divides by the samples nor multiplies by them, as a mean or a sum would."""
    apart = (c for c in (0.5, 0.25, 2.0, 3.0, 1 / 3, 0.1) if not {c * samples * n for n in range(1, 5)} & {1.0})
    return float(generator.choice([c for c in apart if c / samples not in (1.0, 2.0, 3.0, 4.0)]))


def _notes(model: onnx.ModelProto, loss: str, folder: Path) -> tuple[set[str], set[str]] | None:
    """Rules that notes call exact, and kinds of notes; None for a forward that is not derived.

    Where ``loss`` is not "loss", it is not shown: the step shows "loss" alone.
    """
    onnx.save(model, str(folder / "forward.onnx"))
    options = gopt.DeriveOptions(loss=loss, optimizer="sgd")
    try:
        gopt.derive(folder / "forward.onnx", folder / "step.onnx", options, force=True)
    except gopt.GoptError:
        return None
    step = onnx.load(str(folder / "step.onnx"))
    shown = [value for value in step.graph.output if value.name == "loss" or value.name != loss]
    del step.graph.output[:]
    step.graph.output.extend(shown)
    del step.metadata_props[:]
    onnx.save(step, str(folder / "shown.onnx"))
    notes = open_couplings(gopt.shard(gopt.load(folder / "shown.onnx"), "shard=2").program)
    rules = {rule for note in notes for rule in re.findall(r"--loss-reduction (\S+) is exact$", note.exact)}
    return rules, {note.kind.value for note in notes}


def told(seed: int, folder: Path) -> str:
    """Return "right", "doubt" or "false"; "refused" for a step that is not derived."""
    model, reduction = forward(seed)
    notes = _notes(model, "loss", folder)
    if notes is None or notes == (({"sum"}, {"summed_loss"}) if reduction == "sum" else (set(), set())):
        return "refused" if notes is None else "right"
    return "doubt" if "unknown" in notes[1] and reduction == "sum" else f"false: {reduction}, {notes}"


def told_apart(seed: int, backward: str, folder: Path) -> str:
    """As ``told``, of a step that shows a mean beside the backward of a sum, or the other way round. No constant of a
    function's derivative is one over such a batch: with 2 samples the half of a root would be a mean's."""
    model, _ = forward(seed, (7, 11, 13))
    ends = next(place for place, node in enumerate(model.graph.node) if "u" in node.output)
    del model.graph.node[ends + 1 :], model.graph.output[:]
    other = "ReduceMean" if backward == "ReduceSum" else "ReduceSum"
    for operator, name in ((backward, "total"), (other, "loss")):
        model.graph.node.append(helper.make_node(operator, ["u"], [name], keepdims=0))
        model.graph.output.append(helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, []))
    notes = _notes(model, "total", folder)
    if notes is None:
        return "refused"
    right = notes[0] == {"sum"} if backward == "ReduceSum" else not notes[1]
    return "right" if right else "doubt" if "unknown" in notes[1] else f"false: {backward}, {notes}"


@pytest.mark.parametrize("backward", ["ReduceSum", "ReduceMean"])
def test_no_false_word_on_a_chain_behind_what_is_shown(backward: str, tmp_path: Path) -> None:
    found = [told_apart(seed, backward, tmp_path) for seed in range(5000, 5020)]
    assert not [verdict for verdict in found if verdict.startswith("false")]
    assert "right" in found


@pytest.mark.parametrize("seeds", part([range(first, first + 10) for first in range(0, 80, 10)], 4), ids=str)
def test_no_false_word_on_a_chain(seeds: range, tmp_path: Path) -> None:
    found = [told(seed, tmp_path) for seed in seeds]
    assert not [verdict for verdict in found if verdict.startswith("false")]
    assert found.count("right") >= 4


@pytest.mark.slow
@pytest.mark.parametrize("seeds", [range(first, first + 50) for first in range(1000, 3000, 50)], ids=str)
def test_no_false_word_on_many_chains(seeds: range, tmp_path: Path) -> None:
    assert not [verdict for seed in seeds if (verdict := told(seed, tmp_path)).startswith("false")]


@pytest.mark.slow
@pytest.mark.parametrize("backward", ["ReduceSum", "ReduceMean"])
@pytest.mark.parametrize("seeds", [range(first, first + 50) for first in range(6000, 6500, 50)], ids=str)
def test_no_false_word_on_many_chains_behind_what_is_shown(seeds: range, backward: str, tmp_path: Path) -> None:
    assert not [verdict for seed in seeds if (verdict := told_apart(seed, backward, tmp_path)).startswith("false")]
