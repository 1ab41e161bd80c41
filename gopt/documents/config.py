"""The configuration ``gopt.toml`` as a record."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from gopt.documents.records import OPTIONAL, Positive, key
from gopt.documents.roles import StatisticRule

Scalar = str | float | bool
PassOptions = Mapping[str, Scalar | tuple[Scalar, ...] | Mapping[str, Scalar]]


@dataclass(frozen=True, slots=True)
class PipelineTable:
    """The table of the pipeline."""

    passes: tuple[str, ...] | None = field(default=None, metadata=OPTIONAL)
    """The passes, by the names that gopt passes prints, run in the order of this list; absent means the default
    pipeline."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolesTable:
    """The table of roles."""

    loss: str | tuple[str, ...] = field(default="", metadata=OPTIONAL)
    """The loss is this output of the source, or the losses are the outputs in this list; absent means that gopt finds
    them."""
    params: tuple[str, ...] | Mapping[str, str] = field(default=(), metadata=OPTIONAL)
    """The parameters are the inputs in this list, or the keys of this table, whose values are the gradients; absent
    means that gopt finds them."""
    states: Mapping[str, str] | None = field(default=None, metadata=OPTIONAL)
    """The table pairs states, which are inputs, with the outputs that replace them; absent means that gopt finds all
    pairs."""
    batch: tuple[str, ...] = field(default=(), metadata=OPTIONAL)
    """The inputs in this list belong to the batch; absent means that gopt finds the batch."""
    shared: tuple[str, ...] = field(default=(), metadata=OPTIONAL)
    """The update reads these scalars of the forward as their means over the ranks; absent means that there is no such
    value."""
    statistics: Mapping[str, StatisticRule] | None = field(default=None, metadata=OPTIONAL)
    """The table names states that follow the batch without a gradient, and says how the ranks' values of each are
    combined; an empty text leaves it to gopt; absent means that gopt finds them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GoptConfig:
    """The configuration gopt.toml says how to shard; an option on the command line replaces what the file says."""

    accumulate: Positive | None = field(default=None, metadata=OPTIONAL)
    """One update takes this many micro-steps; absent means 1."""
    mesh: Mapping[str, Positive] | None = field(default=None, metadata=OPTIONAL)
    """The table gives the axes of the mesh in order, the last axis varying fastest, and the number of ranks along
    each; absent means that --mesh or --ranks gives the mesh."""
    axes: Mapping[str, str] | None = field(default=None, metadata=OPTIONAL)
    """The table says what the ranks along an axis see of the data: data stands for samples of their own, replica for
    the same samples; absent means that every axis has a name that gopt knows."""
    pipeline: PipelineTable | None = field(default=None, metadata=OPTIONAL)
    """The table gives the pipeline; absent means the default pipeline."""
    passes: Mapping[str, PassOptions] | None = field(default=None, metadata={**key("pass"), **OPTIONAL})
    """The table gives options of passes, a table for each pass that the key names, with options as gopt passes prints
    them; an option that takes several values has a list of them, or a table for patterns or names; an option that is
    not in the table has its default."""
    roles: RolesTable = field(default=RolesTable(), metadata=OPTIONAL)
    """The table gives the roles that the user knows better than the data flow; absent means that gopt finds all
    roles."""
