"""Two models, or two output folders, compared by what they compute; names of inner values do not matter.

Equal structure is matched first (each node numbered by its operator, attributes and operands), then what hangs at
the graph's outputs, then what reads the same values, then equal names. What is left was removed or added.
"""

from __future__ import annotations

import json
import os
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from gopt.analysis.classes import signature
from gopt.analysis.roles import RoleMap
from gopt.analysis.training import State, Training
from gopt.api import read_roles
from gopt.errors import GoptError, InputError, OptionError
from gopt.graph.load import load
from gopt.graph.model import Graph, Node, Tensor
from gopt.offline.inspect import read_record
from gopt.offline.text import attribute_text, digest, node_text, ref, tensor_text
from gopt.report import rank_ranges
from gopt.sources.expand import expand

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Line:
    """One difference. ``kind``: added, removed, op, attribute, rewired, input, output, value, state, bytes, model,
    record; ``where``: the file it is in, '' for a pair of models."""

    kind: str
    text: str
    where: str = ""

    def __str__(self) -> str:
        return f"{self.where}: {self.kind} {self.text}" if self.where else f"{self.kind} {self.text}"


@dataclass(frozen=True, slots=True)
class Diff:
    """All differences between ``a`` and ``b``; ``renamed`` counts inner values that only changed their names."""

    a: str
    b: str
    lines: tuple[Line, ...]
    renamed: int
    notes: tuple[str, ...] = ()

    @property
    def equal(self) -> bool:
        return not self.lines

    @property
    def exit_code(self) -> int:
        return 0 if self.equal else 1

    def to_json(self) -> dict[str, Any]:
        counts: dict[str, int] = {}
        for line in self.lines:
            counts[line.kind] = counts.get(line.kind, 0) + 1
        return {
            "format": "gopt-diff/1", "a": self.a, "b": self.b, "equal": self.equal, "renamed": self.renamed,
            "counts": counts, "notes": list(self.notes),
            "lines": [{"kind": line.kind, "where": line.where, "text": line.text} for line in self.lines],
        }  # fmt: skip


def diff(a: str | os.PathLike[str], b: str | os.PathLike[str]) -> Diff:
    """Compare two ONNX files or two output folders.

    Raises InputError where one cannot be read, OptionError for a file beside a folder.
    """
    first, second = Path(a), Path(b)
    for path in (first, second):
        if not path.exists():
            raise InputError(f"there is no {path}")
    if first.is_dir() != second.is_dir():
        raise OptionError("diff takes two models or two output folders, not one of each")
    return diff_folders(first, second) if first.is_dir() else diff_models(first, second)


def diff_models(a: Path, b: Path) -> Diff:
    """Compare two ONNX files, with their states where both are training steps."""
    return _diff_graphs(str(a), load(a, own=True), str(b), load(b, own=True), states=True)


def diff_graphs(a: Graph, b: Graph, *, states: bool = False) -> Diff:
    """Compare two graphs; ``states``: recover their roles and compare these too."""
    return _diff_graphs("a", a, "b", b, states=states)


def _diff_graphs(name_a: str, a: Graph, name_b: str, b: Graph, *, states: bool) -> Diff:
    notes: list[str] = []
    trainings: list[Training | None] = [None, None]
    if states:
        trainings = [_training(a, name_a, notes), _training(b, name_b, notes)]
    pairing = _Pairing(a, b)
    pairing.match()
    lines = [*_model_lines(a, b), *_interface_lines(a, b, *trainings), *pairing.lines()]
    return Diff(name_a, name_b, tuple(lines), pairing.renamed(), tuple(notes))


def _training(graph: Graph, name: str, notes: list[str]) -> Training | None:
    if "gopt.rank" in graph.metadata:
        return None
    try:
        return read_roles(expand(graph), _kept_roles(graph))
    except GoptError as error:
        notes.append(f"{name}: states are not compared: {error.message}")
        return None


def _kept_roles(graph: Graph) -> RoleMap:
    """Roles that gopt wrote into its own copy of a source."""
    if "gopt.roles" not in graph.metadata:
        return RoleMap()
    from gopt.api import roles_from

    return roles_from(graph.metadata["gopt.roles"])


# --- models ---------------------------------------------------------------------------------------------------------


def _model_lines(a: Graph, b: Graph) -> Iterator[Line]:
    opsets = [{e.domain or "ai.onnx": e.version for e in graph.header.opset_import} for graph in (a, b)]
    for domain in sorted({*opsets[0], *opsets[1]}):
        versions = [each.get(domain, "none") for each in opsets]
        if versions[0] != versions[1]:
            yield Line("model", f"opset {domain}: {versions[0]} -> {versions[1]}")
    functions = [
        {(f.domain, f.name, f.overload): f.SerializeToString(deterministic=True) for f in graph.header.functions}
        for graph in (a, b)
    ]
    for key in sorted({*functions[0], *functions[1]}):
        if functions[0].get(key) != functions[1].get(key):
            both = key in functions[0] and key in functions[1]
            word = "changed" if both else "added" if key in functions[1] else "removed"
            yield Line("model", f"function {key[0]}.{key[1]} {word}")


def _interface_lines(a: Graph, b: Graph, first: Training | None, second: Training | None) -> Iterator[Line]:
    told_inputs: set[str] = set()
    told_outputs: set[str] = set()
    if first is not None and second is not None:
        for name, state, other in _joined(first.state_of(), second.state_of()):
            for each in (state, other):
                told_inputs.update([each.tensor] if each else [])
                told_outputs.update([each.updated] if each else [])
            yield from _state_lines(name, state, other, a, b)
        yield from _byte_lines(first, second)
        if first.loss != second.loss:
            yield Line("output", f"loss: {ref(first.loss)} -> {ref(second.loss)}")
    sides = ("input", a.inputs, b.inputs, told_inputs), ("output", a.outputs, b.outputs, told_outputs)
    for kind, old, new, told in sides:
        for name, before, after in _joined(old, new):
            if name in told:
                continue
            if before is None or after is None:
                yield Line(kind, f"{ref(name)} {'added' if before is None else 'removed'}: {after or before}")
            elif before != after:
                yield Line(kind, f"{ref(name)}: {before} -> {after}")
        if list(old) != list(new) and sorted(old) == sorted(new):
            yield Line(kind, "order changed")
    for name in a.inputs:
        if name in b.inputs:
            values = a.initializers.get(name), b.initializers.get(name)
            if not _same_tensor(*values):
                texts = ["none" if value is None else tensor_text(value) for value in values]
                yield Line("value", f"{ref(name)}: {texts[0]} -> {texts[1]}")


def _state_lines(name: str, state: State | None, other: State | None, a: Graph, b: Graph) -> Iterator[Line]:
    if state is None or other is None:
        each, graph = (state, a) if state is not None else (other, b)
        assert each is not None
        owner = f" of {ref(each.of)}" if each.of else ""
        word = "added" if state is None else "removed"
        yield Line("state", f"{ref(name)} {word}: {graph.types[name]} {each.kind.value}{owner}")
        return
    if a.types[name] != b.types[name]:
        yield Line("state", f"{ref(name)}: {a.types[name]} -> {b.types[name]}")
    if state.kind != other.kind:
        yield Line("state", f"{ref(name)}: {state.kind.value} -> {other.kind.value}")
    if state.of != other.of:
        yield Line("state", f"{ref(name)}: of {ref(state.of or '')} -> of {ref(other.of or '')}")
    if state.updated != other.updated:
        yield Line("state", f"{ref(name)}: replaced by {ref(state.updated)} -> {ref(other.updated)}")


def _byte_lines(first: Training, second: Training) -> Iterator[Line]:
    sums: list[dict[str, int]] = [{}, {}]
    for training, total in zip((first, second), sums):
        for state in training.states:
            total[state.kind.value] = total.get(state.kind.value, 0) + training.graph.types[state.tensor].nbytes
    for kind in sorted({*sums[0], *sums[1]}):
        before, after = sums[0].get(kind, 0), sums[1].get(kind, 0)
        if before != after:
            yield Line("bytes", f"{kind}: {before} -> {after} ({after - before:+d})")


def _joined(a: Mapping[str, T], b: Mapping[str, T]) -> Iterator[tuple[str, T | None, T | None]]:
    """Both mappings by key, in the order of ``a``, then what only ``b`` has."""
    for name in dict.fromkeys((*a, *b)):
        yield name, a.get(name), b.get(name)


def _same_tensor(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    if a.type != b.type:
        return False
    if a.external and (a.path, a.offset) == (b.path, b.offset):
        return True
    return digest(a) == digest(b)


class _Side:
    """One graph, with what the pairing asks of it."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.producer = graph.producers()
        self.constants = {name: t for name, t in graph.initializers.items() if name not in graph.inputs}
        self._keys: dict[str, Hashable] = {}

    def constant(self, name: str) -> Hashable:
        """The content of a constant."""
        if name not in self._keys:
            tensor = self.constants[name]
            self._keys[name] = ("constant", str(tensor.type), digest(tensor) if tensor.type.static else name)
        return self._keys[name]

    def open(self, done: Mapping[int, Node]) -> list[Node]:
        return [node for node in self.graph.nodes if id(node) not in done]


class _Pairing:
    """Which node of ``a`` is which node of ``b``. Every step is linear in the graphs."""

    def __init__(self, a: Graph, b: Graph) -> None:
        self.a, self.b = _Side(a), _Side(b)
        self.mate: dict[int, Node] = {}
        self.back: dict[int, Node] = {}
        self.value: dict[str, str] = {name: name for name in a.inputs if name in b.inputs}
        self.changed: dict[str, str] = {}
        """Constants of ``a`` that have another value in ``b`` -> their name there."""
        self._equal: set[int] = set()
        self._work: list[tuple[str, str]] = []

    def match(self) -> None:
        self._by_structure()
        self._work = [(name, name) for name in self.a.graph.outputs if name in self.b.graph.outputs]
        self._from_readers()
        for _ in range(2):
            self._from_operands()
            self._by_name(same_operator=True)
        self._by_name(same_operator=False)
        self._from_operands()
        self._pair_constants()

    def _join(self, first: Node, second: Node) -> None:
        self.mate[id(first)], self.back[id(second)] = second, first
        for name, other in zip(first.outputs, second.outputs):
            if name and other:
                self.value.setdefault(name, other)

    def _by_structure(self) -> None:
        """Nodes that compute the very same thing, in order where several do."""
        table: dict[Hashable, int] = {}
        queues: dict[int, list[Node]] = {}
        for node, number in _numbers(self.a, table):
            queues.setdefault(number, []).append(node)
        for queue in queues.values():
            queue.reverse()
        for node, number in _numbers(self.b, table):
            queue = queues.get(number, [])
            if queue:
                first = queue.pop()
                self._join(first, node)
                self._equal.add(id(first))

    def _from_readers(self) -> None:
        """From matched readers back to what they read, operand by operand."""
        while self._work:
            name, other = self._work.pop()
            first, second = self.a.producer.get(name), self.b.producer.get(other)
            if first is None or second is None or id(first) in self.mate or id(second) in self.back:
                continue
            if _alike(first, second) and first.outputs.index(name) == second.outputs.index(other):
                self._join(first, second)
                self._work.extend(zip(reversed(first.inputs), reversed(second.inputs)))

    def _from_operands(self) -> None:
        """From matched operands on to those who read them."""
        waiting: dict[Hashable, list[Node]] = {}
        for node in self.b.open(self.back):
            key = self._operands(node, self.b, None)
            if key is not None:
                waiting.setdefault(key, []).append(node)
        for queue in waiting.values():
            queue.reverse()
        for node in self.a.open(self.mate):
            key = self._operands(node, self.a, self.value)
            queue = waiting.get(key, [])
            while queue and id(queue[-1]) in self.back:
                queue.pop()
            if key is not None and queue:
                self._join(node, queue.pop())
        self._from_readers()

    def _operands(self, node: Node, side: _Side, names: Mapping[str, str] | None) -> Hashable:
        keys: list[Hashable] = []
        for name in node.reads:
            if name in side.constants:
                keys.append(side.constant(name))
            elif names is None:
                keys.append(name)
            elif name in names:
                keys.append(names[name])
            else:
                return None
        return (node.domain, node.op_type, len(node.outputs), tuple(keys))

    def _by_name(self, *, same_operator: bool) -> None:
        others = {next((x for x in node.outputs if x), ""): node for node in self.b.open(self.back)}
        for node in self.a.open(self.mate):
            other = others.get(next((x for x in node.outputs if x), ""))
            if other is None or id(other) in self.back:
                continue
            if _alike(node, other) or not same_operator:
                self._join(node, other)
                self._work.extend(zip(node.inputs, other.inputs))
                self._from_readers()

    def _pair_constants(self) -> None:
        """Constants at the same operand of matched nodes whose values differ; one pair for each."""
        taken: set[str] = set()
        for node in self.a.graph.nodes:
            other = self.mate.get(id(node))
            if other is None or id(node) in self._equal:
                continue
            for name, new in zip(node.inputs, other.inputs):
                if name not in self.a.constants or new not in self.b.constants or name in self.changed:
                    continue
                if self.a.constant(name) != self.b.constant(new) and (new not in taken or name == new):
                    self.changed[name] = new
                    taken.add(new)
        for name in self.a.constants:
            unread = name in self.b.constants and name not in self.changed and name not in taken
            if unread and self.a.constant(name) != self.b.constant(name) and self._same_readers(name):
                self.changed[name] = name

    def _same_readers(self, name: str) -> bool:
        """Whether a constant is an output, or read by nothing, in both graphs: no operand tells of its change."""
        return name in self.a.graph.outputs and name in self.b.graph.outputs

    def _same(self, name: str, other: str) -> bool:
        if not name or not other:
            return name == other
        if name in self.a.constants and other in self.b.constants:
            return self.changed.get(name) == other or self.a.constant(name) == self.b.constant(other)
        return self.value.get(name) == other

    def renamed(self) -> int:
        """Inner values that go by another name."""
        outputs = {*self.a.graph.outputs, *self.b.graph.outputs}
        return sum(name != other and not {name, other} & outputs for name, other in self.value.items())

    def lines(self) -> Iterator[Line]:
        for name, new in self.changed.items():
            shown = ref(name) if name == new else f"{ref(name)} (now {ref(new)})"
            old = tensor_text(self.a.constants[name])
            yield Line("value", f"{shown}: {old} -> {tensor_text(self.b.constants[new])}")
        for node in self.a.graph.nodes:
            other = self.mate.get(id(node))
            if other is None:
                yield Line("removed", node_text(node))
            elif id(node) not in self._equal:
                yield from self._pair_lines(node, other)
        for node in self.b.open(self.back):
            yield Line("added", node_text(node))
        for name in self.a.graph.outputs:
            if name in self.b.graph.outputs and not self._same(name, name):
                made = [side.producer.get(name) for side in (self.a, self.b)]
                texts = [ref(name) if node is None else node_text(node) for node in made]
                yield Line("output", f"{ref(name)} is another value: {texts[0]} -> {texts[1]}")

    def _pair_lines(self, node: Node, other: Node) -> Iterator[Line]:
        label = ref(next((name for name in node.outputs if name), "")) if any(node.outputs) else node.label
        if not _alike(node, other):
            yield Line("op", f"{label}: {_called(node)} -> {_called(other)}")
        label = f"{label} = {other.op_type}"
        for key in sorted({*node.attributes, *other.attributes}):
            texts = [attribute_text(n.attributes[key]) if key in n.attributes else "unset" for n in (node, other)]
            if texts[0] != texts[1]:
                yield Line("attribute", f"{label}: {key} {texts[0]} -> {texts[1]}")
        for place in range(max(len(node.inputs), len(other.inputs))):
            old, new = (n.inputs[place] if place < len(n.inputs) else "" for n in (node, other))
            if not self._same(old, new):
                texts = [self._shown(old, self.a), self._shown(new, self.b)]
                yield Line("rewired", f"{label}: input {place} {texts[0]} -> {texts[1]}")
        if len(node.outputs) != len(other.outputs):
            yield Line("op", f"{label}: {len(node.outputs)} outputs -> {len(other.outputs)}")

    def _shown(self, name: str, side: _Side) -> str:
        if name in side.constants and side.constants[name].type.static and side.constants[name].type.elements <= 1:
            return f"{ref(name)} ({tensor_text(side.constants[name])})"
        return ref(name)


def _alike(first: Node, second: Node) -> bool:
    return first.op_type == second.op_type and _domain(first) == _domain(second)


def _domain(node: Node) -> str:
    return "" if node.domain == "ai.onnx" else node.domain


def _called(node: Node) -> str:
    return f"{node.domain}.{node.op_type}" if _domain(node) else node.op_type


def _numbers(side: _Side, table: dict[Hashable, int]) -> Iterator[tuple[Node, int]]:
    """Each node with a number that it shares with every node of the same operator, attributes and operands."""
    values: dict[str, Hashable] = {name: ("input", name) for name in side.graph.inputs}
    values[""] = None
    for node in side.graph.nodes:
        for name in node.reads:
            if name not in values:
                values[name] = side.constant(name)
        key = (signature(node), tuple(values[name] for name in node.inputs), tuple(map(bool, node.outputs)),
               tuple(values[name] for name in node.captures))  # fmt: skip
        number = table.setdefault(key, len(table))
        values.update((name, (number, slot)) for slot, name in enumerate(node.outputs) if name)
        yield node, number


# --- folders --------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Folders:
    a: Path
    b: Path
    lines: list[Line] = field(default_factory=list)
    renamed: int = 0
    notes: list[str] = field(default_factory=list)


def diff_folders(a: Path, b: Path) -> Diff:
    """Compare two output folders: manifest, report, source and each rank's graph with its values."""
    both = _Folders(a, b)
    manifests = [read_record(folder, "manifest") for folder in (a, b)]
    reports = [read_record(folder, "report") for folder in (a, b)]
    both.lines += [Line("record", text, "manifest.json") for text in _records(manifests[0], manifests[1], "")]
    both.lines += [Line("record", text, "report.json") for text in _records(reports[0], reports[1], "")]
    same_values = _same_bytes(a / "states.bin", b / "states.bin")
    if (a / "source.onnx").is_file() and (b / "source.onnx").is_file():
        _file_lines(both, "source.onnx", same_values)
    files = [_files(manifest, folder) for manifest, folder in zip(manifests, (a, b))]
    found: dict[tuple[str, str, str], list[int]] = {}
    for rank, phase in sorted({*files[0], *files[1]}):
        names = files[0].get((rank, phase)), files[1].get((rank, phase))
        if names[0] is None or names[1] is None:
            continue  # the manifests' lines say so
        if same_values and names[0] == names[1] and _same_bytes(a / names[0], b / names[1]):
            continue
        result = _diff_graphs("", load(a / names[0], own=True), "", load(b / names[1], own=True), states=False)
        both.renamed += result.renamed
        for line in result.lines:
            where = "" if phase == "step" else f", {phase}"
            found.setdefault((line.kind, line.text, where), []).append(rank)
    both.lines += [
        Line(kind, text, f"rank {rank_ranges(ranks)}{where}") for (kind, text, where), ranks in found.items()
    ]
    return Diff(str(a), str(b), tuple(both.lines), both.renamed, tuple(both.notes))


def _files(manifest: Mapping[str, Any], folder: Path) -> dict[tuple[int, str], str]:
    """The file of every rank and phase."""
    try:
        files = {
            (int(each["rank"]), str(phase)): str(name)
            for each in manifest["ranks"]
            for phase, name in each["files"].items()
        }
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InputError(f"{folder}: the manifest is damaged ({type(error).__name__}: {error})") from None
    for name in files.values():
        if Path(name).name != name:
            raise InputError(f"{folder}: the manifest names {name!r}, which lies outside the folder")
    return files


def _file_lines(both: _Folders, name: str, same_values: bool) -> None:
    if same_values and _same_bytes(both.a / name, both.b / name):
        return
    first, second = both.a / name, both.b / name
    result = _diff_graphs(str(first), load(first, own=True), str(second), load(second, own=True), states=True)
    both.lines += [Line(line.kind, line.text, name) for line in result.lines]
    both.renamed += result.renamed
    both.notes += result.notes


def _same_bytes(a: Path, b: Path) -> bool:
    if not a.is_file() or not b.is_file():
        return a.is_file() == b.is_file()
    if a.stat().st_size != b.stat().st_size:
        return False
    with a.open("rb") as first, b.open("rb") as second:
        while True:
            pieces = first.read(1 << 22), second.read(1 << 22)
            if pieces[0] != pieces[1]:
                return False
            if not pieces[0]:
                return True


_KEYS = ("tensor", "input", "rank", "op", "name")
"""What tells the entries of a list apart, the first that does."""
_LONG = ("removed_ops", "removed_vars", "added_ops", "added_vars")
"""Lists of a report that are as long as the graph, and that the ranks' own lines explain: counted, not listed."""


def _records(a: Any, b: Any, path: str) -> Iterable[str]:
    """Differences of two JSON records, one leaf a line; entries of a list go by their key, not their place."""
    if a == b:
        return
    if isinstance(a, dict) and isinstance(b, dict):
        for key in dict.fromkeys((*a, *b)):
            inner = f"{path}.{key}" if path else key
            if key not in a or key not in b:
                yield f"{inner} {'added' if key not in a else 'removed'}: {_short(b[key] if key in b else a[key])}"
            else:
                yield from _records(a[key], b[key], inner)
    elif isinstance(a, list) and isinstance(b, list) and path not in _LONG and (key := _list_key(a, b)):
        first, second = ({str(each[key]): each for each in side} for side in (a, b))
        for name in dict.fromkeys((*first, *second)):
            inner = f"{path}[{name}]"
            if name not in first or name not in second:
                yield f"{inner} {'added' if name not in first else 'removed'}"
            else:
                yield from _records(first[name], second[name], inner)
        if list(first) != list(second) and sorted(first) == sorted(second):
            yield f"{path}: order changed"
    elif isinstance(a, list) and isinstance(b, list) and any(isinstance(each, (dict, list)) for each in (*a, *b)):
        texts = [{json.dumps(each, sort_keys=True) for each in side} for side in (a, b)]
        gone, new = len(texts[0] - texts[1]), len(texts[1] - texts[0])
        yield f"{path}: {gone} of {len(a)} entries gone, {new} of {len(b)} new"
    else:
        yield f"{path}: {_short(a)} -> {_short(b)}"


def _list_key(a: Sequence[Any], b: Sequence[Any]) -> str:
    for key in _KEYS:
        has = all(isinstance(each, dict) and isinstance(each.get(key), (str, int)) for each in (*a, *b))
        if has and all(len({str(each[key]) for each in side}) == len(side) for side in (a, b)):
            return key
    return ""


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else f"{text[:77]}..."
