"""The reduction of a model: rounds of all steps until no step makes the graph smaller."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from google.protobuf.message import DecodeError  # type: ignore[import-untyped,unused-ignore]
from onnx import ModelProto

from gopt import documents, limits
from gopt.errors import GoptError, InputError, OptionError
from gopt.ir.external_data import DataFolder, naming
from gopt.ir.model_file import parse_model
from gopt.ir.types import TensorType, dtype_name
from gopt.ir.wire_format import check_parts
from gopt.offline.reduce.search import BudgetSpentError, Fails, Search, SearchBudget
from gopt.offline.reduce.steps import STEPS, Groups, drop_comments, remove_parameters
from gopt.offline.reproducer.failure import Failure
from gopt.offline.reproducer.values import is_external, tensor_bytes

_MODEL_BYTES = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Reduction:
    """A reduced model. ``stopped``: the bound that ended the search, empty where no step makes the model smaller."""

    model: ModelProto
    failure: Failure
    nodes_before: int
    tries: int
    kept: int
    stopped: str

    @property
    def nodes(self) -> int:
        """Remaining nodes."""
        return len(self.model.graph.node)


def read_model(path: Path) -> ModelProto:
    """A model with values inside; above ``limits.REPRODUCER_VALUES`` bytes, states lose their values.

    Raises InputError for a file that is no model, or for constants beyond the limit."""
    with naming(str(path)):
        data = documents.read_bytes(path, _MODEL_BYTES)
        check_parts(data)
        try:
            model: ModelProto = parse_model(data)
        except DecodeError:
            raise InputError("is not an ONNX model", "give the model that the command behind -- fails on") from None
        _embed(model, DataFolder(str(path)))
    return model


def _embed(model: ModelProto, folder: DataFolder) -> None:
    outside = [tensor for tensor in model.graph.initializer if is_external(tensor)]
    if sum(map(tensor_bytes, outside)) > limits.REPRODUCER_VALUES:
        inputs = {info.name for info in model.graph.input}
        if any(tensor.name not in inputs for tensor in outside):
            most = limits.REPRODUCER_VALUES
            raise InputError(
                f"its constants outside of the file have more than {most} bytes (REPRODUCER_VALUES)",
                limits.hint("REPRODUCER_VALUES", sum(map(tensor_bytes, outside))),
            )
        embedded = [tensor for tensor in model.graph.initializer if not is_external(tensor)]
        del model.graph.initializer[:]
        model.graph.initializer.extend(embedded)
        return
    for tensor in outside:
        value = folder.tensor(tensor, TensorType(dtype_name(tensor.data_type), tuple(tensor.dims))).numpy().tobytes()
        tensor.ClearField("external_data")
        tensor.ClearField("data_location")
        tensor.raw_data = value


def parameter_groups(path: Path) -> Groups:
    """For every parameter of a step the outputs with the new values of the parameter and its states.

    Empty where gopt cannot read the step: the very failure, perhaps."""
    from gopt import api

    try:
        states = api.load(path).training.states
    except GoptError:
        return ()
    except MemoryError:
        raise
    except Exception:  # a defect of gopt may be what the reduction is about
        return ()
    groups: dict[str, list[str]] = {}
    for state in states:
        groups.setdefault(state.of or state.tensor, []).append(state.updated)
    return [tuple(group) for group in groups.values()]


def reduce_model(
    model: ModelProto,
    fails: Fails,
    *,
    groups: Groups = (),
    bounds: SearchBudget = SearchBudget(),
    tell: Callable[[str], None],
) -> Reduction:
    """Make a model smaller while ``fails`` finds the same failure as on the whole model.

    Every kept candidate passes ``onnx.checker`` if the model does. Raises OptionError where the command does not fail
    on the model."""
    tell("running the command on the whole model")
    failure = fails(model.SerializeToString(deterministic=True))
    if failure is None:
        raise OptionError("the command does not fail on the whole model", "give the command that fails behind --")
    search = Search(model, failure, fails, bounds, tell)
    stopped = ""
    try:
        _rounds(search, groups)
    except BudgetSpentError as spent:
        stopped = spent.why
    return Reduction(search.view.model, failure, search.nodes_before, search.tries, search.kept, stopped)


def _rounds(search: Search, groups: Groups) -> None:
    remove_parameters(search, groups)
    count = -1
    while count != search.kept:
        count = search.kept
        for step in STEPS:
            step(search)
    drop_comments(search)
