"""The roles of a step as metadata of the model: after sharding they cannot be recovered."""

from __future__ import annotations

import os

from onnx import ModelProto

from gopt.analysis.role_map import RoleMap
from gopt.analysis.roles import recover
from gopt.analysis.training import StateKind, TrainingGraph
from gopt.documents.roles import RolesRecord
from gopt.errors import InputError, OptionError
from gopt.ir.graph import ROLES, Graph


def roles_text(training: TrainingGraph) -> str:
    """The roles as metadata of the kept source: after sharding they cannot be recovered."""
    statistics = [state.tensor for state in training.states if state.kind is StateKind.STATISTIC]
    named = [name for name in statistics if name not in training.counted]  # what counts samples is found again
    return RolesRecord(
        loss=training.loss,
        more_losses=training.losses[1:],
        states={state.tensor: state.updated for state in training.states},
        params=training.gradients,
        batch=tuple(training.batch),
        shared=tuple(training.shared.values()),
        statistics={**dict.fromkeys(named, ""), **training.reductions} or None,
        draws=training.draws or None,
        hyper=training.defaults or None,
    ).text()


def stored_roles(graph: Graph, name: str | os.PathLike[str]) -> RoleMap:
    """The roles in the metadata of a kept source; ``name``: the file. Raises InputError."""
    text = graph.metadata.get(ROLES)
    if text is None:
        raise InputError(f"{name} has no roles in its metadata", "use the source.onnx that gopt shard wrote")
    record = RolesRecord.parse(text, f"{name}: gopt.roles")
    roles = RoleMap(
        record.losses, record.states, record.params, record.batch, record.shared, record.statistics or {},
        record.draws or {}, record.hyper or {},
    )  # fmt: skip
    try:
        roles.check(graph)
    except OptionError as error:
        raise InputError(
            f"{name}: the file's metadata (gopt.roles) does not match its graph: {error.message}", "export it again"
        ) from None
    return roles


def load_stored_source(graph: Graph, roles: RoleMap, name: str | os.PathLike[str]) -> TrainingGraph:
    """The kept source ``name`` with its stored roles; raises InputError where they do not fit the graph."""
    try:
        return recover(graph, roles)
    except OptionError as error:
        raise InputError(f"{name}: gopt.roles: {error.message}", "use the source.onnx that gopt shard wrote") from None


def with_stored_roles(graph: Graph, roles: RoleMap, name: str) -> RoleMap:
    """The user's map over the map left in a model's metadata by ``gopt export`` and ``gopt derive``.

    The graph loses the entry: passes rename the values in it. Raises InputError for an entry that does not fit."""
    if ROLES not in graph.metadata:
        return roles
    stored = stored_roles(graph, name)
    del graph.metadata[ROLES]
    header = ModelProto()
    header.CopyFrom(graph.header)  # a twin of the graph has the same one
    del header.metadata_props[:]
    header.metadata_props.extend(entry for entry in graph.header.metadata_props if entry.key != ROLES)
    graph.header = header
    return RoleMap(
        roles.loss or stored.loss,
        {**stored.states, **roles.states},
        {**{name: value for name, value in stored.params.items() if name not in roles.statistics}, **roles.params},
        [*roles.batch, *(name for name in stored.batch if name not in roles.batch)],
        roles.shared or stored.shared,
        {**{name: rule for name, rule in stored.statistics.items() if name not in roles.params}, **roles.statistics},
        {**stored.draws, **roles.draws},
        {**stored.hyper, **roles.hyper},
    )
