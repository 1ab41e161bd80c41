"""The batch of a loop that counts: what its lines make without the module, by data flow."""

from __future__ import annotations

import ast

import pytest

from gopt.frontends.pytorch.loop_inputs import LoopInputs
from gopt.frontends.pytorch.training_loops import TrainingLoop, forward

END = "    loss.backward()\n"
CASES = {
    "slices": ("for i in range(4, 99, 8):\n    x, y = data[i:i + 8], wanted[i:i + 8]\n    loss = f(net(x), y)\n",
               ("x", "y"), ["i = 4", "x, y = (data[i:i + 8], wanted[i:i + 8])"]),
    "a call": ("for i in range(9):\n    x, y = get('train')\n    out = net(x)\n    loss = f(out, y)\n", ("x", "y"),
               ["x, y = get('train')"]),
    "a whole": ("for i in range(9):\n    loss = f(net(data.to(device)) @ data, wanted)\n", ("data", "wanted"), []),
    "a loader": ("for x, y in loader:\n    x = x * 2\n    loss = f(net(x), y)\n", ("x", "y"), []),
}  # fmt: skip


@pytest.mark.parametrize(("text", "names", "front"), CASES.values(), ids=CASES)
def test_what_needs_no_module_is_the_batch(text, names, front):
    loop = TrainingLoop.of(ast.parse(text + END))
    chain = list(forward(loop.node.body, ()))
    inputs = LoopInputs.of(chain, loop, ("net",), ("data", "wanted", "device"))
    assert inputs.names == names and list(map(ast.unparse, inputs.front)) == front
    assert [statement for statement in chain if statement not in inputs.front] == list(inputs.behind)


ROWS = {
    "slices": ("for i in range(0, 99, 8):\n    loss = f(net(data[i:i + 8]), wanted[i:i + 8])\n", (),
               ["i = 0", "data_batch = data[i:i + 8]", "wanted_batch = wanted[i:i + 8]"],
               ["loss = f(net(data_batch), wanted_batch)"]),
    "drawn": ("for i in range(9):\n    at = randint(9)\n    out = net(data[at])[:, at]\n"
              "    loss = f(out, data[at + 1])\n",
              ("at",), ["at = randint(9)", "data_batch = data[at]", "data_batch2 = data[at + 1]"],
              ["out = net(data_batch)[:, at]", "loss = f(out, data_batch2)"]),
    "a sampler": ("for idx in sampler:\n    loss = f(net(data[idx]), wanted[idx])\n", (),
                  ["idx = next(iter(sampler))", "data_batch = data[idx]", "wanted_batch = wanted[idx]"],
                  ["loss = f(net(data_batch), wanted_batch)"]),
    "a counted sampler": ("for i, idx in enumerate(sampler):\n    x = data[idx]\n    loss = f(net(x), wanted[idx])\n",
                          ("x",), ["i, idx = next(iter(enumerate(sampler)))", "x = data[idx]",
                          "wanted_batch = wanted[idx]"], ["loss = f(net(x), wanted_batch)"]),
    "of a list": ("for i in range(9):\n    loss = f(net(stack([data[j] for j in data])), wanted[0])\n", (), [],
                  ["loss = f(net(stack([data[j] for j in data])), wanted[0])"]),
}  # fmt: skip


@pytest.mark.parametrize(("text", "more", "front", "behind"), ROWS.values(), ids=ROWS)
def test_rows_that_a_call_of_the_module_takes_are_the_batch(text, more, front, behind):
    """They were read in the loss function, whose index was not there, or which stored all data in the step."""
    loop = TrainingLoop.of(ast.parse(text + END))
    inputs = LoopInputs.of(list(forward(loop.node.body, ())), loop, ("net",), ("data", "wanted"))
    rows = [line.partition(" = ")[0] for line in front if "_batch" in line]
    assert set(inputs.names) == {*more, *rows} and list(map(ast.unparse, inputs.front)) == front
    assert list(map(ast.unparse, inputs.behind)) == behind
