"""Checks that a refolded optimizer has each state in the right place, and gives each state the right new value.

Without the operator's body, the other checks cannot tell moments apart. The record of the source's call has the slot of
every state.
"""

from __future__ import annotations

from collections.abc import Mapping

from gopt.errors import InvariantError
from gopt.ir.opaque.origin import Origin
from gopt.ir.opaque.refold import RefoldedCall, RefoldedWeight
from gopt.spmd.program import ShardedState, SpmdProgram


def check_refolded(program: SpmdProgram) -> None:
    """Raise InvariantError for a member of a refolded call with another slot's value; a sweep."""
    calls = [node.origin for node in program.graph.nodes if isinstance(node.origin, RefoldedCall)]
    if not calls:
        return
    slots: dict[str, dict[str, set[str]]] = {}
    """Operator -> slot -> the tensors of the source that stand in it, in any call: a run may be of several calls."""
    states = {state.input: state for state in program.states if not state.copy}
    makers = {state.output: state for state in program.states if not state.copy}
    new = {state.tensor: state.updated for state in program.training.states}
    for call in calls:
        _check_scalars(program, call)
        pairs = _slot_pairs(call, new)
        tensors = slots.setdefault(call.call.op_type, {}) or _fill(slots, program, call.call.op_type)
        for member in call.members:
            _check_member(call, member, tensors, pairs, states, makers)


def _fill(slots: dict[str, dict[str, set[str]]], program: SpmdProgram, operator: str) -> dict[str, set[str]]:
    """Add the tensors in the slots of all calls of an operator."""
    result, numbers = slots[operator], set[int]()
    for node in program.source.graph.nodes:
        call = node.origin.call if isinstance(node.origin, Origin) else None
        if call is None or call.op_type != operator or call.number in numbers:
            continue
        numbers.add(call.number)
        for table in call.slot_values.weights:
            for slot, name in table.items():
                result.setdefault(slot, set()).add(name)
    return result


def _check_member(
    call: RefoldedCall,
    member: RefoldedWeight,
    tensors: Mapping[str, set[str]],
    pairs: Mapping[tuple[str, str], str],
    states: Mapping[str, ShardedState],
    makers: Mapping[str, ShardedState],
) -> None:
    for slot, name in member.inputs.items():
        state = states.get(name)
        if state is None:
            continue
        strange = next((part.tensor for part in state.slices if part.tensor not in tensors.get(slot, ())), "")
        if strange:
            raise InvariantError(f"{call.call.label!r} reads state {strange!r} as its {slot}")
        for part in state.slices:
            output = member.outputs.get(pairs.get((slot, part.tensor), ""), "")
            taker = makers.get(output)
            if taker is not None and taker.input != name:
                raise InvariantError(
                    f"state {taker.slices[0].tensor!r} takes {output!r}, the new value of {part.tensor!r}"
                )


def _slot_pairs(call: RefoldedCall, new: Mapping[str, str]) -> dict[tuple[str, str], str]:
    """Return slot and state -> the slot of the new value: weights of a call may have states in different slots.
    ``new``: state of the source -> new value."""
    slot_values, result = call.call.slot_values, dict[tuple[str, str], str]()
    for before, after in zip(slot_values.weights, slot_values.updated):
        slots = {name: slot for slot, name in after.items()}
        result.update({(slot, name): slots[new[name]] for slot, name in before.items() if new.get(name) in slots})
    return result


def _check_scalars(program: SpmdProgram, call: RefoldedCall) -> None:
    """Check that each scalar of the source is in its own slot; scalars made by passes are free."""
    slots = call.call.slot_values.scalars
    for slot, name in call.scalars.items():
        if name != slots.get(slot) and name in slots.values():
            raise InvariantError(
                f"{call.call.label!r} reads {name!r} as its {slot}, and the source {slots.get(slot)!r}"
            )
