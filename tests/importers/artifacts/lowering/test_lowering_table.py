"""Every record of the table against numbers of the kernel that it stands for."""

from __future__ import annotations

import numpy as np
import pytest
from kernels import lowered, model_of, names, part, run

from gopt.importers.artifacts.lowering.table import LOWERINGS

ELSEWHERE = {
    "BitmaskDropout": "draws random numbers: test_arithmetic",
    "BitmaskDropoutGrad": "only on GPUs: the body of DropoutGrad",
    "PassThrough": "its kernel demands one buffer: an identity",
}
"""Operators without recorded numbers, and why."""


@pytest.mark.parametrize("opset", [17, 18, 21])
@pytest.mark.parametrize("case", names())
def test_a_lowering_gives_the_numbers_of_the_kernel(case, opset):
    wanted = part(case, "out")
    found = run(lowered(model_of(case), opset), part(case, "in"), list(wanted))
    for name, value in wanted.items():
        assert found[name].dtype == value.dtype or name == "places"
        assert found[name].shape == value.shape
        np.testing.assert_allclose(found[name], value, rtol=2e-5, atol=2e-6, err_msg=name)


def test_every_record_has_numbers():
    seen = {(node.domain, node.op_type) for case in names() for node in model_of(case).graph.node}
    assert {name for _, name in LOWERINGS.keys() - seen} == set(ELSEWHERE)


def test_an_attribute_that_is_not_known_is_refused():
    from gopt.errors import UnsupportedError

    model = model_of("ReluGrad")
    model.graph.node[0].attribute.add(name="slope", type=1, f=1.0)
    with pytest.raises(UnsupportedError, match="ReluGrad 'relugrad' has the attribute 'slope'"):
        lowered(model)
