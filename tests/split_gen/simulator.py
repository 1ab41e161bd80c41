"""Trainers and servers of a folder in lockstep, after the manifest alone. Nothing of gopt is imported here."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from onnx import NodeProto, helper
from rank_files import Answers, Array, Call, Program, Run, Values, attributes, dtype_of, has_halves, run_together
from rank_simulator import combined

from split_gen.merging import Fault, cut, merged, same
from split_gen.tables import TableRows, dealt, joined, places


@dataclass
class Simulation:
    """A folder that runs. ``server`` and ``trainer``: what each holds of states, by the name of the input.

    ``pushed`` and ``pulled``: elements and types of a trainer's messages in the last round, for tests of traffic.
    """

    folder: Path
    given: Values = field(default_factory=dict)
    """Start values that the folder does not have."""
    stored: bool = True
    """Whether values of files count; if not, all are given."""
    server: list[Values] = field(default_factory=list)
    trainer: list[Values] = field(default_factory=list)
    rounds: int = 0
    pushed: list[tuple[str, int]] = field(default_factory=list)
    pulled: list[tuple[str, int]] = field(default_factory=list)
    losses: list[list[Array]] = field(default_factory=list)
    outputs: list[Values] = field(default_factory=list)
    """What each trainer's files last gave."""

    def __post_init__(self) -> None:
        self.manifest: dict[str, Any] = json.loads((self.folder / "manifest.json").read_text())
        about = self.manifest["parameter_server"]
        self.keys: list[dict[str, Any]] = about["keys"]
        self.buckets: dict[int, list[dict[str, Any]]] = {}
        for key in self.keys:
            self.buckets.setdefault(key["bucket"], []).append(key)
        ranks = sorted(self.manifest["ranks"], key=lambda each: each["rank"])
        self.trainers = [each for each in ranks if each["role"] == "trainer"]
        self.servers = [each for each in ranks if each["role"] == "server"]
        if len(self.servers) != about["servers"]:
            raise Fault("the manifest lists other servers than it counts")
        self.phases = [(p["name"], p["times"]) for p in self.manifest.get("phases") or [{"name": "step", "times": 1}]]
        halves = has_halves(self.folder)
        opened = cache(lambda file: Program(self.folder / file, halves))
        self.programs = {(each["rank"], phase): opened(file) for each in ranks for phase, file in each["files"].items()}
        """By rank and phase; ranks share what they have alike."""
        self.tables: list[dict[str, Any]] = about.get("tables") or []
        self.rows = TableRows(self.tables, self.servers)
        self._types = {each["tensor"]: each for each in self.manifest["states"]}
        self.server = [self._start(record) for record in self.servers]
        self.trainer = [self._start_trainer(record) for record in self.trainers]

    # --- states -----------------------------------------------------------------------------------------------------

    def _held(self, record: Mapping[str, Any]) -> list[dict[str, Any]]:
        return [*self.manifest["common"]["state"], *record["state"]]

    def _start(self, record: Mapping[str, Any]) -> Values:
        return {each["input"]: self._value(self.programs[record["rank"], "step"], each) for each in self._held(record)}

    def _value(self, program: Program, state: Mapping[str, Any]) -> Array:
        """The start value of a state: the file's, or pieces of what is given."""
        if self.stored and state["input"] in program.stored:
            return program.stored[state["input"]]
        info = next(each for each in program.model.graph.input if each.name == state["input"])
        shape = [each.dim_value for each in info.type.tensor_type.shape.dim]
        shapes = {each["tensor"]: each["shape"] for each in self.manifest["states"]}
        parts = [
            self.given[piece["tensor"]].reshape(-1)[places(piece, shapes[piece["tensor"]])] for piece in state["pieces"]
        ]  # fmt: skip
        return np.concatenate(parts).reshape(shape)

    def _start_trainer(self, record: Mapping[str, Any]) -> Values:
        programs = [self.programs[record["rank"], phase] for phase in record["files"]]
        found: Values = {}
        whole = self._on_servers()
        for each in self._held(record):
            if each.get("copy"):
                (piece,) = each["pieces"]
                value = self.travelled(piece["tensor"], whole[piece["tensor"]])
                infos = [info for program in programs for info in program.model.graph.input]
                info = next((info for info in infos if info.name == each["input"]), None)
                kept = helper.tensor_dtype_to_np_dtype(info.type.tensor_type.elem_type) if info else value.dtype
                found[each["input"]] = value.astype(kept)
            else:
                program = next(each_one for each_one in programs if each["input"] in each_one.inputs)
                found[each["input"]] = self._value(program, each)
        for each in record.get("accumulators") or ():
            found[each["input"]] = np.zeros(each["shape"], dtype_of(each["dtype"]))
        return found

    def _on_servers(self) -> Values:
        """Whole tensors of servers' pieces. Faults where pieces overlap unequally or leave something out."""
        parts: dict[str, list[tuple[int, int, Array]]] = {}
        dealt_out: dict[str, list[tuple[Mapping[str, Any], Array]]] = {}
        for record, values in zip(self.servers, self.server, strict=True):
            for each in self._held(record):
                flat, start = values[each["input"]].reshape(-1), 0
                for piece in each["pieces"]:
                    size = piece["stop"] - piece["start"]
                    own = flat[start : start + size]
                    if dealt(piece):
                        dealt_out.setdefault(piece["tensor"], []).append((piece, own))
                    else:
                        parts.setdefault(piece["tensor"], []).append((piece["start"], piece["stop"], own))
                    start += size
                if start != flat.size:
                    raise Fault(f"{each['input']} has {flat.size} elements, its pieces {start}")
        found = {name: self._joined(name, each) for name, each in parts.items()}
        return found | {name: joined(name, self._types[name]["shape"], each) for name, each in dealt_out.items()}

    def _joined(self, name: str, found: list[tuple[int, int, Array]]) -> Array:
        about = self._types[name]
        unlike = {(start, stop) for start, stop, _ in found}
        one: dict[tuple[int, int], Array] = {}
        for start, stop, part in found:
            if (start, stop) in one and not same(one[start, stop], part):
                raise Fault(f"{name} [{start}:{stop}] differs from server to server")
            one[start, stop] = part
        if len(found) not in (len(unlike), len(unlike) * len(self.servers)):
            raise Fault(f"{name} is held {len(found)} times in {len(unlike)} pieces")
        place = 0
        for start, stop in sorted(one):
            if start != place:
                raise Fault(f"pieces of {name} omit or repeat elements at {min(start, place)}")
            place = stop
        if place != int(np.prod(about["shape"], dtype=int)):
            raise Fault(f"pieces of {name} end at {place}")
        joined = np.concatenate([one[piece] for piece in sorted(one)])
        return joined.astype(dtype_of(about["dtype"])).reshape(about["shape"])

    def states(self, trainer: int = 0) -> Values:
        """Every state of the source: servers' pieces joined, and what a trainer has of its own."""
        found = self._on_servers()
        for each in self._held(self.trainers[trainer]):
            (piece,) = each["pieces"]
            if each.get("copy"):
                continue
            if piece["tensor"] in found:
                raise Fault(f"{piece['tensor']} is on servers and on trainers, not as a copy")
            found[piece["tensor"]] = self.trainer[trainer][each["input"]].reshape(self._types[piece["tensor"]]["shape"])
        if set(found) != set(self._types):
            raise Fault(f"nobody holds {sorted(set(self._types) - set(found))[:3]}")
        return found

    def copies(self, trainer: int) -> Values:
        """What a trainer holds of what servers hold."""
        return {
            each["pieces"][0]["tensor"]: self.trainer[trainer][each["input"]]
            for each in self._held(self.trainers[trainer]) if each.get("copy")
        }  # fmt: skip

    def travelled(self, tensor: str, value: Array) -> Array:
        """A value as a trainer has it that pulled it."""
        with np.errstate(all="ignore"):
            return value.astype(self.wire_of(tensor)).astype(value.dtype)

    def wire_of(self, tensor: str) -> np.dtype[Any]:
        """The type in which a tensor is pulled."""
        named = {key["name"] for key in self.keys for piece in key["pieces"] if piece["tensor"] == tensor}
        named |= {key["name"] for key in self.keys if tensor in key["inputs"]}
        for program in self.programs.values():
            for node in program.messages:
                if node.op_type == "Pull" and named.intersection(attributes(node)["keys"]):
                    return dtype_of(attributes(node)["dtype"])
        raise Fault(f"nobody pulls {tensor}")

    # --- a round ----------------------------------------------------------------------------------------------------

    def round(self, batches: Sequence[Sequence[Values]], hyper: Values) -> None:
        """One step of all. ``batches``: by trainer and micro-step; ``hyper``: what all are fed."""
        self.rounds += 1
        self._hyper = hyper
        self._read: set[tuple[int, int]] = set()
        self._inbox: dict[tuple[int, int], dict[int, tuple[float, list[Array]]]] = {}
        self._done: list[Values] = []
        self.rows = TableRows(self.tables, self.servers)
        self.pushed, self.pulled = [], []
        self.losses = [[] for _ in self.trainers]
        self.outputs = [{} for _ in self.trainers]
        for phase, times in self.phases:
            for turn in range(times):
                self._phase(phase, [mine[turn] for mine in batches])
        if not self._done:
            self._run_servers()
        for number, record in enumerate(self.servers):
            for each in self._held(record):
                self.server[number][each["input"]] = self._done[number][each["output"]]

    def _phase(self, phase: str, turns: Sequence[Values]) -> None:
        runs = {}
        for number, record in enumerate(self.trainers):
            runs[number] = self._run(record, phase, {**self._hyper, **turns[number], **self.trainer[number]})
        for number, outputs in run_together(runs, self._of_trainers).items():
            self._ended(number, outputs)

    def _run(self, record: Mapping[str, Any], phase: str, fed: Values) -> Run:
        program = self.programs[record["rank"], phase]
        feeds = {**fed, "gopt.round": np.asarray(self.rounds, np.int64)}
        return program.run({name: feeds[name] for name in program.inputs if name in feeds})

    def _of_trainers(self, waiting: Mapping[int, Call]) -> Answers:
        """The answers to all messages that need nothing which servers have not computed, or else to all."""
        late = {number for number, (node, _) in waiting.items() if attributes(node).get("version") == "after"}
        if late == waiting.keys() and not self._done:
            self._run_servers()
        return {
            number: self._answer(number, *call) for number, call in waiting.items() if self._done or number not in late
        }

    def _answer(self, number: int, node: NodeProto, operands: Sequence[Array | None]) -> list[Array]:
        if operands[0] is None or operands[0].shape != () or int(operands[0]) != self.rounds:
            raise Fault(f"{node.op_type} has no round")
        rule = {"Push": self._push, "Pull": self._pull, "PullRows": self._of_rows, "PushRows": self._of_rows}
        if node.op_type not in rule:
            raise Fault(f"a trainer calls {node.op_type}")
        return rule[node.op_type](number, node, operands)

    def _ended(self, number: int, outputs: Values) -> None:
        record = self.trainers[number]
        self.outputs[number].update(outputs)
        if self.manifest["loss"] in outputs:
            self.losses[number].append(outputs[self.manifest["loss"]])
        for each in (*self._held(record), *(record.get("accumulators") or ())):
            if each["output"] in outputs:
                self.trainer[number][each["input"]] = outputs[each["output"]]

    def _push(self, number: int, node: NodeProto, operands: Sequence[Array | None]) -> list[Array]:
        about = attributes(node)
        place = self._address(about)
        slot = self._inbox.setdefault(place, {})
        if number in slot or self._done:
            raise Fault(f"trainer {number} pushes bucket {place} twice, or too late")
        weight = 1.0 if operands[1] is None else float(np.asarray(operands[1], np.float32))
        values = [each for each in operands[2:] if each is not None]
        slot[number] = weight, [each.reshape(-1) for each in values]
        if not number:
            self.pushed += [(str(each.dtype), each.size) for each in values]
        return [operands[0]]  # type: ignore[list-item]

    def _of_rows(self, number: int, node: NodeProto, operands: Sequence[Array | None]) -> list[Array]:
        about = attributes(node)
        if self._done:
            raise Fault(f"trainer {number}: {node.op_type} behind the update")
        if node.op_type == "PullRows":
            assert operands[1] is not None
            return self.rows.pull(about, self._on_servers(), operands[1], dtype_of(about["dtype"]))
        weight = 1.0 if operands[1] is None else float(np.asarray(operands[1], np.float32))
        assert operands[0] is not None and operands[2] is not None and operands[3] is not None
        self.rows.push(about, number, weight, operands[2], operands[3])
        return [operands[0]]

    def _address(self, about: Mapping[str, Any]) -> tuple[int, int]:
        """Server and bucket of a message, checked against the manifest."""
        keys = self.buckets.get(about["bucket"])
        if keys is None or [key["name"] for key in keys] != about["keys"]:
            raise Fault(f"bucket {about['bucket']} has other keys in the manifest than {about['keys']}")
        for key in keys:
            if key["server"] is not None and key["server"] != about["server"]:
                raise Fault(f"key {key['name']} is on server {key['server']}, its message goes to {about['server']}")
        return about["server"], about["bucket"]

    def _pull(self, number: int, node: NodeProto, operands: Sequence[Array | None]) -> list[Array]:
        about = attributes(node)
        server, bucket = self._address(about)
        found = []
        for key in self.buckets[bucket]:
            if about["version"] == "before":
                found.append(self.server[server][key["inputs"][0]])
            else:
                found.append(self._done[server][key["outputs"][0]])
        dtype = dtype_of(about["dtype"])
        with np.errstate(all="ignore"):
            flat = np.concatenate([each.reshape(-1).astype(dtype) for each in found])
        parts = cut(flat, about["shapes"], f"bucket {bucket}")
        if not number:
            self.pulled += [(str(each.dtype), each.size) for each in parts]
        return parts

    def _run_servers(self) -> None:
        """Every server's whole round, with the reductions among them."""
        runs = {
            number: self._run(record, "step", {**self._hyper, **self.server[number]})
            for number, record in enumerate(self.servers)
        }
        done = run_together(runs, self._of_servers)
        unread = set(self._inbox) - self._read
        if unread:
            raise Fault(f"nobody merges buckets {sorted(unread)}")
        self._done = [done[number] for number in range(len(self.servers))]

    def _of_servers(self, waiting: Mapping[int, Call]) -> Answers:
        """What servers merge, or else a reduction among them."""
        found = {}
        for number, (node, _) in waiting.items():
            if node.op_type == "AggregateRows":
                about = attributes(node)
                found[number] = self.rows.merge(about, number, len(self.trainers), dtype_of(about["dtype"]))
            elif node.op_type == "Aggregate":
                found[number] = self._aggregate(number, node)
        if found:
            return found
        nodes = [node for node, _ in waiting.values()]
        kinds = {(node.op_type, attributes(node).get("reduce", "sum"), len(node.input)) for node in nodes}
        if len(waiting) != len(self.servers) or len(kinds) != 1 or nodes[0].op_type != "AllReduce":
            raise Fault(f"servers are stuck at {sorted(kinds)}")
        (_, reduce, _), = kinds  # fmt: skip
        columns = zip(*(waiting[number][1] for number in sorted(waiting)), strict=True)
        answer = [combined(list(arrays), reduce) for arrays in columns]  # type: ignore[arg-type]
        return dict.fromkeys(waiting, answer)

    def _aggregate(self, server: int, node: NodeProto) -> list[Array]:
        about = attributes(node)
        self._read.add((server, about["bucket"]))
        slot = self._inbox.get((server, about["bucket"]), {})
        if sorted(slot) != list(range(len(self.trainers))):
            raise Fault(f"server {server} merges bucket {about['bucket']} of trainers {sorted(slot)}")
        given = [(weight, np.concatenate(values)) for weight, values in (slot[each] for each in sorted(slot))]
        flat = merged(given, about["reduce"], dtype_of(about["dtype"]))
        return cut(flat, about["shapes"], f"bucket {about['bucket']}")
