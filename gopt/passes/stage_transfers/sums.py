"""Sums of gradients on each stage with a term, sent once for all micro-batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from gopt.analysis.training import Phase
from gopt.ir.graph import SPMD, TRANSFER, Node
from gopt.ir.rewriter import GraphRewriter, Removal
from gopt.ir.types import TensorType
from gopt.operators.kinds import ADDITIONS, SIZES
from gopt.passes.stage_transfers.place import NAME, PREFIX, on_all_stages
from gopt.records.placements import Sharding
from gopt.spmd.program import Accumulator, SpmdProgram
from gopt.spmd.stage_plan import StagePlan, transfers


@dataclass(frozen=True, slots=True)
class _Gradient:
    """A sum of terms from several stages, added to the sum over micro-batches.

    ``adds_up``: the addition to the sum over micro-batches; ``value``: the gradient; ``additions``: nodes of the source
    with a term of another stage behind an operand; ``terms``: stage -> the transfers of its terms; ``local``: all other
    terms."""

    accumulator: Accumulator
    adds_up: Node
    value: str
    additions: list[Node] = field(default_factory=list)
    terms: dict[int, list[Node]] = field(default_factory=dict)
    local: list[str] = field(default_factory=list)


def sum_on_stages(program: SpmdProgram, plan: StagePlan) -> list[Removal]:
    """Let each stage sum own terms of a gradient over micro-batches, and send the sum to the parameter's stage in the
    update: where the gradient itself is summed, without a call or a cast before the sum. Linear time."""
    if program.micro_steps == 1:
        return []
    rewriter, readers = GraphRewriter(program.graph, NAME), program.graph.users()
    for gradient in _Gradients(program, readers).all():
        _Apart(program, plan, rewriter, gradient).rewrite(readers.get(gradient.accumulator.input, ()))
    rewriter.finish()
    program.set_states(program.states)
    return rewriter.removed


class _Gradients:
    """Finds the gradients with terms of other stages in each micro-batch, where a sum there is as good."""

    def __init__(self, program: SpmdProgram, readers: Mapping[str, Sequence[Node]]) -> None:
        self.program, self.types = program, program.graph.types
        results = program.results()
        self.passed_on = {name for name, nodes in readers.items() if len(nodes) == 1 and name not in results}
        """Values with a reader alone."""
        self.makers = program.graph.producers()

    def all(self) -> list[_Gradient]:
        gradients = []
        for accumulator in self.program.accumulators:
            adds_up = self.makers.get(accumulator.added)
            if adds_up is None or not adds_up.is_in(ADDITIONS) or accumulator.input not in adds_up.inputs:
                continue
            value = next(name for name in adds_up.inputs if name != accumulator.input)
            gradient = _Gradient(accumulator, adds_up, value)
            self._follow(gradient)
            if gradient.terms:
                gradients.append(gradient)
        return gradients

    def _follow(self, gradient: _Gradient) -> None:
        """Collect the terms of a gradient: the leaves of the tree of additions that end in the gradient."""
        names, type = [gradient.value], gradient.accumulator.type
        for name in names:  # sums before operands; grows meanwhile
            if self._is_sum(name, type):
                names += self.makers[name].inputs
        distant = set[str]()
        for name in reversed(names):
            if self._is_distant(name) or (self._is_sum(name, type) and distant & {*self.makers[name].inputs}):
                distant.add(name)
        open_ = [gradient.value]
        while open_:
            name = open_.pop()
            if name not in distant:
                gradient.local.append(name)
            elif self._is_distant(name):
                gradient.terms.setdefault(_stages(self.makers[name])[0], []).append(self.makers[name])
            else:
                gradient.additions.append(self.makers[name])
                open_ += reversed(self.makers[name].inputs)

    def _is_sum(self, name: str, type: TensorType) -> bool:
        """Return whether an addition of the source makes a value, of different values, and repeats no element."""
        node = self.makers.get(name) if name in self.passed_on else None
        return (
            node is not None and node.is_in(ADDITIONS) and node.source is not None
            and len({*node.inputs}) == len(node.inputs) and all(self.types[each] == type for each in node.inputs)
        )  # fmt: skip

    def _is_distant(self, name: str) -> bool:
        node = self.makers.get(name) if name in self.passed_on else None
        return (
            node is not None and transfers(node) and not transfers(node, to_all=True) and node.phase is Phase.BACKWARD
        )


@dataclass(frozen=True, slots=True)
class _Apart:
    """Rewrites a gradient."""

    program: SpmdProgram
    plan: StagePlan
    rewriter: GraphRewriter
    gradient: _Gradient

    def rewrite(self, readers: Sequence[Node]) -> None:
        """``readers``: of the sum over micro-batches."""
        gradient, rewriter, old = self.gradient, self.rewriter, self.gradient.accumulator
        late = [node for node in readers if node is not gradient.adds_up and not node.is_in(SIZES)]
        totals, reader = [old.input] if gradient.local else [], rewriter.earliest(late)
        for stage, terms in gradient.terms.items():
            totals = [self._sum_on(stage, terms, totals, reader)]
        for node in late:
            rewriter.rewire(node, old.input, totals[0])
        home, root = self.program.value_stages[gradient.adds_up.first_output], f"{PREFIX}.{gradient.value}.own"
        if gradient.local:
            rewriter.rewire(
                gradient.adds_up, gradient.value, self._added(gradient.local, root, home, gradient.adds_up.sharding)
            )
        else:
            self._drop_sum(readers)
        for node in gradient.additions:
            assert node.source is not None
            rewriter.remove(node.source, "each stage sums its part over micro-batches")

    def _drop_sum(self, readers: Sequence[Node]) -> None:
        """Leave out the sum over micro-batches of a stage without a term: the sum, the next one and the zeros."""
        program, old = self.program, self.gradient.accumulator
        sizes = {name for node in readers if node.is_in(SIZES) for name in node.outputs}
        for name in (old.added, old.output, *sizes):
            self.rewriter.discard(name)
        program.accumulators.remove(old)
        del program.graph.inputs[old.input]

    def _sum_on(self, stage: int, terms: Sequence[Node], totals: Sequence[str], reader: Node | None) -> str:
        """Sum the terms of a stage there, and add the sum to a total so far, or none, before ``reader``; returns the
        result."""
        program, rewriter, old = self.program, self.rewriter, self.gradient.accumulator
        values, home = [node.inputs[0] for node in terms], _stages(terms[0])[1]
        root, sharding = f"{PREFIX}.{values[0]}.sum", self.plan.on(stage, on_all_stages(self.gradient.adds_up.sharding))
        partial = replace(
            old, input=root, output=f"{root}_out", added=f"{root}_next",
            sharding=self.plan.on(stage, on_all_stages(old.sharding)),
        )  # fmt: skip
        program.graph.types[root] = program.graph.inputs[root] = old.type
        value = self._added(values, f"{root}_part", stage, sharding)
        rewriter.add(
            "Add", [root, value], {partial.added: old.type}, sharding=sharding, after=rewriter.latest([value])
        ).phase = self.gradient.adds_up.phase
        rewriter.zeros(root, partial.output, f"{root}_sizes", sharding)
        sent = rewriter.add(
            TRANSFER, [root], {f"{root}.stage{home}": old.type}, domain=SPMD, attributes=dict(terms[0].attributes),
            sharding=terms[0].sharding, before=reader,
        )  # fmt: skip
        result = sent
        if totals:
            result = rewriter.add(
                "Add", [*totals, *sent.outputs], {f"{root}.total": old.type}, sharding=self.gradient.adds_up.sharding,
                before=reader,
            )  # fmt: skip
        sent.phase = result.phase = Phase.UPDATE
        for node in terms:
            rewriter.discard(node.first_output)
        program.accumulators.append(partial)
        program.value_stages |= dict.fromkeys((root, partial.added, partial.output, f"{root}_sizes"), stage)
        program.value_stages |= dict.fromkeys((*sent.outputs, *result.outputs), home)
        return result.first_output

    def _added(self, values: Sequence[str], root: str, stage: int, sharding: Sharding) -> str:
        """Sum values on a stage; returns the sum."""
        result = values[0]
        for number, value in enumerate(values[1:]):
            adds = self.rewriter.add(
                "Add", [result, value], {f"{root}{number}": self.gradient.accumulator.type}, sharding=sharding,
                after=self.rewriter.latest([result, value]),
            )  # fmt: skip
            result, adds.phase = adds.first_output, self.gradient.adds_up.phase
            self.program.value_stages[result] = stage
        return result


def _stages(transfer: Node) -> tuple[int, int]:
    """From which stage to which a transfer goes."""
    source, home = transfer.attributes["stages"]
    return int(source), int(home)
