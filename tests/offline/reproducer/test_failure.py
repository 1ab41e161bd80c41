"""When two failures are of the same kind."""

from __future__ import annotations

import pytest

from gopt.errors import UnsupportedError
from gopt.offline.reproducer.failure import Failure, failure_of, message_shape

SAME = [
    ("step.onnx: 'w0' has no gradient", "small.onnx: 'layer.3' has no gradient"),
    ("/tmp/a/model.onnx: 3 nodes of 12", "model.onnx: 1 nodes of 9"),
    ("values 'a', 'b' and 'c' differ", "values 'x' and 'y' differ"),
    ("the rate v12_0 is 0.5", "the rate gopt.shard.b0 is 1e-3"),
    ("it's 'a' of two", "it's 'b' of two"),
]
OTHER = [
    ("'w0' has no gradient", "'w0' has two gradients"),
    ("the loss differs", "the state differs"),
    ("3 nodes", "no nodes"),
]


@pytest.mark.parametrize(("one", "two"), SAME)
def test_names_numbers_and_paths_are_no_difference(one, two):
    assert message_shape(one) == message_shape(two)


@pytest.mark.parametrize(("one", "two"), OTHER)
def test_words_are(one, two):
    assert message_shape(one) != message_shape(two)


def test_code_kind_place_and_command_must_agree():
    failure = Failure(70, "KeyError", "'a'", "gopt.api:shard")
    assert failure.same_as(Failure(70, "KeyError", "'b'", "gopt.api:shard"))
    for other in (
        Failure(5, "KeyError", "'a'", "gopt.api:shard"), Failure(70, "ValueError", "'a'", "gopt.api:shard"),
        Failure(70, "KeyError", "'a'", "gopt.api:load"), Failure(70, "KeyError", "'a'", "gopt.api:shard", 1),
        Failure(70, "KeyError", "none", "gopt.api:shard"),
    ):  # fmt: skip
        assert not failure.same_as(other), other


def test_a_defect_says_where_and_a_refusal_does_not():
    from gopt.records.mesh import Mesh

    with pytest.raises(AttributeError) as caught:
        Mesh.parse(None)  # type: ignore[arg-type]
    assert failure_of(caught.value, 70).where == "gopt.records.mesh:parse"
    assert failure_of(UnsupportedError("first\nsecond"), 4) == Failure(4, "UnsupportedError", "first")
