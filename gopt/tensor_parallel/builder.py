"""Builds the nodes of a split graph: the nodes of the source, and the mappings between them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gopt.ir.graph import COMM, SPMD, Graph, Node
from gopt.ir.opset import opset_of
from gopt.ir.phase import Phase
from gopt.ir.tape import takes_axes
from gopt.ir.tensor import Tensor
from gopt.ir.types import TensorType, numpy_dtype
from gopt.records.placements import Partial, Placement, Replicated, Shard, Window
from gopt.spmd.conversions import Conversion
from gopt.spmd.halo import Halo

PASS = "tensor-parallel"


def inner(name: str, role: str) -> str:
    """The name of a value on the way to ``name``; no name of the source begins so."""
    return f"{name}.{role}" if name.startswith("gopt.") else f"gopt.{PASS}.{name}.{role}"


@dataclass(slots=True)
class ExpansionBuilder:
    """The nodes of a graph in order. Types are logical. ``axis``: the mesh axis; ``phase``: the phase of added nodes;
    ``placements``: of values not replicated along the axis."""

    graph: Graph
    axis: str
    placements: dict[str, Placement] = field(default_factory=dict)
    nodes: list[Node] = field(default_factory=list)
    phase: Phase | None = None
    _shapes: dict[tuple[int, ...], str] = field(default_factory=dict)

    @property
    def root(self) -> str:
        """Return the prefix of the names of new values."""
        return f"gopt.{PASS}." if self.axis in ("tp", "local") else f"gopt.{PASS}.{self.axis}."

    def add(
        self, op_type: str, inputs: Sequence[str], output: str, type: TensorType, *, domain: str = "", **attributes: Any
    ) -> str:
        """Add a node with one result; return the result's name."""
        node = Node(op_type, inputs, [output], domain=domain, attributes=attributes, made_by=PASS)
        node.phase = self.phase
        self.graph.types[output] = type
        self.nodes.append(node)
        return output

    def ints(self, values: Sequence[int]) -> str:
        """Return a constant of int64 values; equal lists share a constant."""
        key = tuple(values)
        if key not in self._shapes:
            name = f"gopt.{PASS}.{self.axis}.ints" + "".join(f"_{value}" for value in key)
            type = TensorType("int64", (len(key),))
            self.graph.initializers[name] = Tensor(type, array=np.array(key, np.int64))
            self.graph.types[name] = type
            self._shapes[key] = name
        return self._shapes[key]

    def number(self, value: float, dtype: str) -> str:
        """Return a scalar constant; equal values of a dtype share a constant."""
        name = f"gopt.{PASS}.{self.axis}.{dtype}_{value}"
        if name not in self.graph.initializers:
            type = TensorType(dtype, ())
            self.graph.initializers[name] = Tensor(type, array=np.array(value, numpy_dtype(dtype)))
            self.graph.types[name] = type
        return name

    def reduction(self, op_type: str, value: str, axes: Sequence[int], output: str, *, keepdims: int = 1) -> str:
        """Add a reduction over some dimensions, an operand or an attribute by operator set."""
        type = self.graph.types[value]
        shape = [1 if dim in axes else size for dim, size in enumerate(type.dims) if keepdims or dim not in axes]
        result = TensorType(type.dtype, tuple(shape))
        if takes_axes(op_type, opset_of(self.graph.header)):
            inputs = [value, self.ints(axes)] if axes else [value]
            return self.add(op_type, inputs, output, result, keepdims=keepdims)
        return self.add(op_type, [value], output, result, axes=list(axes), keepdims=keepdims)

    def convert(self, value: str, before: Placement, after: Placement, name: str) -> str:
        """Add the mapping bringing a value to another placement; ``name``: of the result."""
        self._mapped(value, before, after, name)
        if not isinstance(after, Replicated):
            self.placements[name] = after
        return name

    def _mapped(self, value: str, before: Placement, after: Placement, name: str) -> str:
        halo = Conversion(before, after).halo
        if halo is not None:
            return self._halo(value, halo, after, name)
        if isinstance(before, Partial):
            return self._reduced(value, before, after, name)
        if isinstance(before, Shard) and isinstance(after, Replicated):
            return self._in_runs(value, before, after, before, name, "AllGather", COMM)
        if isinstance(before, Replicated) and isinstance(after, Shard):
            return self._in_runs(value, before, after, after, name, "DimSlice", SPMD)
        assert isinstance(before, Shard) and isinstance(after, Shard)
        if before.dim != after.dim:
            return self._exchange(value, before, after, name)
        whole = self.convert(value, before, Replicated(), inner(name, "whole"))
        return self.convert(whole, Replicated(), after, name)

    def _exchange(self, value: str, before: Shard, after: Shard, name: str) -> str:
        """Move a shard from a dimension to another (all-to-all). Several runs become separate dimensions meanwhile."""
        type = self.graph.types[value]
        apart = [part for dim, size in enumerate(type.dims) for part in _runs_apart(dim, size, before, after)]
        old, new = (shard.dim + (shard.runs > 1) for shard in (before, after))
        old += before.dim > after.dim and after.runs > 1
        new += after.dim > before.dim and before.runs > 1
        sizes = {
            "concat_axis": old, "concat_sizes": list(before.sizes),
            "split_axis": new, "split_sizes": list(after.sizes),
        }  # fmt: skip
        if before.runs == after.runs == 1:
            return self._call("AllToAll", value, name, **sizes)
        parts = self.add(
            "Reshape", [value, self.ints(apart)], inner(name, "runs"), TensorType(type.dtype, tuple(apart))
        )
        self.placements[parts] = Shard(old, before.sizes)
        moved = self._call("AllToAll", parts, inner(name, "parts"), **sizes)
        self.placements[moved] = Shard(new, after.sizes)
        return self.add("Reshape", [moved, self.ints(type.dims)], name, type)

    def _halo(self, value: str, halo: Halo, after: Placement, name: str) -> str:
        """Add a halo exchange or a halo sum: one call gathers the strips other members need, and a node joins or adds
        them."""
        assert isinstance(after, (Shard, Window))
        type = self.graph.types[value]
        fields: dict[str, Any] = {"group": self.axis, "axis": after.dim, **halo.attributes}
        inputs = [value]
        if any(halo.strip_sizes):
            shape = (*type.dims[: after.dim], sum(halo.strip_sizes), *type.dims[after.dim + 1 :])
            apart = TensorType(type.dtype, shape)
            strips = self.add("HaloStrips", [value], inner(name, "strips"), apart, domain=SPMD, **fields)
            self.placements[strips] = Shard(after.dim, halo.strip_sizes)
            call = {"axis": after.dim, "sizes": list(halo.strip_sizes), "group": self.axis}
            inputs.append(self.add("AllGather", [strips], inner(name, "joined"), apart, domain=COMM, **call))
        if halo.kind == "sum":
            return self.add("HaloSum", inputs, name, type, domain=SPMD, **fields)
        border = after.border if isinstance(after, Window) else "zeros"
        return self.add("HaloJoin", inputs, name, type, domain=SPMD, border=border, **fields)

    def _reduced(self, value: str, before: Partial, after: Placement, name: str) -> str:
        if isinstance(after, Replicated):
            return self._call("AllReduce", value, name, reduce=before.op)
        assert isinstance(after, Shard)
        return self._in_runs(value, before, after, after, name, "ReduceScatter", COMM, reduce=before.op)

    def _call(self, op_type: str, value: str, name: str, **attributes: Any) -> str:
        return self.add(op_type, [value], name, self.graph.types[value], domain=COMM, group=self.axis, **attributes)

    def _in_runs(
        self, value: str, before: Placement, after: Placement, shard: Shard, name: str, op_type: str, domain: str,
        **attributes: Any,
    ) -> str:  # fmt: skip
        """Add a call along a dimension. Several runs of the dimension become a separate dimension meanwhile."""
        type = self.graph.types[value]
        dim = shard.dim + (shard.runs > 1)
        fields: Mapping[str, Any] = attributes | {"axis": dim, "sizes": list(shard.sizes), "group": self.axis}
        if shard.runs == 1:
            return self.add(op_type, [value], name, type, domain=domain, **fields)
        shape = (*type.dims[: shard.dim], shard.runs, sum(shard.sizes), *type.dims[shard.dim + 1 :])
        apart = TensorType(type.dtype, shape)
        parts = self.add("Reshape", [value, self.ints(shape)], inner(name, "runs"), apart)
        inside = Shard(dim, shard.sizes)
        for role, placement in (("runs", before), ("parts", after)):
            if not isinstance(placement, Replicated):
                self.placements[inner(name, role)] = inside if isinstance(placement, Shard) else placement
        moved = self.add(op_type, [parts], inner(name, "parts"), apart, domain=domain, **fields)
        return self.add("Reshape", [moved, self.ints(type.dims)], name, type)


def _runs_apart(dim: int, size: int, *shards: Shard) -> tuple[int, ...]:
    """Return a dimension as (runs, elements of a run) where a shard has several runs; else as one dimension."""
    runs = next((shard.runs for shard in shards if shard.dim == dim), 1)
    return (runs, size // runs) if runs > 1 else (size,)
