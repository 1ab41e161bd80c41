"""Operators with no fact but the call of PyTorch: draws, sequences, numbers of few bits."""

from __future__ import annotations

from gopt.operators.calls import draws, quantise, sequences
from gopt.operators.operator import Operator
from gopt.operators.torch_call import numbers

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
)
