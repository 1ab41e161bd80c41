"""Compute values of the forward again in the backward, and save fewer values in between."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from gopt.analysis.flops import flops
from gopt.analysis.training import Phase
from gopt.errors import OptionError, UnsupportedError
from gopt.ir.graph import RECOMPUTE
from gopt.passes.base import Pass
from gopt.passes.recompute import choose
from gopt.passes.recompute.copies import Copies
from gopt.passes.recompute.forward import ForwardValues
from gopt.records.mesh import PIPELINE
from gopt.records.pass_facts import PassOptions, RecomputeFacts
from gopt.records.topology import parse_bytes
from gopt.spmd.pass_records import PassResult
from gopt.spmd.program import SpmdProgram
from gopt.spmd.step_memory import live, members
from gopt.spmd.traffic import calls_of
from gopt.text.suggestions import did_you_mean

_RULES = {"full": choose.full, "selective": choose.selective}
_SAVE, _AGAIN = "save", "recompute"


@dataclass(frozen=True, kw_only=True)
class RecomputeOptions(PassOptions):
    """The options of recompute say which values of the forward the backward computes again."""

    policy: str = "selective"
    """The policy is full: all values inside of repeated blocks; selective: values that take few operations for their
    bytes; or the most bytes that a rank has alive at once beside its states, such as 200MiB."""
    override: str = ""
    """The text decides for the values whose name, or the name of whose node, matches a pattern, as PATTERN:save or
    PATTERN:recompute with semicolons between; it is empty when the policy decides for all."""


def recompute(program: SpmdProgram, options: RecomputeOptions) -> PassResult:
    """Compute values of the forward again in the backward, instead of saving them in between.

    Requires: to run behind shard and before overlap. Guarantees: a copy is a node of the forward on equal operands, so
    the bits stay the same; draws, calls and updates of running statistics run once. On the wire: nothing.
    """
    rules = _parse(options.override)
    forward, before = ForwardValues(program), _peaks(program)
    rule = _RULES.get(options.policy)
    if rule is None and max(before.values()) <= (most := _most(options.policy)):
        return PassResult(
            note=f"{max(before.values())} bytes are alive at once, and {most} may be: nothing is computed again"
        )
    chosen = _overridden(forward, rule(forward), rules) if rule else _under(program, forward, before, most, rules)
    copies, behind = _tried(program, chosen)
    if not copies.nodes:
        why = "no block is repeated" if options.policy == "full" else "the backward reads nothing to compute again"
        return PassResult(note=why)
    if worse := {member for member, peak in behind.items() if peak > before[member]}:
        most_behind = max(behind[member] for member in worse)
        chosen = {name for name in chosen if forward.member(name) not in worse}
        copies, behind = _tried(program, chosen)
        if not copies.nodes:
            return PassResult(
                note=f"{most_behind} bytes would be alive at once, and {max(before.values())} are: nothing is computed "
                "again"
            )
    saved_before = _saved(program, forward)
    Copies(forward, chosen).write()
    saved = _saved(program, forward)
    facts = RecomputeFacts(
        saved=len(saved), recomputed=len(saved_before - saved), nodes=len(copies.nodes),
        saved_bytes_before=sum(map(forward.nbytes, saved_before)), saved_bytes=sum(map(forward.nbytes, saved)),
        live_bytes_before=max(before.values()), live_bytes=max(behind.values()),
        operations=flops(program.training.graph), operations_added=copies.operations.total(),
    )  # fmt: skip
    return PassResult(facts=facts)


def _most(policy: str) -> int:
    try:
        return parse_bytes(policy)
    except OptionError as error:
        raise OptionError(
            f"--recompute cannot be {policy!r}", "it is full, selective, or a number of bytes, such as 200MiB"
        ) from error


def _peaks(program: SpmdProgram) -> dict[int, int]:
    """The peak of live bytes of each member of the axis of stages, over all parts of the states; without stages, of
    member 0."""
    peaks: dict[int, int] = {}
    for at in members(program):
        variant, member = program.at(at), at.get(PIPELINE, 0)
        peaks[member] = max(peaks.get(member, 0), live(variant, calls_of(variant), at).peak)
    return peaks


def _tried(program: SpmdProgram, chosen: set[str]) -> tuple[Copies, dict[int, int]]:
    """The copies of a choice on a fork of the program, and the peaks of live bytes there."""
    trial = program.fork()
    return Copies(ForwardValues(trial), chosen).write(), _peaks(trial)


def _under(
    program: SpmdProgram, forward: ForwardValues, before: Mapping[int, int], most: int, rules: list[tuple[str, str]]
) -> set[str]:  # fmt: skip
    """The choice of the fewest operations with a peak of at most ``most`` live bytes, by itself for each member of the
    axis of stages: no copy reads a value of another member."""
    by_rule = (rule(forward) for rule in _RULES.values())
    choices = [_overridden(forward, chosen, rules) for chosen in (*choose.cuts(forward), *by_rule)]
    trials = [_tried(program, chosen) for chosen in choices]
    result = set[str]()
    for member in (member for member, peak in before.items() if peak > most):
        fitting = [
            (copies.operations[member], peaks[member], number) for number, (copies, peaks) in enumerate(trials)
            if peaks[member] <= most
        ]  # fmt: skip
        if not fitting:
            least = min(peaks[member] for _, peaks in trials)
            raise UnsupportedError(
                f"--recompute: a rank has at least {least} bytes alive at once, and {most} may be",
                "allow more, or shard the step further",
            )
        result |= {name for name in choices[min(fitting)[-1]] if forward.member(name) == member}
    return result


def _saved(program: SpmdProgram, forward: ForwardValues) -> set[str]:
    """The values of the forward read by the backward; for a view, the value shown."""
    makers, root = forward.makers, forward.root
    return {
        root.get(name, name) for node in program.graph.nodes if node.phase is Phase.BACKWARD
        for name in node.inputs if name in makers
    }  # fmt: skip


def _parse(text: str) -> list[tuple[str, str]]:
    """``*.ln*:recompute;embed*:save`` -> patterns with actions; raises OptionError."""
    rules = []
    for part in filter(None, (part.strip() for part in text.split(";"))):
        pattern, colon, what = part.rpartition(":")
        if not colon or what not in (_SAVE, _AGAIN):
            raise OptionError(f"cannot read {part!r} as a rule of recompute", "write it as 'NAME*:save'")
        rules.append((pattern, what))
    return rules


def _overridden(forward: ForwardValues, chosen: set[str], rules: list[tuple[str, str]]) -> set[str]:
    """A choice with the user's patterns; of several matches, the first decides."""
    makers = forward.makers
    for pattern, action in reversed(rules):
        matched = {
            name for name, node in makers.items() if fnmatchcase(name, pattern) or fnmatchcase(node.name, pattern)
        }
        if not matched:
            hint = did_you_mean(pattern, makers) or "see the values with gopt inspect"
            raise OptionError(f"recompute: override {pattern}:{action} matches no value of the forward", hint)
        chosen = chosen | matched if action == _AGAIN else chosen - matched
    return chosen


PASS = Pass(
    RECOMPUTE, RecomputeOptions, recompute,
    after=("tensor-parallel", "shard", "statistics", "stage-transfers", "fuse-collectives"), facts=RecomputeFacts,
)  # fmt: skip
