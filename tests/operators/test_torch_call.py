"""The calls of PyTorch of operator records, compared with onnx's reference."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from operator_forms import forms
from operator_probes import Probe, probes

from gopt.operators.operator import Operator
from gopt.operators.table import OPERATORS, names
from gopt.operators.torch_call import called

pytestmark = pytest.mark.torch
SINGLE = frozenset({"GroupNormalization", "GridSample", "HammingWindow", "HannWindow", "LinearAttention"})
"""Computed by the reference in float32."""
CALLED = sorted(names(lambda each: each.torch is not None))
FORMED = frozenset(name for name in CALLED if forms(name))
LACKING = frozenset({"GlobalLpPool"})
"""Computed by no reference."""
STEPPED = frozenset({"Ceil", "Floor", "Round", "Sign", "Mod", "Hardmax", "QuantizeLinear"})
"""A rounding of an operand may be a step of the result."""


def tensor(value: Any) -> Any:
    import torch

    return None if value is None else torch.from_numpy(np.array(value))


def listed(record: Operator, place: int, value: Any) -> bool:
    """Whether a constant may be a Python number, or a list of them; a Range has the type of its constants."""
    return value is not None and record.name != "Range" and (place != record.raised_to or not value.ndim)


def of_tensors(name: str, probe: Probe, *, lists: bool = False) -> tuple[Callable[..., Any], list[Any]]:
    """A function of the operands that are tensors in a run, and these; ``lists``: constants are Python numbers."""
    import torch

    record, case = OPERATORS[name], probe.case
    fixed = {place: each for place, each in enumerate(probe.inputs) if place in record.constants or each is None}
    fixed = {
        place: each.tolist() if lists and listed(record, place, each) else tensor(each) for place, each in fixed.items()
    }

    def function(*tensors: Any) -> tuple[Any, ...]:
        rest = iter(tensors)
        operands = [fixed[place] if place in fixed else next(rest) for place in range(len(probe.inputs))]
        return called(record, torch, operands, case.attributes, case.opset, case.results)

    return function, [tensor(each) for place, each in enumerate(probe.inputs) if place not in fixed]


def compared(found: tuple[Any, ...], probe: Probe, tolerance: float) -> None:
    expected = probe.results()
    assert len(found) == len(expected)
    for mine, due in zip(found, expected):
        use = (probe.case.opset, probe.case.attributes, [each is not None and each.shape for each in probe.inputs])
        assert (tuple(mine.shape), mine.numpy().dtype) == (due.shape, due.dtype), use
        least = tolerance * np.abs(due[np.isfinite(due)]).max(initial=0) if due.dtype.kind == "f" else 0
        np.testing.assert_allclose(mine.numpy(), due, rtol=tolerance, atol=least, err_msg=str(use))


@pytest.mark.parametrize("name", CALLED)
@pytest.mark.parametrize("wide", [True, False])
def test_calls_compute_what_the_reference_does(name, wide):
    pytest.importorskip("torch")
    uses = list(probes(name, 20, wide=wide))
    assert uses or name not in FORMED - LACKING
    for probe in uses:
        function, tensors = of_tensors(name, probe)
        compared(function(*tensors), probe, 1e-7 if wide and name not in SINGLE else 2e-6)


@pytest.mark.parametrize("name", CALLED)
def test_calls_are_traced_without_the_numbers_in_their_operands(name):
    pytest.importorskip("torch")
    from torch.fx.experimental.proxy_tensor import make_fx

    for probe in probes(name, wide=True):
        function, tensors = of_tensors(name, probe, lists=True)
        compared(make_fx(function, tracing_mode="fake", _allow_non_fake_inputs=True)(*tensors)(*tensors), probe, 1e-6)


@pytest.mark.parametrize("name", CALLED)
def test_calls_are_compiled_as_one_graph(name):
    torch = pytest.importorskip("torch")
    for probe in last(probes(name, wide=True)):
        function, tensors = of_tensors(name, probe, lists=True)
        torch._dynamo.reset()
        compared(torch.compile(function, fullgraph=True, backend="eager")(*tensors), probe, 1e-6)


def last(uses: Iterator[Probe]) -> list[Probe]:
    return [*uses][-1:]


@pytest.mark.parametrize("name", CALLED)
@pytest.mark.parametrize("half", ["float16", "bfloat16"])
def test_calls_compute_halves_as_wider_numbers_rounded(name, half):
    """Beside the reference in float32, of operands that are halves: up to three roundings of the largest number."""
    torch = pytest.importorskip("torch")
    dtype = getattr(torch, half)
    for probe in (each for each in probes(name) if each.floats):
        rounded = {place: tensor(probe.inputs[place]).to(dtype) for place in probe.floats}
        due = probe.results({place: each.float().numpy() for place, each in rounded.items()})
        halves = [rounded.get(place, tensor(each)) for place, each in enumerate(probe.inputs)]
        attributes = {**probe.case.attributes, **({"to": 1} if name == "Cast" else {})}
        results = called(OPERATORS[name], torch, halves, attributes, probe.case.opset, probe.case.results)
        for mine, expected in zip(results, due):
            if expected.dtype.kind == "f" and name not in STEPPED:
                assert mine.dtype in (dtype, torch.float32)
                largest, exact = np.abs(expected[np.isfinite(expected)]).max(initial=0), torch.finfo(dtype)
                most = 8 * exact.eps * largest + exact.smallest_normal
                np.testing.assert_allclose(mine.float().numpy(), expected, rtol=0, atol=most)


@pytest.mark.parametrize("name", sorted(names(lambda each: each.torch is not None and each.constants) & FORMED))
def test_constants_are_the_operands_that_tracing_asks_for(name):
    """A number that a fake tensor has not is asked for, by a call that reads it."""
    torch = pytest.importorskip("torch")
    from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

    asked: set[int] = set()
    due = OPERATORS[name].constants - {OPERATORS[name].raised_to}
    for probe in probes(name):
        operands = [tensor(value) for value in probe.inputs]
        for place in [place for place, each in enumerate(operands) if each is not None]:
            with FakeTensorMode():
                fake = torch.empty(operands[place].shape, dtype=operands[place].dtype)
            changed = [fake if at == place else each for at, each in enumerate(operands)]
            try:
                called(OPERATORS[name], torch, changed, probe.case.attributes, probe.case.opset)
            except DataDependentOutputException:
                asked.add(place)
            except Exception as error:
                assert place not in due, error
    assert asked == due


def test_a_pool_of_all_places_is_a_pool_by_a_window_of_all():
    torch = pytest.importorskip("torch")
    x = torch.arange(24.0).reshape(1, 2, 3, 4) - 9
    for power in (1, 2, 3):
        whole = called(OPERATORS["LpPool"], torch, [x], {"kernel_shape": [3, 4], "p": power}, 22)[0]
        assert torch.allclose(called(OPERATORS["GlobalLpPool"], torch, [x], {"p": power}, 22)[0], whole)


def test_a_constant_exponent_is_traced_as_a_number():
    torch = pytest.importorskip("torch")
    from torch.fx.experimental.proxy_tensor import make_fx

    for exponent, due in ((torch.tensor(2.0), "pow.Tensor_Scalar"), (torch.tensor([2.0, 3.0]), "pow.Tensor_Tensor")):

        def raised(x: Any) -> Any:
            return called(OPERATORS["Pow"], torch, [x, exponent], {}, 15)[0]  # noqa: B023

        assert due in make_fx(raised, tracing_mode="fake", _allow_non_fake_inputs=True)(torch.ones(3, 2)).code
