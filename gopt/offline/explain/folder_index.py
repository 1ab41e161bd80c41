"""Index of an output folder by name, from manifest, report, source and first rank."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import TypeVar

from gopt.api import stored_roles
from gopt.artifact.manifest_entries import SourceState
from gopt.artifact.pass_facts import BucketFacts, buckets
from gopt.artifact.report_groups import (
    AddedVarFact,
    OpFact,
    RemovedVarFact,
    expand_added_vars,
    expand_ops,
    expand_removed_vars,
)
from gopt.errors import InputError
from gopt.ir.graph import COMM, Graph, Node
from gopt.ir.load import load
from gopt.offline.explain.wiring import Wiring
from gopt.offline.folder_contents import folder_records

FactType = TypeVar("FactType", OpFact, RemovedVarFact, AddedVarFact)


class FolderIndex:
    """Everything by name. Only the parts needed by a story are read."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.manifest, self.report = folder_records(folder)
        self.states = {state.tensor: state for state in self.manifest.states}
        self.updated = {state.updated: state for state in self.manifest.states}
        self.buckets: dict[str, BucketFacts] = {bucket.name: bucket for bucket in buckets(self.report.pipeline)}
        self.bucket_of = {tensor: bucket for bucket in self.buckets.values() for tensor in bucket.tensors}

    @cached_property
    def removed_ops(self) -> Mapping[str, list[OpFact]]:
        return _by_name(expand_ops(self.report.removed_ops))

    @cached_property
    def removed_vars(self) -> Mapping[str, list[RemovedVarFact]]:
        return _by_name(expand_removed_vars(self.report.removed_vars))

    @cached_property
    def added_ops(self) -> Mapping[str, list[OpFact]]:
        return _by_name(expand_ops(self.report.added_ops))

    @cached_property
    def added_vars(self) -> Mapping[str, list[AddedVarFact]]:
        return _by_name(expand_added_vars(self.report.added_vars))

    @cached_property
    def stands_for(self) -> Mapping[str, list[str]]:
        """Value of the ranks -> the replaced operators and states of the source."""
        names_of: dict[str, list[str]] = {}
        ops = ((fact.name, fact.replaced_by) for facts in self.removed_ops.values() for fact in facts)
        values = ((fact.name, fact.replaced_by) for facts in self.removed_vars.values() for fact in facts)
        for name, now in (*ops, *(row for row in values if row[0] in self.states)):
            for value in now:
                names_of.setdefault(value, []).append(name)
        return names_of

    @cached_property
    def source(self) -> Wiring:
        """The wiring of the kept source."""
        return Wiring(self._source)

    @cached_property
    def _source(self) -> Graph:
        path = self.folder / "source.onnx"
        if not path.is_file():
            raise InputError(f"{self.folder} has no {path.name}", "write the folder again with gopt shard")
        return load(path, own=True)

    @cached_property
    def gradients(self) -> Mapping[str, str]:
        """Parameter -> the gradient in the source."""
        return stored_roles(self._source, self.folder / "source.onnx").params

    @cached_property
    def of_gradient(self) -> Mapping[str, list[str]]:
        """Gradient -> the parameters of the gradient."""
        parameters: dict[str, list[str]] = {}
        for parameter, gradient in self.gradients.items():
            parameters.setdefault(gradient, []).append(parameter)
        return parameters

    def wiring(self, rank: int) -> list[Wiring]:
        """The wiring of each file of a rank."""
        if rank not in self._wirings:
            entry = next((entry for entry in self.manifest.ranks if entry.rank == rank), None)
            files = dict.fromkeys(() if entry is None else entry.files.values())
            self._wirings[rank] = [Wiring(load(self.folder / Path(name).name, own=True)) for name in files]
        return self._wirings[rank]

    @cached_property
    def _wirings(self) -> dict[int, list[Wiring]]:
        return {}

    def first_rank(self, ranks: str = "") -> int:
        """The first written rank, or the first of some ranges such as ``3-7,9``."""
        return int(ranks.split(",")[0].split("-")[0]) if ranks else self.manifest.ranks[0].rank

    def calls(self) -> Iterator[Node]:
        """The collectives and messages of the first rank, in the order of its files."""
        for wiring in self.wiring(self.first_rank()):
            yield from (node for node in wiring.graph.nodes if node.domain == COMM)

    def parameter(self, name: str) -> SourceState | None:
        """The parameter of a state, or the state itself if a parameter."""
        state = self.states.get(name)
        return state if state is None or state.of is None else self.states.get(state.of, state)

    def names(self, length: int) -> list[str]:
        """Names that can be explained, of about a length."""
        plan = self.manifest.parameter_server
        every: Iterable[str] = (
            *self.states, *self.updated, *self.buckets, *self.added_ops, *self.added_vars, *self.removed_ops,
            *self.source.labels, *self.source.producers, *self._source.inputs,
            *((key.name for key in plan.keys) if plan is not None else ()),
        )  # fmt: skip
        return [name for name in dict.fromkeys(every) if abs(len(name) - length) < 4]


def _by_name(facts: Iterable[FactType]) -> dict[str, list[FactType]]:
    groups: dict[str, list[FactType]] = {}
    for fact in facts:
        groups.setdefault(fact.name, []).append(fact)
    return groups
