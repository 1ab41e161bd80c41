"""Splits without rounds: an order of pulls and pushes, run by the trainers' file and gopt's own keys of servers.

The reference shares no code with gopt and knows one rule: a push changes the states of one parameter, as the source's
update does with this one gradient, and with the counters as they are after as many advances as the rule gives.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from onnx import NodeProto
from rank_files import Answers, Array, Call, Program, Values, attributes, dtype_of, has_halves, run_together
from steps_gen.graphs import reads

from gopt.artifact.manifest_check import read_manifest
from gopt.ir.load import load
from gopt.parameter_server.blocks import find_blocks
from gopt.runtime.device import Host
from gopt.runtime.parameter_server.key_state import KeyState
from gopt.runtime.session import SessionCache
from gopt.runtime.training.hyper_parameters import HyperParameter
from gopt.runtime.training.schedules import RateSchedule
from gopt.runtime.tuning.tuning import tuning_of
from split_gen.merging import Fault, cut
from split_gen.reference import Reference
from split_gen.tables import places

Event = tuple[str, int]
"""``pull`` or ``push``, and a trainer."""


def rate_at(advances: int) -> float:
    """The hyper-parameter of a round."""
    return 0.1 / (1 + advances)


def drawn_order(seed: int, trainers: int, pushes: int) -> list[Event]:
    """An order in which trainers pull and push; trainer 0 is the fastest."""
    r, busy, found = random.Random(seed), set[int](), list[Event]()
    while sum(kind == "push" for kind, _ in found) < pushes:
        trainer = min(r.randrange(trainers), r.randrange(trainers))
        found.append(("push" if trainer in busy else "pull", trainer))
        busy ^= {trainer}
    return found


@dataclass
class Served:
    """A folder without rounds: the keys of its servers, and one trainer's file that all trainers run."""

    folder: Path
    given: Values
    own: list[Values] = field(default_factory=list)
    """Local states of each trainer."""

    def __post_init__(self) -> None:
        self.manifest: dict[str, Any] = json.loads((self.folder / "manifest.json").read_text())
        self.types = {each["tensor"]: each for each in self.manifest["states"]}
        about = self.manifest["parameter_server"]
        ranks = sorted(self.manifest["ranks"], key=lambda each: each["rank"])
        self.trainers = [each for each in ranks if each["role"] == "trainer"]
        self.program = Program(self.folder / "trainer.onnx", has_halves(self.folder))
        self.buckets: dict[int, list[dict[str, Any]]] = {}
        self.keys: dict[int, KeyState] = {}
        record, _ = read_manifest(self.folder)
        plan = record.parameter_server
        assert plan is not None
        for key in about["keys"]:
            self.buckets.setdefault(key["bucket"], []).append(key)
        self.number = {id(key): number for number, key in enumerate(about["keys"])}
        self.held: list[dict[str, Any]] = []
        hyper = [each for each in self.manifest["common"]["inputs"] if each["kind"] == "hyper"]
        for number, each in enumerate(each for each in ranks if each["role"] == "server"):
            held = [*self.manifest["common"]["state"], *each["state"]]
            self.held.append(held)
            graph = load(self.folder / each["files"]["step"], own=True)
            states = {state["input"]: state["output"] for state in held}
            values = {state["input"]: self._start(state, graph.inputs[state["input"]].dims) for state in held}
            fed = [(h["name"], np.empty(h["shape"], dtype_of(h["dtype"]))) for h in hyper]
            rates = [HyperParameter(name, RateSchedule(rate_at), array) for name, array in fed]
            for block in find_blocks(graph, plan, number, states, [h["name"] for h in hyper]):
                self.keys[block.key] = KeyState(block, values, plan.count, rates, Host(tuning_of(True)), SessionCache())
        self.own = [
            {state["input"]: self.given[state["pieces"][0]["tensor"]] for state in self._held(each)
             if not state.get("copy")} for each in self.trainers
        ]  # fmt: skip
        self.rounds = [0] * len(self.trainers)

    def _held(self, record: Mapping[str, Any]) -> list[dict[str, Any]]:
        return [*self.manifest["common"]["state"], *record["state"]]

    def _start(self, state: Mapping[str, Any], shape: Sequence[int]) -> Array:
        parts = [self.given[p["tensor"]].reshape(-1)[places(p, self.types[p["tensor"]]["shape"])]
                 for p in state["pieces"]]  # fmt: skip
        return np.concatenate(parts).reshape(shape)

    def pull(self, trainer: int) -> dict[int, Array]:
        """All values of the servers, by key."""
        return {number: np.array(key.pull(trainer)) for number, key in self.keys.items()}

    def push(self, trainer: int, pulled: Mapping[int, Array], batch: Values, hyper: Values) -> None:
        """A trainer's step on what it pulled; its gradients are applied."""
        self.rounds[trainer] += 1
        feeds = {**hyper, **batch, **self.own[trainer], "gopt.round": np.asarray(self.rounds[trainer], np.int64)}
        run = self.program.run({name: feeds[name] for name in self.program.inputs if name in feeds})

        def answers(waiting: Mapping[int, Call]) -> Answers:
            node, operands = waiting[trainer]
            if node.op_type not in ("Push", "Pull"):
                raise Fault(f"a trainer calls {node.op_type}")
            pull = node.op_type == "Pull"
            return {trainer: self.pulled(node, pulled.__getitem__) if pull else self.pushed(trainer, node, operands)}

        outputs = run_together({trainer: run}, answers)[trainer]
        for each in self._held(self.trainers[trainer]):
            if each["output"] in outputs and not each.get("copy"):
                self.own[trainer][each["input"]] = outputs[each["output"]]

    def _numbers(self, about: Mapping[str, Any]) -> list[int]:
        """The keys of a message."""
        keys = self.buckets[about["bucket"]]
        if [key["name"] for key in keys] != about["keys"]:
            raise Fault(f"bucket {about['bucket']} has other keys in the manifest")
        return [self.number[id(key)] for key in keys]

    def pushed(self, trainer: int, node: NodeProto, operands: Sequence[Array | None]) -> list[Array]:
        """Give the servers what a trainer pushes."""
        flat = np.concatenate([each.reshape(-1) for each in operands[2:] if each is not None])
        for number in self._numbers(attributes(node)):
            state = self.keys[number]
            size = int(np.prod(state.type.dims, dtype=int))
            state.push(trainer, flat[:size].copy(), len(self.trainers))
            flat = flat[size:]
        return [operands[0]]  # type: ignore[list-item]

    def pulled(self, node: NodeProto, value: Callable[[int], Array]) -> list[Array]:
        """What a pull gets; ``value``: of a key."""
        about = attributes(node)
        found = [value(each).reshape(-1).astype(dtype_of(about["dtype"])) for each in self._numbers(about)]
        return cut(np.concatenate(found), about["shapes"], "a pull")

    def states(self) -> Values:
        """Every state that follows a gradient, put together from the keys."""
        found: Values = {}
        seen: dict[str, Array] = {}
        for key in self.keys.values():
            for held in self.held:
                for state in held:
                    if state["input"] not in key.states:
                        continue
                    flat, start = key.states[state["input"]].reshape(-1), 0
                    for piece in state["pieces"]:
                        about = self.types[piece["tensor"]]
                        size = piece["stop"] - piece["start"]
                        whole = found.setdefault(piece["tensor"], np.zeros(about["shape"], flat.dtype)).reshape(-1)
                        times = seen.setdefault(piece["tensor"], np.zeros(whole.size, int))
                        at = places(piece, about["shape"])
                        whole[at], times[at] = flat[start : start + size], times[at] + 1
                        start += size
        for name, times in seen.items():
            if (times != 1).any():
                raise Fault(f"keys leave or repeat elements of {name}")
        return found


@dataclass
class Serial:
    """What an order of pulls and pushes must give: the source's update, one push after the other."""

    source: Reference
    kinds: Mapping[str, Mapping[str, Any]]
    """The manifest's states."""
    rule: str = "round"
    strength: float | None = None
    factor: float = 1.0
    """By how much pushed gradients are larger than those of the loss."""

    def __post_init__(self) -> None:
        s = self.source
        self.parameters = list(s.roles["params"])
        self.counters = self._counters()
        self.held: dict[str, Values] = {}
        """Parameter -> its states and its copies of all counters."""
        for name in self.parameters:
            own = [each for each in s.shared if each == name or self.kinds[each].get("of") == name]
            own = [each for each in own if each not in self.counters]
            self.held[name] = {each: s.states[each] for each in (*own, *self.counters)}
        self.pushes = {name: [0, 0] for name in self.parameters}
        """Advances of the counters, and pushes since the last one."""
        self.backup = [{name: s.states[name] for name in self.parameters} for _ in range(s.trainers)]

    def _counters(self) -> list[str]:
        graph, updated = self.source.model.graph, self.source.roles["states"]
        reached = set(self.source.roles["params"].values())
        while True:
            before = len(reached)
            for node in graph.node:
                if reached & reads(node):
                    reached.update(node.output)
            reached |= {name for name, new in updated.items() if new in reached}
            if len(reached) == before:
                return [name for name in self.source.shared if name not in reached]

    def pull(self, trainer: int) -> Values:
        self.backup[trainer] = {name: self.held[name][name] for name in self.parameters}
        return self.backup[trainer]

    def push(self, trainer: int, pulled: Values, batch: Values, hyper: Values) -> None:
        s = self.source
        everything = {name: value for held in self.held.values() for name, value in held.items()}
        feeds = {**s.stored, **s.fixed, **hyper, **everything, **pulled, **s.local[trainer], **batch}
        found = {**feeds, **s.first.run(feeds)}
        for name in s.own:
            s.local[trainer][name] = found[s.roles["states"][name]]
        for name in self.parameters:
            held, gradient = self.held[name], s.roles["params"][name]
            g = found[gradient]
            if self.strength is not None:
                away = (held[name] - self.backup[trainer][name]).reshape(g.shape)
                g = np.asarray(g + np.asarray(self.strength, g.dtype) * away * g * g / np.asarray(self.factor, g.dtype))
            rates = {each: np.full_like(value, rate_at(self.pushes[name][0])) for each, value in hyper.items()}
            rest = {other: found[other] for other in s.cuts}
            fed = {**s.stored, **s.fixed, **rates, **everything, **held, **rest, gradient: g}
            made = {**fed, **s.second.run(fed)}
            for state in held:
                if state not in self.counters:
                    held[state] = made[s.roles["states"][state]]
            advances, due = self.pushes[name]
            due += 1
            if {"push": True, "round": due >= s.trainers, "chief": trainer == 0}[self.rule]:
                for state in self.counters:
                    held[state] = made[s.roles["states"][state]]
                advances, due = advances + 1, 0
            self.pushes[name] = [advances, due]

    def states(self) -> Values:
        return {name: value for held in self.held.values() for name, value in held.items()
                if name not in self.counters}  # fmt: skip


def compared(served: Served, serial: Serial, order: Sequence[Event], batches: Iterator[Values], hyper: Values) -> (
    Iterator[tuple[int, Values, Values, Values]]
):  # fmt: skip
    """After each push: its number, the states of the folder, those that must be, and those that must have been."""
    mine: dict[int, Any] = {}
    theirs: dict[int, Any] = {}
    for number, (kind, trainer) in enumerate(order):
        if kind == "pull":
            mine[trainer], theirs[trainer] = served.pull(trainer), serial.pull(trainer)
            continue
        batch, before = next(batches), serial.states()
        served.push(trainer, mine[trainer], batch, hyper)
        serial.push(trainer, theirs[trainer], batch, hyper)
        yield number, served.states(), serial.states(), before
