"""Small nodes around the messages of a trainer: casts to the type on the wire, reshapes, constants."""

from __future__ import annotations

from dataclasses import replace

from gopt.ir.graph import Node
from gopt.ir.rewriter import GraphRewriter
from gopt.ir.types import TensorType, dtype_code
from gopt.parameter_server.options import SplitOptions


class TrainerNodes:
    """Adds nodes to a trainer's graph. Constants, and forms of values in transit, are made once."""

    def __init__(self, rewriter: GraphRewriter, options: SplitOptions) -> None:
        self.rewriter, self.options = rewriter, options
        self.types = rewriter.graph.types
        self._constants: dict[tuple[int, ...], str] = {}

    def on_wire(self, type: TensorType) -> TensorType:
        """Return the type of values in transit."""
        return replace(type, dtype=self.options.travels(type.dtype))

    def narrow(self, value: str) -> str:
        """Return a value in the type in transit."""
        type, wired = self.types[value], self.on_wire(self.types[value])
        if wired == type:
            return value
        narrowed = f"{value}.wire" if value.startswith("gopt.") else f"gopt.ps.wire.{value}"
        if narrowed not in self.types:
            self.rewriter.add(
                "Cast", [value], {narrowed: wired}, attributes={"to": dtype_code(wired.dtype)},
                after=self.rewriter.latest([value]),
            )  # fmt: skip
        return narrowed

    def cast(self, value: str, output: str, type: TensorType, before: Node | None) -> None:
        """Add a Cast of ``value`` to ``type``, named ``output``."""
        self.rewriter.add("Cast", [value], {output: type}, attributes={"to": dtype_code(type.dtype)}, before=before)

    def reshaped(self, value: str, shape: tuple[int, ...], before: Node | None, after: Node | None = None) -> str:
        """Return a value as a flat tensor; ``shape`` is what its Reshape reads."""
        output = f"{value}.flat" if value.startswith("gopt.") else f"gopt.ps.flat.{value}"
        if output not in self.types:
            type = self.types[value]
            flat = {output: TensorType(type.dtype, (type.elements,))}
            self.rewriter.add("Reshape", [value, self.shape(shape, before)], flat, before=before, after=after)
        return output

    def shape(self, shape: tuple[int, ...], before: Node | None) -> str:
        """Return a list of integers as a constant of the file."""
        if shape not in self._constants:
            output = self._constants[shape] = "gopt.ps.ints" + "_".join(["", *map(str, shape)])
            head = self.rewriter.graph.nodes[0] if self.rewriter.graph.nodes else before
            self.rewriter.constant(output, shape, before=head)
        return self._constants[shape]
