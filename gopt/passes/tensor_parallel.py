"""Split the computation of a step along axes whose ranks see the same samples: forward, backward and update."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from gopt.analysis.region_mappings import find_region_mappings
from gopt.artifact.report import PassResult
from gopt.ir.graph import Graph, origin
from gopt.ir.rewriter import Removal
from gopt.passes.base import Pass
from gopt.program import SpmdProgram
from gopt.sharding.placements import Sharding
from gopt.tensor_parallel.axes import AxisSplit, Request, split_axes, splitting_axes
from gopt.tensor_parallel.classes import classes
from gopt.tensor_parallel.explain import Explanation
from gopt.tensor_parallel.localise import localise
from gopt.tensor_parallel.marks import Marks, parse_marks
from gopt.tensor_parallel.patterns import FED, Pattern
from gopt.tensor_parallel.propagated import Propagated
from gopt.tensor_parallel.sizes import Sizes
from gopt.tensor_parallel.split import split_step
from gopt.topology import Topology


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of the pass.

    ``parameters``: the splits of some parameters (``up*:column;head*:replicate``: column, row, vocab, expert,
    replicate, or dimN; ``up*:expert@ep`` along another axis than tp). ``inputs``: the dimension along which a batch
    input is split (``mask:dim2@cp``, or whole). ``gradients``: the axes over which the gradients of some parameters are
    split (``*.norm.weight:tp+cp``, or none), checked against the step. ``auto``: other splits are inferred from the
    structure. ``sizes``: how a dimension is divided: balanced, ceil or floor-last. ``sequence``: along tp, activations
    between two pairs of products are split by tokens. ``regather``: values gathered in the forward are gathered again
    in the backward instead of kept. ``configuration``: the device configuration of the file whose sharding specs count;
    none: no configuration; '': the one that fits the mesh. ``link``: the links between ranks, as in gopt plan;
    conflicts are settled by time on them; '': by bytes.
    """

    parameters: str = ""
    inputs: str = ""
    gradients: str = ""
    auto: bool = True
    sizes: Sizes = Sizes.BALANCED
    sequence: bool = False
    regather: bool = False
    configuration: str = ""
    link: str = ""

    def __post_init__(self) -> None:
        """Raise OptionError for texts that cannot be read, before any work."""
        _ = self.request, self.marks

    @cached_property
    def request(self) -> Request:
        """The requested splits, read from the texts."""
        return Request(
            Pattern.parse(self.parameters), Pattern.parse(self.inputs, FED), self.auto, self.sizes, self.sequence,
            self.configuration, self.link,
        )  # fmt: skip

    @cached_property
    def marks(self) -> tuple[Pattern, ...]:
        """The axes of gradients, read from the text."""
        return parse_marks(self.gradients)


def tensor_parallel(program: SpmdProgram, options: Options) -> PassResult:
    """Split weights, activations and updates along the axes whose ranks see the same samples, or parts of them: columns
    and rows of weights in pairs, classes, tables (tp); experts (ep); tokens (cp, sp); height and width (h, w).

    Requires: roles recovered, static shapes, no sharding yet. Guarantees: the values of every state are those of the
    source, up to the order of sums. On the wire, per block of a transformer and rank of tp: two all-reduces of the
    activations in the forward and two in the backward, 8(t-1)/t of their bytes.
    """
    mesh, training = program.mesh, program.training
    found = [each.to_json() for each in find_region_mappings(training) if mesh.live(each.group)]
    of_source = {"source_mappings": found} if found else {}
    if options.link:
        Topology.parse(options.link, mesh)
    if not splitting_axes(mesh, training):
        idle = ": link has no effect" if options.link else ""
        return PassResult(facts=of_source, note=f"no axis splits the computation{idle}")
    notes: list[str] = []
    splits = split_axes(training, mesh, options.request, notes.append)
    axes = [split.axis for split in splits]
    marks = Marks.read(training, mesh, axes, options.marks)
    made = split_step(training, splits, marks, regather=options.regather)
    program.warnings += marks.warnings
    for split, result in zip(splits, made.along):
        reasons = {name: choice.why for name, choice in split.choices.items()}
        reasons |= dict.fromkeys(split.fed, "ranks are fed parts")
        program.explanations.append(
            Explanation(split.axis, result.graph, result.placements, reasons, result.origins, result.converted)
        )
    program.parts = {name: made.shardings[name] for split in splits for name in split.states}
    program.fed = {name: made.shardings[name] for split in splits for name in split.fed}
    program.split = {split.axis: options.sizes.value for split in splits}
    members = {split.axis: split.members for split in splits}
    _make_variants(program, made.graph, made.shardings, classes(made.shardings.values(), members))
    kept = {id(node.source) for node in made.graph.nodes}
    gone = [node for node in training.graph.nodes if id(node) not in kept]
    removed = [Removal(gone, "written as operators that are split")] if gone else []
    return PassResult(removed=removed, facts=_facts(program, splits, made.along) | of_source, note=_joined(notes))


def _facts(program: SpmdProgram, splits: Sequence[AxisSplit], made: Sequence[Propagated]) -> dict[str, Any]:
    """Return the facts for the report; those of an axis other than tp are under its name."""
    parameters: dict[str, str] = {}
    mappings: Counter[str] = Counter()
    whole: dict[str, int] = {}
    for split, result in zip(splits, made):
        along = "" if split.axis == "tp" else f" along {split.axis}"
        for name, choice in split.choices.items():
            said = f"{choice.why}: {split.states[name]}{along}"
            parameters[name] = f"{parameters[name]}; {said}" if name in parameters else said
        mappings.update({f"{kind}{along}": count for kind, count in result.conversions.items()})
        whole |= result.whole
    facts: dict[str, Any] = {
        "parameters": parameters, "mappings": dict(sorted(mappings.items())), "computed_whole": whole,
    }  # fmt: skip
    if program.others:
        facts["classes"] = [[dict(place) for place in variant.places] for variant in program.variants]
    return facts


def _joined(notes: Sequence[str]) -> str:
    """Notes in one line, each once."""
    return "; ".join(f"{text} ({count} times)" if count > 1 else text for text, count in Counter(notes).items())


def _make_variants(
    program: SpmdProgram,
    graph: Graph,
    shardings: Mapping[str, Sharding],
    ranks: Sequence[tuple[dict[str, int], ...]],
) -> None:
    """Give every class of ranks the step in its own types, each as a program that later passes work on."""
    graphs = [graph, *(graph.copy() for _ in ranks[1:])]
    source = program.source
    random = set(map(id, source.random))
    program.others = [
        SpmdProgram(source, source.graph, program.mesh, [], micro_steps=program.micro_steps, parts=program.parts,
                    fed=program.fed, split=program.split, first=program)
        for _ in ranks[1:]
    ]  # fmt: skip
    for variant, graph, places in zip(program.variants, graphs, ranks):
        localise(graph, shardings, places[0])
        drawn = [node for node in graph.nodes if id(origin(node)) in random]
        variant.training = replace(source, graph=graph, random=drawn)
        variant.graph = graph.copy()
        variant.places = places if program.others else ()
        variant.hold_whole()


def needed(program: SpmdProgram) -> str:
    """Return the reason why a step needs this pass; '' if it does not."""
    axes = splitting_axes(program.mesh, program.training)
    return f"nothing else splits the computation along {axes[0]}: its ranks would be copies" if axes else ""


PASS = Pass("tensor-parallel", Options, tensor_parallel, needed=needed)
