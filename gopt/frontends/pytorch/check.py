"""Compares an exported step with eager PyTorch: every state and the loss, over several steps.

The limit for a state is a share of its change, or the effect of disturbing all states in the last place: a gradient
that is zero but for rounding moves a state by a full step (docs/verifying.md).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType

import numpy as np
import torch

from gopt.errors import GoptError, UnsupportedError
from gopt.frontends.pytorch.eager import NARROW
from gopt.frontends.pytorch.eager_states import Arrays, EagerStates, Shake
from gopt.frontends.pytorch.eager_steps import EagerSteps
from gopt.frontends.pytorch.factory import Recipe
from gopt.frontends.pytorch.narrow_noise import NarrowNoise
from gopt.frontends.pytorch.options import Autocast, ExportOptions
from gopt.frontends.pytorch.randomness import DrawnInput, draw_names
from gopt.frontends.pytorch.rates import OptionPlace
from gopt.frontends.pytorch.ties import ties
from gopt.frontends.pytorch.tracing import EPOCH
from gopt.ir.graph import Graph
from gopt.runtime.executor import Executor
from gopt.runtime.float64 import Float64Graph
from gopt.runtime.pytorch.tensors import array_over
from gopt.runtime.session import SessionCache
from gopt.runtime.widen import widened
from gopt.verification.compare import distance_of


@dataclass(frozen=True, slots=True)
class CheckLimits:
    """Allowed relative difference of the ``loss``, allowed ``share`` of a state's change, the disturbance in units of
    the last place, the share of a state's ``size`` allowed for even the smallest change, and the share of the
    ``largest`` state allowed in each: a gradient of zero is rounding of others."""

    loss: float
    share: float
    shake: float
    size: float = 1e-6
    largest: float = 0.0


LIMITS = {
    None: CheckLimits(4e-5, 5e-3, 2.0**-23),
    Autocast.FP16: CheckLimits(5e-3, 0.1, 2.0**-11),
    Autocast.BF16: CheckLimits(2e-2, 0.15, 2.0**-8),
}
"""By the narrow type of a step."""
WIDE = CheckLimits(1e-6, 1e-4, 2.0**-52, 1e-9, 2.0**-50)
"""In float64, where constants of the exported step are still float32's: 1 - 0.999 is off by 1e-5."""
NOISE = 64.0
"""Allowed as well: this many times what a disturbance in the last place does."""
NARROW_NOISE = 8.0
"""And this many times what a disturbance of each bfloat16 or float16 result does, in its last place."""
KERNELS = 4.0
"""And this many times what other kernels of PyTorch do: oneDNN's for convolutions round more than the plain ones
that exports follow."""
DOUBTFUL = 20.0
"""Up to this many times a limit, a difference in float32 may be rounding that training amplifies, and float64 tells."""
SHAKES = 8
"""Disturbances that tell of a difference whether it is rounding: one alone may leave by chance what is all rounding,
such as the sum of the gradients of a softmax."""
BRANCHED = 12
"""Steps in which both sides of branches may be taken."""
SMALLER = 0.9
"""Factor of the floats of a batch from step to step."""


@dataclass(frozen=True, slots=True)
class FedOptions:
    """Inputs that are options of groups with the values; ``rates``: as in TracedStep."""

    values: Arrays
    rates: Mapping[str, OptionPlace]


@dataclass(frozen=True, slots=True)
class ExportCheck:
    """The distance of an export from eager PyTorch: losses of both, the largest difference of a state as a share of its
    change, with the state's name, and the number of steps with an update (no overflow).

    ``rounding``: the difference in float32, if the comparison in float64 shows rounding, or ''. ``one_sided``: lines
    with branches: all steps took the same side.
    """

    losses: tuple[float, ...]
    eager_losses: tuple[float, ...]
    worst: float
    worst_state: str
    updates: int
    rounding: str = ""
    one_sided: tuple[str, ...] = ()


class _Difference(Exception):
    """A value of the export is not eager PyTorch's, by more than rounding is known to make: ``times`` the limit."""

    def __init__(self, name: str, step: int, what: str, times: float) -> None:
        self.times, self.what = times, f"{name!r} after step {step + 1} is {what}"
        self.step = step


def batches(recipe: Recipe, count: int) -> list[dict[str, torch.Tensor]]:
    """The example batch, and variants: rows of each input in another order, floats scaled down, so shares and
    probabilities stay between 0 and 1."""
    drawn = []
    for step in range(count):
        batch = {}
        for index, (name, value) in enumerate(recipe.batch.items()):
            moved = value.roll((index + 1) * step, 0) if value.dim() and value.shape[0] > 1 else value
            batch[name] = moved * SMALLER ** (step % 5) if moved.is_floating_point() else moved.clone()
        drawn.append(batch)
    return drawn


def compare(
    graph: Graph, recipe: Recipe, run_seen: EagerSteps, options: ExportOptions, draws: Sequence[DrawnInput],
    hyper: FedOptions, branches: Mapping[str, str] = MappingProxyType({}),
) -> ExportCheck:  # fmt: skip
    """Run the exported graph, with first values, and eager PyTorch; raises UnsupportedError, naming the first different
    value.

    Options moved by a scheduler outside of the graph come from eager PyTorch. For different float32 values, both run
    again in float64, without rounding differences. ``branches``: conditions among the values of the graph, with their
    lines; up to BRANCHED steps are compared until both sides are taken.
    """
    _refuse_new_shapes(graph)
    shown = {name: graph.types[name] for name in branches if name in graph.types}
    graph = replace(graph, outputs={**graph.outputs, **shown})
    arguments = graph, recipe, run_seen, options, draws, hyper, branches
    with contextlib.suppress(_Difference):
        return _Comparison(*arguments).run()
    comparison = _Comparison(*arguments, shakes=SHAKES)
    try:
        return comparison.run()
    except _Difference as difference:
        with contextlib.suppress(_Difference, GoptError, RuntimeError, TypeError, ValueError):
            if options.autocast is None and difference.times < DOUBTFUL:
                return replace(_Comparison(*arguments, shakes=SHAKES, wide=True).run(), rounding=difference.what)
        raise _refusal(difference, next(ties(graph, comparison.read), "")) from None


def _refuse_new_shapes(graph: Graph) -> None:
    """Raise UnsupportedError for a state of another shape behind the step."""
    for name, type in graph.inputs.items():
        after = graph.types.get(f"{name}_out", type)
        if type.static and after.static and after.dims != type.dims:
            raise UnsupportedError(
                f"the step changes the shape of its state {name!r}: {[*type.dims]} becomes {[*after.dims]}",
                "a state of a graph has one shape in all steps",
            )


class _Comparison:
    """The exported graph beside eager PyTorch, step by step; arguments as of ``compare``.

    ``shakes``: eager trainings with a disturbance in the last place; ``wide``: whether all compute in float64."""

    def __init__(
        self, graph: Graph, recipe: Recipe, run_seen: EagerSteps, options: ExportOptions, draws: Sequence[DrawnInput],
        hyper: FedOptions, branches: Mapping[str, str], *, shakes: int = 1, wide: bool = False,
    ) -> None:  # fmt: skip
        self.graph, self.options, self.branches, self.wide = graph, options, branches, wide
        self.limits = limits = WIDE if wide else LIMITS[_narrowest(recipe, options)]
        self.data = batches(recipe, max(options.check, BRANCHED if branches else 0))
        self.drawn = _drawn(graph, draws, len(self.data), options.seed)
        names = {*graph.inputs, *graph.initializers}
        self.training = training = partial(EagerStates, recipe, run_seen, options, names, wide=wide)
        self.eager = training()
        self.disturbances = [
            _Other([training(Shake(limits.shake, 5 + number)) for number in range(shakes)], NOISE,
                   of_loss=options.autocast is None),
        ]  # fmt: skip
        if options.autocast is None and not wide:
            self.disturbances += [_Other([training()], NARROW_NOISE, NarrowNoise)]
            self.disturbances += [_Other([training()], KERNELS, _plain_kernels)]
        self.start = self.eager.states()
        self.rates = hyper.rates if recipe.scheduler is not None and EPOCH not in graph.inputs else {}
        cache = SessionCache()
        self.program = Float64Graph(widened(graph, "float64"), cache) if wide else Executor(graph, cache)
        self.fed: Arrays = dict(hyper.values)
        self.states: Arrays = {}
        """Of the graph, behind the last step."""
        self.sides: dict[str, set[bool]] = {name: set() for name in branches}
        self.losses: list[float] = []
        self.eager_losses: list[float] = []
        self.worst, self.drift, self.updates = (0.0, ""), 0.0, 0
        self.noise: dict[str, float] = {}
        self.read: Arrays = {}
        """By the last step."""

    def run(self) -> ExportCheck:
        """Compare all steps. Raises _Difference, and UnsupportedError where nothing can be compared."""
        for step, (batch, numbers) in enumerate(zip(self.data, self.drawn)):
            if step >= self.options.check and all(len(outcomes) == 2 for outcomes in self.sides.values()):
                break
            results = self._results(batch, numbers)
            self.eager_losses.append(self.eager.step(batch, numbers))
            self.updates += not self.eager.overflowed
            for disturbance in self.disturbances:
                disturbance.step(step, batch, numbers)
            self._compare_losses(step)
            for name, value in self.eager.outputs.items():
                allowed = sum(disturbance.of_outputs(name, value) for disturbance in self.disturbances)
                _check_output(name, step, results.pop(name), value, self.limits.loss, allowed)
            self.states = {name.removesuffix("_out"): value for name, value in results.items()}
            self._compare_states(step)
            if step == 0:
                _check_again(self.training(), batch, numbers, self.eager, self.start, self.limits)
                # The rest compute in no narrow type, or by no other kernels.
                expected = self.eager.states()
                self.disturbances = [other for other in self.disturbances if not other.equal(expected)]
        one_sided = {self.branches[name]: None for name, outcomes in self.sides.items() if len(outcomes) < 2}
        return ExportCheck(
            tuple(self.losses), tuple(self.eager_losses), *self.worst, self.updates, one_sided=tuple(one_sided)
        )

    def _results(self, batch: Mapping[str, torch.Tensor], numbers: Sequence[torch.Tensor]) -> dict[str, np.ndarray]:
        """The outputs and states of the next step of the graph, without the loss and the sides of branches."""
        self.fed |= {name: self.eager.option(*option) for name, option in self.rates.items()}
        feeds = {name: array_over(value) for name, value in batch.items()} | self.fed | self.states
        feeds |= {name: array_over(value) for name, value in zip(draw_names(len(numbers)), numbers)}
        self.read = read = {name: feeds[name] for name in self.graph.inputs if name in feeds}
        if self.wide:
            read = {name: value.astype(float) if value.dtype.kind == "f" else value for name, value in read.items()}
        results = self.program.run(read)
        for name in self.branches.keys() & results.keys():
            self.sides[name].add(bool(results.pop(name)))
        self.losses.append(float(results.pop("loss")))
        return results

    def _compare_losses(self, step: int) -> None:
        mine, theirs = self.losses[-1], self.eager_losses[-1]
        # Two losses, or two states that are rounding alone, may be near by chance: the largest difference so far.
        self.drift = max([self.drift, *(disturbance.of_losses(theirs) for disturbance in self.disturbances)])
        near = self.limits.loss * (1 + abs(theirs)) + self.drift
        if np.isnan(theirs):
            raise UnsupportedError(
                f"the loss of eager PyTorch is not a number in step {step + 1}: nothing can be compared",
                "give an example batch, values or a rate with which eager training works",
            )
        if mine != theirs and not abs(mine - theirs) <= near:  # both may be infinite
            raise _Difference("loss", step, f"{mine:.7g}, eager PyTorch {theirs:.7g}", abs(mine - theirs) / near)

    def _compare_states(self, step: int) -> None:
        expected, limits = self.eager.states(), self.limits
        sizes = filter(np.isfinite, map(distance_of, expected.values() if limits.largest else ()))
        least = limits.largest * max(sizes, default=0.0)
        for name, value in expected.items():
            moved = sum(disturbance.of_states(name, value) for disturbance in self.disturbances)
            self.noise[name] = max(self.noise.get(name, 0.0), moved)
            allowed = least + self.noise[name]
            distance = _distance(name, step, self.states[name], value, allowed, self.start[name], limits)
            self.worst = max(self.worst, (distance, name))


def _drawn(graph: Graph, draws: Sequence[DrawnInput], steps: int, seed: int) -> list[list[torch.Tensor]]:
    """The random numbers of each step: first the recorded ones, where the graph has values made of them."""
    generator = torch.Generator().manual_seed(seed + 1)
    drawn = [[draw.values(generator) for draw in draws] for _ in range(steps)]
    recorded = torch.Generator().manual_seed(seed)
    for index, (name, draw) in enumerate(zip(draw_names(len(draws)), draws)):
        value = draw.values(recorded)
        if name not in graph.inputs:  # it made a value before the first step, which the graph holds
            drawn[0][index] = value
    return drawn


def _check_again(
    twin: EagerStates, batch: Mapping[str, torch.Tensor], numbers: Sequence[torch.Tensor], eager: EagerStates,
    start: Arrays, limits: CheckLimits,
) -> None:  # fmt: skip
    """Raise UnsupportedError for a first step with other results when repeated: unseen random numbers would look like
    rounding, and be constants of the graph."""
    twin.step(batch, numbers)
    states, expected = twin.states(), eager.states()
    changed = "its loss" if _apart(twin.loss, eager.loss) > limits.loss * (1 + abs(eager.loss)) else ""
    for name, value in expected.items():
        allowed = limits.share * _norm(value, start[name]) + limits.size * _norm(value, np.zeros_like(value))
        changed = changed or (repr(name) if _norm(states[name], value) > allowed else "")
    if changed:
        raise UnsupportedError(
            f"the eager step is another one when it runs again from the same values: {changed} differs",
            "it draws numbers that gopt does not see (of a generator of NumPy's or Python's own, or of the clock): "
            "draw them outside and put them into the batch, or draw tensors by torch (torch.rand)",
        )


def _narrowest(recipe: Recipe, options: ExportOptions) -> Autocast | None:
    """The narrow type of autocast, or of parameters."""
    types = {parameter.dtype for parameter in recipe.whole.parameters()}
    return options.autocast or next((key for key, type in NARROW.items() if type in types), None)


@dataclass(slots=True)
class _Other:
    """Eager trainings with different rounding: a difference of ``factor`` times the largest effect is rounding.

    ``around``: surrounds a step, called with the step; ``of_loss``: whether losses and outputs may differ as well.
    """

    trainings: Sequence[EagerStates]
    factor: float
    around: Callable[[int], AbstractContextManager[object]] = contextlib.nullcontext
    of_loss: bool = True
    states: list[Arrays] = field(default_factory=list)
    """Of each training, behind the last step."""

    def step(self, step: int, batch: Mapping[str, torch.Tensor], numbers: Sequence[torch.Tensor]) -> None:
        for training in self.trainings:
            with self.around(step):
                training.step(batch, numbers)
        self.states = [training.states() for training in self.trainings]

    def of_losses(self, reference: float) -> float:
        return self.of_loss * self.factor * max(_apart(training.loss, reference) for training in self.trainings)

    def of_outputs(self, name: str, reference: np.ndarray) -> float:
        moved = (_norm(training.outputs[name], reference) for training in self.trainings if self.of_loss)
        return self.factor * max(moved, default=0.0)

    def of_states(self, name: str, reference: np.ndarray) -> float:
        return self.factor * max(_norm(states[name], reference) for states in self.states)

    def equal(self, reference: Arrays) -> bool:
        return all(_equal(states, reference) for states in self.states)


def _plain_kernels(step: int) -> AbstractContextManager[object]:
    return torch.backends.mkldnn.flags(enabled=False)  # type: ignore[no-any-return, no-untyped-call]


def _check_output(
    name: str, step: int, mine: np.ndarray, theirs: np.ndarray, limit: float, noise: float
) -> None:  # fmt: skip
    """Raise _Difference where an output of the module differs from eager PyTorch's."""
    difference, size = output_distance(mine, theirs)
    if np.isinf(difference):
        raise _Difference(name, step, "not finite where eager PyTorch is finite, or another infinity", np.inf)
    if not difference <= (allowed := limit * max(size, 1.0) + noise):
        what = f"{difference:.2e} from eager PyTorch, where its norm is {size:.2e}"
        raise _Difference(name, step, what, difference / allowed)


def output_distance(mine: np.ndarray, theirs: np.ndarray) -> tuple[float, float]:
    """The norm of the difference of two results in float64, and the norm of eager PyTorch's, of finite elements.

    The difference is infinite for different shapes, or for a NaN or an infinity in only one result.
    """
    a, b = mine.astype(np.float64), theirs.astype(np.float64)
    finite = np.isfinite(b)
    size = float(np.linalg.norm(b[finite]))
    if a.shape != b.shape or not np.array_equal(a[~finite], b[~finite], equal_nan=True):
        return np.inf, size
    return (float(np.linalg.norm(a[finite] - b[finite])) if np.isfinite(a[finite]).all() else np.inf), size


def _apart(one: float, reference: float) -> float:
    """The distance of two losses, if both are numbers."""
    return abs(one - reference) if np.isfinite([one, reference]).all() else 0.0


def _equal(one: Arrays, reference: Arrays) -> bool:
    return all(np.array_equal(value, reference[name], equal_nan=value.dtype.kind == "f") for name, value in one.items())


def _distance(
    name: str, step: int, mine: np.ndarray, theirs: np.ndarray, noise: float, start: np.ndarray, limits: CheckLimits
) -> float:
    """The difference as a share of the change; raises _Difference beyond the limit."""
    difference, change, size = distance_of(mine, theirs), distance_of(theirs, start), distance_of(theirs)
    if not np.isfinite([difference, change, size]).all():
        a, b = mine.astype(np.float64), theirs.astype(np.float64)
        if np.isnan(b).any():
            raise UnsupportedError(
                f"{name!r} of eager PyTorch is not a number after step {step + 1}: nothing can be compared",
                "give an example batch, values or a rate with which eager training works",
            )
        finite = np.isfinite(b)
        if not np.array_equal(a[~finite], b[~finite]) or not np.isfinite(a[finite]).all():
            raise _Difference(name, step, "not finite where eager PyTorch is finite, or another infinity", np.inf)
        a, b, start = a[finite], b[finite], np.where(np.isfinite(start), start, 0)[finite]
        difference, change, size = _norm(a, b), _norm(b, start), float(np.linalg.norm(b.ravel()))
    allowed = noise + limits.size * size
    most = max(limits.share * change, allowed)
    if difference > most:
        what = f"{difference:.2e} from eager PyTorch, where it changed by {change:.2e}"
        raise _Difference(name, step, what, difference / most if most else np.inf)
    return difference / change if change and difference > allowed else 0.0


def _norm(a: np.ndarray, b: np.ndarray) -> float:
    """The norm of the difference, in float64, over elements finite in both."""
    size = distance_of(a, b)
    if np.isfinite(size):
        return size
    apart = (a.astype(np.float64) - b.astype(np.float64)).ravel()
    return float(np.linalg.norm(apart[np.isfinite(apart)]))


def _refusal(difference: _Difference, tied: str) -> UnsupportedError:
    causes = (
        "an optimizer that treats its first step in Python, a branch on values, or a state that Python keeps"
        if difference.step
        else "a branch on values or on the count of steps, or an operator that is exported wrongly"
    )
    hint = tied or f"likely cause: {causes}"
    return UnsupportedError(f"the exported step is not the eager one: {difference.what}", hint)
