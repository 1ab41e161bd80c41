"""The invariant by which ranks stay together: what they hold in common never follows one rank's own data.

Every state that is equal on ranks, and every shard of one, may depend on batches and random numbers only through
reductions over all ranks that see different data, whatever passes made the graph. See ``analysis.standing``.
"""

from __future__ import annotations

from dataclasses import dataclass

from gopt.analysis.spmd import Accumulator, Holding, Step
from gopt.analysis.standing import Standing, Sweep
from gopt.analysis.training import Kind, Phase
from gopt.errors import GoptError, InvariantError, UnsupportedError
from gopt.graph.model import Node


def check_agreement(step: Step) -> int:
    """Raise InvariantError for a state on which ranks would part, UnsupportedError where the source itself parts them;
    returns how many values were asked."""
    sweep = Sweep(step).run()
    statistics = {state.tensor for state in step.training.states if state.kind is Kind.STATISTIC}
    for holding in step.holdings:
        if holding.local and holding.input not in statistics:
            raise InvariantError(f"state {holding.input!r} is held as each rank's own, and is no statistic")
        if not sweep.fits(sweep.of(holding.output), sweep.held(holding)):
            raise _Blame(step, sweep).state(holding)
    for held in step.accumulators:
        if not sweep.fits(sweep.of(held.added), sweep.summed(held)):
            raise _Blame(step, sweep).sum(held)
    _check_zeros(step)
    return len(step.holdings) + len(step.accumulators)


def _check_zeros(step: Step) -> None:
    """The update leaves every accumulator at zero."""
    if not step.accumulators:
        return
    filled = [node for node in step.graph.nodes if node.is_a("ConstantOfShape", "Constant")]
    zeros = {name for node in filled if _zero(node) for name in node.outputs}
    for held in step.accumulators:
        if held.output not in zeros:
            raise InvariantError(f"accumulator {held.input!r} is not zero again behind the update: {held.output!r}")


def _zero(node: Node) -> bool:
    value = node.attributes.get("value")
    return value is None or (not any(value.raw_data) and not any((*value.float_data, *value.double_data)))


@dataclass(slots=True)
class _Blame:
    """Says of a state that fails why, and where the fault came in."""

    step: Step
    sweep: Sweep

    def state(self, holding: Holding) -> GoptError:
        parts = holding.parts
        name = repr(parts[0].tensor) + (f" (and {len(parts) - 1} more)" if len(parts) > 1 else "")
        kinds = {state.tensor: state.kind for state in self.step.training.states}
        kind = "statistic" if kinds[parts[0].tensor] is Kind.STATISTIC else "state"
        held = "equal on all ranks" if self.sweep.held(holding).part is None else "in shards"
        found = self.sweep.of(holding.output)
        return self._error(f"{kind} {name} is held {held}", holding.output, found, self.sweep.held(holding))

    def sum(self, held: Accumulator) -> GoptError:
        found, wanted = self.sweep.of(held.added), self.sweep.summed(held)
        what = "in shards" if wanted.part is not None else "by every rank"
        return self._error(f"accumulator {held.input!r} is held {what}", held.added, found, wanted)

    def _error(self, what: str, output: str, found: Standing, wanted: Standing) -> GoptError:
        own, apart = found.own & ~wanted.own, found.apart & ~wanted.apart
        same = (own | apart) & ~self.sweep.data
        if same:
            axes = "+".join(self.sweep.axes(same))
            value, reader = self._source(output, same)
            of = next((name for name, each in self.step.training.gradients.items() if each == value), "")
            what = f"state {of!r} is held equal along {axes}" if of else what  # a bucket has many
            return UnsupportedError(
                f"{what}, and the source parts ranks there that must compute the same: {reader} {value!r}",
                f"let the source bring it together over {axes}",
            )
        if own:
            group = "+".join(self.sweep.axes(own))
            value, reader = self._source(output, own)
            why = f"{reader} {value!r}, which differs from rank to rank along {group}"
            return InvariantError(
                f"{what}, and its new value {output!r} follows each rank's own data: {why}",
                f"a reduction over {group} is missing in front of it",
            )
        if apart:
            group = "+".join(self.sweep.axes(apart))
            return InvariantError(
                f"{what}, and members of {group} make another {output!r} each", f"a gather over {group} is missing"
            )
        return InvariantError(f"{what}, and its new value {output!r} is not the same part of it on every member")

    def _source(self, name: str, bits: int) -> tuple[str, str]:
        """Back along operands that differ along some axes: the first that forward or backward make, such as a
        gradient, or the value at which it began."""
        training, makers = self.step.training, self.step.graph.producers()
        local = {
            each for node, phase in zip(training.graph.nodes, training.phases) if phase is not Phase.UPDATE
            for each in node.outputs
        }  # fmt: skip
        reader: Node | None = None
        while name in makers and (reader is None or name not in local):
            behind = next((each for each in makers[name].reads if self._differs(each) & bits), None)
            if behind is None:
                break
            reader, name = makers[name], behind
        return name, f"{reader.op_type} {reader.label!r} reads" if reader is not None else "it is"

    def _differs(self, name: str) -> int:
        standing = self.sweep.of(name)
        return standing.own | (standing.apart & ~self.sweep.data)
