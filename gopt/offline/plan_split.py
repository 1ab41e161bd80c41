"""Ranks the ways to place parameters on servers by cost; nothing is written, and no graph is rewritten."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gopt import limits
from gopt.analysis.training import StateKind, TrainingGraph
from gopt.parameter_server.node_placement import NodePlacement
from gopt.parameter_server.options import SplitOptions
from gopt.parameter_server.placement import Placement
from gopt.parameter_server.plan import ServerPlan
from gopt.parameter_server.slicing import Slicing
from gopt.parameter_server.split import place_step, pulled_beside
from gopt.text.amounts import balance, format_bytes

_SLICINGS = (Slicing.BALANCED, Slicing.CLASSIC, Slicing.OFF)
_PLACEMENTS = (Placement.BYTES, Placement.ROUND_ROBIN, Placement.HASH)
"""The defaults first: of ways that give the same, they stay."""


@dataclass(frozen=True, slots=True)
class SplitChoice:
    """A way to place parameters. Sequences have an item for each server; bytes of messages are of one trainer in one
    step."""

    options: SplitOptions
    pieces: tuple[int, ...]
    parameters: tuple[int, ...]
    optimizer_states: tuple[int, ...]
    pushed: tuple[int, ...]
    pulled: tuple[int, ...]
    messages: int
    rows: tuple[int, ...] = ()
    """Rows of tables, both ways: an estimate (``row_traffic``); empty without tables."""

    @property
    def held(self) -> tuple[int, ...]:
        """Bytes of parameters and states on each server."""
        return tuple(map(sum, zip(self.parameters, self.optimizer_states)))

    @property
    def busiest(self) -> int:
        """Bytes between all trainers and the busiest server."""
        rows = self.rows or (0,) * len(self.pushed)
        return self.options.trainers * max(map(sum, zip(self.pushed, self.pulled, rows)))

    @property
    def balance(self) -> float:
        """Bytes of the fullest server over the mean."""
        return balance(self.held)

    @property
    def idle(self) -> int:
        """Servers without a piece."""
        return sum(not pieces and not parameter for pieces, parameter in zip(self.pieces, self.parameters))

    def __repr__(self) -> str:
        options = self.options
        return f"<SplitChoice of {options.servers} servers, {options.slicing.value}, {options.placement.value}>"

    def to_json(self) -> dict[str, Any]:
        options = self.options
        return {
            "servers": options.servers, "slicing": options.slicing.value, "placement": options.placement.value,
            "per_server": [
                {"pieces": pieces, "parameters": parameters, "optimizer_states": states, "pushed": pushed,
                 "pulled": pulled}
                for pieces, parameters, states, pushed, pulled in zip(
                    self.pieces, self.parameters, self.optimizer_states, self.pushed, self.pulled)
            ],
            "pushed": sum(self.pushed), "pulled": sum(self.pulled), "messages": self.messages,
            "rows": sum(self.rows), "busiest": self.busiest, "balance": self.balance, "idle": self.idle,
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class RankedSplit:
    """A choice, whether it fits the limits, and the reason for the rank."""

    choice: SplitChoice
    fits: bool
    why: str

    def to_json(self) -> dict[str, Any]:
        return self.choice.to_json() | {"fits": self.fits, "why": self.why}


def split_choices(
    training: TrainingGraph, options: SplitOptions, advance: Callable[[str], None] = lambda _: None
) -> Iterator[SplitChoice]:
    """Every slicing and placement, for as many servers as asked, half and twice as many; results equal to an earlier
    choice are left out. Raises as ``place_step``."""
    keys: set[tuple[object, ...]] = set()
    for servers in sorted({options.servers, max(1, options.servers // 2), min(2 * options.servers, limits.RANKS)}):
        for slicing in _SLICINGS:
            for placement in _PLACEMENTS:
                variant = replace(options, servers=servers, slicing=slicing, placement=placement)
                advance(f"{servers} servers: {slicing.value}, {placement.value}")
                choice = weigh(training, variant)
                key = (servers, choice.pieces, choice.held, choice.pushed, choice.pulled, choice.messages)
                if key not in keys:
                    keys.add(key)
                    yield choice


def weigh(training: TrainingGraph, options: SplitOptions) -> SplitChoice:
    """The cost of one choice."""
    plan, placement = place_step(training, options)
    counts = _Counts(training, options, plan, placement)
    counts.hold()
    counts.send()
    return SplitChoice(
        options, tuple(counts.pieces), tuple(counts.held[StateKind.PARAMETER]),
        tuple(counts.held[StateKind.OPTIMIZER_STATE]), tuple(counts.pushed), tuple(counts.pulled), counts.messages,
        plan.tables.row_traffic(training, options),
    )  # fmt: skip


class _Counts:
    def __init__(
        self, training: TrainingGraph, options: SplitOptions, plan: ServerPlan, placement: NodePlacement
    ) -> None:
        self.training, self.options, self.plan, self.placement = training, options, plan, placement
        self.types = training.graph.types
        count = options.servers
        self.pieces, self.pushed, self.pulled = [0] * count, [0] * count, [0] * count
        self.held = {kind: [0] * count for kind in StateKind}
        self.messages = 0

    def hold(self) -> None:
        """Bytes of states: a piece has the piece's share of all states of the parameter's shape, and the others
        whole."""
        every = range(self.options.servers)
        for unit in self.plan.units:
            for subgraph, piece in zip(unit.subgraphs, unit.pieces):
                self.pieces[piece.server] += 1
                whole = self.types[piece.parameter].elements
                for state in subgraph.states:
                    type = self.types[state.tensor]
                    cut = unit.split and type.elements == whole
                    nbytes = type.nbytes * piece.elements // max(whole, 1) if cut else type.nbytes
                    for server in every if unit.server is None else (unit.server,):
                        self.held[state.kind][server] += nbytes
        for served in self.plan.tables.served:
            for server in served.layout.servers:
                for state in served.subgraph.states:
                    type = self.types[state.tensor]
                    part = type.nbytes * served.elements(server) // max(type.elements, 1)
                    self.held[state.kind][server] += part
        kinds = {state.tensor: state.kind for state in self.training.states}
        for name in self.placement.shared:
            for server in every:
                self.held[kinds[name]][server] += self.types[name].nbytes

    def send(self) -> None:
        """Messages and bytes of one trainer in one step."""
        every = range(self.options.servers)
        for bucket in self.plan.buckets:
            for server in every if bucket.server is None else (bucket.server,):
                self.messages += 1
                self.pushed[server] += sum(self._travels(unit.dtypes[0], unit.nbytes) for unit in bucket.units)
            pieces = [piece for unit in bucket.units for piece in unit.pieces]
            if any(piece.parameter in self.placement.pulled for piece in pieces):
                self.pulled[bucket.server or 0] += sum(
                    self._part(piece.parameter, piece.elements) for piece in pieces
                )  # fmt: skip
        for gradient in self.placement.merged:
            self.messages += len(every)
            for server in every:
                self.pushed[server] += self.types[gradient].nbytes
        for name, server_of in pulled_beside(self.training, self.plan, self.placement).items():
            self.pulled[server_of or 0] += self.types[name].nbytes
        self.pulled[0] += sum(self.types[name].nbytes for name in self.placement.metrics)

    def _part(self, parameter: str, elements: int) -> int:
        type = self.plan.read_type(parameter, self.types[parameter])
        return self._travels(type.dtype, type.nbytes * elements // max(type.elements, 1))

    def _travels(self, dtype: str, nbytes: int) -> int:
        """Bytes on the wire: types of 4 and 8 bytes are replaced by a type of 2."""
        if self.options.travels(dtype) == dtype:
            return nbytes
        return nbytes // (4 if dtype == "float64" else 2)


def rank_splits(choices: Sequence[SplitChoice], servers: int, memory: int | None) -> list[RankedSplit]:
    """Best first: servers within ``memory`` bytes, ``servers`` servers before other numbers; then the least traffic of
    the busiest server, the fullest server, the fewest messages, the fewest pieces."""

    def key(choice: SplitChoice) -> tuple[Any, ...]:
        return (not _fits(choice, memory), choice.options.servers != servers, *_cost(choice))

    ordered = sorted(choices, key=key)
    return [RankedSplit(choice, _fits(choice, memory), _why(choice, ordered[0], servers, memory)) for choice in ordered]


def _fits(choice: SplitChoice, memory: int | None) -> bool:
    return memory is None or max(choice.held) <= memory


def _cost(choice: SplitChoice) -> tuple[int, int, int, int]:
    return choice.busiest, max(choice.held), choice.messages, sum(choice.pieces)


def _why(choice: SplitChoice, top: SplitChoice, servers: int, memory: int | None) -> str:
    if not _fits(choice, memory):
        return f"does not fit: {format_bytes(max(choice.held))} on one server"
    if choice is top:
        return "least traffic of the busiest server"
    if choice.options.servers != top.options.servers:
        return f"{choice.busiest / top.busiest:.2f} times the traffic" if top.busiest else "another number of servers"
    if choice.busiest != top.busiest:
        return f"{choice.busiest / top.busiest:.2f} times the traffic" if top.busiest else "more traffic"
    if max(choice.held) != max(top.held):
        return f"{format_bytes(max(choice.held) - max(top.held))} more on one server"
    if choice.messages != top.messages:
        return f"{choice.messages - top.messages} messages more"
    return "more pieces" if sum(choice.pieces) > sum(top.pieces) else "the same as row 1"
