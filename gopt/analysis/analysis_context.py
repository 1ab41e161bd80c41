"""Facts about a step that the search for gradients asks of its values and nodes, collected once for all parameters."""

from __future__ import annotations

from dataclasses import dataclass, field

from gopt.analysis.losses import LossRoots
from gopt.analysis.step_skeleton import StepSkeleton
from gopt.ir.graph import Node
from gopt.ir.graph_index import GraphIndex, descendants, walk
from gopt.ir.node_kinds import chosen_by, divisor_of
from gopt.operators.kinds import COUNTS, SCALES, SUMS, UNMOVED

_OF_LOSS = UNMOVED | SUMS | SCALES | {"Neg"}
"""Operators whose one-element result is as good as the loss that they are computed from."""


@dataclass(slots=True)
class AnalysisContext:
    """Facts about the graph that the walks need: which values depend on the batch, and which belong to the forward."""

    index: GraphIndex
    tainted: set[str]
    forward: set[int]
    barrier: set[int] = field(default_factory=set)
    """Nodes known to belong to the backward although they look like update."""
    update_only: set[str] = field(default_factory=set)
    """Values that depend on optimizer states: what reads them is update."""
    settings: set[str] = field(default_factory=set)
    """Inputs that neither the batch nor the forward has: hyper-parameters."""
    model: set[str] = field(default_factory=set)
    """Values that the forward reads or computes, and all that depends on parameters: a factor among them is no
    optimizer mask.
    """
    computed: set[str] = field(default_factory=set)
    """Values that the forward computes from parameters alone."""
    of_other_gradients: set[str] = field(default_factory=set)
    """Values that depend on other parameters' gradients: not followed when the parameter has one element."""
    divisors: set[str] = field(default_factory=set)
    """Values of the forward by which something of the forward is divided, such as a token count."""
    of_loss: set[str] = field(default_factory=set)
    """The losses and what depends on them."""

    later: set[str] = field(init=False)
    """Values computed after the forward."""

    def __post_init__(self) -> None:
        nodes = self.index.graph.nodes
        self.later = {name for node in nodes if id(node) not in self.forward for name in node.outputs}

    def starts_in_forward(self, values: list[str]) -> bool:
        """Return whether a node reads a batch-dependent value of the forward and so computes a local gradient.

        ``values``: the operands that depend on the batch. A factor computed from the loss does not count next to a
        value of the backward: no backward of a mean reads it there."""
        later = self.later
        if later.issuperset(values):
            return False
        local = [name for name in values if name not in later]
        if len(local) == len(values):
            return True
        return any(not (name in self.of_loss and self.index.one_element(name)) for name in local)

    def masks_locally(self, node: Node) -> bool:
        """Return whether a node keeps a value or zero by a flag of the forward, as the backward of a ReLU does."""
        if not any(self.index.constants.zero(name) for name in chosen_by(node)):
            return False
        producer = self.index.producers.get(node.inputs[0])
        masks = [name for name in producer.reads if name in self.tainted] if producer is not None else []
        return bool(masks) and self.later.isdisjoint(masks)

    def adjoints(self, operands: list[str]) -> list[str]:
        """Return the one-element operands that may be gradients: operands that depend on the model and not on the loss.

        If no operand qualifies, all are returned. A rate that follows the loss, or a count of the batch, is a factor of
        a gradient.
        """
        operands = [name for name in operands if name not in self.of_loss] or operands
        return [name for name in operands if name in self.model or name not in self.tainted] or operands


def build_context(step: StepSkeleton) -> AnalysisContext:
    """The facts of a step; one sweep over the nodes for each fact."""
    index = step.index
    context = AnalysisContext(index, step.tainted, step.forward, of_loss=descendants(index, _same_as_loss(step)))
    read = [name for name in step.updated if name in step.forward_values]
    of_parameters = descendants(index, read)
    context.model = step.forward_values | of_parameters
    outputs = {name for node in index.graph.nodes if id(node) in step.forward for name in node.outputs}
    context.computed = outputs & of_parameters - step.tainted
    available = {*step.forward_values, *step.batch, *step.roles.statistics}  # a backward may read a scale of its own
    foreign = [name for name in index.graph.inputs if name not in available]
    # One-element states and settings are left out: a loss scale is in every gradient.
    context.update_only = descendants(index, [name for name in foreign if not index.one_element(name)])
    context.settings = {name for name in foreign if name not in step.updated}
    for node in index.graph.nodes:
        if id(node) in step.forward and (divisor := divisor_of(node)):
            context.divisors.update(_scalar_chain(index, divisor))
    return context


def _same_as_loss(step: StepSkeleton) -> list[str]:
    """The losses, and the one-element values from which a loss is cast, reshaped or scaled: as good as the loss, and no
    backward of these operators reads such a value."""
    equals, roots = [], LossRoots(step)
    for name in roots.ends:
        equals.append(name)
        while (producer := step.index.producers.get(name)) is not None and producer.is_in(_OF_LOSS):
            moving = [name for name in producer.reads if name in step.tainted]
            if len(moving) != 1 or not step.index.one_element(moving[0]) or not roots.alone(moving[0]):
                break
            name = moving[0]
            equals.append(name)
    return equals


def _scalar_chain(index: GraphIndex, name: str) -> list[str]:
    """A one-element value, and the sources of its casts, bounds and shifts: a count, clipped to at least 1."""
    numbers = walk(
        [name], lambda value: filter(index.one_element, index.operands(value, lambda node: node.is_in(COUNTS)))
    )
    return list(numbers) if index.one_element(name) else []
