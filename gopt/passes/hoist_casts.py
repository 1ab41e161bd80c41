"""Move the cast of a parameter from the head of the step behind the update."""

from __future__ import annotations

from dataclasses import dataclass

from gopt.analysis.parameter_uses import low_precision_uses, parameter_users
from gopt.analysis.training import State
from gopt.ir.graph import Node
from gopt.ir.rewriter import GraphRewriter
from gopt.ir.types import dtype_code
from gopt.passes.base import Pass
from gopt.records.pass_facts import HoistFacts, PassOptions
from gopt.spmd.pass_records import PassResult
from gopt.spmd.program import BucketSlice, ShardedState, SpmdProgram


@dataclass(frozen=True, kw_only=True)
class HoistOptions(PassOptions):
    """Nothing to choose."""


def hoist_casts(program: SpmdProgram, options: HoistOptions) -> PassResult:
    """Cast each parameter once behind its update, and carry the narrow copy from step to step.

    Requires: to run before shard, which then leaves the wide master with its owner and gathers the narrow copy.
    Guarantees: a parameter that forward and backward read through casts alone has no cast in either; the copy is always
    the wide state's cast. A parameter that is read wide as well is left alone. On the wire: nothing by itself; behind
    shard the gathered bytes shrink to the narrow type's.
    """
    data = program.mesh.data_group
    if (data is None or program.mesh.size(data) == 1) and program.micro_steps == 1:
        return PassResult(note="one rank: the cast stays where it is")
    reads, training = parameter_users(program.training), program.training
    cast = [(state, reads.get(state.tensor, [])) for state in training.parameters if state.tensor in training.gradients]
    cast = [(state, casts) for state, casts in cast if low_precision_uses(training, casts)]
    if not cast:
        return PassResult(note="no parameter is read through casts alone")
    users, rewriter = program.graph.users(), GraphRewriter(program.graph, "hoist-casts")
    copies = [_hoist(rewriter, users, state, casts, number) for number, (state, casts) in enumerate(cast)]
    removed = sum(len(casts) for _, casts in cast)
    rewriter.finish()
    program.set_states([*program.states, *copies])
    return PassResult(removed=rewriter.removed, facts=HoistFacts(len(copies), removed))


def _hoist(
    rewriter: GraphRewriter, users: dict[str, list[Node]], state: State, casts: list[Node], number: int
) -> ShardedState:
    """Turn the first cast's result into a state; every other cast's readers read this result."""
    name = casts[0].outputs[0]
    for cast in casts:
        why, by = "the parameter is cast once, behind its update", {cast.outputs[0]: name}
        rewriter.remove(cast, why, of=state.tensor, by=by)
        for reader in users.get(cast.outputs[0], ()) if cast is not casts[0] else ():
            rewriter.rewire(reader, cast.outputs[0], name)
    type = rewriter.graph.types[name]
    output = f"gopt.hoist-casts.{number}.copy_out"
    rewriter.add("Cast", [state.updated], {output: type}, attributes={"to": dtype_code(type.dtype)})
    return ShardedState(name, output, type.dtype, (BucketSlice(state.tensor, 0, type.elements),), copy=True)


PASS = Pass("hoist-casts", HoistOptions, hoist_casts, facts=HoistFacts)
