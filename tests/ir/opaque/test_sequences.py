"""Sequences that are put together and taken apart in one graph."""

import numpy as np
import pytest

from gopt.ir.graph import Node
from gopt.ir.opaque.sequences import constant_index, look_through_sequences
from gopt.ir.tensor import Tensor
from gopt.ir.types import TensorType


def index(value, shape=()):
    return Tensor(TensorType("int64", shape), array=np.full(shape, value, np.int64))


@pytest.mark.parametrize(("place", "found"), [(0, {"y": "a"}), (1, {"y": "b"}), (-1, {"y": "b"}), (2, {}), (-3, {})])
def test_an_element_is_the_value_in_its_place(place, found):
    made, taken = Node("SequenceConstruct", ["a", "b"], ["s"]), Node("SequenceAt", ["s", "i"], ["y"])
    assert look_through_sequences([made, taken], {"s": made, "y": taken}, {"i": index(place)}) == found


def test_sequences_in_sequences_are_followed_to_the_last_value():
    nodes = [
        Node("SequenceConstruct", ["a"], ["s"]), Node("SequenceAt", ["s", "i"], ["b"]),
        Node("SequenceConstruct", ["b"], ["t"]), Node("SequenceAt", ["t", "i"], ["c"]),
    ]  # fmt: skip
    producers = {node.outputs[0]: node for node in nodes}
    assert look_through_sequences(nodes, producers, {"i": index(0, (1,))}) == {"b": "a", "c": "a"}


def test_an_index_that_is_computed_or_long_is_unknown():
    assert constant_index("i", {"i": Node("Add", ["a", "b"], ["i"])}, {}) is None
    assert constant_index("i", {}, {"i": index(0, (2,))}) is None
    assert constant_index("i", {"i": Node("Constant", [], ["i"], attributes={"value_int": 3})}, {}) == 3
