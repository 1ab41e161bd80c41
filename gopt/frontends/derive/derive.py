"""Derives a training step from a forward ONNX model, and checks its gradients by finite differences."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gopt.analysis.role_map import RoleMap
from gopt.analysis.training import TrainingGraph
from gopt.api import read_roles, with_stored_roles
from gopt.artifact.model_file import check_model
from gopt.artifact.output_paths import resolve_output
from gopt.errors import RunError, UnsupportedError
from gopt.frontends.derive.forward_model import read_forward
from gopt.frontends.derive.options import DYNAMIC, DeriveOptions
from gopt.frontends.derive.step import Step, write_step
from gopt.frontends.derive.update import FIRST_SCALE
from gopt.notebook import HtmlTable
from gopt.offline.merge import save_model
from gopt.sanitize import show
from gopt.verification import sampling
from gopt.verification.gradient_check import GradientCheck, check_gradients
from gopt.verification.gradient_check.verdict import PROPORTIONAL, UNSTEADY, ZERO
from gopt.verification.gradient_sample import sample_gradients

NEAR = 0.05
"""How far a ratio of a gradient and its finite difference may be from one: in half precision it is."""
BATCHES = 3
"""Batches that are drawn for the check."""


@dataclass(frozen=True, slots=True)
class Derived(HtmlTable):
    """The result of ``derive``.

    ``data``: the file of values beside the model, or ''. ``inputs``: inputs that a run feeds. ``lr``: the optimizer's
    default learning rate, None where the rate is a constant of the graph. ``lr_input``: the input that holds the rate,
    or ''. ``confirmed``: the number of gradients that the
    check confirmed.
    """

    model: str
    data: str
    forward_nodes: int
    nodes: int
    parameters: int
    states: int
    nbytes: int
    inputs: tuple[str, ...]
    lr: float | None
    lr_input: str
    confirmed: int
    notes: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """The record that ``gopt derive --json`` prints."""
        return {
            "format": "gopt-derived/1", "model": self.model, "data": self.data, "forward_nodes": self.forward_nodes,
            "nodes": self.nodes, "parameters": self.parameters, "states": self.states, "bytes": self.nbytes,
            "inputs": list(self.inputs), "lr": self.lr, "lr_input": self.lr_input,
            "confirmed": self.confirmed, "notes": list(self.notes),
        }  # fmt: skip


def derive(
    forward: str | os.PathLike[str],
    output: str | os.PathLike[str],
    options: DeriveOptions,
    *,
    force: bool = False,
    advance: Callable[[str], None] = lambda text: None,
) -> Derived:
    """Write the training step of a forward model.

    Raises InputError for a damaged model, OptionError for a request that makes no step, UnsupportedError for an
    operator without a derivative or a gradient that finite differences do not confirm, RunError when the file cannot be
    written.
    """
    target = resolve_output(output)
    check_model(target, shown=Path(output), force=force)
    advance("reading the model")
    model = read_forward(forward, options.dims)
    advance("differentiating")
    step = write_step(model, options)
    advance("confirming gradients by finite differences")
    checks, constant = _confirm(step, options)
    data = save_model(target, step.graph, Path(output), force=force)
    graph = step.graph
    fed = tuple(name for name in graph.inputs if name not in graph.initializers)
    return Derived(
        str(Path(output)), data, len(model.model.graph.node), len(graph.nodes), len(step.parameters), step.states,
        sum(each.nbytes for each in graph.initializers.values()), fed,
        options.rule.lr if options.lr is None else None, step.lr, len(checks), (*step.notes, *constant),
    )  # fmt: skip


def _confirm(step: Step, options: DeriveOptions) -> tuple[list[GradientCheck], list[str]]:
    """The gradients that were checked, and a remark on those that no batch changes; raises UnsupportedError where one
    is not confirmed."""
    copy, seed = step.graph.twin(), options.seed
    training = read_roles(copy, with_stored_roles(copy, RoleMap(), "the step"))
    sample = sample_gradients(training, seed)
    try:
        checks = check_gradients(training, _points(training, seed), seed, names=sample.parameters if sample else None)
    except RunError as error:
        raise UnsupportedError(
            f"gradients cannot be confirmed by finite differences: {error.message}", *error.hints,
            "replace that operator in the model",
        ) from None  # fmt: skip
    scale = FIRST_SCALE if options.loss_scale == DYNAMIC else float(options.loss_scale or 1)
    wrong = [each for each in checks if not _is_gradient(each, scale)]
    if wrong:
        names = ", ".join(show(each.parameter) for each in wrong[:4])
        raise UnsupportedError(
            f"the gradient of {names} is not confirmed: {wrong[0].why}",
            "make its random numbers an input of the model" if wrong[0].why == UNSTEADY else
            "--freeze what is not a parameter, or derive from a model whose inputs have the sizes of real data",
        )  # fmt: skip
    apart = [name for name in step.parameters if name not in training.gradients]
    more = f", and {len(apart) - 4} more" if len(apart) > 4 else ""
    names = ", ".join(map(show, apart[:4])) + more
    return checks, [f"not confirmed, for no batch changes their gradients: {names}"] if apart else []


def _is_gradient(check: GradientCheck, scale: float) -> bool:
    """Return whether a value is ``scale`` times the gradient. ``gopt verify`` also accepts an average over ranks."""
    right = all(abs(ratio / scale - 1) < NEAR for ratio in check.ratios)
    return check.holds and (check.why == ZERO or (check.why == PROPORTIONAL and right))


def _points(training: TrainingGraph, seed: int) -> list[dict[str, np.ndarray]]:
    """The stored states with random batches."""
    graph, ranges = training.graph, sampling.without_ignored(sampling.integer_ranges(training))
    states = {name: np.array(graph.initializers[name].numpy()) for name in graph.inputs if name in graph.initializers}
    hyper = {name: sampling.hyper(graph.types[name]) for name in training.hyper}
    made = []
    for number in range(BATCHES):
        generator = np.random.default_rng([seed, number])
        batch = {name: sampling.draw(graph.types[name], generator, ranges.get(name)) for name in training.batch}
        made.append({**states, **hyper, **batch})
    return made
