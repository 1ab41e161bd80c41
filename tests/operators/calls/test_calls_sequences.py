"""Sequences by PyTorch, compared with onnx's reference."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx.reference import ReferenceEvaluator

from gopt.operators.table import OPERATORS
from gopt.operators.torch_call import called

pytestmark = pytest.mark.torch
torch = pytest.importorskip("torch")
CHAINS = [
    "s = SequenceConstruct(x, y) r = SequenceAt(s, one)",
    "s = SequenceConstruct(x, y) r = SequenceAt(s, last)",
    "s = SequenceConstruct(x, y) u = SequenceInsert(s, x, one) r = ConcatFromSequence<axis=0>(u)",
    "s = SequenceConstruct(x, y) u = SequenceInsert(s, y) r = ConcatFromSequence<axis=-1, new_axis=1>(u)",
    "e = SequenceEmpty() u = SequenceInsert(e, y) r = SequenceLength(u)",
    "s = SequenceConstruct(x, y, x) u = SequenceErase(s, last) r = ConcatFromSequence<axis=1>(u)",
    "s = SequenceConstruct(x, y, x) u = SequenceErase(s) r = SequenceLength(u)",
    "s = SplitToSequence<axis=1>(x) r = SequenceAt(s, one)",
    "s = SplitToSequence<axis=1, keepdims=0>(x) r = SequenceAt(s, last)",
    "s = SplitToSequence<axis=1>(x, two) r = SequenceAt(s, last)",
    "s = SplitToSequence<axis=1>(x, parts) r = SequenceAt(s, one)",
]
VALUES = {
    "x": np.arange(10.0).reshape(2, 5), "y": -np.arange(10.0).reshape(2, 5), "one": np.array(1), "last": np.array(-1),
    "two": np.array(2), "parts": np.array([1, 4]),
}  # fmt: skip


@pytest.mark.parametrize("chain", CHAINS)
@pytest.mark.parametrize("lists", [False, True])
def test_sequences_hold_what_the_reference_says(chain, lists):
    header = "double[2, 5] x, double[2, 5] y, int64 one, int64 last, int64 two, int64[2] parts"
    model = onnx.parser.parse_model(f'<ir_version: 9, opset_import: ["": 18]> g ({header}) => (double r) {{ {chain} }}')
    (due,) = ReferenceEvaluator(model).run(None, VALUES)
    values = {name: torch.from_numpy(value) for name, value in VALUES.items()}
    for node in model.graph.node:
        record, attributes = OPERATORS[node.op_type], {each.name: each.i for each in node.attribute}
        operands = [values[name] for name in node.input]
        operands = [
            each.tolist() if lists and place in record.constants else each for place, each in enumerate(operands)
        ]
        (values[node.output[0]],) = called(record, torch, operands, attributes, 18)
    assert np.array_equal(values["r"].numpy(), due)
    assert values["r"].numpy().dtype == np.asarray(due).dtype


def test_values_that_may_be_absent():
    x = torch.ones(2)
    (value,) = called(OPERATORS["Optional"], torch, [x], {}, 18)
    assert called(OPERATORS["OptionalGetElement"], torch, [value], {}, 18)[0] is x
    assert called(OPERATORS["OptionalHasElement"], torch, [value], {}, 18)[0].item()
    (absent,) = called(OPERATORS["Optional"], torch, [], {}, 18)
    assert not called(OPERATORS["OptionalHasElement"], torch, [absent], {}, 18)[0].item()
