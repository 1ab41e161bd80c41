"""Checks the lines of a certificate of ``gopt prove`` beside the files of a folder, without search."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from fractions import Fraction
from functools import reduce
from math import prod
from operator import or_
from pathlib import Path
from typing import Any

import numpy as np

from gopt.analysis.training import StateKind
from gopt.artifact.integrity import check_files
from gopt.artifact.manifest_check import check_all_ranks, read_manifest
from gopt.artifact.manifest_entries import LocalState, RankEntry
from gopt.artifact.pieces import Piece, cover, cut, put
from gopt.collectives.node import CallSignature, call_signature
from gopt.collectives.table import COLLECTIVES
from gopt.errors import GoptError, UnsupportedError
from gopt.ir.graph import COMM, Graph, Node
from gopt.ir.load import load
from gopt.ir.node_kinds import draws
from gopt.ir.opaque.expand import expand
from gopt.ir.opset import opset_of
from gopt.records.boxes import ranges_of
from gopt.records.mesh import PIPELINE
from gopt.runtime.capacity import check_elements
from gopt.runtime.inlined_functions import inlined
from gopt.runtime.step_runs import check_schedule
from gopt.text.sanitize import show
from gopt.verification.certificate.field import Array
from gopt.verification.certificate.lines import FORMAT, MICRO, decoded, encoded, order_of, sealed
from gopt.verification.certificate.nodes import CheckedProgram, NodeChecker
from gopt.verification.certificate.result import CertificateCheck, CertificateFault
from gopt.verification.certificate.values import NUMBERS, WIDER, ExpressionLine, WrongLine, box, joined

NARROW = frozenset({"int8", "uint8", "int16", "uint16", "bool"})
"""Types in which a sum over members may overflow."""


def _versions(graph: Graph) -> dict[str, int]:
    """The versions of operators of a graph, without the collectives."""
    return {entry.domain or "ai.onnx": entry.version for entry in graph.header.opset_import if entry.domain != COMM}


class FolderCheck(NodeChecker):
    """The lines of a certificate beside the files of a folder."""

    def __init__(self, home: Path, text: str) -> None:
        self.home, self.number, self.lines = home, 0, text.split("\n")
        self.manifest, self.mesh = read_manifest(home)
        check_all_ranks(self.manifest, home)
        check_schedule(home, self.manifest, self.mesh)
        check_files(home, self.manifest.files)
        members = {**dict(self.mesh.axes), MICRO: self.manifest.accumulate}
        super().__init__(
            {axis: size for axis, size in members.items() if size > 1 or axis != MICRO},
            hashlib.sha256(text.encode()).hexdigest(),
        )
        self.lemmas: dict[str, list[str]] = {}
        self.rows: list[dict[str, Any]] = []
        self.used: set[int] = {0}
        self.where, self.subject, self.line = "", "", 0
        self.rest: set[int] = set()
        self.chosen: set[str] = set()
        self.current: dict[tuple[int, str], Array] = {}
        """(rank, input) -> the value behind the phases so far."""
        self.unread: set[tuple[int, str]] = set()
        self.mail: dict[tuple[int, int, str, int], list[tuple[CallSignature, list[int]]]] = {}
        """(sender, receiver, group, tag) -> calls and values on the way."""
        self.schedule, self.state_types = self.manifest.schedule, {of.tensor: of.type for of in self.manifest.states}
        self.split = frozenset(axis for axis, size in self.extents.items() if size > 1)
        self.varying = self.split.intersection((*self.mesh.data_axes, MICRO))

    def run(self) -> None:
        """Check all lines. Raises WrongLine for the first wrong one."""
        self._head()
        self._expressions()
        self._files()
        self._claims()
        self._source()
        self._ranks()
        if self.number != len(self.rows):
            raise WrongLine("more lines", "the end")
        if unused := set(range(len(self.forms))) - self.used:
            raise WrongLine(f"expression {min(unused)}, which no line reads", "no such line")

    def next(self, key: str) -> dict[str, Any]:
        """The next line, which has a key first."""
        line = self.rows[self.number] if self.number < len(self.rows) else {}
        if key not in line:
            raise WrongLine(json.dumps(line), f"a line with {key!r}")
        self.number += 1
        return line

    def take(self, line: dict[str, Any], *keys: str) -> list[Any]:
        """The values of a line with these keys alone; numbers of expressions are used by it."""
        if line.keys() != set(keys):
            raise WrongLine(f"keys {sorted(line)}", f"keys {sorted(keys)}")
        for key in {"number", "start", "during", "new"}.intersection(keys):
            if line[key].__class__ is not int or not 0 <= line[key] < len(self.forms):
                raise WrongLine(f"{key} {line[key]}", "the number of an expression")
            self.used.add(line[key])
        return [line[key] for key in keys]

    def _head(self) -> None:
        rows = [json.loads(line) for line in self.lines[:-1]]
        head = dict(rows[0])
        digest = head.pop("digest", None)
        if sealed([head, *rows[1:]]) != "\n".join(self.lines):
            raise WrongLine(f"digest {digest}", "the SHA-256 of all lines")
        due = {"format": FORMAT, "mesh": encoded(self.manifest.mesh.axes), "accumulate": self.manifest.accumulate,
               "files": self.manifest.read_digests, "lines": len(rows) - 1}  # fmt: skip
        if head != due:
            key = next(key for key in {**due, **head} if head.get(key) != due.get(key))
            raise WrongLine(f"{key} {head.get(key)}", f"{due.get(key)}, as the folder has")
        self.rows, self.number = rows, 1

    def _expressions(self) -> None:
        while self.number < len(self.rows) and "expression" in self.rows[self.number]:
            line = self.next("expression")
            keys = ["expression", "form", "attributes", "operands", "shape", *["varies"][: not line.get("operands")]]
            index, op, attributes, operands, shape = self.take(line, *keys)[:5]
            form = ExpressionLine(op, decoded(attributes), tuple(operands), None if shape is None else tuple(shape))
            if index != len(self.forms) or any(not 0 <= operand < index for operand in operands):
                raise WrongLine(f"expression {index} of {operands}", f"expression {len(self.forms)} of earlier ones")
            self.used.update(operands)
            self.forms.append(form)
            axes = line.get("varies", [])
            if (index == 0) != (form == ExpressionLine("one", (), (), ())) or axes != sorted(set(axes)):
                raise WrongLine(str(form), "the number 1 first, and axes in order")
            self.varies.append(frozenset(axes))
            self.formed(index)
            self.begun.append(op == "sum so far" or any(self.begun[operand] for operand in operands))
            self.counted.append(op in ("counted", "weight") or any(self.counted[operand] for operand in operands))
            inner = reduce(or_, (self.leaves[operand] for operand in operands), 0 if operands else 1 << index)
            self.leaves.append(inner)
            self.risks.append(reduce(or_, map(self.risks.__getitem__, operands), 0) if op in NUMBERS else inner)

    def _claims(self) -> None:
        """States, inputs, combined values and outputs: what is claimed of the source."""
        self.states, self.inputs, self.shown = dict[str, list[int]](), dict[str, int](), dict[str, int]()
        states = (state for entry in self.manifest.ranks for state in self.manifest.states_of(entry))
        self.local = {state.pieces[0].tensor for state in states if state.local}
        for state in self.manifest.states:
            name, *numbers = self.take(self.next("state"), "state", "start", "during", "new")
            axes = frozenset[str]()
            if state.kind is StateKind.STATISTIC:
                axes = self.varying if name in self.local else self.varying & {MICRO}
            initial = "initial state" if MICRO in axes else "state"
            for number, kind, varies in zip(numbers, (initial, "state"), (axes - {MICRO}, axes)):
                self._leaf(number, kind, name, state.tensor, varies, state.shape)
            self.states[name] = numbers
        self.starts, self.during, self.new = ({name: of[at] for name, of in self.states.items()} for at in range(3))
        for entry in self.manifest.common.inputs:
            name, number = self.take(self.next("input"), "input", "number")
            batch = entry.kind.value == "batch"
            varies = self.varying if batch else frozenset()
            self._leaf(number, "batch" if batch else "input", name, entry.name, varies, entry.shape)
            self.inputs[name] = number
        self.combined = list[dict[str, Any]]()
        while "combined" in self.rows[self.number]:
            self.combined.append(self.next("combined"))
        while "shown" in self.rows[self.number]:
            name, number = self.take(self.next("shown"), "shown", "number")
            if name in self.shown:
                raise WrongLine(f"output {name} twice", "once")
            self.shown[name] = number
        if list(self.shown) != [output.name for output in self.manifest.common.outputs]:
            raise WrongLine(f"outputs {list(self.shown)}", "the outputs of the manifest")

    def _leaf(self, number: int, kind: str, name: str, of: str, varies: frozenset[str], shape: Any) -> None:
        form = ExpressionLine(kind, of, (), None if shape is None else tuple(shape))
        if (name, self.forms[number], self.varies[number]) != (of, form, varies):
            actual = f"{name}, {self.forms[number]}, which varies along {sorted(self.varies[number])}"
            raise WrongLine(actual, f"{form}, along {sorted(varies)}")

    # --- programs ---

    def _program(
        self, head: Mapping[str, Any], graph: Graph, fed: Mapping[str, int], lead: CheckedProgram | None
    ) -> CheckedProgram:
        """The lines of a graph; values without a line come from ``lead``."""
        if (line := self.next(next(iter(head)))) != head:
            raise WrongLine(json.dumps(line), json.dumps(head))
        program = CheckedProgram(head, graph, dict(fed))
        for name in order_of(graph):
            if name in fed:
                continue
            row = self.rows[self.number] if self.number < len(self.rows) else {}
            if row.get("value") == name:
                program.lines[name] = self.number
                _, program.values[name], program.rules[name] = self.take(self.next("value"), "value", "number", "rule")
                before = lead and (lead.values.get(name), lead.rules.get(name))
                if before == (program.values[name], program.rules[name]):
                    raise WrongLine(f"{name} again", "no line for the expression of the program before")
            elif lead is not None and name in lead.values and name in lead.rules:
                program.values[name], program.rules[name] = lead.values[name], lead.rules[name]
                program.lines[name] = lead.lines[name]
        return program

    def _checked_node(self, program: CheckedProgram, node: Node) -> None:
        """Check a node; a rule that the checker does not have is counted."""
        name = next(filter(None, node.outputs))
        self._at(program, name)
        if missing := [operand for operand in node.reads if operand not in program.values]:
            raise WrongLine(f"{node.label} reads {missing[0]}", "a value with a line")
        if missing := [output for output in node.outputs if output and output not in program.values]:
            raise WrongLine(f"no line for {missing[0]}", "a line for every result")
        self._lawful(name, self.node, program, node)

    def _lawful(self, name: str, check: Callable[..., None], *operands: Any) -> None:
        try:
            check(*operands)
        except WrongLine as wrong:
            if not wrong.lemma:
                raise
            self._rests(name, wrong.lemma)

    def _rests(self, name: str, lemma: str) -> None:
        self.lemmas.setdefault(lemma, []).append(f"{self.where}, {name}")
        self.rest.add(self.line)

    def _at(self, program: CheckedProgram, name: str) -> None:
        self.where = ", ".join(str(value) for value in program.head.values())
        self.line, self.subject = program.lines.get(name, self.line), name

    def _constants(self, program: CheckedProgram, fed: Collection[str] = ()) -> None:
        """Stored values beside no fed input."""
        for name, tensor in program.graph.initializers.items():
            if name in program.values and name in program.rules and name not in fed:
                self._at(program, name)
                if program.rules[name] != "constant":
                    raise WrongLine(f"rule {program.rules[name]}", "rule constant")
                self.constant(program.values[name], np.asarray(tensor.numpy()))

    def _source(self) -> None:
        """The source before and behind the combined gradients."""
        graph, self.opset = self.graph, opset_of(self.graph.header)
        local = self._program({"program": "local"}, graph, self.during | self.inputs, None)
        self._constants(local)
        for node in graph.nodes:
            if not local.values.keys().isdisjoint(node.outputs):
                self._checked_node(local, node)
        kinds = (next((key for key in ("parameter", "shared", "state") if key in line), "") for line in self.combined)
        order = [(kind, line["combined"]) for kind, line in zip(kinds, self.combined)]
        if order != sorted(set(order)):
            raise WrongLine("combined values in another order", "sorted")
        met = {line["combined"]: self._combination(line, local) for line in self.combined}
        if len(met) != len(self.combined):
            raise WrongLine("a value combined twice", "each once")
        update = self._program({"program": "update"}, graph, self.starts | self.inputs | met, local)
        self._constants(update)
        for node in graph.nodes:
            outputs = [name for name in node.outputs if name]
            if any(name in met for name in outputs):
                continue
            listed = any(name in update.lines and update.lines[name] != local.lines.get(name) for name in outputs)
            if listed:
                self._checked_node(update, node)
            elif any(update.values.get(name, -1) != local.values.get(name) for name in node.reads):
                for name in outputs:
                    update.values.pop(name, None)
        for state in self.manifest.states:
            number = self.states[state.tensor][2]
            self.where, self.subject = "the source", state.tensor
            moved = local.values.get(state.updated) if state.kind is StateKind.STATISTIC else None
            if moved is not None and state.tensor not in self.chosen:
                self._lawful(state.tensor, self._statistic, state.tensor, moved, number)
            elif update.values.get(state.updated) != number:
                raise WrongLine(f"expression {number} of the new {state.tensor}", f"{update.values.get(state.updated)}")
        for name, number in self.shown.items():
            if local.values.get(name, update.values.get(name)) != number:
                raise WrongLine(f"expression {number} of {name}", "the expression of the source")

    def _combination(self, line: dict[str, Any], local: CheckedProgram) -> int:
        """A value combined over all batches by the rule of the manifest."""
        name, rule = line["combined"], line.get("rule")
        self.where, self.subject = "the combined values", name
        if "state" in line:
            _, tensor, _, number = self.take(line, "combined", "state", "rule", "number")
            self.chosen.add(tensor)
            if rule != "new" or tensor not in self.states:
                raise WrongLine(f"rule {rule} of {tensor}", "rule new of a state")
            self._lawful(tensor, self._statistic, tensor, local.values[name], number)
            return int(number)
        gradient = "parameter" in line
        _, of, _, number = self.take(line, "combined", "parameter" if gradient else "shared", "rule", "number")
        word, _, summed = self.manifest.loss_reduction.partition(":")
        due = "mean" if not gradient or (summed and word == "sum" and of not in summed.split(",")) else word
        if rule != due or (gradient and of not in self.states):
            raise WrongLine(f"rule {rule} of {of}", f"rule {due} of a parameter")
        value = local.values.get(name if gradient else of)
        if value is None or self.shape(number) != self.shape(value):
            raise WrongLine(f"combined of {of}", "a value of its shape")
        if rule == "weighted":
            self._rests(name, "weighted mean")
            return int(line["number"])
        mean = f"the {rule} over all batches"
        self._lawful(name, lambda: self.due(number, self._mean(self.value(value), self.varying, rule), mean))
        return int(number)

    def _mean(self, value: Array, axes: Iterable[str], rule: str) -> Array:
        share = Fraction(1, prod(self.extents[axis] for axis in axes) if rule == "mean" else 1)
        return self.times(self.over(value, axes), self.element(share))

    def _statistic(self, tensor: str, number: int, new: int) -> None:
        """A new statistic, as ranks combine it."""
        value, data = self.value(number), self.varying - {MICRO}
        if MICRO in self.varying:
            value = self.iterated(MICRO, [*map(self.value, (number, *self.states[tensor][1::-1]))], (-1,))
        rules = {entry.tensor: entry.rule for entry in self.manifest.reductions}
        rule = rules.get(tensor, "local" if tensor in self.local else self.manifest.statistics)
        if rule == "mean":
            value = self._mean(value, data, rule)
        elif rule == "root":
            value = self.on(value, [(axis, 0) for axis in data])
        elif rule != "local":
            self._rests(tensor, f"statistics by {rule}")
            return
        self.due(new, value, f"the {rule} of the new statistic")

    # --- ranks ---

    def _held(self, pieces: Iterable[Piece], whole: Mapping[str, int]) -> Array:
        """Pieces of values of the source, flat."""
        result = []
        for piece in pieces:
            value = self.value(whole[piece.tensor])
            if piece.box is not None:
                value = box(value, [tuple(ranges_of(ends)) for ends in piece.box])
            if piece.every is not None:
                value = np.take(value, range(piece.every[0], value.shape[self.lead], piece.every[1]), self.lead)
            result.append(value.reshape(*value.shape[: self.lead], -1)[..., piece.start : piece.stop])
        return joined(result, -1)

    def _files(self) -> None:
        """The files of the source and of all ranks. A stage of a pipeline may draw a value for all stages."""
        names = {name: None for entry in self.manifest.ranks for name in entry.files.values()}
        paths = (self.home / name for name in (self.manifest.source, *names))
        self.graph, *graphs = (inlined(expand(load(path, own=True))) for path in paths)
        self.files, source = dict(zip(names, graphs)), _versions(self.graph)
        for name, graph in self.files.items():
            if any(source.get(domain, version) != version for domain, version in _versions(graph).items()):
                raise WrongLine(f"{name} of another operator set", "the operator set of the source")
        drawn = {name: [node.outputs[0] for node in graph.nodes if draws(node)] for name, graph in self.files.items()}
        phases, stages = dict[tuple[int, str], str](), dict[str, int]()
        self.apart = self.split - {PIPELINE}
        for entry in self.manifest.ranks:
            stage = self.mesh.coordinates(entry.rank).get(PIPELINE, 0)
            for phase, value in ((phase, value) for phase, name in entry.files.items() for value in drawn[name]):
                if phases.setdefault((entry.rank, value), phase) != phase:
                    raise WrongLine(f"{value}, which two files of rank {entry.rank} draw", "a draw in one file")
                if stages.setdefault(value, stage) != stage:
                    self.apart = self.split

    def _ranks(self) -> None:
        """All ranks, phase by phase."""
        programs: dict[tuple[int, str], CheckedProgram] = {}
        moved: dict[tuple[int, str], int] = {}
        self.rank_graphs = programs
        for entry in self.manifest.ranks:
            for phase in self.schedule:
                lead, graph = programs.get((self.manifest.ranks[0].rank, phase)), self.files[entry.files[phase]]
                programs[entry.rank, phase] = self._program({"rank": entry.rank, "phase": phase}, graph, {}, lead)
            while self.number < len(self.rows) and "moved" in self.rows[self.number]:
                name, number = self.take(self.next("moved"), "moved", "number")
                if (entry.rank, name) in moved:
                    raise WrongLine(f"{name} moves twice", "once")
                moved[entry.rank, name] = number
        shown: dict[tuple[int, str], int] = {}
        types: dict[tuple[int, str], str] = {}
        for phase, times in self.schedule.items():
            for entry in self.manifest.ranks:
                self._inputs(programs[entry.rank, phase], entry, times)
            self._phase([programs[entry.rank, phase] for entry in self.manifest.ranks])
            for entry in self.manifest.ranks:
                program = programs[entry.rank, phase]
                self._carry(program, entry, times, moved, types)
                for name in self.shown.keys() & program.graph.outputs.keys():
                    self._at(program, name)
                    number = program.values[name]
                    if self.begun[number] or not self.equal(number, self.shown[name]):
                        raise WrongLine(str(self.forms[number]), str(self.forms[self.shown[name]]))
                    shown[entry.rank, name] = number
        if moved or any(self.mail.values()):
            raise WrongLine(f"moved {list(moved)}, sent {[way for way in self.mail if self.mail[way]]}", "all received")
        self._ends(shown, types)

    def _inputs(self, program: CheckedProgram, entry: RankEntry, times: int) -> None:
        """The inputs of a rank are the pieces of the manifest, or constants."""
        states, fed = {state.input: state for state in self.manifest.states_of(entry)}, self.manifest.fed(entry)
        self._constants(program, fed)
        for name, type in program.graph.inputs.items():
            if name in program.graph.initializers and name not in fed:
                continue
            self._at(program, name)
            if name not in program.values or program.rules[name] != "input":
                raise WrongLine(f"{name}, rule {program.rules.get(name)}", "rule input")
            number, state = program.values[name], states.get(name)
            if type.static and self.forms[number].shape != type.shape:
                raise WrongLine(f"shape {self.forms[number].shape}", f"shape {type.shape}")
            if state is None or {(entry.rank, name)} & (self.current.keys() | self.unread):
                self._lawful(name, self._input, number, name, entry, times)
                continue
            moves = times > 1 and state.output in program.graph.outputs
            self._lawful(name, self._held_state, number, state, self.during if moves else self.starts, type.dtype)

    def _held_state(self, number: int, state: LocalState, whole: Mapping[str, int], dtype: str) -> None:
        """A state at the start of a step or of a micro-step."""
        source = self.state_types[state.pieces[0].tensor].dtype
        self.due(number, self.cast(self._held(state.pieces, whole), source, dtype), "the pieces of the manifest")

    def _input(self, number: int, name: str, entry: RankEntry, times: int) -> None:
        """A sum, a value of the phase before, a batch or a hyper-parameter."""
        boxes = {part.input: part.box for part in entry.fed}
        carried = {(entry.rank, name)} & (self.current.keys() | self.unread)
        if any(accumulator.input == name for accumulator in entry.accumulators) and (times > 1 or not carried):
            elements = self._parts(number)
            due = [("sum so far", (name, entry.rank, index)) for index, _ in enumerate(elements)]
            if [self.forms[of][:2] for of in elements] != due:
                raise WrongLine(str(self.forms[number]), "any sum so far")
        elif carried:
            self.due(number, self._carried_on(entry.rank, name), "the value of the phase before")
        elif name in boxes:
            selection = [tuple(ranges_of(ends)) for ends in boxes[name]]
            self.due(number, box(self.value(self.inputs[name]), selection), "a part of the batch")
        elif self.inputs.get(name) != number:
            raise WrongLine(f"expression {number}", f"expression {self.inputs.get(name)} of the input {name}")

    def _parts(self, number: int) -> list[int]:
        """The expressions behind an expression of elements in a row."""
        op, _, operands, shape = self.forms[number]
        inner = [part for of in operands for part in self._parts(of)] if op in ("view", "flat", "take") else [number]
        return inner if prod(shape or ()) else []

    def _carry(
        self, program: CheckedProgram, entry: RankEntry, times: int, moved: dict[tuple[int, str], int],
        types: dict[tuple[int, str], str],
    ) -> None:  # fmt: skip
        """The new states, sums and saved values of a phase."""
        outputs = program.graph.outputs
        for saved in (of for of in entry.saved if of.name in outputs):
            self._keep(program, entry.rank, saved.name, saved.name, self._of_phase)
        for of in (of for of in entry.accumulators if of.output in outputs):
            self._keep(program, entry.rank, of.input, of.output, self._sum, program.values[of.input], times)
        for state in (state for state in self.manifest.states_of(entry) if state.output in outputs):
            types[entry.rank, state.input] = outputs[state.output].dtype
            within = (state, moved.pop((entry.rank, state.input), None)) if times > 1 else ()
            law = self._moved if within else self._of_phase
            self._keep(program, entry.rank, state.input, state.output, law, *within)

    def _keep(
        self, program: CheckedProgram, rank: int, name: str, output: str, law: Callable[..., Array], *operands: Any
    ) -> None:
        """Store an output of a phase for the input ``name`` of further phases, if a law of the checker allows."""

        def store() -> None:
            self.current[rank, name] = law(program.values[output], *operands)
            self.unread.discard((rank, name))

        self._at(program, output)
        self.unread.add((rank, name))
        self._lawful(output, store)

    def _sum(self, number: int, before: int, times: int) -> Array:
        """A sum after all micro-steps of a phase."""
        value, fault = self.value(number), WrongLine("what a micro-step adds depends on the sum", "a term for any sum")
        if times > 1:
            value = self.plus(value, self.times(self.value(before), self.element(-1)))
            again = tuple((of, None) for of in self._parts(before))
            elsewhere = self.plus(self.value(number, again), self.times(self.value(before, again), self.element(-1)))
            if not np.array_equal(value, elsewhere):
                raise fault
            return self.over(value, self.varying & {MICRO})
        if self.begun[number]:
            raise fault
        return value

    def _of_phase(self, number: int) -> Array:
        """A state of a phase run once, or a value saved for a further phase."""
        if self.begun[number]:
            raise WrongLine("a value that depends on sums of micro-steps", "another")
        return self.value(number)

    def _moved(self, number: int, state: LocalState, within: int | None) -> Array:
        """A state after all micro-steps of a phase, an expression ``within`` the next phase."""
        self._of_phase(number)
        if within is None:
            raise WrongLine(f"no line for {state.input} after all micro-steps", "such a line")
        rows = (self._held(state.pieces, whole) for whole in (self.during, self.starts))
        value = self.iterated(MICRO, [self.value(number), *rows], (-1,))
        self.due(within, value, "the state after all micro-steps")
        return self.value(within)

    def _carried_on(self, rank: int, name: str) -> Array:
        """The value of a state or a sum behind the phases so far."""
        if (rank, name) in self.unread:
            raise WrongLine("", "", "values of phases before")
        return self.current.get((rank, name), np.zeros([1] * self.lead + [0], np.uint64))

    def _ends(self, shown: Mapping[tuple[int, str], int], types: Mapping[tuple[int, str], str]) -> None:
        """The new states of all ranks are pieces of the source's, and the pieces are all of them."""
        covered: dict[str, set[Piece]] = {name: set() for name in self.states}
        self.line = 0
        for entry in self.manifest.ranks:
            self.where = f"rank {entry.rank}"
            for accumulator in entry.accumulators:
                self.subject = accumulator.input
                self._lawful(accumulator.input, self._empty, entry.rank, accumulator.input)
            for state in self.manifest.states_of(entry):
                self.subject = state.input
                for piece in state.pieces if not state.copy else ():
                    covered[piece.tensor].add(piece)
                to = types.get((entry.rank, state.input), "")
                self._lawful(state.input, self._end, entry.rank, state, to)
        for name in self.shown:
            if not any((entry.rank, name) in shown for entry in self.manifest.ranks):
                raise WrongLine(f"no rank shows {name}", "the output")
        for of in self.manifest.states:
            if of.shape is None or not cover(covered[of.tensor], of.type.dims):
                raise WrongLine(f"the pieces of {of.tensor} are not all of it", "all elements")
        self._starts()

    def _empty(self, rank: int, name: str) -> None:
        if self._carried_on(rank, name).any():
            raise WrongLine("a sum of micro-steps that is not empty", "zero")

    def _end(self, rank: int, state: LocalState, to: str) -> None:
        """Raise WrongLine unless a rank's new state is pieces of the source's, alike on all ranks."""
        value, due = self._carried_on(rank, state.input), self._held(state.pieces, self.new)
        if not state.local and any((value != np.take(value, [0], at)).any() for at in range(self.lead)):
            raise WrongLine("a state that differs between ranks", "one value")
        source = self.state_types[state.pieces[0].tensor].dtype
        if state.copy and to not in (source, *WIDER.get(source, ())):
            due = self.rounded(due, to)
        value = value.reshape(*value.shape[: self.lead], -1)
        if value.shape[self.lead :] != due.shape[self.lead :] or not (value == due).all():
            raise WrongLine("another expression", f"the pieces of the new {state.pieces[0].tensor}")

    def _starts(self) -> None:
        """All ranks start an element of a state from one value, and sums from zero."""
        whole: dict[str, tuple[np.ndarray, np.ndarray]] = {}
        entries = {entry.rank: entry for entry in self.manifest.ranks}
        for (rank, phase), program in self.rank_graphs.items():
            entry, graph = entries[rank], program.graph
            stored = {name: tensor for name, tensor in graph.initializers.items() if name in graph.inputs}
            self.where = f"rank {rank}, {phase}"
            for accumulator in entry.accumulators:
                if accumulator.input in stored and np.asarray(stored[accumulator.input].numpy()).any():
                    raise WrongLine(f"{accumulator.input} does not start at zero", "zero")
            for state in self.manifest.states_of(entry):
                if state.input not in stored or state.copy or state.local:
                    continue
                flat, at = np.asarray(stored[state.input].numpy()).reshape(-1), 0
                for piece in state.pieces:
                    if piece.tensor not in whole:
                        self.subject, dims = piece.tensor, self.state_types[piece.tensor].dims
                        check_elements(dims, 1)
                        whole[piece.tensor] = np.zeros(dims, flat.dtype), np.zeros(dims, bool)
                    (values, written), part = whole[piece.tensor], flat[at : at + piece.elements]
                    mask = cut(piece, written)
                    if cut(piece, values)[mask].tobytes() != part[mask].tobytes():
                        raise WrongLine(f"{piece.tensor} starts from another value", "the value of the ranks before")
                    put(values, piece.place, part, piece.start)
                    put(written, piece.place, np.ones(piece.elements, bool), piece.start)
                    at += piece.elements

    # --- calls ---

    def _phase(self, programs: Sequence[CheckedProgram]) -> None:
        """All nodes of a phase, side by side from call to call."""
        waiting: dict[int, Node] = {}
        for rank in range(len(programs)):
            self._to_call(programs, rank, waiting)
        while waiting:
            done = [rank for rank, node in waiting.items() if self._moves(programs[rank], rank, node)]
            groups: dict[tuple[int, ...], int] = {}
            for rank, node in waiting.items():
                members = self.mesh.members(str(node.attributes["group"]), rank)
                groups[members] = groups.get(members, 0) + (not COLLECTIVES[node.op_type].pairwise)
            ready = [members for members, count in groups.items() if count == len(members)]
            if not ready and not done:
                rank, node = min(waiting.items())
                self._at(programs[rank], next(filter(None, node.outputs), ""))
                raise WrongLine(f"call {node.label}, to which members never come", "all members in one call")
            for members in ready:
                nodes = [waiting[rank] for rank in members]
                self._lawful(nodes[0].label, self._call, [programs[rank] for rank in members], nodes, members)
            for rank in (*done, *(rank for members in ready for rank in members)):
                del waiting[rank]
                programs[rank].at += 1
                self._to_call(programs, rank, waiting)

    def _to_call(self, programs: Sequence[CheckedProgram], rank: int, waiting: dict[int, Node]) -> None:
        program = programs[rank]
        while program.at < len(program.graph.nodes):
            node = program.graph.nodes[program.at]
            if node.domain == COMM:
                waiting[rank] = node
                return
            self._checked_node(program, node)
            program.at += 1

    def _moves(self, program: CheckedProgram, rank: int, node: Node) -> bool:
        """Return whether a waiting rank sends a value, or receives a sent value."""
        if not COLLECTIVES[node.op_type].pairwise:
            return False
        group, tag, peer = str(node.attributes["group"]), node.attributes["tag"], node.attributes["peer"]
        axes = self.mesh.split(group)
        among = [{axis: self.mesh.coordinates(member)[axis] for axis in axes} for member in (peer, rank)]
        self._at(program, next(filter(None, node.outputs), ""))
        if peer == rank or peer not in self.mesh.members(group, rank):
            raise WrongLine(f"{node.op_type} with rank {peer}", f"another rank along {group}")
        signature = self._signature(program, node)._replace(op="")
        if node.op_type == "Send":
            message = signature, [program.values[name] for name in node.inputs]
            self.mail.setdefault((rank, peer, group, tag), []).append(message)
            return True
        if not (mail := self.mail.get((peer, rank, group, tag))):
            return False
        sent, numbers = mail.pop(0)
        if sent != signature or any(program.rules[name] != "call" for name in node.outputs):
            raise WrongLine(f"{signature}", f"{sent}, by rule call")
        self._lawful(node.label, self._received, [program.values[name] for name in node.outputs], numbers, *among)
        return True

    def _signature(self, program: CheckedProgram, node: Node) -> CallSignature:
        types = [(program.graph.types[name].dtype, self.shape(program.values[name])) for name in node.inputs]
        return call_signature(node.op_type, node.attributes, types)

    def _received(
        self, results: Sequence[int], sent: Sequence[int], sender: Mapping[str, int], receiver: Mapping[str, int]
    ) -> None:
        """Raise WrongLine unless receiver and sender have the same values."""
        for result, number in zip(results, sent, strict=True):
            self.due(result, self.on(self.value(number), sender.items()), "what was sent", member=receiver)

    def _call(self, programs: Sequence[CheckedProgram], nodes: Sequence[Node], ranks: Sequence[int]) -> None:
        """A call of all members of a group."""
        signatures = set()
        for program, node in zip(programs, nodes):
            self._at(program, next(filter(None, node.outputs), ""))
            reads = [name for name in node.inputs if name not in program.values]
            if reads or any(name and program.rules.get(name, "call") != "call" for name in node.outputs):
                raise WrongLine(f"{node.label} reads {reads}", "values with lines, and rule call")
            signatures.add(self._signature(program, node) if node.inputs else None)
        if len(signatures - {None}) > 1:
            raise WrongLine(" and ".join(map(str, signatures)), "one call of all members")
        node, axes = nodes[0], self.mesh.split(str(nodes[0].attributes["group"]))
        root = node.attributes.get("root") if node.op_type == "Reduce" else None
        for member, (program, of) in enumerate(zip(programs, nodes)):
            for name in of.outputs if root not in (None, member) else ():  # has no value
                program.values.pop(name, None)
        operands = [[program.values[name] for name in of.inputs] for program, of in zip(programs, nodes)]
        results = [[program.values[name] for name in of.outputs if root in (None, member)]
                   for member, (program, of) in enumerate(zip(programs, nodes))]  # fmt: skip
        coordinates = [{axis: self.mesh.coordinates(rank)[axis] for axis in axes} for rank in ranks]
        key = (node.op_type, str(node.attributes), str(coordinates), str(operands), str(results))
        if key in self.checked:
            return
        if any(call is not None and call.reduce in ("sum", "mean") and call.dtype in NARROW for call in signatures):
            raise WrongLine("", "", "sums of small integers")
        self.call(node.op_type, node.attributes, coordinates, operands, results)
        self.checked.add(key)


MALFORMED = (ArithmeticError, AttributeError, LookupError, RecursionError, StopIteration, TypeError, ValueError)
"""Errors of a line of another form."""


def check(home: Path, text: str) -> CertificateCheck:
    """Check a certificate. Raises InputError for a damaged folder, UnsupportedError for values larger than memory."""
    folder = FolderCheck(home, text)
    try:
        folder.run()
    except MemoryError as error:
        what = f"{folder.where}, {show(folder.subject)}: every element is computed, and memory is too small: {error}"
        raise UnsupportedError(what, "gopt prove computes no element") from None
    except (WrongLine, GoptError, *MALFORMED) as error:
        wrong = error if isinstance(error, WrongLine) else WrongLine(f"{type(error).__name__}: {error}")
        line, where = max(folder.line or folder.number, 1), folder.where or "the head and the expressions"
        fault = CertificateFault(line, where, folder.subject, wrong.actual, wrong.due)
        return CertificateCheck(len(folder.lines) - 1, 0, {}, fault)
    return CertificateCheck(len(folder.rows), len(folder.rows) - len(folder.rest), folder.lemmas)
