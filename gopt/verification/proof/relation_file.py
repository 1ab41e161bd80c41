"""The relation file as a record: how inputs and outputs of another tool's ranks stand to the source."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from gopt import documents
from gopt.artifact.manifest_entries import WireType
from gopt.artifact.pieces import Piece
from gopt.documents.config import RolesTable
from gopt.documents.records import OPTIONAL, Bounds, Count, Positive, from_document, one_of
from gopt.errors import InputError, OptionError
from gopt.records.boxes import Box
from gopt.text.suggestions import near_file

Axis = str
"""A mesh axis, several joined by +, or ''."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InputRelation:
    """An input, or a stored value, of a rank: a value of the source, or a part."""

    of: str = field(default="", metadata=OPTIONAL)
    """The value is the input or stored value of this name of the source; absent means the same name."""
    own: bool | None = field(default=None, metadata=OPTIONAL)
    """The value is true where ranks along the data axes of the mesh have samples of their own, and false where all
    ranks have the same; absent means true for the batch of a training step, and false for all else."""
    split: tuple[Axis, ...] = field(default=(), metadata=OPTIONAL)
    """The list has a mesh axis, or several joined by +, for each dimension that its members share out in equal parts in
    the order of their numbers, and an empty text for a dimension that they have whole; absent means that the rank has
    all of the value, or a box or pieces."""
    box: Box | None = field(default=None, metadata=OPTIONAL)
    """The box is the part of the value that the rank has, with a list for each dimension as in a piece of the manifest;
    absent means all of it, or what split or pieces say."""
    pieces: tuple[Piece, ...] = field(default=(), metadata=OPTIONAL)
    """The value of the rank, flattened, is these pieces of values of the source one after the other; absent means that
    it is of one value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputRelation:
    """An output of a rank beside new states: an output of the source, a part, or a term."""

    of: str = field(default="", metadata=OPTIONAL)
    """The output is the output of this name of the source; absent means the same name."""
    split: tuple[Axis, ...] = field(default=(), metadata=OPTIONAL)
    """The list has for each dimension the mesh axes that share it out, as for an input; absent means that the rank has
    all of the output, or a box or pieces."""
    box: Box | None = field(default=None, metadata=OPTIONAL)
    """The box is the part of the output that the rank has; absent means all of it, or what split or pieces say."""
    pieces: tuple[Piece, ...] = field(default=(), metadata=OPTIONAL)
    """The output of the rank, flattened, is these pieces of outputs of the source; absent means that it is of one
    output."""
    sum: Axis = field(default="", metadata=OPTIONAL)
    """The ranks along these mesh axes have terms that sum up to the output of the source; along data axes the output is
    the sum of the source's over all batches. Absent means that each rank has the value itself."""
    mean: Axis = field(default="", metadata=OPTIONAL)
    """The output of the source is the mean of the ranks' along these mesh axes; along data axes the output is the mean
    of the source's over all batches. Absent means that each rank has the value itself."""


Inputs = Mapping[str, InputRelation]
Outputs = Mapping[str, OutputRelation]
States = Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankOverrides:
    """The relation of a rank where ranks differ."""

    rank: Count
    """The rank has this number, counted from 0."""
    inputs: Inputs | None = field(default=None, metadata=OPTIONAL)
    """The table has inputs and stored values of the rank, in place of all ranks' inputs. The value is of the input of
    this name."""
    outputs: Outputs | None = field(default=None, metadata=OPTIONAL)
    """The table has outputs of the rank, in place of all ranks' outputs. The value is of the output of this name."""
    states: States | None = field(default=None, metadata=OPTIONAL)
    """The table has state pairs of the rank, in place of all ranks' pairs. The value is the output that replaces the
    input of this name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RelationFile:
    """A relation is a TOML or JSON file about the inputs and outputs of ranks as values of the source, for gopt prove
    SOURCE RANK... --relation FILE."""

    format: str = "gopt-relation/1"
    """The format is the name and version of this format."""
    mesh: Mapping[str, Positive]
    """The table gives the axes of the mesh in order, the last axis varying fastest with the number of the rank, and
    the number of ranks along each. The value is the number of ranks along the axis of this name."""
    axes: Mapping[str, Annotated[str, one_of("data", "replica")]] | None = field(default=None, metadata=OPTIONAL)
    """The table says what the ranks along an axis see of the data: data stands for samples of their own, replica for
    the same samples; absent means that every axis has a name that gopt knows. The value is for the axis of this
    name."""
    roles: RolesTable = field(default=RolesTable(), metadata=OPTIONAL)
    """The table gives roles of the source, as in gopt.toml; absent means that gopt finds all roles."""
    forward: bool | None = field(default=None, metadata=OPTIONAL)
    """The value is true where the source is a forward model, all of whose outputs are compared; absent means that gopt
    sees whether it is a training step."""
    loss_reduction: Annotated[str, Bounds(pattern="^(mean|sum|sum:.+|weighted:.+)$")] = field(
        default="mean", metadata=OPTIONAL
    )
    """The rule says how the gradients of ranks along data axes become the gradient of the step, as in the manifest;
    absent means their mean."""
    reduce_dtype: WireType = field(default="", metadata=OPTIONAL)
    """Gradients travel between ranks in this type, as in the manifest; absent means the type in which they are made."""
    states: States | None = field(default=None, metadata=OPTIONAL)
    """The table pairs inputs of ranks that are states with the outputs that replace them; absent means that outputs
    have the names that they have in the source. The value is the output that replaces the input of this name."""
    inputs: Inputs | None = field(default=None, metadata=OPTIONAL)
    """The table has inputs and stored values of all ranks; an input that is not in it is the source's of its name. The
    value is of the input of this name."""
    outputs: Outputs | None = field(default=None, metadata=OPTIONAL)
    """The table has outputs of all ranks; an output that is not in it is the source's of its name. The value is of the
    output of this name."""
    ranks: tuple[RankOverrides, ...] = field(default=(), metadata=OPTIONAL)
    """The list has the ranks that differ from the tables above. Each item is one rank."""


def read_relation(file: str | os.PathLike[str] | Mapping[str, Any]) -> tuple[RelationFile, str]:
    """The relation of a file, or of a document in memory, and the name in messages. Raises InputError, and OptionError
    for a file neither called .toml nor .json."""
    if isinstance(file, Mapping):
        name = "the relation"
        document = documents.parse_json(json.dumps(file), documents.RELATION, name)
    else:
        name = os.fspath(file)
        if not os.path.exists(name):
            raise InputError(f"there is no relation {name}", *near_file(name))
        if not name.endswith((".json", ".toml")):
            raise OptionError(f"--relation {name} is neither TOML nor JSON by its name", "call it .toml or .json")
        read = documents.read_json if name.endswith(".json") else documents.read_toml
        document = read(name, documents.RELATION)
    return from_document(RelationFile, document), name
