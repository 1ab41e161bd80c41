"""Operators with no fact but the call of PyTorch: draws, sequences, numbers of few bits, signals."""

from __future__ import annotations

from gopt.operators.calls import draws, quantise, sequences, signals
from gopt.operators.operator import Operator
from gopt.operators.torch_call import TYPES, numbers

OPERATORS = (
    Operator("RandomUniform", torch=draws.random_uniform),
    Operator("RandomUniformLike", torch=draws.random_uniform),
    Operator("RandomNormal", torch=draws.random_normal),
    Operator("RandomNormalLike", torch=draws.random_normal),
    Operator("Bernoulli", torch=draws.bernoulli),
    Operator("Multinomial", torch=draws.multinomial),
    Operator("SequenceEmpty", torch=lambda t, a: []),
    Operator("SequenceConstruct", torch=lambda t, a, *items: list(items)),
    Operator("SequenceAt", settings=(1,), torch=lambda t, a, items, at: items[int(numbers(at)[0])]),
    Operator("SequenceInsert", settings=(2,), torch=sequences.inserted),
    Operator("SequenceErase", settings=(1,), torch=sequences.erased),
    Operator("SequenceLength", torch=lambda t, a, items: t.tensor(len(items), device="cpu")),
    Operator("SplitToSequence", settings=(1,), torch=sequences.parts),
    Operator("ConcatFromSequence", torch=sequences.joined),
    Operator("Optional", torch=lambda t, a, value=None: value),
    Operator("OptionalGetElement", torch=lambda t, a, value: value),
    Operator("OptionalHasElement", torch=lambda t, a, value=None: t.tensor(value is not None, device="cpu")),
    Operator("DynamicQuantizeLinear", torch=quantise.quantise_by_range),
    Operator("MatMulInteger", torch=signals.product_of_steps),
    Operator("BlackmanWindow", settings=(0,), torch=signals.window("blackman_window")),
    Operator("HammingWindow", settings=(0,), torch=signals.window("hamming_window", alpha=25 / 46, beta=21 / 46)),
    Operator("HannWindow", settings=(0,), torch=signals.window("hann_window")),
    Operator("GridSample", torch=signals.grid_sample),
    Operator("EyeLike", torch=signals.identity),
    Operator("TensorScatter", torch=signals.written),
    Operator("Det", torch=signals.determinant),
    Operator("SwiGLU", torch=lambda t, a, x, y: x * t.sigmoid(a.get("alpha", 1.0) * x) * y),
    Operator("BitCast", torch=lambda t, a, x: x.view(getattr(t, TYPES[a["to"]]))),
)
