"""Exports a factory of eager training code as a functional step on disk, compared with eager PyTorch."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import onnx
import torch

from gopt.artifact.model_file import check_model
from gopt.artifact.output_paths import resolve_output
from gopt.documents.default_values import DefaultValue
from gopt.documents.draws import Draw
from gopt.documents.records import to_document
from gopt.errors import GoptError, InputError, RunError, UnsupportedError
from gopt.frontends.pytorch.autocasts import recorded_autocasts
from gopt.frontends.pytorch.check import ExportCheck, FedOptions, compare
from gopt.frontends.pytorch.convert import (
    quiet,
    with_random_nodes,
    with_values,
)
from gopt.frontends.pytorch.evaluation import evaluation_model
from gopt.frontends.pytorch.factory import Recipe, call_factory, load_factory, make_recipe, own_arguments, script_of
from gopt.frontends.pytorch.options import Draws, ExportOptions
from gopt.frontends.pytorch.randomness import named
from gopt.frontends.pytorch.recorded_step import RecordedStep
from gopt.frontends.pytorch.shapes import check_trained, without_values
from gopt.frontends.pytorch.tracing import TracedStep
from gopt.ir.graph import Graph
from gopt.offline.merge import save_model
from gopt.text.notebook import HtmlTable


@dataclass(frozen=True, slots=True)
class Exported(HtmlTable):
    """The result of ``export``.

    ``data``: the file of values beside the model, or ''. ``inputs``: inputs fed by a run. ``checked``: the comparison
    with eager PyTorch; None for a step without values.
    """

    model: str
    data: str
    nodes: int
    parameters: int
    states: int
    nbytes: int
    inputs: tuple[str, ...]
    checked: ExportCheck | None
    notes: tuple[str, ...]
    draws: Mapping[str, Draw] = field(default_factory=dict)
    """Input of random numbers -> what ``gopt run`` draws it from."""
    hyper: Mapping[str, DefaultValue] = field(default_factory=dict)
    """Hyper-parameter -> what ``gopt run`` feeds where none is set."""
    evaluation: str = ""
    """The model of the forward in evaluation mode, or ''."""
    metrics: tuple[str, ...] = ()
    """Its outputs."""

    def to_json(self) -> dict[str, Any]:
        """The record printed by ``gopt export --json``."""
        return {
            "format": "gopt-export/1", "model": self.model, "data": self.data, "nodes": self.nodes,
            "parameters": self.parameters, "states": self.states, "bytes": self.nbytes, "inputs": list(self.inputs),
            "check": None if self.checked is None else {
                "steps": len(self.checked.losses), "losses": list(self.checked.losses),
                "eager_losses": list(self.checked.eager_losses), "worst": self.checked.worst,
                "worst_state": self.checked.worst_state, "rounding": self.checked.rounding,
            },
            "draws": {name: to_document(draw) for name, draw in self.draws.items()},
            "hyper": {name: to_document(value) for name, value in self.hyper.items()},
            "evaluation": {"model": self.evaluation, "outputs": list(self.metrics)} if self.evaluation else None,
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

    ``factory``: ``MODULE:FACTORY``, a function, or its result: (module, loss function or None, optimizer or several,
    example batch[, scheduler]). Raises OptionError and InputError for wrong arguments, UnsupportedError for a step not
    exportable or unlike eager PyTorch, RunError for a failed write.
    """
    options = options or ExportOptions()
    target = resolve_output(output)
    check_model(target, shown=Path(output), force=force)
    beside = evaluation_path(output)
    if options.evaluation:
        check_model(resolve_output(beside), shown=beside, force=force)
    advance("building the model")
    with recorded_autocasts(), contextlib.nullcontext() if options.values else without_values():
        recipe = _recipe(factory, options)
    if not options.values:
        check_trained(recipe)
    step = RecordedStep.of(recipe, options)
    traced, model, graph, checked = _agreeing(step, Path(output).stem, advance)
    if options.draws is Draws.NODES and step.draws:
        with_random_nodes(model, step.draws)
        graph = with_values(model, traced.states, traced.constants)
    evaluation = None
    if options.evaluation:
        advance("tracing the forward in evaluation mode")
        evaluation = evaluation_model(recipe, options, step.seen, beside.stem)
        save_model(resolve_output(beside), evaluation.graph, beside, force=force)
        if evaluation.note:
            step.notes.append(f"{beside} holds for the example's number of samples alone: {evaluation.note}")
    script = script_of(factory)
    step.notes += [] if script is None else script.left_out(options, str(factory).rpartition(":")[2])
    data = save_model(target, graph, Path(output), force=force)
    fed = [name for name in graph.inputs if name not in graph.initializers and name not in traced.states]
    return Exported(
        str(Path(output)), data, len(graph.nodes), step.parameters, len(traced.states),
        sum(tensor.nbytes for tensor in graph.initializers.values()), tuple(fed), checked,
        tuple(step.notes), {name: draw for name, draw in named(step.draws).items() if name in fed},
        {name: value for name, value in traced.defaults.items() if name in fed},
        "" if evaluation is None else str(beside), () if evaluation is None else tuple(evaluation.graph.outputs),
    )  # fmt: skip


def evaluation_path(output: str | os.PathLike[str]) -> Path:
    """The model of the forward in evaluation mode, beside a step: ``step.eval.onnx``."""
    return Path(output).with_suffix(f".eval{Path(output).suffix or '.onnx'}")


def _agreeing(
    step: RecordedStep, name: str, advance: Callable[[str], None]
) -> tuple[TracedStep, onnx.ModelProto, Graph, ExportCheck | None]:
    """The step by the first way of tracing its optimizers in agreement with eager PyTorch; if none agrees, raises the
    refusal of the first way of many paths."""
    ways, notes = step.ways(), step.notes
    refusals: list[GoptError] = []
    for way in ways:
        step.way, step.notes = way, [*notes]
        advance("tracing")
        try:
            traced, model = step.converted(name, advance)
            graph = _readable(model, traced, step.options)
            return traced, model, graph, _compared(step, traced, graph, advance)
        except GoptError as error:
            refusals.append(error)
    refusal = next(refusal for way, refusal in zip(ways, refusals) if way.paths > 1)
    raise refusal from (refusals[-1] if len(ways) > 1 else None)


def _compared(
    step: RecordedStep, traced: TracedStep, graph: Graph, advance: Callable[[str], None]
) -> ExportCheck | None:
    options = step.options
    if not options.values:
        return None
    advance(f"comparing {options.check} steps with eager PyTorch")
    hyper = FedOptions(
        {name: value.numpy() for name, value in traced.hyper.items() if name in graph.inputs}, traced.rates
    )
    with quiet():
        try:
            branches = {traced.copies.get(name, name): line for name, line in traced.branches.items()}
            checked = compare(graph, step.recipe, step.seen, options, step.draws, hyper, branches)
        except RunError as error:
            raise UnsupportedError(f"the exported step cannot be run: {error.message}", *error.hints) from error
        if not checked.updates:
            raise UnsupportedError(
                f"--loss-scale: gradients overflow in each of {options.check} compared steps: no update is compared",
                "compare more steps with --check N, or give a smaller scale",
            )
        step.compare_other_sizes(graph, hyper)
    step.notes += [
        f"{len(checked.losses)} compared steps took one side alone of the branch {line}" for line in checked.one_sided
    ]
    return checked


def _readable(model: onnx.ModelProto, traced: TracedStep, options: ExportOptions) -> Graph:
    """The model as a graph with the values; raises UnsupportedError for an operator ONNX lacks in a type of
    autocast."""
    try:
        return with_values(model, traced.states, traced.constants)
    except InputError as error:
        if options.autocast is None:
            raise
        raise UnsupportedError(
            f"--autocast {options.autocast.value}: ONNX has no such operator in that type: {error.message}",
            "compute it inside torch.autocast('cpu', enabled=False), or take another type",
        ) from error


def _recipe(factory: Any, options: ExportOptions) -> Recipe:
    torch.manual_seed(options.seed)
    if isinstance(factory, str):
        with own_arguments(factory):
            return call_factory(load_factory(factory), factory)
    return (
        call_factory(factory, getattr(factory, "__name__", "the factory"))
        if callable(factory)
        else make_recipe(factory)
    )
