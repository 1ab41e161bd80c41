"""Split the computation of a step along axes of ranks with the same samples: forward, backward and update."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Annotated

from gopt.analysis.region_mappings import find_region_mappings
from gopt.passes.base import Pass
from gopt.records.pass_facts import SIZES, PassOptions, TensorParallelFacts
from gopt.records.topology import Topology
from gopt.spmd.pass_records import PassResult
from gopt.spmd.program import SpmdProgram
from gopt.tensor_parallel.mesh_axes import splitting_axes
from gopt.tensor_parallel.sizes import Sizes

if TYPE_CHECKING:
    from gopt.tensor_parallel.axes import AxisRequest
    from gopt.tensor_parallel.patterns import Pattern


@dataclass(frozen=True, kw_only=True)
class TensorParallelOptions(PassOptions):
    """The options of tensor-parallel say what is split, and how."""

    parameters: str = ""
    """The text gives the splits of some parameters, such as `up*:column;head*:replicate`: column, row, vocab, expert,
    replicate, or dimN, and `up*:expert@ep` along another axis than tp; it is empty without any."""
    inputs: str = ""
    """The text gives the dimension along which inputs of the batch are split, such as `mask:dim2@cp`, or whole; it is
    empty without any."""
    gradients: str = ""
    """The text says over which axes the gradients of some parameters are shared, such as `*.norm.weight:tp+cp`, or
    none, which is checked against the step; it is empty without any."""
    auto: bool = True
    """The value is true where parameters are found by structure as well."""
    sizes: Annotated[Sizes, SIZES] = Sizes.BALANCED
    """The rule says how a dimension is shared out where it does not come out even."""
    sequence: bool = False
    """The value is true where activations between pairs of products are shared out by tokens."""
    regather: bool = False
    """The value is true where activations that the forward gathers are gathered again in the backward."""
    configuration: str = ""
    """The device configuration of the file whose sharding specs count; none: no one; empty: the one that fits the
    mesh."""
    link: str = ""
    """The links between ranks, as in gopt plan, by which conflicts were settled; empty: by bytes."""

    def __post_init__(self) -> None:
        """Raise OptionError for unreadable texts, before any work."""
        if self.parameters or self.inputs or self.gradients:  # what reads them is imported for steps that are split
            _ = self.request, self.marks

    @cached_property
    def request(self) -> AxisRequest:
        """The requested splits, read from the texts."""
        from gopt.tensor_parallel.axes import AxisRequest
        from gopt.tensor_parallel.patterns import FED, Pattern

        return AxisRequest(
            Pattern.parse(self.parameters), Pattern.parse(self.inputs, FED), self.auto, self.sizes, self.sequence,
            self.configuration, self.link,
        )  # fmt: skip

    @cached_property
    def marks(self) -> tuple[Pattern, ...]:
        """The axes of gradients, read from the text."""
        from gopt.tensor_parallel.marks import parse_marks

        return parse_marks(self.gradients)


def tensor_parallel(program: SpmdProgram, options: TensorParallelOptions) -> PassResult:
    """Split weights, activations and updates along the axes whose ranks see the same samples, or parts of them: columns
    and rows of weights in pairs, classes, tables (tp); experts (ep); tokens (cp, sp); height and width (h, w).

    Requires: roles recovered, static shapes, no sharding yet. Guarantees: every state has the values of the
    source, up to the order of sums. On the wire, per block of a transformer and rank of tp: two all-reduces of the
    activations in the forward and two in the backward, 8(t-1)/t of their bytes.
    """
    mesh, training = program.mesh, program.training
    result = [mapping.to_json() for mapping in find_region_mappings(training) if mesh.live(mapping.group)]
    of_source = {"source_mappings": result} if result else {}
    if options.link:
        Topology.parse(options.link, mesh)
    if not splitting_axes(mesh, training):
        idle = ": link has no effect" if options.link else ""
        return PassResult(facts=of_source, note=f"no axis splits the computation{idle}")
    from gopt.tensor_parallel.split_program import split_program

    return split_program(program, options.request, options.marks, of_source, regather=options.regather)


def needed(program: SpmdProgram) -> str:
    """Return the reason why a step needs this pass, or ''."""
    axes = splitting_axes(program.mesh, program.training)
    return f"nothing else splits the computation along {axes[0]}: its ranks would be copies" if axes else ""


PASS = Pass("tensor-parallel", TensorParallelOptions, tensor_parallel, needed=needed, facts=TensorParallelFacts)
