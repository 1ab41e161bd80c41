"""Where each node of a step runs, and what goes from stage to stage."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

from gopt.analysis.open_shapes import fix_sizes
from gopt.analysis.training import Phase
from gopt.errors import UnsupportedError
from gopt.ir.graph import SPMD, TRANSFER, Node
from gopt.ir.node_kinds import draws
from gopt.ir.rewriter import GraphRewriter
from gopt.operators.kinds import MAY_DRAW, MOVES
from gopt.records.mesh import PIPELINE
from gopt.records.placements import FULLY_REPLICATED, Sharding
from gopt.spmd.program import ShardedState, SpmdProgram
from gopt.spmd.stage_plan import StagePlan, transfers
from gopt.text.sanitize import show

NAME = "stage-transfers"
PREFIX = "gopt.stages"


class StagePlacement:
    """A sweep over a program. ``names``: value -> stage -> the name there; a value without an entry is on all
    stages. ``home``: value -> the stage of the node behind the value."""

    def __init__(self, program: SpmdProgram, plan: StagePlan) -> None:
        self.program, self.plan, self.graph = program, plan, program.graph
        self.rewriter = GraphRewriter(program.graph, NAME)
        self.names: dict[str, dict[int, str]] = {}
        self.home: dict[str, int] = {}
        self._values: dict[str, str] = {}
        """Name of an operand on a stage -> the value."""
        self.counts: Counter[int] = Counter()
        self.transfers = 0
        self._producers = program.graph.producers()
        self._phases: dict[str, Phase] = {}
        """Value of a stage -> the phase of the node behind the value."""
        self._shardings: dict[tuple[int, int], tuple[Sharding, Sharding]] = {}
        """Stage and id of a sharding -> this sharding on the stage, and the sharding, so that the id stays in use."""
        self._due: dict[str, int | None] = dict.fromkeys(program.training.shown)
        """A result of the step -> the stage where the result is due; None: all stages."""
        self._states = {state.input: state for state in program.states}
        self._copies: dict[tuple[str, int], ShardedState] = {}
        """Parameter and another stage -> the copy there, sent anew by each update."""
        gradients = {**program.source.gradients, **program.training.gradients}
        self._gradients = {name: plan.states[of] for of, name in gradients.items() if of in plan.states}
        """Gradient -> the stage of its parameter."""
        self._sums = {accumulator.added: accumulator.input for accumulator in program.accumulators}

    def place(self) -> None:
        """Place states, then the nodes of a micro-step, then all others: the update reads the sums of micro-steps."""
        program = self.program
        for state in program.states:
            stage = self.plan.states.get(state.slices[0].tensor)
            self._due[state.output] = stage
            if stage is not None:
                self._have(state.input, stage, Phase.FORWARD)
            if state.input in program.loop_carried:
                self._due[program.loop_carried[state.input]] = stage
        micro, drawing = self._of_micro_step(), self._drawing()
        for in_micro in (True, False):
            for node in self.graph.nodes:
                if (id(node) in micro) is in_micro:
                    self._visit(node, drawing.get(id(node)))
        program.accumulators = [
            replace(item, sharding=self._of_input(item.input, item.sharding)) for item in program.accumulators
        ]
        states = [replace(item, sharding=self._of_input(item.input, item.sharding)) for item in program.states]
        states += [self._renewed(*key, copy) for key, copy in self._copies.items()]
        program.value_stages = self.home
        self.rewriter.finish()
        program.set_states(states)

    def _of_input(self, name: str, sharding: Sharding) -> Sharding:
        """A sharding on the stage of a state or sum; the same sharding for a value on all stages."""
        return self._on(self.home[name], sharding) if name in self.home else sharding

    def _of_micro_step(self) -> set[int]:
        """The ids of the nodes of a micro-step; of all nodes of a step without micro-steps."""
        if self.program.micro_steps == 1:
            return set(map(id, self.graph.nodes))
        needed, nodes = set(self.program.phase_results()[0].values()), set[int]()
        for node in reversed(self.graph.nodes):
            if not needed.isdisjoint(node.outputs):
                needed.update(node.reads)
                nodes.add(id(node))
        return nodes

    def _drawing(self) -> dict[int, int]:
        """The id of each node that draws, or reads drawn values alone -> the earliest stage with a reader."""
        drawn: set[str] = set()
        stages = dict(self.home)
        nodes = []
        for node in self.graph.nodes:
            read = [stages[name] for name in node.reads if name in stages]
            if read:
                stages.update(dict.fromkeys(node.outputs, max(read)))
            elif (node.op_type in MAY_DRAW and draws(node)) or not drawn.isdisjoint(node.reads):
                drawn.update(node.outputs)
                nodes.append(node)
        if not nodes:
            return {}
        result = {}
        for node in reversed(nodes):
            behind = [stages[out] for name in node.outputs for reader in self._readers.get(name, ())
                      for out in reader.outputs if out in stages]  # fmt: skip
            result[id(node)] = min(behind, default=0)
            stages.update(dict.fromkeys(node.outputs, result[id(node)]))
        return result

    # --- a node ---

    def _visit(self, node: Node, drawn: int | None) -> None:
        read = [name for name in dict.fromkeys(node.reads) if name in self.names]
        if read:
            stage = self._stage(node, read)
        elif drawn is not None:
            stage = drawn
        else:  # the same on all stages, unless a single stage holds the result
            due = {self._due[name] for name in node.outputs if name in self._due} - {None}
            due |= {self.home[name] for name in map(self._sum_of.get, node.outputs) if name in self.home}
            if not due:
                return
            stage = due.pop() or 0
        self._put(node, stage, read)

    @cached_property
    def _readers(self) -> dict[str, list[Node]]:
        return self.graph.users()

    @cached_property
    def _sum_of(self) -> dict[str, str]:
        """A sum over micro-steps as the update leaves it -> the sum."""
        return {accumulator.output: accumulator.input for accumulator in self.program.accumulators}

    def _stage(self, node: Node, read: Sequence[str]) -> int:
        """The stage of a node with operands on stages."""
        if node.phase is Phase.UPDATE:
            nbytes: Counter[int] = Counter()
            for name in read:
                for stage in (self.home[name],) if name in self._states else self.names[name]:
                    nbytes[stage] += self._nbytes(name)  # a stage with a copy of a state is not preferred
            states = {self.home[name] for name in read if name in self._states}
            states |= {due for name in node.outputs if (due := self._due.get(name)) is not None}
            return max(nbytes, key=lambda stage: (nbytes[stage], stage in states, stage))
        homes = [self.home[name] for name in read]
        if node.phase is not Phase.BACKWARD:
            return max(homes)
        common = set.intersection(*map(self._stages_with, read))
        stage, due = max(common, default=min(homes)), self._gradients.get(node.outputs[0])
        if due is None or due >= stage:
            return stage
        read_on = self._viewed(node.outputs[0]) and len(self._readers.get(node.outputs[0], ())) > 1
        return stage if read_on else due  # the sum reads a view on the stage of the rest of the backward

    def _put(self, node: Node, stage: int, read: Sequence[str]) -> None:
        """Run a node on a stage alone, on operands sent there."""
        for name in read:
            here = self._fetch(name, stage, node)
            if here != name:
                if name in node.captures:
                    raise UnsupportedError(
                        f"{node.op_type} {node.label!r} on pipeline stage {stage} reads {show(name)} of stage "
                        f"{self.home[name]} inside a body, where gopt sends nothing",
                        "let the body have it as an operand, or move the cut with pipeline{stages=...}",
                    )
                self.rewriter.rewire(node, name, here)
                self._values[here] = name
        node.sharding = self._on(stage, node.sharding)
        self.counts[stage] += 1
        for name in list(filter(None, node.outputs)):
            self._have(name, stage, node.phase or Phase.UPDATE)
            if name in self._sums:
                self._have(self._sums[name], stage, Phase.FORWARD)
            if self._due.get(name, stage) != stage:
                self._return(node, name, self._due[name])

    def _return(self, node: Node, name: str, due: int | None) -> None:
        """Give another stage, or all, a result of the step under the name in the step."""
        inner, stage, placement = f"{PREFIX}.{name}.stage{self.home[name]}", self.home[name], self.plan.placement
        if node.phase is Phase.UPDATE and due is not None and placement[due] == placement[stage]:
            self.names[name][due] = name  # one update of all stages of a member
            return
        self.home[inner] = stage
        self.rewriter.rename_output(node, name, inner)
        self.names[name] = {stage: inner}
        phase = Phase.BACKWARD if node.phase is not Phase.UPDATE else Phase.UPDATE
        self._transfer(inner, name, stage, due, node, phase)
        if due is not None:
            self.names[name][due] = name

    # --- a second sweep ---

    def begin(self) -> list[Node]:
        """Begin further changes; returns the nodes of the graph."""
        self.rewriter = GraphRewriter(self.graph, NAME)
        return list(self.graph.nodes)

    def move(self, node: Node, stage: int) -> None:
        """Run a node on another stage, with the operands there."""
        self.counts[self.home[node.first_output]] -= 1
        self._put(node, stage, [name for name in dict.fromkeys(node.reads) if name in self.names])

    def leave_out(self, transfer: Node, readers: list[Node]) -> list[Node]:
        """Leave out the transfer of a value that the target makes itself now; returns the readers of the value."""
        for reader in readers:
            self.rewriter.rewire(reader, transfer.first_output, transfer.inputs[0])
        self.rewriter.discard(transfer.first_output)
        self.transfers -= 1
        return readers

    def drop_unread(self) -> None:
        """Leave out transfers without a reader, and views without a reader on one of the stages with the view."""
        needed = self.program.results()
        for node in reversed(self.begin()):
            if not needed.isdisjoint(node.outputs):
                needed.update(node.reads)
            elif transfers(node):
                self.leave_out(node, [])
            elif len(self.names.get(node.first_output, ())) > 1 and self._viewed(node.first_output):
                self.rewriter.discard(node.first_output)
            else:
                needed.update(node.reads)
        self.rewriter.finish()
        there = self.graph.producers().keys() | self.graph.inputs.keys()
        for value, by_stage in self.names.items():
            self.names[value] = {stage: name for stage, name in by_stage.items() if name in there}

    # --- tables ---

    def _have(self, name: str, stage: int, phase: Phase) -> None:
        self.home[name], self._phases[name] = stage, phase
        self.names[name] = {stage: name}

    def _viewed(self, name: str) -> str:
        """The operand of a view or a transpose of the step with result ``name``, or ''."""
        node = self._producers.get(name)
        if node is None or node.source is None or not node.is_in(MOVES):
            return ""
        operand = self._values.get(node.inputs[0], node.inputs[0])
        return operand if operand in self.names and self.names.keys().isdisjoint(node.inputs[1:]) else ""

    def has(self, name: str, stage: int) -> bool:
        """Return whether a stage has a value, or the operand of a view."""
        return stage in self._stages_with(name)

    def _stages_with(self, name: str) -> set[int]:
        """The stages with a value, or with the operand of a view."""
        stages = set(self.names[name])
        while name := self._viewed(name):
            stages.update(self.names[name])
        return stages

    def _fetch(self, name: str, stage: int, reader: Node) -> str:
        """The name of a value on a stage, after a transfer of the value, or of the operand of a view."""
        if stage in self.names[name]:
            return self.names[name][stage]
        operand = self._viewed(name)
        if not operand:
            return self._send(name, stage, reader)
        inner, node = self._fetch(operand, stage, reader), self._producers[name]
        result = f"{PREFIX}.{name}.stage{stage}"
        sharding = self._on(stage, on_all_stages(node.sharding))
        copy = self.rewriter.repeat(node, [inner, *node.inputs[1:]], {result: self.graph.types[name]}, sharding)
        copy.name, copy.encoded, copy.source = node.name, node.encoded, node.source
        copy.made_by, copy.phase = node.made_by, node.phase
        if self._phases.get(inner) is Phase.UPDATE:  # sent there by the update
            copy.phase = self._phases[result] = Phase.UPDATE
        self.home[result] = stage
        self.names[name][stage] = result
        return result

    def _send(self, name: str, stage: int, reader: Node) -> str:
        """Send a value to a stage; returns the name there."""
        home, result = self.home[name], f"{PREFIX}.{name}.stage{stage}"
        phase = self._phases[name]
        if stage < home and phase is Phase.FORWARD:
            if reader.phase is Phase.FORWARD:
                raise UnsupportedError(
                    f"{reader.op_type} {reader.label!r} of the forward on pipeline stage {stage} reads {show(name)} of "
                    f"the later stage {home}",
                    "let stages follow the order in which the forward reads parameters: pipeline{stages=...}",
                )
            phase = reader.phase or Phase.UPDATE
        if stage > home and phase is Phase.BACKWARD:
            phase = reader.phase or Phase.UPDATE
            if phase is not Phase.UPDATE or self.program.micro_steps > 1:
                raise UnsupportedError(
                    f"{reader.op_type} {reader.label!r} on pipeline stage {stage} reads {show(name)}, which the "
                    f"backward makes on the earlier stage {home}",
                    "move the cut with pipeline{stages=...}, or leave out --micro-batches",
                )
        beside = self._beside(name, stage, phase)
        if beside is None and self._renewable(name, reader):
            self._copy(name, stage, result)
        elif beside is None:
            maker = self._producers.get(self.names[name][home])
            self._transfer(self.names[name][home], result, home, stage, maker, phase, before=reader)
            self._phases[result] = phase
        self.names[name][stage] = beside or result
        return self.names[name][stage]

    def _renewable(self, name: str, reader: Node) -> bool:
        """Return whether another stage keeps a copy of a value from step to step: of a whole parameter that
        micro-batches read and an update makes anew."""
        state = self._states.get(name)
        whole = state is not None and not state.sharded and not state.copy and name not in self.program.loop_carried
        if not whole or self.program.micro_steps == 1 or reader.phase is Phase.UPDATE:
            return False
        tensor = self._states[name].slices[0].tensor
        parameters = {item.tensor for item in self.program.training.parameters}
        return tensor in parameters - self.program.copies().keys() and self._states[name].output in self._producers

    def _copy(self, name: str, stage: int, result: str) -> None:
        """Let a stage read a copy of a parameter under the name ``result``."""
        state = self._states[name]
        self.graph.inputs[result] = self.graph.types[result] = self.graph.types[name]
        self._copies[name, stage] = replace(state, input=result, output=f"{result}.new", copy=True)
        self._have(result, stage, Phase.FORWARD)

    def _renewed(self, name: str, stage: int, copy: ShardedState) -> ShardedState:
        """Send the new value of a parameter to the stage with the copy."""
        updated, home = self._states[name].output, self.home[name]
        self._transfer(updated, copy.output, home, stage, self._producers[updated], Phase.UPDATE)
        return replace(copy, sharding=self._on(stage, copy.sharding))

    def _beside(self, name: str, stage: int, phase: Phase) -> str | None:
        """The name of a value on an earlier run of another stage of the same member, or None."""
        placement = self.plan.placement
        for there, result in self.names[name].items():
            in_time = phase is Phase.UPDATE or (there < stage if phase is Phase.FORWARD else there > stage)
            if placement[there] == placement[stage] and in_time:
                return result
        return None

    def _transfer(
        self, value: str, result: str, home: int, stage: int | None, maker: Node | None, phase: Phase,
        before: Node | None = None,
    ) -> None:  # fmt: skip
        if not self.graph.types[value].static:
            raise UnsupportedError(
                f"pipeline stage {home} sends {show(value)} of the open shape {self.graph.types[value]}, and a stage "
                "receives values of fixed sizes",
                fix_sizes(self.program.source.graph.inputs),
            )
        placement = self.plan.placement
        attributes = {
            "group": PIPELINE, "source": placement[home], "target": -1 if stage is None else placement[stage],
            "tag": self.transfers, "stages": [home, -1 if stage is None else stage],
        }  # fmt: skip
        sharding = FULLY_REPLICATED if maker is None else on_all_stages(maker.sharding)
        node = self.rewriter.add(
            TRANSFER, [value], {result: self.graph.types[value]}, domain=SPMD, attributes=attributes,
            sharding=sharding, after=maker, before=before,
        )  # fmt: skip
        node.phase = phase
        self.transfers += 1

    def _on(self, stage: int, sharding: Sharding) -> Sharding:
        key = stage, id(sharding)
        if key not in self._shardings:
            self._shardings[key] = self.plan.on(stage, sharding), sharding
        return self._shardings[key][0]

    def _nbytes(self, name: str) -> int:
        type = self.graph.types.get(name)
        return type.nbytes if type is not None and type.static else 1


def on_all_stages(sharding: Sharding) -> Sharding:
    """``sharding`` without the placement along ``pp``."""
    return Sharding(tuple(item for item in sharding.by_axis if item[0] != PIPELINE))
