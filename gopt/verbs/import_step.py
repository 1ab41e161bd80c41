"""``gopt.import_step``."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gopt.artifact.model_file import check_model
from gopt.artifact.output_paths import resolve_output
from gopt.errors import InputError, OptionError
from gopt.importers.load import read_step
from gopt.offline.merge import save_model
from gopt.options.types import checked
from gopt.steps.source import find_roles
from gopt.system.garbage import gc_paused
from gopt.text.notebook import HtmlTable


@dataclass(frozen=True, slots=True)
class Imported(HtmlTable):
    """A step written by ``import_step``. ``data``: the file of values beside the model, or ''; ``inputs``: inputs fed
    by a run; ``missing``: states without a value; ``uninitialized``: values computed first by the source, but kept as
    stored in the step."""

    model: str
    data: str
    nodes: int
    parameters: int
    states: int
    nbytes: int
    inputs: tuple[str, ...]
    missing: tuple[str, ...]
    uninitialized: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """The record printed by ``gopt import --json``."""
        return {
            "format": "gopt-import/1", "model": self.model, "data": self.data, "nodes": self.nodes,
            "parameters": self.parameters, "states": self.states, "bytes": self.nbytes, "inputs": list(self.inputs),
            "missing": list(self.missing), "uninitialized": list(self.uninitialized),
        }  # fmt: skip


@gc_paused()
@checked
def import_step(source: str | os.PathLike[str], output: str | os.PathLike[str], *, force: bool = False) -> Imported:
    """Write the step of a folder of ONNX Runtime's training artifacts, or of a model with ``training_info``, as one
    plain model.

    Raises OptionError for a model that is a plain graph, and for an output that exists; InputError and UnsupportedError
    for a source that is not a training step; RunError when the file cannot be written.

    >>> gopt.import_step("fixtures/ort/mlp_adamw", "step.onnx", force=True).parameters
    6
    """
    path, target = Path(source), resolve_output(output)
    file = read_step(path)
    if file is None:
        raise InputError(
            f"{path} holds no training artifacts", "they are a training graph, an optimizer graph and a checkpoint"
        )
    if file.plain:
        raise OptionError(
            f"{path} is a plain graph already", "give a folder of training artifacts, or a model with training_info"
        )
    check_model(target, shown=Path(output), force=force)
    graph = file.graph
    training, _ = find_roles(graph.twin(), path.name)  # refuses what is not a step
    data = save_model(target, graph, Path(output), force=force)
    states = {state.tensor for state in training.states}
    return Imported(
        str(Path(output)), data, len(graph.nodes), len(training.parameters), len(states),
        sum(tensor.nbytes for tensor in graph.initializers.values()),
        tuple(name for name in graph.inputs if name not in states),
        tuple(name for name in graph.inputs if name in states - graph.initializers.keys()),
        () if file.startup is None else tuple(file.startup.outputs),
    )  # fmt: skip
