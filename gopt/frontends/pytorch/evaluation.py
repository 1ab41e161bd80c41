"""The forward of a recipe in evaluation mode, as a model beside the step. Parameters and buffers are inputs with the
names of the step's states, so a run feeds its own. The model is compared with eager PyTorch at other values of
parameters and buffers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import onnx
import torch
from torch._functorch._aot_autograd.functional_utils import from_fun, to_fun

from gopt.documents.draws import Draw
from gopt.errors import GoptError, InputError, OptionError, UnsupportedError
from gopt.frontends.functional_step import LOSS
from gopt.frontends.pytorch.batch_sizes import join_sizes, pairs_of_sizes
from gopt.frontends.pytorch.check import LIMITS, batches, output_distance
from gopt.frontends.pytorch.convert import quiet, to_onnx, unread_inputs, with_values, without_inputs
from gopt.frontends.pytorch.eager import autocast
from gopt.frontends.pytorch.eager_code import on_attention_math
from gopt.frontends.pytorch.eager_steps import EagerSteps
from gopt.frontends.pytorch.factory import Recipe
from gopt.frontends.pytorch.hyper import Hyper
from gopt.frontends.pytorch.optimizer_runs import OptimizerTracing
from gopt.frontends.pytorch.options import ExportOptions
from gopt.frontends.pytorch.outputs import returned
from gopt.frontends.pytorch.randomness import RandomSource
from gopt.frontends.pytorch.recorded_step import OTHER_SIZES, no_form
from gopt.frontends.pytorch.samples import Sampled, dimensions, resized, samples_of
from gopt.frontends.pytorch.size_branches import inputs_with_samples, refuse_branches
from gopt.frontends.pytorch.states import Place, StateForm, find_places
from gopt.frontends.pytorch.tracing import TracedStep, exportable, graph_of_code, swapped
from gopt.ir.graph import Graph
from gopt.runtime.executor import Executor
from gopt.runtime.pytorch.tensors import array_over
from gopt.runtime.session import SessionCache
from gopt.text.sanitize import show

Tensors = dict[str, torch.Tensor]


class _NoDraws(RandomSource):
    def next(self, draw: Draw, shape: Sequence[int]) -> torch.Tensor:
        raise UnsupportedError(
            f"--eval: the forward draws random numbers in evaluation mode too ({draw})",
            "put them into the batch, or leave --eval out",
        )


@dataclass(frozen=True, slots=True)
class EvaluationModel:
    """``graph``: the model with first values of parameters and buffers; ``note``: why the model holds for a single
    batch size, '' if for any."""

    graph: Graph
    note: str


@dataclass(slots=True)
class _Forward:
    """The forward of a recipe with the module in evaluation mode."""

    recipe: Recipe
    options: ExportOptions
    seen: EagerSteps

    def places(self) -> list[Place]:
        """Parameters, buffers and constants."""
        return [cell for cell in find_places(self.recipe, self.seen) if cell.kind is not StateForm.OPTIMIZER]

    def values(self, tensors: Mapping[str, torch.Tensor], batch: Mapping[str, torch.Tensor]) -> Tensors:
        """The loss, other metrics, and the module's results, with ``tensors`` in place of the held ones."""
        nothing = Hyper({}, [], {})
        names = [*tensors, *batch, LOSS]
        with (
            swapped(self.recipe, self.places(), tensors, nothing, False, OptimizerTracing()),
            returned(self.recipe, self.options, names) as module_values,
            torch.no_grad(), autocast(self.options), _NoDraws(),
        ):  # fmt: skip
            results = self.recipe.evaluated(batch)
        metrics = {f"metric.{name}" if name in (*tensors, *batch) else name: value for name, value in results.items()}
        return metrics | {name: value for name, value in module_values.outputs.items() if name not in metrics}

    def model(self, name: str) -> onnx.ModelProto:
        """The forward as a model, with parameters and buffers as inputs. Raises UnsupportedError."""
        carried = {cell.name: cell.value.detach().clone() for cell in self.places()}
        arguments, names = self.recipe.batch | carried, list[str]()

        def run(*flat: Any) -> list[Any]:
            with exportable():
                values = dict(zip(arguments, map(to_fun, flat)))
                results = self.values(
                    {name: values[name] for name in carried}, {n: values[n] for n in self.recipe.batch}
                )
            names[:] = results
            return [from_fun(value.detach()) for value in results.values()]

        with quiet():
            graph = graph_of_code(run, arguments, {}, self.options, self.seen)
            traced = TracedStep(
                graph, dict(self.recipe.batch), {}, {}, {}, carried, names[1:], {}, {}, [], []
            )  # fmt: skip
            try:
                model = to_onnx(traced, name)
            except torch.onnx.OnnxExporterError as error:
                raise no_form(error) from error
        without_inputs(model, unread_inputs(model))
        return model

    def resized(self, size: int, sampled: Sampled) -> _Forward:
        return replace(self, recipe=replace(self.recipe, batch=resized(self.recipe.batch, size, sampled)))


def evaluation_model(recipe: Recipe, options: ExportOptions, eager: EagerSteps, name: str) -> EvaluationModel:
    """The forward of a recipe in evaluation mode, for any number of samples if the code allows.

    Raises UnsupportedError for a forward with random numbers, not exportable, or unlike eager PyTorch."""
    forward = _Forward(recipe, options, eager)
    with _evaluating(recipe.whole), _refusals():
        sampled, note = _sampled(forward)
        model = forward.model(name)
        if sampled:
            try:
                model = _at_any_size(forward, sampled, name)
            except UnsupportedError as error:
                sampled, note = {}, error.message
        graph = _graph(model, forward)
        _compare(graph, forward, sampled)
    return EvaluationModel(graph, note)


@contextlib.contextmanager
def _evaluating(module: torch.nn.Module) -> Iterator[None]:
    """Put a module and its parts into evaluation mode, and back at the end."""
    modes = {module: module.training for module in module.modules()}
    module.eval()
    try:
        yield
    finally:
        for part, training in modes.items():
            part.training = training


@contextlib.contextmanager
def _refusals() -> Iterator[None]:
    """Turn any error of code into an UnsupportedError naming the option."""
    try:
        yield
    except (UnsupportedError, InputError) as error:
        text = error.message if error.message.startswith("--eval") else f"--eval: {error.message}"
        raise UnsupportedError(text, *error.hints) from error
    except GoptError:
        raise
    except Exception as error:
        if isinstance(error.__cause__, GoptError):
            raise error.__cause__ from None
        text = next(iter(str(error).splitlines()), "no message")[:400]
        raise UnsupportedError(
            f"--eval: the forward in evaluation mode cannot be traced: {type(error).__name__}: {text}",
            "code that looks at the values of tensors (item(), if x > 0) has no graph; --debug shows where",
        ) from error


def _sampled(forward: _Forward) -> tuple[Sampled, str]:
    """The inputs with samples, or the reason for a fixed number of samples."""
    recipe, options = forward.recipe, forward.options
    try:
        sampled = inputs_with_samples(recipe, options)
        size = next(pairs_of_sizes(dimensions(recipe)))[0]
        refuse_branches(recipe, options, size, sampled, (samples_of(recipe.batch, sampled), *OTHER_SIZES))
    except (UnsupportedError, OptionError) as error:
        return {}, error.message.removeprefix("--dynamic batch: ").removeprefix("--dynamic batch ")
    return sampled, ""


def _at_any_size(forward: _Forward, sampled: Sampled, name: str) -> onnx.ModelProto:
    refusals = []
    for sizes in pairs_of_sizes(dimensions(forward.recipe)):
        one, two = (forward.resized(size, sampled).model(name) for size in sizes)
        try:
            return join_sizes((one, two), sizes)
        except UnsupportedError as error:
            refusals.append(error)
    raise refusals[0]


def _graph(model: onnx.ModelProto, forward: _Forward) -> Graph:
    cells = forward.places()
    states = {cell.name: cell.value for cell in cells if cell.kind is not StateForm.CONSTANT}
    return with_values(model, states, {cell.name: cell.value for cell in cells if cell.kind is StateForm.CONSTANT})


def _compare(graph: Graph, forward: _Forward, sampled: Sampled) -> None:
    """Run the model and eager PyTorch on the example batch, another batch, and other numbers of samples if open, with
    disturbed parameters and buffers. Raises UnsupportedError for a different value."""
    generator = torch.Generator().manual_seed(forward.options.seed + 2)
    values = {cell.name: _disturbed(cell, generator) for cell in forward.places()}
    executor = Executor(graph, SessionCache())
    fed = {name: array_over(value) for name, value in values.items() if name in graph.inputs}
    tried = batches(forward.recipe, 2) + [
        forward.resized(size, sampled).recipe.batch for size in OTHER_SIZES if sampled
    ]
    for batch in tried:
        with quiet(), on_attention_math():
            theirs = forward.values(values, batch)
        batch_feeds = {name: array_over(value) for name, value in batch.items() if name in graph.inputs}
        mine = executor.run(batch_feeds | fed)
        for name, value in theirs.items():
            _check(name, mine[name], value, LIMITS[forward.options.autocast].loss)


def _disturbed(cell: Place, generator: torch.Generator) -> torch.Tensor:
    """A value of a place other than the first, if a run may have another."""
    value = cell.value.detach()
    if cell.kind is StateForm.CONSTANT or not value.is_floating_point():
        return value.clone()
    return value + 0.1 * torch.rand(value.shape, generator=generator).to(value.dtype)


def _check(name: str, mine: np.ndarray, theirs: torch.Tensor, limit: float) -> None:
    difference, size = output_distance(mine, eager := array_over(theirs.double()))
    if name == LOSS and not np.isfinite(eager).all():
        raise UnsupportedError(
            "the loss of eager PyTorch in evaluation mode is not a number: nothing can be compared",
            "give an example batch and values with which evaluation works",
        )
    if not difference <= limit * max(size, 1.0):
        raise UnsupportedError(
            f"the evaluation model is not the eager one: {show(name)} is {difference:.2e} from eager PyTorch, where "
            f"its norm is {size:.2e}",
            "likely cause: a branch on values, or an operator that is exported wrongly",
        )
