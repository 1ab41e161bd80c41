"""``gopt.import_step``."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gopt import api
from gopt.artifact.model_file import check_model
from gopt.artifact.output_paths import resolve_output
from gopt.errors import InputError, OptionError
from gopt.importers.load import holds_step, load_step
from gopt.notebook import HtmlTable
from gopt.offline.merge import save_model


@dataclass(frozen=True, slots=True)
class Imported(HtmlTable):
    """A step that ``import_step`` wrote. ``data``: the file of values beside the model, or ''; ``inputs``: the inputs
    that a run feeds; ``missing``: states without a value."""

    model: str
    data: str
    nodes: int
    parameters: int
    states: int
    nbytes: int
    inputs: tuple[str, ...]
    missing: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """The record that ``gopt import --json`` prints."""
        return {
            "format": "gopt-import/1", "model": self.model, "data": self.data, "nodes": self.nodes,
            "parameters": self.parameters, "states": self.states, "bytes": self.nbytes, "inputs": list(self.inputs),
            "missing": list(self.missing),
        }  # fmt: skip


def import_step(folder: str | os.PathLike[str], output: str | os.PathLike[str], *, force: bool = False) -> Imported:
    """Write the step of a folder of ONNX Runtime's training artifacts as one model of standard operators.

    Raises OptionError for what is no folder or a model that exists, InputError and UnsupportedError for artifacts that
    are no step, RunError when the file cannot be written.

    >>> gopt.import_step("fixtures/ort/mlp_adamw", "step.onnx", force=True).parameters
    6
    """
    place, target = Path(folder), resolve_output(output)
    if not place.is_dir():
        raise OptionError(f"{place} is not a folder", "gopt import takes a folder of training artifacts")
    if not holds_step(place):
        raise InputError(
            f"{place} holds no training artifacts", "they are a training graph, an optimizer graph and a checkpoint"
        )
    check_model(target, shown=Path(output), force=force)
    training = api.load(place).training  # refuses what is no step
    graph = load_step(place)
    data = save_model(target, graph, Path(output), force=force)
    states = {state.tensor for state in training.states}
    return Imported(
        str(Path(output)), data, len(graph.nodes), len(training.parameters), len(states),
        sum(each.nbytes for each in graph.initializers.values()),
        tuple(name for name in graph.inputs if name not in states),
        tuple(name for name in graph.inputs if name in states - graph.initializers.keys()),
    )  # fmt: skip
