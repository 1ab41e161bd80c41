"""Scalars of a trace are computed before the rest, with the bits of the whole trace."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.torch
torch = pytest.importorskip("torch")
hoisting = pytest.importorskip("gopt.runtime.pytorch.hoisting")


def traced(function, *operands):
    from torch.fx.experimental.proxy_tensor import make_fx

    return make_fx(function, tracing_mode="fake", _allow_non_fake_inputs=True)(*operands)


def calls(module) -> set[str]:
    return {str(node.target).split(".")[1] for node in module.graph.nodes if node.op == "call_function"}


def update(w, m, beta, step, clip):
    """As Adam's: ``step`` is overwritten and shown, and the norm of a gradient is no early scalar."""
    later = step.reshape(1) + 1
    shown = step.reshape(1).clone()
    correction = 1 - torch.pow(beta, later.to(torch.float32))
    scale = clip / torch.sqrt((m * m).sum())
    w_new = w - m * scale / correction
    noise = torch.rand(1)
    return [w.copy_(w_new), step.copy_(later.reshape(())), shown, correction, noise]


def operands():
    random = torch.Generator().manual_seed(0)
    w, m = (torch.randn(40, generator=random) for _ in range(2))
    return [w, m, torch.tensor([0.9]), torch.tensor(3), torch.tensor(0.5)]


def run(program, steps: int = 3):
    given, found = operands(), []
    torch.manual_seed(1)
    for _ in range(steps):
        found.append([result.clone() for result in program(*given)])
    return found


def test_powers_leave_the_loops_and_all_results_stay():
    module = traced(update, *operands())
    split = hoisting.split_scalars(module)
    assert "pow" in calls(split.scalars) and "pow" not in calls(split.rest)
    assert {"sum", "sqrt", "rand", "copy_"} <= calls(split.rest) and not {"rand", "copy_"} & calls(split.scalars)

    def both(*given):
        return split.rest(*given, *split.scalars(*(given[index] for index in split.indices)))

    for mine, theirs in zip(run(both), run(module), strict=True):
        assert all(map(torch.equal, mine, theirs))


def test_compiled_steps_agree_with_the_trace():
    module = traced(update, *operands())
    for mine, theirs in zip(run(hoisting.compiled(module, operands())), run(module), strict=True):
        for one, other in zip(mine[:4], theirs[:4], strict=True):  # Inductor draws numbers of its own
            torch.testing.assert_close(one, other)


@pytest.mark.parametrize(
    "function", [lambda a, b: [a + b], lambda a, b: [a.copy_(a * b.sum())], lambda a, b: [a * torch.rand(1)]],
    ids=["no scalar", "of a reduction", "a draw"],
)  # fmt: skip
def test_a_trace_without_early_scalars_stays_whole(function):
    assert hoisting.split_scalars(traced(function, torch.ones(5), torch.ones(5))) is None
