"""Which calls of functions belong to an update: those of counters too."""

from __future__ import annotations

import pytest
from written_steps import NET, Written, hold_ranks, sgd

FUNCTION = (
    '<domain: "own", opset_import: ["" : 20]> Next (a) => (b) { one = Constant<value_int = 1>()\n b = Add(a, one) }'
)
COUNTERS = {
    "a call": "  step_out = own.Next(step)\n",
    "calls behind one another": "  s = own.Next(step)\n  t = own.Next(s)\n  step_out = Identity(t)\n",
    "a call behind an operator": "  two = Constant<value_int = 2>()\n  s = Mul(step, two)\n  step_out = own.Next(s)\n",
}


@pytest.mark.parametrize("name", COUNTERS)
def test_a_counter_through_a_function_is_a_state(name, tmp_path):
    step = Written(NET + COUNTERS[name] + sgd(), {"step": ("int64", ())}, functions=FUNCTION)
    hold_ranks(step, tmp_path, 2, 2)
