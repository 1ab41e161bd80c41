"""Whether an update looks for infinities, which decides whether verify feeds them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from gopt.ir.graph import Node
from gopt.ir.phase import Phase
from gopt.ir.tensor import Tensor
from gopt.ir.types import TensorType
from gopt.operators.kinds import COMPARISONS
from gopt.verification.variants import has_finite_check


@pytest.mark.parametrize("operator", sorted(COMPARISONS))
def test_every_comparison_with_infinity_is_a_finite_check(operator):
    """``inf >= |gradient|`` and its mirror are as good a test as ``==``."""
    for limit, looks in ((np.inf, True), (1.0, False)):
        node = Node(operator, ["gradient", "limit"], ["flag"])
        node.phase = Phase.UPDATE
        limits = {"limit": Tensor(TensorType("float32", ()), array=np.array(limit, np.float32))}
        graph = SimpleNamespace(nodes=[node], initializers=limits)
        training = SimpleNamespace(graph=graph, gradients={"weight": "gradient"})
        assert has_finite_check(cast(Any, training)) is looks
