"""Memory of a member of a pipeline through the actions of its schedule."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field

from gopt.ir.graph import Node, clone
from gopt.records.mesh import PIPELINE
from gopt.spmd.host_memory import on_device
from gopt.spmd.liveness import LivePeaks, peaks
from gopt.spmd.local_sizes import LocalSizes
from gopt.spmd.program import SpmdProgram
from gopt.spmd.stage_actions import ChunkAction, StageActions, stage_actions, with_common
from gopt.spmd.stage_plan import StagePlan, transfers


@dataclass(frozen=True, slots=True)
class StepRun:
    """The peaks of live bytes in a step. ``saved``: the most bytes left by actions for later actions, of all
    micro-batches at once."""

    peaks: LivePeaks
    saved: int = 0


def on_rank(nodes: Iterable[Node], coordinates: Mapping[str, int]) -> list[Node]:
    """The nodes of a rank; of a transfer, the sending or the receiving half."""
    member = coordinates.get(PIPELINE, 0)
    return [half for node in nodes if node.sharding.covers(coordinates) for half in _halves(node, member)]


def _halves(node: Node, member: int) -> Iterator[Node]:
    if not transfers(node) or transfers(node, to_all=True):
        yield node
        return
    if node.attributes["source"] == member:
        sends = clone(node)
        sends.outputs = []
        yield sends
    if node.attributes["target"] == member:
        receives = clone(node)
        receives.inputs = []
        yield receives


@dataclass(slots=True)
class _Action:
    """An action of a member. ``nodes``: with positions in the order of the step."""

    nodes: list[tuple[int, Node]] = field(default_factory=list)
    saves: set[str] = field(default_factory=set)
    peaks: LivePeaks = field(init=False)
    stored: Counter[str] = field(default_factory=Counter)
    """Field of ``LivePeaks`` -> bytes saved by the action."""
    freed: Counter[str] = field(default_factory=Counter)
    """Field of ``LivePeaks`` -> bytes without a reader after the action."""


@dataclass(frozen=True, slots=True)
class _Memory:
    """The actions of a rank, and the peaks of the update."""

    actions: Mapping[ChunkAction, _Action]
    update: LivePeaks


def scheduled(
    program: SpmdProgram, plan: StagePlan, sizes: LocalSizes, updated: Set[str],
    kinds: Mapping[str, str], coordinates: Mapping[str, int],
) -> StepRun:  # fmt: skip
    """The memory of a rank: in each action, the saved values of all micro-batches, the sums, and the results of the
    action. A saved value stays to the end of the last action with a reader, as in a run."""
    assert plan.schedule is not None
    row = plan.schedule.members[coordinates[PIPELINE]]
    order = [(action.kind, plan.chunk(action.stage)) for action in row]
    ends = {part: number for number, part in enumerate(order)}  # micro-batches are alike: the last one will do
    last_runs = tuple(sorted(ends, key=ends.__getitem__))

    def measured() -> _Memory:
        return _measured(program, last_runs, sizes, updated, kinds, coordinates)

    memory = program.once(("memory of actions", last_runs, program.host, tuple(coordinates.items())), measured)
    actions = memory.actions
    sums = sum(item.local_type(coordinates).nbytes for item in program.accumulators if item.present(coordinates))
    now, most = Counter(gradients=sums), Counter[str]()

    def during(live: LivePeaks) -> None:
        most["peak"] = max(most["peak"], now.total() + live.peak)
        for kind in ("activations", "gradients", "gathered"):
            most[kind] = max(most[kind], now[kind] + getattr(live, kind))

    for part in order:
        during(actions[part].peaks)
        now.update(actions[part].stored)
        most["saved"] = max(most["saved"], now.total() - sums)
        now.subtract(actions[part].freed)
    during(memory.update)
    return StepRun(
        LivePeaks(most["peak"], most["activations"], most["gradients"], most["gathered"]), most["saved"]
    )  # fmt: skip


def _measured(
    program: SpmdProgram, last_runs: Sequence[ChunkAction], sizes: LocalSizes, updated: Set[str],
    kinds: Mapping[str, str], coordinates: Mapping[str, int],
) -> _Memory:  # fmt: skip
    """The memory of each action of a rank. ``last_runs``: the actions by the ends of the last runs."""
    results = program.results()
    updated = updated | {name for item in program.accumulators for name in (item.added, item.output)}
    actions = _actions(stage_actions(program), coordinates)
    moved = set(program.host.activations)
    _save(actions, last_runs, sizes, kinds, moved)
    for action in actions.values():
        nodes = [node for _, node in action.nodes]
        carried = moved.difference(*(node.outputs for node in nodes))
        device_nodes, counts = on_device(program, nodes, sizes, carried, moved & action.saves)
        action.peaks = peaks(device_nodes, counts, updated, kinds, action.saves | results)
    update = with_common(set(program.phase_results()[1].values()), program.graph.nodes)
    device_nodes, counts = on_device(program, on_rank(update, coordinates), sizes)
    return _Memory(actions, peaks(device_nodes, counts, updated, kinds, results))


def _actions(step: StageActions, coordinates: Mapping[str, int]) -> dict[ChunkAction, _Action]:
    """The actions of a rank, with the common nodes behind the operands."""
    actions = {part: _Action() for part in step.order}
    common: list[Node] = []
    position: dict[int, int] = {}
    for number, node in enumerate(step.nodes):
        for half in on_rank([node], coordinates):
            if id(node) in step.common:
                common.append(node)
                position[id(node)] = number
            elif transfers(node):
                sent_from, sent_to = node.attributes["stages"]
                stage = sent_from if half.inputs else sent_to
                actions[step.kind(node), step.plan.chunk(stage)].nodes.append((number, half))
            else:
                actions[step.part(node)].nodes.append((number, node))
    for (kind, _), action in actions.items():
        needed = {name for _, node in action.nodes for name in node.reads}
        repeated = [(position[id(node)], node) for node in with_common(needed, common)]
        action.nodes = list(enumerate(step.in_order(kind, action.nodes, repeated)))
    return actions


def _save(
    actions: Mapping[ChunkAction, _Action], last_runs: Sequence[ChunkAction], sizes: LocalSizes,
    kinds: Mapping[str, str], moved: Set[str],
) -> None:  # fmt: skip
    """Find the values saved by each action, and the last reader of each. ``last_runs``: as in ``_measured``;
    ``moved``: values on the host between actions."""
    ends = {part: number for number, part in enumerate(last_runs)}
    makers: dict[str, ChunkAction] = {}
    reads: dict[ChunkAction, set[str]] = {}
    for part, action in actions.items():
        results = {name for _, node in action.nodes for name in node.outputs}
        reads[part] = {name for _, node in action.nodes for name in node.reads} - results
        makers.update((name, part) for name in results if name not in makers)
    last: dict[str, ChunkAction] = {}
    for part in sorted(actions, key=lambda part: ends.get(part, -1)):
        last.update((name, part) for name in reads[part] if name in makers)
    for name, reader in last.items():
        kind, size = kinds.get(name, "activations"), 0 if name in moved else sizes.nbytes(name)
        actions[makers[name]].saves.add(name)
        actions[makers[name]].stored[kind] += size
        actions[reader].freed[kind] += size
