"""Split the computation of a step along axes whose ranks see the same samples: forward, backward and update."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from gopt.analysis.training import State, TrainingGraph
from gopt.artifact.report import PassResult
from gopt.errors import OptionError, UnsupportedError
from gopt.ir.graph import COMM, origin
from gopt.passes.base import Pass
from gopt.program import SpmdProgram
from gopt.sharding.placements import Placement, Shard, Sharding
from gopt.tensor_parallel.check import check
from gopt.tensor_parallel.choose import choose
from gopt.tensor_parallel.classes import classes
from gopt.tensor_parallel.explain import Explanation
from gopt.tensor_parallel.localise import localise
from gopt.tensor_parallel.patterns import Pattern, apply
from gopt.tensor_parallel.propagate import Propagated, propagate
from gopt.tensor_parallel.sizes import Sizes
from gopt.tensor_parallel.specs import with_specs
from gopt.tensor_parallel.tokens import Tokens

AXIS = "tp"


@dataclass(frozen=True, kw_only=True)
class Options:
    """``parameters``: what you say of some by name (``up*:column;head*:replicate``: column, row, vocab, expert,
    replicate, or dimN); ``auto``: whether others are found by structure; ``sizes``: how a dimension is shared out:
    balanced, ceil or floor-last; ``sequence``: between two pairs of products, activations are shared out by tokens;
    ``configuration``: the device configuration of the file whose sharding specs count; none: no one; '': the one that
    fits the mesh."""

    parameters: str = ""
    auto: bool = True
    sizes: Sizes = Sizes.BALANCED
    sequence: bool = False
    configuration: str = ""


def tensor_parallel(program: SpmdProgram, options: Options) -> PassResult:
    """Split weights, activations and updates along ``tp``: columns and rows of weights in pairs, classes, tables.

    Requires: roles recovered, static shapes, no sharding yet. Guarantees: the values of every state are those of the
    source, up to the order of sums. On the wire, per block of a transformer and rank: two all-reduces of the
    activations in the forward and two in the backward, 8(t-1)/t of their bytes.
    """
    members = dict(program.mesh.axes).get(AXIS, 1)
    if members == 1:
        return PassResult(note="no axis splits the computation")
    training = program.training
    if AXIS in dict(program.mesh.kinds):
        return PassResult(note=f"ranks along {AXIS} are copies, as the user says")
    if _has_calls(program):
        return PassResult(note=f"the source has calls of its own along {AXIS}")
    notes: list[str] = []
    patterns = Pattern.parse(options.parameters)
    choices = choose(training, members, options.sizes, notes.append) if options.auto else {}
    choices = apply(training, members, options.sizes, patterns, choices)
    choices = with_specs(
        training, program.mesh, AXIS, options.sizes, choices,
        patterns=patterns, configuration=options.configuration, note=notes.append,
    )  # fmt: skip
    if not choices:
        raise UnsupportedError(
            f"no parameter can be split along {AXIS}: no two products follow one another with nothing between them "
            "that needs whole values",
            f"use the ranks for data: --mesh dp={members} or shard={members}",
        )
    seeds = _seeds(training, {name: choice.placement for name, choice in choices.items()})
    tokens = Tokens.of(training, members, options.sizes) if options.sequence else None
    if options.sequence and tokens is None:
        raise OptionError(f"tensor-parallel: no input of the batch has tokens to share out over {members} ranks")
    result = propagate(training, training.graph.copy(), AXIS, members, seeds, tokens)
    check(training, result.graph, AXIS, seeds)
    reasons = {name: choice.why for name, choice in choices.items()}
    logical = replace(result.graph, types=dict(result.graph.types))
    program.explanations.append(
        Explanation(AXIS, logical, result.placements, reasons, result.origins, result.converted)
    )
    shardings = {
        name: Sharding.along(AXIS, placement) for name, placement in result.placements.items()
        if isinstance(placement, Shard)
    }  # fmt: skip
    program.parts = {name: shardings[name] for name in seeds}
    program.split = {AXIS: options.sizes.value}
    _make_variants(program, result, shardings, classes(shardings.values(), {AXIS: members}))
    kept = {id(node.source) for node in result.graph.nodes}
    removed = {
        next(filter(None, node.outputs)): "written as operators that are split" for node in training.graph.nodes
        if id(node) not in kept
    }  # fmt: skip
    facts = {
        "parameters": {name: f"{choice.why}: {choice.placement}" for name, choice in choices.items()},
        "mappings": dict(sorted(result.conversions.items())),
        "computed_whole": result.whole,
    }
    if program.others:
        facts["classes"] = [[dict(place) for place in variant.places] for variant in program.variants]
    return PassResult(removed=removed, facts=facts, note=_joined(notes))


def _joined(notes: Sequence[str]) -> str:
    """Notes in one line, each once."""
    return "; ".join(f"{text} ({count} times)" if count > 1 else text for text, count in Counter(notes).items())


def _make_variants(
    program: SpmdProgram,
    result: Propagated,
    shardings: Mapping[str, Sharding],
    ranks: Sequence[tuple[dict[str, int], ...]],
) -> None:
    """Give every class of ranks the step in its own types, each as a program that later passes work on."""
    graphs = [result.graph, *(result.graph.copy() for _ in ranks[1:])]
    source = program.source
    random = set(map(id, source.random))
    program.others = [
        SpmdProgram(source, source.graph, program.mesh, [], micro_steps=program.micro_steps, parts=program.parts,
                    first=program)
        for _ in ranks[1:]
    ]  # fmt: skip
    for variant, graph, places in zip(program.variants, graphs, ranks):
        localise(graph, shardings, places[0])
        drawn = [node for node in graph.nodes if id(origin(node)) in random]
        variant.training = replace(source, graph=graph, random=drawn)
        variant.graph = graph.copy()
        variant.places = places if program.others else ()
        variant.hold_whole()


def _seeds(training: TrainingGraph, chosen: Mapping[str, Placement]) -> dict[str, Placement]:
    """Placements of parameters and of the states that have their shape."""
    types = training.graph.types

    def like(state: State) -> str:
        return state.of if state.of is not None and types[state.of].shape == types[state.tensor].shape else state.tensor

    return {state.tensor: chosen[like(state)] for state in training.states if like(state) in chosen}


def _has_calls(program: SpmdProgram) -> bool:
    """Whether the source is the step of one member already: it has calls along the axis."""
    calls = {str(node.attributes["group"]) for node in program.training.graph.nodes if node.domain == COMM}
    return any(AXIS in program.mesh.live(group) for group in calls)


def needed(program: SpmdProgram) -> str:
    """Why a step cannot do without this pass."""
    mesh = program.mesh
    if dict(mesh.axes).get(AXIS, 1) == 1 or AXIS in dict(mesh.kinds) or _has_calls(program):
        return ""
    return f"nothing else splits the computation along {AXIS}: its ranks would be copies"


PASS = Pass("tensor-parallel", Options, tensor_parallel, needed=needed)
