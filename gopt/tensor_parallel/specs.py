"""Reads sharding specs of a file (ONNX IR 11) as placements of parameters along an axis.

A spec on a parameter, on a state of the same shape, on the new value or on a view of the parameter says how the
parameter is split. Specs on other values are ignored: placements of activations follow from the weights'.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from math import prod

from gopt.analysis.training import TrainingGraph
from gopt.errors import InputError, OptionError, UnsupportedError
from gopt.ir.constant_folding import Constants
from gopt.ir.device_specs import OWN, Configuration, TensorSpec, read_configurations
from gopt.ir.external_data import show
from gopt.ir.graph import Node
from gopt.ir.operator_use import use_of
from gopt.operators.kinds import CARRIES
from gopt.records.mesh import PIPELINE, Mesh
from gopt.records.placements import REPLICATED, Placement, Shard
from gopt.spmd.links import Slot, strategies
from gopt.tensor_parallel.choose import Choice
from gopt.tensor_parallel.patterns import Pattern
from gopt.tensor_parallel.sizes import Sizes, part_sizes

WHY = "sharding spec of the file"
NONE = "none"
"""The name that stands for no device configuration."""
_HINT = f"leave the specs out with -O tensor-parallel.configuration={NONE}"


def with_specs(
    training: TrainingGraph, mesh: Mesh, axis: str, rule: Sizes, choices: Mapping[str, Choice], *,
    patterns: Sequence[Pattern] = (), configuration: str = "", note: Callable[[str], None] = lambda text: None,
) -> dict[str, Choice]:  # fmt: skip
    """Return ``choices``, overridden by the file's specs; parameters that a pattern matches stay.

    ``configuration``: the device configuration whose specs count; '': the one that fits the mesh; ``none``: no specs.
    Raises InputError for specs that contradict one another, UnsupportedError for splits gopt does not have, OptionError
    where the model has no such configuration, or several that fit.
    """
    merged = dict(choices)
    chosen = _chosen(read_configurations(training.graph), mesh, axis, configuration, note)
    if chosen is None:
        return merged
    reader = _Reader(training, mesh, axis, rule, chosen)
    for name, placement in reader.placements().items():
        if any(pattern.axis == axis and fnmatchcase(name, pattern.glob) for pattern in patterns):
            continue
        if isinstance(placement, Shard):
            merged[name] = Choice(placement, WHY)
        else:
            merged.pop(name, None)
    if reader.unused:
        note(f"sharding specs of {len(reader.unused)} values that follow from no parameter alone are not used")
    if chosen.stages and mesh.along(PIPELINE) == 1:
        note("pipeline stages of the file are not used: the mesh has no axis pp")
    return merged


def _chosen(
    configurations: Sequence[Configuration], mesh: Mesh, axis: str, wanted: str, note: Callable[[str], None]
) -> Configuration | None:
    """Return the configuration with the specs in use, or None."""
    if wanted == NONE:
        return None
    if wanted and wanted not in {config.name for config in configurations}:
        names = ", ".join(show(config.name) for config in configurations) or "none"
        raise OptionError(f"the model has no device configuration {wanted!r}", f"it has {names}")
    named = [config for config in configurations if config.specs and wanted in ("", config.name)]
    written = [config for config in named if config.name.startswith(OWN) and not wanted]
    named = [config for config in named if config not in written]
    counts = (mesh.size(axis), mesh.ranks)
    fit = [config for config in named if config.devices in counts]
    if len(fit) > 1:
        names = ", ".join(show(config.name) for config in fit)
        raise OptionError(
            f"several device configurations of the model fit the mesh {mesh}: {names}",
            f"say which: -O tensor-parallel.configuration={fit[0].name}",
        )
    if named and not fit:
        raise UnsupportedError(
            f"the device configuration {show(named[0].name)} of the model has {named[0].devices} devices, and the mesh "
            f"{mesh} has {counts[0]} ranks along {axis}, {counts[1]} in all",
            _HINT,
        )
    if not named:
        fit = [config for config in written if config.name == f"{OWN}{mesh}"]
        if written and not fit:
            note(f"{written[-1].name} is of another mesh: its sharding specs are not used")
    return fit[0] if fit else None


@dataclass(slots=True)
class _Reader:
    training: TrainingGraph
    mesh: Mesh
    axis: str
    rule: Sizes
    chosen: Configuration
    unused: set[str] = field(default_factory=set)
    constants: Constants = field(init=False)
    producers: dict[str, Node] = field(init=False)
    roots: dict[str, str] = field(init=False)
    """State of a parameter's shape, or its new value -> the parameter."""

    def __post_init__(self) -> None:
        graph = self.training.graph
        self.constants = Constants(graph)
        self.producers = {name: node for node in graph.file_nodes or graph.nodes for name in node.outputs if name}
        self.roots = {}
        parameters = {state.tensor for state in self.training.parameters}
        for state in self.training.states:
            root = state.of or state.tensor
            if root in parameters and graph.types[root].shape == graph.types[state.tensor].shape:
                self.roots |= {state.tensor: root, state.updated: root}

    def placements(self) -> dict[str, Placement]:
        """Return parameter -> placement."""
        agreed: dict[str, tuple[Placement, TensorSpec]] = {}
        for spec in self.chosen.specs:
            views = self._views(spec.tensor)
            if views is None:
                self.unused.add(spec.tensor)
                continue
            root, placement = self._followed(spec, views)
            before, first = agreed.setdefault(root, (placement, spec))
            if before != placement:
                raise InputError(
                    f"the sharding specs of {show(root)} contradict one another: {before} by node {show(first.node)}, "
                    f"{placement} by node {show(spec.node)}",
                    _HINT,
                )
        return {root: placement for root, (placement, _) in agreed.items()}

    def _views(self, name: str) -> list[Node] | None:
        """Return the nodes between a value and the viewed parameter; None for other values."""
        nodes: list[Node] = []
        while name not in self.roots:
            node = self.producers.get(name)
            if node is None or not node.is_in(CARRIES):
                return None
            nodes.append(node)
            name = node.inputs[0]
        return nodes

    def _followed(self, spec: TensorSpec, views: Sequence[Node]) -> tuple[str, Placement]:
        """Return the parameter behind a view, and the placement."""
        placement = self._placement(spec)
        name = spec.tensor
        for node in views:
            if isinstance(placement, Shard):
                described = use_of(node, self.training.graph, self.constants)
                options = [strategy.operands[0] for strategy in strategies(described, Slot(0, True), placement)]
                if not options:
                    raise UnsupportedError(
                        f"{self._where(spec)} cannot be brought to what it is a view of, through {node.op_type} "
                        f"{show(node.label)}",
                        _HINT,
                    )
                placement = options[0]
            name = node.inputs[0]
        return self.roots[name], placement

    # --- one spec ---------------------------------------------------------------------------------------------------

    def _where(self, spec: TensorSpec) -> str:
        return f"the sharding spec of {show(spec.tensor)} in node {show(spec.node)}"

    def _refused(self, spec: TensorSpec, what: str) -> UnsupportedError:
        return UnsupportedError(f"{self._where(spec)} {what}", _HINT)

    def _placement(self, spec: TensorSpec) -> Placement:
        split = [dim for dim in spec.dims if any(shards > 1 for _, shards in dim.factors)]
        if not split:
            if len(spec.devices) < self.chosen.devices:
                raise self._refused(spec, f"has it on {len(spec.devices)} of {self.chosen.devices} devices alone")
            return REPLICATED
        members = self.mesh.size(self.axis)
        factors = split[0].factors
        counts = [shards for _, shards in factors]
        if len(split) > 1 or sum(count > 1 for count in counts) > 1:
            raise self._refused(spec, f"splits it twice, and gopt splits one dimension along {self.axis}")
        if max(counts) != members:
            raise self._refused(
                spec, f"splits it into {max(counts)} shards, and the mesh {self.mesh} has {members} ranks along "
                f"{self.axis}"
            )  # fmt: skip
        self._check_devices(spec, members)
        length = self._length(spec, split[0].axis, factors)
        index = counts.index(members)
        runs, unit = (prod(size or 1 for size, _ in part) for part in (factors[:index], factors[index + 1 :]))
        return Shard(split[0].axis, part_sizes(length // runs, members, self.rule, unit), runs)

    def _length(self, spec: TensorSpec, axis: int, factors: Sequence[tuple[int | None, int]]) -> int:
        """Return the length of the dimension; the spec's factors must multiply to it."""
        type = self.training.graph.type_of(spec.tensor)
        if not type.static:
            raise self._refused(spec, f"needs a static shape, and it is {type}")
        length = type.dims[axis]
        if len(factors) == 1 and factors[0][0] is None:
            return length
        if any(size is None for size, _ in factors) or prod(size or 0 for size, _ in factors) != length:
            factors_text = " x ".join("?" if size is None else str(size) for size, _ in factors)
            raise InputError(
                f"{self._where(spec)} says {factors_text} of axis {axis}, which has {length} elements",
                "correct the spec, or remove it from the file",
            )
        return length

    def _check_devices(self, spec: TensorSpec, members: int) -> None:
        """Check that device d is member d of the axis, or rank d of the mesh."""
        if self.chosen.devices == members:
            wanted = [{member} for member in range(members)]
        else:
            wanted = [set() for _ in range(members)]
            for rank in range(self.mesh.ranks):
                wanted[self.mesh.coordinates(rank)[self.axis]].add(rank)
        if len(spec.groups) != members:
            raise self._refused(spec, f"names {len(spec.groups)} devices or groups for {members} shards")
        for index, (group, ranks) in enumerate(zip(wanted, map(set, spec.groups))):
            if ranks != group:
                raise self._refused(
                    spec, f"has part {index} on devices {sorted(ranks)}, and on the mesh {self.mesh} ranks "
                    f"{sorted(group)} have it"
                )  # fmt: skip
