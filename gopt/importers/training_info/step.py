"""``ModelProto.training_info``, ONNX's own form of a training step, as one functional step.

The standard says: the step is the inference graph and the ``algorithm`` graph, one behind the other, and
``update_binding`` says which result replaces which initializer. ``onnx.checker`` looks at none of it, so all of it is
checked here.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, replace

from onnx import GraphProto, ModelProto, TrainingInfoProto, ValueInfoProto

from gopt.documents.roles import RolesRecord
from gopt.errors import UnsupportedError
from gopt.importers.training_info.bindings import bind, check_types, value_infos
from gopt.importers.training_info.gradient import expand_gradients
from gopt.importers.training_info.initialization import check_initialization
from gopt.importers.training_info.names import broken, check_reads, join, stored_types
from gopt.importers.training_info.startup import startup_model
from gopt.ir.graph import ROLES, STEP_ROLES
from gopt.ir.model_file import refill
from gopt.text.sanitize import show


@dataclass(frozen=True, slots=True)
class TrainingInfoStep:
    """A functional step, with the roles in the metadata of ``model``; ``notes``: remarks; ``startup``: the graph
    computing first values, see ``startup_model``."""

    model: ModelProto
    notes: tuple[str, ...]
    startup: ModelProto | None = None


def step_of(model: ModelProto) -> TrainingInfoStep:
    """The step of a model with one entry of ``training_info``.

    Raises InputError where names, bindings or types contradict each other, UnsupportedError for several entries and for
    a Gradient operator at other values than those that it names.
    """
    info = _only(model)
    step = deepcopy(model)
    del step.training_info[:]
    roles_written = _given_roles(model)
    entries = [row for row in step.metadata_props if row.key not in (ROLES, STEP_ROLES)]  # ROLES: of another form of it
    refill(step.metadata_props, entries)
    join(step.graph, info.algorithm)
    check_reads(step.graph, "the step")
    check_initialization(model, info, stored_types(step.graph))
    updates = bind(step, info)
    calls = expand_gradients(step, {update.state for update in updates})
    check_types(step, updates)
    losses = tuple(dict.fromkeys(call.scalar for call in calls))
    for loss in losses:
        _add_output(step, loss)
    _check_given(roles_written, step.graph)
    roles = replace(roles_written, states={update.state: update.output for update in updates})
    if losses:
        roles = replace(roles, loss=losses[0], more_losses=losses[1:])
    step.metadata_props.add(key=ROLES, value=roles.text())
    note = "read from training_info: the inference graph, followed by the algorithm"
    return TrainingInfoStep(step, (note,), startup_model(model, info))


def _given_roles(model: ModelProto) -> RolesRecord:
    """The roles that ``gopt merge --training-info`` leaves in the metadata; raises InputError for a broken entry."""
    for entry in model.metadata_props:
        if entry.key == STEP_ROLES:
            return RolesRecord.parse(entry.value, STEP_ROLES)
    return RolesRecord()


def _check_given(roles: RolesRecord, graph: GraphProto) -> None:
    """Raise InputError for a role of a value the step does not have."""
    inputs = {value.name for value in (*graph.input, *graph.initializer)}
    values = {name for node in graph.node for name in node.output} | inputs
    for name, allowed in (
        *((name, inputs) for name in (*roles.params, *roles.batch)),
        *((name, values) for name in (*roles.losses, *roles.params.values(), *roles.shared)),
    ):
        if name and name not in allowed:
            raise broken(
                f"the metadata entry {STEP_ROLES} names {show(name)}, which is not "
                f"{'an input' if allowed is inputs else 'a value'} of the step",
                "a tool has changed the step: remove the entry, and data flow finds the roles",
            )


def _only(model: ModelProto) -> TrainingInfoProto:
    count = len(model.training_info)
    if count != 1:
        raise UnsupportedError(
            f"training_info holds {count} training steps, and gopt reads one",
            "write a model for each, with its own algorithm",
        )
    info: TrainingInfoProto = model.training_info[0]
    return info


def _add_output(step: ModelProto, name: str) -> None:
    if all(value.name != name for value in step.graph.output):
        step.graph.output.append(ValueInfoProto(name=name))
        step.graph.output[-1].CopyFrom(value_infos(step, "the step")[name])
