"""Determines the role of each mesh axis: splitting weights, the batch, or samples for experts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod

from gopt.analysis.open_shapes import fix_sizes
from gopt.analysis.training import State, TrainingGraph
from gopt.errors import OptionError, UnsupportedError
from gopt.records.mesh import EXPERT, TENSOR, TOKENS, Mesh
from gopt.records.placements import Placement, Shard
from gopt.tensor_parallel.choose import Choice, choose, experts
from gopt.tensor_parallel.cost import Cost
from gopt.tensor_parallel.forward import Forward
from gopt.tensor_parallel.mesh_axes import splitting_axes
from gopt.tensor_parallel.patterns import Pattern, apply, fed_by
from gopt.tensor_parallel.sizes import Sizes, part_sizes
from gopt.tensor_parallel.specs import with_specs
from gopt.tensor_parallel.tokens import Tokens, inputs_of_tokens
from gopt.text.sanitize import show


@dataclass(frozen=True, slots=True)
class AxisSplit:
    """How an axis splits a step. ``choices``: sharded parameters; ``states``: placements of sharded states; ``fed``:
    batch inputs fed to each rank in part; ``cut``: batch inputs fed whole and read in part."""

    axis: str
    members: int
    choices: dict[str, Choice] = field(default_factory=dict)
    states: dict[str, Shard] = field(default_factory=dict)
    fed: dict[str, Shard] = field(default_factory=dict)
    cut: dict[str, Shard] = field(default_factory=dict)
    tokens: Tokens | None = None
    cost: Cost | None = None

    @property
    def seeds(self) -> dict[str, Placement]:
        """Return the placements at which propagation begins."""
        return {**self.states, **self.fed}


@dataclass(frozen=True, slots=True)
class AxisRequest:
    """The user's request: see the options of the pass ``tensor-parallel``."""

    parameters: tuple[Pattern, ...] = ()
    inputs: tuple[Pattern, ...] = ()
    auto: bool = True
    sizes: Sizes = Sizes.BALANCED
    sequence: bool = False
    configuration: str = ""
    link: str = ""


def split_axes(
    training: TrainingGraph, mesh: Mesh, request: AxisRequest, note: Callable[[str], None]
) -> list[AxisSplit]:
    """Return the split along each axis, in the order of ``ORDER``; ``note`` gets a line for each whole product.

    Raises OptionError for a pattern fitting nothing, UnsupportedError for an axis without anything to split.
    """
    axes = splitting_axes(mesh, training)
    for pattern in (*request.parameters, *request.inputs):
        if pattern.axis not in axes:
            raise OptionError(
                f"tensor-parallel: {pattern} is of an axis that the mesh {mesh} does not have",
                "add the axis to --mesh, or leave the pattern out",
            )
    planner = _Planner(training, mesh, axes, request, note)
    splits: list[AxisSplit] = []
    for axis in axes:
        split = _inside(planner.split(axis), splits)
        _shared_out(split)
        splits.append(replace(split, cost=Cost.parse(request.link, mesh, axis)))
    return splits


def _shared_out(split: AxisSplit) -> None:
    """Raise OptionError for a dimension held by a single member. Nothing would be split, and a reshape could not tell
    the dimension from another of the same length."""
    for name, shard in {**split.states, **split.fed, **split.cut}.items():
        if shard.alone:
            raise OptionError(
                f"tensor-parallel: one of the {split.members} members along {split.axis} would have all of dimension "
                f"{shard.dim} of {name!r}, which is divided into {list(shard.sizes)}",
                "shard another dimension, use other sizes, or set replicate (of an input: whole)",
            )


@dataclass(frozen=True, slots=True)
class _Planner:
    training: TrainingGraph
    mesh: Mesh
    axes: list[str]
    request: AxisRequest
    note: Callable[[str], None]

    def split(self, axis: str) -> AxisSplit:
        members = dict(self.mesh.axes)[axis]
        if axis == TENSOR:
            return self._weights(axis, members)
        if axis == EXPERT:
            return self._experts(axis, members)
        return self._batch(axis, members)

    def _weights(self, axis: str, members: int) -> AxisSplit:
        request = self.request
        apart = EXPERT not in self.axes
        choices = choose(self.training, members, request.sizes, self.note, apart=apart) if request.auto else {}
        choices = with_specs(
            self.training, self.mesh, axis, request.sizes, self._asked(axis, members, choices),
            patterns=request.parameters, configuration=request.configuration, note=self.note,
        )  # fmt: skip
        if not choices:
            raise UnsupportedError(
                f"no parameter can be split along {axis}: no two products follow one another with nothing between them "
                "that needs whole values",
                *self._fixed(),
                f"use the ranks for data: --mesh dp={members} or shard={members}",
            )
        tokens = self._sequence(axis, members) if request.sequence else None
        if request.sequence and tokens is None:
            ranks = members * self._outside(axis)
            message = self._uncut(axis, fed=False) or f"no input of the batch has tokens to divide among {ranks} ranks"
            raise OptionError(f"tensor-parallel: {message}", "take fewer ranks along the axis")
        return AxisSplit(axis, members, choices, self._states(choices), tokens=tokens)

    def _sequence(self, axis: str, members: int) -> Tokens | None:
        """Return the tokens along which sequence parallelism shards activations: of all streams of the model, unless
        another axis shards tokens already."""
        outside, sizes = self._outside(axis), self.request.sizes
        streams = Tokens.streams(Forward(self.training), members, sizes) if outside == 1 else None
        return streams or Tokens.of(self.training, members, sizes, runs=outside)

    def _experts(self, axis: str, members: int) -> AxisSplit:
        automatic = experts(self.training, members, self.request.sizes) if self.request.auto else {}
        choices = self._asked(axis, members, automatic)
        if not choices:
            raise UnsupportedError(
                f"no weights of experts are found to split along {axis}: no product has a dimension that it shares "
                "with a weight and does not sum over",
                *self._fixed(),
                "name them: -O tensor-parallel.parameters='*.experts.*:expert@ep'",
                f"use the ranks for data: --mesh dp={members} or shard={members}; or say that copies are meant: "
                f"--axis {axis}=replica",
            )
        ways = (Tokens.of(self.training, members, self.request.sizes, dim=dim, fed=True) for dim in (0, 1))
        tokens = next(filter(None, ways), None)
        cut = self._fed(tokens) if tokens is not None else {}
        return AxisSplit(axis, members, choices, self._states(choices), cut=cut, tokens=tokens)

    def _batch(self, axis: str, members: int) -> AxisSplit:
        request, tokens = self.request, None
        if axis in TOKENS:
            outside = self._outside(axis)
            tokens = Tokens.of(
                self.training, members, request.sizes, runs=outside, fed=True, heads=axis == "sp"
            )  # fmt: skip
            fed = self._fed(tokens) if tokens is not None else {}
        else:
            fed = images(self.training, axis, members, request.sizes)
        fed = fed_by(self.training, axis, members, request.sizes, request.inputs, fed)
        if not fed:
            if axis in TOKENS and (message := self._uncut(axis, fed=True)):
                hint = "; parts along one axis alone may be uneven" if self._outside(axis) > 1 else ""
                raise UnsupportedError(message, f"take fewer ranks along {axis}{hint}")
            what = "tokens" if axis in TOKENS else "rows or columns of an image"
            raise UnsupportedError(
                f"no input of the batch has {what} to divide among the {members} ranks along {axis}",
                *(self._fixed() if axis in TOKENS else ()),
                f"name one and its dimension: -O tensor-parallel.inputs='NAME:dim1@{axis}'",
            )
        choices = self._asked(axis, members, {})
        return AxisSplit(axis, members, choices, self._states(choices), fed, tokens=tokens)

    def _uncut(self, axis: str, *, fed: bool) -> str:
        """Say that the tokens of the batch do not cut into the parts of an axis; '' where no input has tokens."""
        lengths = {name: type.dims[1] for name, type in inputs_of_tokens(self.training, fed).items()}
        if max(lengths.values(), default=1) == 1:
            return ""
        axes = [*self._ahead(axis), axis]
        count, kind = prod(map(self.mesh.size, axes)), "equal parts" if len(axes) > 1 else "parts"
        name = next((name for name in lengths if lengths[name] >= count), max(lengths, key=lengths.__getitem__))
        return f"the {lengths[name]} tokens of {show(name)} do not cut into {count} {kind} along {' and '.join(axes)}"

    def _fixed(self) -> list[str]:
        """Return the hint of a batch of an open size, if it has one: parts are found by sizes."""
        inputs = {name: self.training.graph.inputs[name] for name in self.training.batch}
        return [] if all(type.static for type in inputs.values()) else [fix_sizes(inputs)]

    def _outside(self, axis: str) -> int:
        """Return the number of parts into which outer axes shard the tokens before this axis does."""
        return prod(map(self.mesh.size, self._ahead(axis)))

    def _ahead(self, axis: str) -> list[str]:
        """The axes that shard the tokens before an axis does, in the order of the mesh."""
        tokens = [name for name, _ in self.mesh.axes if name in TOKENS and name in self.axes]
        return tokens[: tokens.index(axis)] if axis in tokens else tokens

    def _fed(self, tokens: Tokens) -> dict[str, Shard]:
        shards = {name: tokens.batch(self.training.graph.types[name]) for name in self.training.batch}
        return {name: shard for name, shard in shards.items() if shard is not None}

    def _asked(self, axis: str, members: int, automatic: Mapping[str, Choice]) -> dict[str, Choice]:
        patterns = tuple(parameter for parameter in self.request.parameters if parameter.axis == axis)
        return apply(self.training, members, self.request.sizes, patterns, automatic)

    def _states(self, choices: Mapping[str, Choice]) -> dict[str, Shard]:
        """Return the placements of sharded parameters, and of their states of the same shape."""
        types = self.training.graph.types

        def like(state: State) -> str:
            of = state.of
            return of if of is not None and types[of].shape == types[state.tensor].shape else state.tensor

        return {
            state.tensor: choices[like(state)].placement for state in self.training.states if like(state) in choices
        }


def images(training: TrainingGraph, axis: str, members: int, rule: Sizes) -> dict[str, Shard]:
    """Return the batch inputs with an image's height and width, sharded along one of them: h or w.

    The image is the first input of samples, channels and places. Other inputs qualify by the same last dimensions.
    """
    batch = [(name, training.graph.types[name]) for name in training.batch if training.graph.types[name].static]
    behind = next((type.dims[2:] for _, type in batch if len(type.dims) > 2), ())
    back = 1 if axis == "w" else 2
    if len(behind) < back or behind[-back] < members:
        return {}
    sizes = part_sizes(behind[-back], members, rule)
    return {
        name: Shard(len(type.dims) - back, sizes) for name, type in batch
        if len(type.dims) > len(behind) and type.dims[-len(behind) :] == behind
    }  # fmt: skip


def _inside(split: AxisSplit, before: Sequence[AxisSplit]) -> AxisSplit:
    """Return the split with parts nested inside earlier axes' parts. Raises OptionError for an uneven division."""
    states, fed = dict(split.states), dict(split.fed)
    for outer in before:
        for name in states.keys() & outer.states.keys():
            states[name] = _part_of(name, states[name], outer.states[name], split.axis, outer.axis)
        for name in fed.keys() & outer.fed.keys():
            fed[name] = _part_of(name, fed[name], outer.fed[name], split.axis, outer.axis)
    return replace(split, states=states, fed=fed)


def _part_of(name: str, inner: Shard, outer: Shard, axis: str, outer_axis: str) -> Shard:
    """Return a shard along ``axis`` whose parts lie inside the parts along ``outer_axis``."""
    if inner.fits(outer):
        return inner
    runs, members = outer.runs * len(outer.sizes), len(inner.sizes)
    if len(set(outer.sizes)) > 1 or inner.length % (runs * members):
        raise OptionError(
            f"tensor-parallel: dimension {inner.dim} of {name!r} cannot be divided evenly over {len(outer.sizes)} "
            f"ranks along {outer_axis} and {members} along {axis}",
            "split another dimension along one of them",
        )
    return Shard(inner.dim, (inner.length // (runs * members),) * members, runs)
