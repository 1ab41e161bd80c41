"""Sums of gradients of a tied parameter on each stage with a reader, sent once for all micro-batches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from gopt.analysis.training import Phase
from gopt.ir.graph import SPMD, TRANSFER, Node
from gopt.ir.rewriter import GraphRewriter, Removal
from gopt.ir.types import TensorType
from gopt.operators.kinds import ADDITIONS, SIZES
from gopt.passes.stage_transfers.place import NAME, PREFIX
from gopt.records.mesh import PIPELINE
from gopt.records.placements import Sharding
from gopt.spmd.program import Accumulator, SpmdProgram
from gopt.spmd.stage_plan import StagePlan, transfers


@dataclass(frozen=True, slots=True)
class _Term:
    """A term of a gradient from another stage: the transfer; the additions of the source from the term to the gradient;
    and the addition of the gradient to the sum over micro-batches."""

    transfer: Node
    additions: tuple[Node, ...]
    adds_up: Node
    accumulator: Accumulator

    @property
    def further(self) -> list[str]:
        """The values added to the term."""
        path = {self.transfer.outputs[0], *(node.outputs[0] for node in self.additions)}
        return [name for node in self.additions for name in node.inputs if name not in path]


def sum_on_stages(program: SpmdProgram, plan: StagePlan) -> list[Removal]:
    """Let each stage sum its part of a gradient over micro-batches, and send the sum to the parameter's stage in the
    update: where the gradient itself is summed, without a call or a cast before the sum."""
    removals: list[Removal] = []
    while (term := next(_terms(program), None)) is not None:
        rewriter = GraphRewriter(program.graph, NAME)
        _apart(program, plan, rewriter, term)
        rewriter.finish()
        program.set_states(program.states)
        removals += rewriter.removed
    return removals


def _terms(program: SpmdProgram) -> Iterator[_Term]:
    """Yield the parts of gradients from another stage in each micro-batch, where a sum there is as good."""
    if program.micro_steps == 1:
        return
    types, users, results = program.graph.types, program.graph.users(), program.results()
    sums = {accumulator.added: accumulator for accumulator in program.accumulators}
    for node in program.graph.nodes:
        if not transfers(node) or transfers(node, to_all=True) or node.phase is not Phase.BACKWARD:
            continue
        path: list[Node] = []
        name, reader = node.first_output, _only_addition(users, node.first_output)
        while reader is not None and reader.source is not None and name not in results:
            path.append(reader)
            name = reader.first_output
            reader = _only_addition(users, name)
        accumulator = sums.get(reader.first_output) if path and reader is not None and name not in results else None
        if reader is not None and accumulator is not None and _all_of(path, accumulator.type, types):
            yield _Term(node, tuple(path), reader, accumulator)


def _only_addition(users: Mapping[str, Sequence[Node]], name: str) -> Node | None:
    """The only reader of a value, if an addition of different values."""
    readers = users.get(name, ())
    adds = len(readers) == 1 and readers[0].is_in(ADDITIONS) and len({*readers[0].inputs}) == len(readers[0].inputs)
    return readers[0] if adds else None


def _all_of(additions: Iterable[Node], type: TensorType, types: Mapping[str, TensorType]) -> bool:
    """Return whether the operands of additions have a type, so that no addition repeats an operand."""
    return all(types[name] == type for node in additions for name in node.inputs)


def _apart(program: SpmdProgram, plan: StagePlan, rewriter: GraphRewriter, term: _Term) -> None:
    graph, old = program.graph, term.accumulator
    stage, home = (int(number) for number in term.transfer.attributes["stages"])
    value = term.transfer.inputs[0]
    root = f"{PREFIX}.{value}.sum"
    distant = plan.on(stage, _off(term.adds_up.sharding))
    partial = replace(
        old, input=root, output=f"{root}_out", added=f"{root}_next", sharding=plan.on(stage, _off(old.sharding))
    )
    graph.types[root] = graph.inputs[root] = old.type
    readers = [node for node in graph.users().get(old.input, ()) if node is not term.adds_up and not node.is_in(SIZES)]
    maker, reader = rewriter.latest([value]), rewriter.earliest(readers)
    rewriter.add(
        "Add", [root, value], {partial.added: old.type}, sharding=distant, after=maker
    ).phase = term.adds_up.phase
    rewriter.zeros(root, partial.output, f"{root}_sizes", distant)
    sent = rewriter.add(
        TRANSFER, [root], {f"{root}.stage{home}": old.type}, domain=SPMD, attributes=dict(term.transfer.attributes),
        sharding=term.transfer.sharding, before=reader,
    )  # fmt: skip
    total = rewriter.add(
        "Add", [old.input, sent.outputs[0]], {f"{root}.total": old.type}, sharding=term.adds_up.sharding, before=reader
    )
    for node in (sent, total):
        node.phase = Phase.UPDATE
    for node in readers:
        rewriter.rewire(node, old.input, total.outputs[0])
    gradient, *further = term.additions[-1].first_output, *term.further
    rest = further.pop(0)
    for number, value in enumerate(further):
        adds = rewriter.add(
            "Add", [rest, value], {f"{root}.rest{number}": old.type}, sharding=term.adds_up.sharding,
            before=term.adds_up,
        )  # fmt: skip
        adds.phase, rest = term.adds_up.phase, adds.first_output
        program.value_stages[rest] = home
    rewriter.rewire(term.adds_up, gradient, rest)
    for node in term.additions:
        assert node.source is not None
        rewriter.remove(node.source, "each stage sums its part over micro-batches")
    rewriter.discard(term.transfer.outputs[0])
    program.accumulators.append(partial)
    program.value_stages.update(dict.fromkeys((root, partial.added, partial.output, f"{root}_sizes"), stage))
    program.value_stages.update(dict.fromkeys((sent.outputs[0], total.outputs[0]), home))


def _off(sharding: Sharding) -> Sharding:
    """``sharding`` on all stages."""
    return Sharding(tuple(item for item in sharding.by_axis if item[0] != PIPELINE))
