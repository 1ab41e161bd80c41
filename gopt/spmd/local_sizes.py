"""Shapes and bytes of values on a rank, from the common graph of all ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from copy import copy
from types import MappingProxyType

from gopt.ir.graph import Graph
from gopt.ir.types import nbytes
from gopt.records.placements import Sharding
from gopt.spmd.program import SpmdProgram
from gopt.spmd.verifier import shardings_so_far


class LocalSizes:
    """The sizes of values at some coordinates; ``parts``: the shardings of values held in parts."""

    def __init__(
        self,
        graph: Graph,
        parts: Mapping[str, Sharding] = MappingProxyType({}),
        coordinates: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        self.types, self.parts, self.coordinates = graph.types, parts, coordinates
        self._nbytes: dict[str, int] = {}

    @classmethod
    def at(cls, program: SpmdProgram, coordinates: Mapping[str, int]) -> LocalSizes:
        """The sizes on the rank of a program at some coordinates."""
        return cls(program.graph, _parts(program), coordinates)

    def renamed(self, names: Mapping[str, str]) -> LocalSizes:
        """The sizes with further values: new name -> the value of the same size."""
        result = copy(self)
        result._nbytes = {}
        result.types = {**self.types, **{new: self.types[old] for new, old in names.items() if old in self.types}}
        result.parts = {**self.parts, **{new: self.parts[old] for new, old in names.items() if old in self.parts}}
        return result

    def shape(self, name: str) -> tuple[int, ...] | None:
        """The shape of a value; None if unknown."""
        type = self.types.get(name)
        if type is None or not type.static:
            return None
        return self.parts[name].local_shape(type.dims, self.coordinates) if name in self.parts else type.dims

    def nbytes(self, name: str) -> int:
        """Bytes of a value; 0 if the shape is unknown."""
        size = self._nbytes.get(name)
        if size is None:
            shape = self.shape(name)
            self._nbytes[name] = size = 0 if shape is None else nbytes(self.types[name].dtype, math.prod(shape))
        return size


def _parts(program: SpmdProgram) -> Mapping[str, Sharding]:
    """Return the shardings of values held in parts. A verified program has them, except for windows along axes of a
    split computation."""
    if program.sharded and not program.split:
        return program.sharded
    return program.once("shardings by name", lambda: shardings_so_far(program).by_name())
