"""Derives a training step from a forward ONNX model, and checks its gradients by finite differences."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from gopt.artifact.model_file import check_model
from gopt.artifact.output_paths import resolve_output
from gopt.documents.records import key, to_document
from gopt.errors import OptionError, RunError
from gopt.frontends.derive.confirm import confirm
from gopt.frontends.derive.forward_model import read_forward
from gopt.frontends.derive.options import DeriveOptions
from gopt.frontends.derive.step import write_step
from gopt.ir.tensor import Tensor
from gopt.offline.merge import save_model
from gopt.system.files import reason
from gopt.text.notebook import HtmlTable

IN_MEMORY = 1 << 28
"""Bytes of stored values above which they lie in a file while gradients are confirmed, which holds moved ones."""


@dataclass(frozen=True, slots=True)
class Derived(HtmlTable):
    """The result of ``derive``.

    ``data``: the file of values beside the model, or ''. ``inputs``: inputs fed by a run. ``lr``: the optimizer's
    default learning rate, None for a constant rate. ``lr_input``: the input holding the rate, or ''. ``confirmed``: the
    number of gradients the check confirmed.
    """

    model: str
    data: str
    forward_nodes: int
    nodes: int
    parameters: int
    states: int
    nbytes: int = field(metadata=key("bytes"))
    inputs: tuple[str, ...]
    lr: float | None
    lr_input: str
    confirmed: int
    notes: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """The record printed by ``gopt derive --json``."""
        return {"format": "gopt-derived/1"} | to_document(self)


def derive(
    forward: str | os.PathLike[str],
    output: str | os.PathLike[str],
    options: DeriveOptions,
    *,
    force: bool = False,
    advance: Callable[[str], None] = lambda text: None,
) -> Derived:
    """Write the training step of a forward model.

    Raises InputError for a damaged model, OptionError for a request making no step, UnsupportedError for an operator
    without a derivative or a gradient unconfirmed by finite differences, RunError for a failed write.
    """
    target = resolve_output(output)
    check_model(target, shown=Path(output), force=force)
    if target.exists() and os.path.exists(forward) and os.path.samefile(target, forward):
        raise OptionError(f"{output} is the model itself", "choose another name with -o")
    advance("reading the model")
    model = read_forward(forward, options.dims, values=options.values)
    with TemporaryDirectory(prefix="gopt-derive-") as folder:
        if sum(tensor.nbytes for tensor in model.stored.values()) > IN_MEMORY:
            _move_to_file(model.stored.values(), os.path.join(folder, "values"))
        advance("differentiating")
        step = write_step(model, options)
        confirmed, remarks = 0, ["without values no gradient is confirmed: gopt verify draws values and confirms them"]
        if options.values:
            advance("confirming gradients by finite differences")
            confirmed, remarks = confirm(step, options)
        data = save_model(target, step.graph, Path(output), force=force)
    graph = step.graph
    fed = tuple(name for name in graph.inputs if name not in graph.initializers)
    return Derived(
        str(Path(output)), data, len(model.model.graph.node), len(graph.nodes), len(step.parameters), step.states,
        sum(tensor.nbytes for tensor in graph.initializers.values()), fed,
        options.rule.lr if options.lr is None else None, step.lr, confirmed, (*step.notes, *remarks),
    )  # fmt: skip


def _move_to_file(tensors: Iterable[Tensor], path: str) -> None:
    """Move values from memory to a file, for reading on demand."""
    try:
        with open(path, "wb") as file:
            for tensor in tensors:
                if tensor.array is not None and tensor.array.nbytes == tensor.nbytes:
                    offset = file.tell()
                    file.write(np.ascontiguousarray(tensor.array).reshape(-1).view(np.uint8).data)
                    tensor.array, tensor.path, tensor.offset = None, path, offset
    except OSError as error:
        raise RunError(f"cannot write {path}: {reason(error)}", "TMPDIR names another folder") from error
