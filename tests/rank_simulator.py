"""The ranks of an output folder in one process, after the contract's section 5: calls of ``gopt.comm`` as
docs/collectives.md defines them, made by NumPy. Nothing of gopt is imported here."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from onnx import ModelProto, NodeProto, helper, numpy_helper
from rank_files import HALVES, Answers, Array, Call, Program, Run, Values, attributes, dtype_of, run_together, shape_of

Mail = dict[tuple[int, int, int, str], list[list[Array]]]
Axes = tuple[tuple[str, int], ...]
DATA = ("dp", "shard")


@cache
def coordinates(axes: Axes, rank: int) -> dict[str, int]:
    place = np.unravel_index(rank, [size for _, size in axes])
    return dict(zip((name for name, _ in axes), map(int, place)))


@cache
def members(axes: Axes, group: str, rank: int) -> tuple[int, ...]:
    """The ranks that share every coordinate but the group's, in order."""
    own, moving = coordinates(axes, rank), group.split("+")
    ranks = range(int(np.prod([size for _, size in axes], dtype=int)))
    return tuple(
        other for other in ranks
        if all(at == own[name] for name, at in coordinates(axes, other).items() if name not in moving)
    )  # fmt: skip


def sample_parts(axes: Axes) -> list[int]:
    """For every rank, which part of the samples it sees: ranks along ``dp`` and ``shard`` see different ones."""
    ranks = range(int(np.prod([size for _, size in axes], dtype=int)))
    seen = [tuple(at for name, at in coordinates(axes, rank).items() if name in DATA) for rank in ranks]
    order = list(dict.fromkeys(seen))
    return [order.index(each) for each in seen]


@dataclass
class World:
    """The ranks of one output folder, and which tensor's elements each holds."""

    folder: Path

    def __post_init__(self) -> None:
        self.manifest: dict[str, Any] = json.loads((self.folder / "manifest.json").read_text())
        self.axes: Axes = tuple((name, size) for name, size in self.manifest["mesh"]["axes"])
        self.records = sorted(self.manifest["ranks"], key=lambda record: record["rank"])
        listed = self.manifest.get("phases") or [{"name": "step", "times": 1}]
        self.phases: list[tuple[str, int]] = [(each["name"], each["times"]) for each in listed]
        """The files of a rank in their order, and how often each runs in a step."""
        self.programs = {
            name: [Program(self.folder / record["files"][name]) for record in self.records] for name, _ in self.phases
        }
        self.ranks = range(len(self.records))
        common = self.manifest["common"]
        self.held = [[*common.get("state", []), *record.get("state", [])] for record in self.records]
        self.sums = [[*common.get("accumulators", []), *record.get("accumulators", [])] for record in self.records]
        self.sees = sample_parts(self.axes)
        self.plain = [(name, turn) for name, times in self.phases for turn in range(times)]
        """The runs of a rank without a schedule: files, and the micro-step of each."""
        self.runs = [self._scheduled(rank) for rank in self.ranks]
        self.last: list[Values] = [{} for _ in self.records]
        """What each rank's files last gave."""

    def _scheduled(self, rank: int) -> list[tuple[str, int]]:
        """The runs of a rank in the order of the schedule, after docs/schedules.md."""
        name = (self.manifest.get("pipeline") or {}).get("schedule")
        if name is None:
            return self.plain
        rows = [line.split() for line in (self.folder / name).read_text().splitlines()]
        placement = next([int(word) for word in row[1:]] for row in rows if row[:1] == ["placement"])
        member, numbers = coordinates(self.axes, rank)["pp"], list[int]()
        for stage, home in enumerate(placement):
            before = [numbers[other] + 1 for other in range(stage) if placement[other] == home]
            numbers.append(max([0, *before, *numbers[-1:]]))
        top, last, runs = max(number for number, home in zip(numbers, placement) if home == member), numbers[-1], []
        actions = [row for row in rows if len(row) == 4 and row[0].isdigit()]
        for _, kind, stage, turn in (row for row in actions if row[0] == str(member)):
            chunks = [numbers[int(stage)]]
            if chunks[0] == top < last and kind != "weight":  # what all members take arrives with the last
                chunks.insert(1 if kind == "forward" else 0, last)
            runs += [(f"{kind}.{chunk}" if last else kind, int(turn)) for chunk in chunks]
        kinds = {row[1] for row in actions}
        return [*runs, *((name, 0) for name, _ in self.phases if name.split(".")[0] not in kinds)]

    def zeros(self, rank: int) -> Values:
        return {each["input"]: np.zeros(each["shape"], dtype_of(each["dtype"])) for each in self.sums[rank]}

    def starts(self) -> list[Values]:
        """What each rank holds of states as the files store them; its accumulators at zero."""
        stored = [[program.stored for program in ranks] for ranks in zip(*self.programs.values())]
        return [
            {name: each[name] for each in stored[rank] for name in self._inputs(rank) if name in each}
            | self.zeros(rank) for rank in self.ranks
        ]  # fmt: skip

    def _inputs(self, rank: int) -> list[str]:
        return [state["input"] for state in self.held[rank]]

    def feeds(self, rank: int, states: Mapping[str, Array]) -> Values:
        """What a rank reads of its states, from whole tensors; its accumulators at zero."""
        types = {name: type for ranks in self.programs.values() for name, type in ranks[rank].types.items()}
        fed = self.zeros(rank)
        for state in self.held[rank]:
            parts = [elements(states[p["tensor"]], p) for p in state["pieces"]]
            type = types[state["input"]]
            dtype = helper.tensor_dtype_to_np_dtype(type.elem_type)
            shape = [each.dim_value for each in type.shape.dim]
            fed[state["input"]] = np.concatenate([*parts, np.zeros(0, dtype)]).astype(dtype).reshape(shape)
        return fed

    def whole(self, values: Sequence[Values]) -> Values:
        """All tensors, from their pieces; pieces that several ranks hold must be equal."""
        found: dict[str, tuple[Array, Array]] = {}
        shapes = {each["tensor"]: (each["shape"], dtype_of(each["dtype"])) for each in self.manifest["states"]}
        for listed, mine in zip(self.held, values, strict=True):
            for state in listed:
                if state.get("copy"):
                    continue
                flat, at = np.asarray(mine[state["input"]]).reshape(-1), 0
                for piece in state["pieces"]:
                    name = piece["tensor"]
                    shape, dtype = shapes[name]
                    value, seen = found.setdefault(name, (np.zeros(shape, dtype), np.zeros(shape, bool)))
                    numbers = elements(np.arange(value.size).reshape(shape), piece)
                    part, at = flat[at : at + len(numbers)], at + len(numbers)
                    assert part.dtype == dtype, (state["input"], part.dtype, dtype)
                    old, was = value.reshape(-1)[numbers], seen.reshape(-1)[numbers]
                    same = (old == part) | (old != old) & (part != part)
                    assert state.get("local") or (same | ~was).all(), f"{name}: ranks hold different values"
                    value.reshape(-1)[numbers[~was]] = part[~was]
                    seen.reshape(-1)[numbers] = True
                assert at == flat.size, f"{state['input']}: {flat.size} elements, pieces have {at}"
        missing = [name for name, (_, seen) in found.items() if not seen.all()]
        assert not missing and set(found) == set(shapes), f"no rank holds all of {missing or set(shapes) - set(found)}"
        return {name: value for name, (value, _) in found.items()}

    def dealt(self, batches: Sequence[Sequence[Values]], hyper: Values) -> list[list[Values]]:
        """By micro-step and rank, from ``batches`` by micro-step and part of the samples."""
        return [[{**turn[self.sees[rank]], **hyper} for rank in self.ranks] for turn in batches]

    def _part(self, rank: int, batch: Values) -> Values:
        """What a rank is fed of a whole batch."""
        boxes = {each["input"]: each["box"] for each in self.records[rank].get("fed", [])}
        return {name: boxed(each, boxes[name]) if name in boxes else each for name, each in batch.items()}

    def step(self, held: Sequence[Values], settings: Sequence[Sequence[Values]]) -> None:
        """All ranks through one step; ``held``, what each has of states, follows.

        ``settings``: by micro-step and rank, what else a rank is fed, of inputs that are divided the whole.
        """
        mail: Mail = defaultdict(list)
        """What was sent and not yet received."""
        steps = {rank: self._step(rank, held[rank], [turn[rank] for turn in settings]) for rank in self.ranks}
        for rank, done in run_together(steps, partial(self._answers, mail)).items():
            self.last[rank].update(done)
        assert not any(mail.values()), "a value that was sent is never received"

    def _step(self, rank: int, held: Values, settings: Sequence[Values]) -> Run:
        """The files of a rank one after the other; returns what they last gave."""
        saved: dict[int, Values] = defaultdict(dict)
        """By micro-step, what an earlier file left for a later one."""
        outputs: dict[tuple[str, int], Values] = {}
        names = [each["name"] for each in self.records[rank].get("saved", [])]
        for phase, turn in self.runs[rank]:
            program = self.programs[phase][rank]
            feeds = {**held, **self._part(rank, settings[turn % len(settings)]), **saved[turn]}
            outputs[phase, turn] = done = yield from program.run(
                {k: v for k, v in feeds.items() if k in program.inputs}
            )
            saved[turn].update((each, done[each]) for each in names if each in done)
            for each in (*self.held[rank], *self.sums[rank]):
                if each["output"] in done:
                    held[each["input"]] = done[each["output"]]
        return {name: value for run in self.plain if run in outputs for name, value in outputs[run].items()}

    def _answers(self, mail: Mail, waiting: Mapping[int, Call]) -> Answers:
        """Messages that are sent or received, or else a call that all members of its group wait for."""
        if moved := self._moved(waiting, mail):
            return moved
        ready = next(filter(None, (self._ready(rank, waiting) for rank in sorted(waiting))), None)
        return {} if ready is None else dict(zip(ready, perform([waiting[rank] for rank in ready]), strict=True))

    def _moved(self, waiting: Mapping[int, Call], mail: Mail) -> Answers:
        """The ranks that send a value, or receive one that was sent, each with what it gets."""
        moved: dict[int, list[Array]] = {}
        for rank, (node, given) in waiting.items():
            about = attributes(node)
            if node.op_type == "Send":
                assert about["peer"] in members(self.axes, about["group"], rank)
                mail[rank, about["peer"], about["tag"], about["group"]].append([np.array(each) for each in given])
                moved[rank] = []
            elif node.op_type == "Recv" and mail[about["peer"], rank, about["tag"], about["group"]]:
                values = mail[about["peer"], rank, about["tag"], about["group"]].pop(0)
                assert [each.shape for each in values] == [shape_of(text) for text in about["shapes"]]
                assert all(each.dtype == dtype_of(about["dtype"]) for each in values)
                moved[rank] = values
        return moved

    def _ready(self, rank: int, waiting: Mapping[int, Call]) -> tuple[int, ...] | None:
        node = waiting[rank][0]
        group = attributes(node)["group"]
        if node.op_type in ("Send", "Recv"):
            return None
        together = members(self.axes, group, rank)
        same = all(
            other in waiting
            and waiting[other][0].op_type == node.op_type
            and attributes(waiting[other][0])["group"] == group
            for other in together
        )
        return together if same else None


def boxed(whole: Array, box: Sequence[Sequence[int]]) -> Array:
    """The part of an array in a box: of each dimension one range or several, ``[start, stop, start, stop, …]``."""
    for dim, ends in enumerate(box):
        places = [place for start, stop in zip(ends[::2], ends[1::2]) for place in range(start, stop)]
        whole = whole.take(places, dim)
    return whole


def elements(whole: Array, piece: Mapping[str, Any]) -> Array:
    """The elements of a piece, flat."""
    part = boxed(whole, piece["box"]) if "box" in piece else whole
    return part.reshape(-1)[piece["start"] : piece["stop"]]


def drawn(model: ModelProto) -> Values:
    """A value for every input: the stored one, small positive numbers, ids of 0 and 1."""
    stored = {each.name: numpy_helper.to_array(each) for each in model.graph.initializer}
    generator, found = np.random.default_rng(3), {}
    for each in model.graph.input:
        type = each.type.tensor_type
        dtype, shape = helper.tensor_dtype_to_np_dtype(type.elem_type), [size.dim_value for size in type.shape.dim]
        wide = generator.uniform(0.01, 0.5, shape) if dtype.kind in "fV" else generator.integers(0, 2, shape)
        found[each.name] = stored.get(each.name, np.asarray(wide).astype(dtype)).reshape(shape)
    return found


def perform(calls: Sequence[tuple[NodeProto, Sequence[Any]]]) -> list[list[Array]]:
    """One collective for all members of its group, in order: what each gets."""
    said, given, n = [attributes(node) for node, _ in calls], [inputs for _, inputs in calls], len(calls)
    kind, about = calls[0][0].op_type, said[0]
    own = kind in ("Broadcast", "AllToAll", "AllGather")
    assert own or all(other == about for other in said), said
    if kind in ("AllReduce", "Reduce", "ReduceScatter"):
        shapes = [[each.shape for each in arrays] for arrays in given]
        assert all(each == shapes[0] for each in shapes), shapes
        whole = [combined(arrays, about.get("reduce", "sum")) for arrays in zip(*given, strict=True)]
        if kind == "AllReduce":
            return [list(whole) for _ in given]
        if kind == "Reduce":
            return [whole if place == about["root"] else [np.full_like(x, -9) for x in whole] for place in range(n)]
        if "axis" in about:
            assert whole[0].shape[about["axis"]] == sum(about["sizes"])
            return [[part] for part in np.split(whole[0], np.cumsum(about["sizes"])[:-1], about["axis"])]
        flat, cuts = np.concatenate([each.reshape(-1) for each in whole]), about["cuts"]
        assert cuts[0] == 0 and cuts[-1] == flat.size and len(cuts) == n + 1
        return [[part] for part in np.split(flat, cuts[1:-1])]
    if kind == "Broadcast":
        return [list(given[about["root"]]) for _ in given]
    if kind == "AllToAll":
        ends = np.cumsum([each["split_sizes"] for each in said], 1)[:, :-1]
        apart = [np.split(x, cut, each["split_axis"]) for (x,), cut, each in zip(given, ends, said)]
        return [[np.concatenate([parts[place] for parts in apart], about["concat_axis"])] for place in range(n)]
    assert kind == "AllGather", kind
    if "axis" in about:
        assert [each[0].shape[about["axis"]] for each in given] == list(about["sizes"])
        return [[np.concatenate([each[0] for each in given], about["axis"])]] * n
    assert [each[0].size for each in given] == np.diff(about["cuts"]).tolist()
    return [cut_up(np.concatenate([each[0] for each in given]), about["shapes"])] * n


def cut_up(flat: Array, shapes: Sequence[str]) -> list[Array]:
    """Elements as tensors, behind one another."""
    sizes = [int(np.prod(shape_of(text), dtype=int)) for text in shapes]
    assert sum(sizes) == flat.size, f"{flat.size} elements travel, {sum(sizes)} are expected"
    parts = np.split(flat, np.cumsum(sizes)[:-1])
    return [part.reshape(shape_of(text)) for part, text in zip(parts, shapes, strict=True)]


def combined(arrays: Sequence[Array], how: str) -> Array:
    """Halves are summed in float32 and rounded once."""
    wide = [each.astype(np.float32) if each.dtype in HALVES else each for each in arrays]
    with np.errstate(all="ignore"):
        if how in ("sum", "mean"):
            total = sum(wide[1:], wide[0])
            total = total / np.asarray(len(wide), total.dtype) if how == "mean" else total
        else:
            total = np.max(wide, 0) if how == "max" else np.min(wide, 0)
    return np.asarray(total).astype(arrays[0].dtype)
