"""Exports a factory of eager training code as a functional step on disk, compared with eager PyTorch."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from torch._subclasses.fake_tensor import FakeTensor

from gopt.artifact.model_file import check_model
from gopt.artifact.output_paths import resolve_output
from gopt.errors import GoptError, UnsupportedError
from gopt.frontends.functional_step import LOSS, UPDATED, add_roles
from gopt.frontends.pytorch.check import Checked, compare
from gopt.frontends.pytorch.convert import (
    quiet,
    to_onnx,
    unread_inputs,
    with_random_nodes,
    without_inputs,
)
from gopt.frontends.pytorch.eager import EagerTraining
from gopt.frontends.pytorch.eager_code import on_attention_math
from gopt.frontends.pytorch.factory import Recipe, call_factory, load_factory, make_recipe
from gopt.frontends.pytorch.options import Draws, ExportOptions
from gopt.frontends.pytorch.randomness import Draw, RecordedDraws
from gopt.frontends.pytorch.schedules import in_graph
from gopt.frontends.pytorch.shapes import check_trained, mode_of, one_step, without_values
from gopt.frontends.pytorch.states import FirstStep, find_places, first_step
from gopt.frontends.pytorch.tracing import TracedStep, trace
from gopt.ir.graph import Graph, Tensor
from gopt.ir.load import graph_of
from gopt.notebook import HtmlTable
from gopt.offline.merge import save_model
from gopt.sanitize import show


@dataclass(frozen=True, slots=True)
class Exported(HtmlTable):
    """The result of ``export``.

    ``data``: the file of values beside the model, or ''. ``inputs``: inputs that a run feeds. ``checked``: the
    comparison with eager PyTorch; None for a step without values.
    """

    model: str
    data: str
    nodes: int
    parameters: int
    states: int
    nbytes: int
    inputs: tuple[str, ...]
    checked: Checked | None
    notes: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """The record that ``gopt export --json`` prints."""
        return {
            "format": "gopt-export/1", "model": self.model, "data": self.data, "nodes": self.nodes,
            "parameters": self.parameters, "states": self.states, "bytes": self.nbytes, "inputs": list(self.inputs),
            "check": None if self.checked is None else {
                "steps": len(self.checked.losses), "losses": list(self.checked.losses),
                "eager_losses": list(self.checked.eager_losses), "worst": self.checked.worst,
                "worst_state": self.checked.worst_state,
            },
            "notes": list(self.notes),
        }  # fmt: skip


def export(
    factory: str | Callable[[], Any] | tuple[Any, ...] | Recipe,
    output: str | os.PathLike[str],
    *,
    options: ExportOptions | None = None,
    force: bool = False,
    advance: Callable[[str], None] = lambda text: None,
) -> Exported:
    """Trace a training step, compare it with eager PyTorch, and write it as one ONNX file.

    ``factory``: ``MODULE:FACTORY``, a function, or what one returns: (module, loss function or None, optimizer or
    several, example batch[, scheduler]). Raises OptionError and InputError for what the user gave, UnsupportedError
    for a step that cannot be exported or is not equal to eager PyTorch, RunError when the file cannot be written.
    """
    options = options or ExportOptions()
    target = resolve_output(output)
    check_model(target, shown=Path(output), force=force)
    advance("building the model")
    with contextlib.nullcontext() if options.values else without_values():
        recipe = _recipe(factory, options)
    if not options.values:
        check_trained(recipe)
    step = _Step.of(recipe, options)
    advance("tracing")
    traced = step.trace()
    advance("converting")
    model = step.convert(traced, Path(output).stem)
    graph = _with_values(model, traced)
    checked = None
    if options.values:
        advance(f"comparing {options.check} steps with eager PyTorch")
        hyper = {name: value.numpy() for name, value in traced.hyper.items() if name in graph.inputs}
        with quiet():
            checked = compare(graph, recipe, step.seen, options, step.draws, hyper)
    if options.draws is Draws.NODES and step.draws:
        with_random_nodes(model, step.draws)
        graph = _with_values(model, traced)
    data = save_model(target, graph, Path(output), force=force)
    fed = [name for name in graph.inputs if name not in graph.initializers and name not in traced.states]
    return Exported(
        str(Path(output)), data, len(graph.nodes), step.parameters, len(traced.states),
        sum(each.nbytes for each in graph.initializers.values()), tuple(fed), checked,
        tuple(step.notes),
    )  # fmt: skip


def _recipe(factory: Any, options: ExportOptions) -> Recipe:
    torch.manual_seed(options.seed)
    if isinstance(factory, str):
        return call_factory(load_factory(factory), factory)
    return (
        call_factory(factory, getattr(factory, "__name__", "the factory"))
        if callable(factory)
        else make_recipe(factory)
    )


@dataclass(slots=True)
class _Step:
    """A recipe that has run for one eager step."""

    recipe: Recipe
    options: ExportOptions
    seen: FirstStep
    draws: list[Draw]
    scheduled: bool
    notes: list[str]
    parameters: int = 0

    @classmethod
    def of(cls, recipe: Recipe, options: ExportOptions) -> _Step:
        """Run the recipe for one step. Raises InputError where eager code fails, UnsupportedError where it cannot be
        exported."""
        scheduled, why = in_graph(recipe, options.schedules)
        notes = [f"the schedule is not in the graph ({why}): feed lr"] if why else []
        recorded = RecordedDraws(options.seed)

        def run(tried: Recipe) -> None:
            plain = replace(options, loss_scale=None)
            mode = mode_of(tried)
            if mode is not None:
                with on_attention_math(), mode, recorded:
                    one_step(tried, plain)
                return
            with on_attention_math(), recorded:
                EagerTraining(tried, plain).step(recipe.batch)

        try:
            with quiet():
                seen = first_step(recipe, run)
        except GoptError:
            raise
        except Exception as error:
            raise UnsupportedError(
                f"the eager step raised {type(error).__name__}: {_line(error)}", "--debug shows where"
            ) from error
        return cls(recipe, options, seen, recorded.found, scheduled, notes)

    def trace(self) -> TracedStep:
        """The step as a graph; raises UnsupportedError where its code cannot be traced."""
        places = find_places(self.recipe, self.seen)
        self.parameters = sum(each.kind.value == "parameter" for each in places)
        try:
            with quiet():
                return trace(self.recipe, self.options, places, self.draws, self.scheduled)
        except GoptError:
            raise
        except Exception as error:
            raise UnsupportedError(
                f"the step cannot be traced: {type(error).__name__}: {_line(error)}",
                "code that looks at the values of tensors (item(), if x > 0) has no graph; --debug shows where",
            ) from error

    def convert(self, traced: TracedStep, name: str) -> onnx.ModelProto:
        """Convert to a model without values; raises UnsupportedError where an operator has no ONNX form."""
        try:
            model = to_onnx(traced, name)
        except torch.onnx.OnnxExporterError as error:
            raise UnsupportedError(f"the step has no ONNX form: {_root(error)}", "--debug shows where") from error
        dead = set(unread_inputs(model))
        unread = [name for name in (*traced.batch, *traced.hyper, *traced.constants) if name in dead]
        self.notes += [f"nothing reads {show(name)}: it is left out" for name in unread]
        without_inputs(model, unread)
        self.notes += [
            f"the code compares {name} with a number: the step holds on the side of {float(traced.hyper[name]):g} alone"
            for name in traced.fixed
        ]
        _add_roles(model, traced)
        return model


def _root(error: BaseException) -> str:
    """The cause of the exporter's error: the last exception in its chain with a message."""
    while error.__cause__ is not None and str(error.__cause__).strip():
        error = error.__cause__
    return _line(error)


def _line(error: BaseException) -> str:
    """The first line of a message that is not empty."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "no message")[:400]


def _add_roles(model: onnx.ModelProto, traced: TracedStep) -> None:
    """Write states and batch as metadata, which gopt reads first."""
    inputs = {each.name for each in model.graph.input}
    states = {name: f"{name}{UPDATED}" for name in traced.states}
    add_roles(model, LOSS, states, [name for name in (*traced.batch, *traced.draws) if name in inputs])


def _with_values(model: onnx.ModelProto, traced: TracedStep) -> Graph:
    """The model as a graph with the first values of states and with constants, which are no longer inputs."""
    graph = graph_of(model)
    for name, value in (traced.states | traced.constants).items():
        if name in graph.inputs and not isinstance(value, FakeTensor):
            graph.initializers[name] = Tensor(graph.inputs[name], array=_array(value))
    for name in traced.constants:
        graph.inputs.pop(name, None)
    return graph


def _array(value: torch.Tensor) -> np.ndarray:
    value = value.detach().contiguous()
    if value.dtype is torch.bfloat16:
        import ml_dtypes

        return value.view(torch.uint16).numpy().view(ml_dtypes.bfloat16)
    return value.numpy()
