"""The stage of each parameter: as patterns say, or by the cut of the forward whose largest stage costs least.

Every other node follows: the forward goes to the latest stage of its operands, so that the parameters decide alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import accumulate, pairwise

from gopt.analysis.flops import flops_of
from gopt.analysis.training import Phase, StateKind, TrainingGraph
from gopt.errors import OptionError, UnsupportedError
from gopt.ir.device_specs import read_stages
from gopt.ir.graph import Node
from gopt.records.mesh import PIPELINE
from gopt.text.suggestions import did_you_mean

SLACK = 1.05
"""The largest stage may cost this much more than the least possible, where fewer bytes cross between stages."""


def parameter_stages(training: TrainingGraph, stages: int, patterns: str) -> dict[str, int]:
    """The stage of each parameter and of each state of a parameter. Raises OptionError for patterns that match nothing,
    UnsupportedError for fewer parameters than stages."""
    uses = _first_uses(training)
    if len(uses) < stages:
        raise UnsupportedError(
            f"too few parameters for {stages} pipeline stages: {len(uses)} that the forward reads one behind the other",
            f"take at most {PIPELINE}={len(uses)}",
        )
    if patterns:
        chosen = _matched(list(uses), stages, patterns)
    else:
        chosen = _of_file(training, uses, stages) or _cut(training, uses, stages)
    owned = {state.tensor: chosen[state.of] for state in training.states if state.of in chosen}
    return owned | chosen | _statistics(training, chosen)


def _first_uses(training: TrainingGraph) -> dict[str, int]:
    """Parameter -> position of the first reader in the forward, in the order of use, for parameters with a reader."""
    names = {state.tensor for state in training.parameters}
    result: dict[str, int] = {}
    for position, node in enumerate(training.graph.nodes):
        for name in node.reads if node.phase is Phase.FORWARD else ():
            if name in names:
                result.setdefault(name, position)
    return result


def _matched(names: Sequence[str], stages: int, patterns: str) -> dict[str, int]:
    """``wte+h.0.*|h.1.*|ln_f``: the patterns of each stage; others go with the parameter before."""
    groups = [[item.strip() for item in group.split("+")] for group in patterns.split("|")]
    if len(groups) != stages:
        raise OptionError(
            f"pipeline: {patterns!r} has patterns for {len(groups)} stages, and there are {stages}",
            "write the patterns of a stage with + between them, and | between stages",
        )
    unused = next((item for group in groups for item in group if not any(fnmatchcase(n, item) for n in names)), None)
    if unused is not None:
        hint = did_you_mean(unused, names) or "see the parameters with gopt inspect"
        raise OptionError(f"pipeline: {unused!r} matches no parameter of the forward", hint)
    result, current = {}, 0
    for name in names:
        matching = [stage for stage, group in enumerate(groups) if any(fnmatchcase(name, item) for item in group)]
        if matching and matching[0] < current:
            raise OptionError(
                f"pipeline: {name!r} is of stage {matching[0]}, and the forward reads it behind parameters of stage "
                f"{current}",
                "give the stages in the order in which the forward reads their parameters",
            )
        current = result[name] = matching[0] if matching else current
    return result


def _of_file(training: TrainingGraph, uses: Mapping[str, int], stages: int) -> dict[str, int]:
    """The stages that the file names (ONNX IR 11, ``pipeline_stage``), by the first reader of each parameter; a
    parameter without goes with the parameter before. {} where the file names none."""
    named = read_stages(training.graph)
    result, current = {}, 0
    for name, position in uses.items() if named else ():
        reader = training.graph.nodes[position]
        stage = named.get(reader.first_output, current)
        if stage < current:
            raise OptionError(
                f"the file puts {reader.op_type} {reader.label!r} on pipeline stage {stage}, and the forward runs it "
                f"behind parameters of stage {current}",
                "say the stages by patterns: -O pipeline.stages=...",
            )
        current = result[name] = stage
    if named and (highest := max(named.values()) + 1) != stages:
        raise OptionError(
            f"the file names {highest} pipeline stages, and the step is cut into {stages}",
            f"take {PIPELINE}={highest}, or say the stages by patterns: -O pipeline.stages=...",
        )
    return result


def _cut(training: TrainingGraph, uses: Mapping[str, int], stages: int) -> dict[str, int]:
    """Cut the parameters, in the order of use, into stages of about equal operations with few bytes across."""
    starts = sorted({*uses.values()})
    nodes = training.graph.nodes
    work = [0, *accumulate(_cost(training, node) for node in nodes)]
    before = [0, *(work[start] for start in starts[1:]), work[-1]]
    crossing = _crossing(training, starts)
    cuts = _best_cuts(before, crossing, stages)
    stage_of = {start: sum(index >= cut for cut in cuts) for index, start in enumerate(starts)}
    return {name: stage_of[start] for name, start in uses.items()}


def _cost(training: TrainingGraph, node: Node) -> int:
    """Operations of a node of the forward, and an operation for each element of its results."""
    if node.phase is not Phase.FORWARD:
        return 0
    types = (training.graph.types.get(name) for name in node.outputs if name)
    return flops_of(training.graph, node) + sum(type.elements for type in types if type is not None and type.static)


def _crossing(training: TrainingGraph, starts: Sequence[int]) -> list[int]:
    """For each start of a run of nodes: bytes of the forward's values made before and read behind."""
    start: dict[str, int] = {}
    last: dict[str, int] = {}
    for position, node in enumerate(training.graph.nodes):
        if node.phase is Phase.FORWARD:
            last.update((name, position) for name in node.reads if name in start)
            start.update((name, position) for name in node.outputs if name)
    changes = [0] * (len(training.graph.nodes) + 2)
    for name, position in start.items():
        type = training.graph.types.get(name)
        if name in last and type is not None and type.static:
            changes[position + 1] += type.nbytes
            changes[last[name] + 1] -= type.nbytes
    live = list(accumulate(changes))
    return [live[start] for start in starts]


def _best_cuts(before: Sequence[int], crossing: Sequence[int], stages: int) -> list[int]:
    """Where stages begin, as positions of ``crossing``: least bytes across, among cuts with no stage above the least
    possible cost times ``SLACK``. ``before``: cost in front of each position, and the total."""
    runs = len(crossing)
    low, high = max(max(b - a for a, b in pairwise(before)), -(-before[-1] // stages)), before[-1]
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if _stages_needed(before, middle) <= stages else (middle + 1, high)
    limit = max(int(low * SLACK), low)
    best: list[list[float]] = [[0.0] + [float("inf")] * runs]
    source: list[list[int]] = []
    for _ in range(stages):
        row, come = [float("inf")] * (runs + 1), [0] * (runs + 1)
        window: deque[int] = deque()
        for end in range(1, runs + 1):
            start = end - 1
            while window and best[-1][window[-1]] >= best[-1][start]:
                window.pop()
            window.append(start)
            while before[end] - before[window[0]] > limit and len(window) > 1:
                window.popleft()
            if before[end] - before[window[0]] <= limit:
                row[end] = best[-1][window[0]] + (crossing[end] if end < runs else 0)
                come[end] = window[0]
        best.append(row)
        source.append(come)
    cuts, end = [], runs
    if best[stages][runs] == float("inf"):
        raise UnsupportedError(f"the forward cannot be cut into {stages} pipeline stages", "take fewer stages")
    for come in reversed(source[1:]):
        end = come[end]
        cuts.append(end)
    return cuts[::-1]


def _stages_needed(before: Sequence[int], limit: int) -> int:
    """The least number of runs with a cost of at most ``limit`` each."""
    count, start = 1, 0
    for index in range(1, len(before)):
        if before[index] - before[start] > limit:
            count, start = count + 1, index - 1
    return count


def _statistics(training: TrainingGraph, chosen: Mapping[str, int]) -> dict[str, int]:
    """The stage of each running statistic: the stage of the values behind the update."""
    statistics = {state.tensor: state.updated for state in training.states if state.kind is StateKind.STATISTIC}
    stage_of = dict(chosen)
    for node in training.graph.nodes if statistics else ():
        read = [stage_of[name] for name in node.reads if name in stage_of]
        if read:
            stage_of.update(dict.fromkeys(node.outputs, max(read)))
    return {name: stage_of[updated] for name, updated in statistics.items() if updated in stage_of}


def check_stages(used: Container[int], count: int) -> None:
    """Raise OptionError for a stage without a parameter; ``used``: the stages with parameters."""
    empty = next((stage for stage in range(count) if stage not in used), None)
    if empty is not None:
        raise OptionError(f"pipeline: stage {empty} has no parameter", "give each stage at least one")
