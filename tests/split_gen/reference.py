"""What a split must compute: the source graph alone, cut at its gradients. Nothing of gopt is imported here."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import NodeProto, numpy_helper
from rank_files import HALVES, Array, Block, Values, has_halves
from steps_gen.graphs import reads

from split_gen.merging import Fault, merged
from split_gen.tables import kept_rows


class Unknown(Exception):
    """There is no one right answer: the update reads a batch past its gradients."""


class Unseen(Exception):
    """The roles name values inside of functions, which a graph does not show."""


@dataclass
class Reference:
    """The source of a folder: per trainer the gradients of its own batch, merged in order, then the update once.

    ``roles``: loss, states (tensor -> new value), params (parameter -> gradient), batch, shared. ``states``: what all
    trainers share, and under ``local`` what each has of its own.
    """

    model: onnx.ModelProto
    roles: dict[str, Any]
    trainers: int
    statistics: Sequence[str] = ()
    reduce: str = "mean"
    weight: str = ""
    micro: int = 1
    wire: Any = None
    halves: bool = False
    states: Values = field(default_factory=dict)
    local: list[Values] = field(default_factory=list)
    losses: list[list[Array]] = field(default_factory=list)
    lazy: dict[str, list[str]] = field(default_factory=dict)
    """Table whose updates run on pushed rows alone -> the tensors with its rows."""
    outputs: Values = field(default_factory=dict)
    """What the update gave of the graph's other outputs."""

    @classmethod
    def of(cls, folder: Path, start: Values, trainers: int, **given: Any) -> Reference:
        """The reference of a split's folder, with the source's own start values."""
        manifest = json.loads((folder / "manifest.json").read_text())
        model = onnx.load(str(folder / "source.onnx"))
        roles = json.loads({each.key: each.value for each in model.metadata_props}["gopt.roles"])
        statistics = [each["tensor"] for each in manifest["states"] if each["kind"] == "statistic"]
        roles = given.pop("roles", roles)
        reduce, _, weight = (manifest.get("loss_reduction") or "mean").partition(":")
        made = cls(model, roles, trainers, statistics, reduce, weight, manifest.get("accumulate") or 1, **given)
        made.halves = has_halves(folder)
        made.lazy = kept_rows(manifest["parameter_server"].get("tables") or (), manifest["states"])
        made.begin(start)
        return made

    def begin(self, start: Values) -> None:
        graph = self.model.graph
        updated: dict[str, str] = self.roles["states"]
        self.cuts = list(dict.fromkeys([*self.roles["params"].values(), *self.roles.get("shared", ())]))
        outputs = [each.name for each in graph.output]
        missing = set(self.cuts) - {name for node in graph.node for name in node.output} - {*start}
        if missing:
            raise Unseen(f"{min(missing)} is in a function")
        by_update = {name for node in self._behind(self.cuts) for name in node.output}
        by_update.update(name for name in updated.values() if name in self.cuts)  # a state that keeps a gradient
        local = [name for name in updated if name in self.statistics or updated[name] not in by_update]
        # What follows from settings and itself alone is the same on every trainer, or on servers.
        self.own = [name for name in local if self._needs_batch([updated[name]], ())]
        shared = [name for name in updated if name not in self.own]
        rest = [name for name in outputs if name in by_update and name not in self.cuts]
        wanted = list(dict.fromkeys([*(updated[name] for name in shared), *rest]))
        self.mixed = self._needs_batch(wanted, self.cuts)
        forward = [self.roles["loss"], *self.cuts, *(updated[name] for name in self.own), *filter(None, [self.weight])]
        forward += [name for name in outputs if name not in by_update]
        self.shared = shared
        self.stored = {each.name: numpy_helper.to_array(each) for each in graph.initializer}
        self.states = {name: start[name] for name in shared}
        self.local = [{name: start[name] for name in self.own} for _ in range(self.trainers)]
        self.fixed = {name: value for name, value in start.items() if name not in updated}
        self.first = Block(self.model, self._part(forward, ()), forward, self.halves)
        self.second = Block(self.model, self._part(wanted, self.cuts), wanted, self.halves)
        self.passed = [name for name in wanted if name not in self.second.kept]

    def step(
        self, batches: Sequence[Sequence[Values]], hyper: Values, touched: Mapping[str, set[int]] | None = None
    ) -> None:
        """One step. ``batches``: by trainer and micro-step; ``touched``: rows that were pushed of tables that are
        updated on these alone. Faults where another row has a gradient."""
        given: dict[str, list[tuple[float, Array]]] = {name: [] for name in self.cuts}
        self.losses = []
        for number in range(self.trainers):
            sums: Values = {}
            weight, losses = 1.0, []
            for batch in batches[number]:
                pulled = {
                    name: self._sent(value) if name in self.roles["params"] else value
                    for name, value in self.states.items()
                }
                feeds = {**self.stored, **self.fixed, **hyper, **pulled, **self.local[number], **batch}
                found = {**feeds, **self.first.run(feeds)}
                losses.append(found[self.roles["loss"]])
                if self.weight:
                    weight = float(np.asarray(found[self.weight], np.float32).reshape(()))
                for name in self.cuts:  # halves are summed over micro-steps in float32 and rounded once
                    wide = self.micro > 1 and found[name].dtype in HALVES
                    term = found[name].astype(np.float32) if wide else found[name]
                    sums[name] = sums[name] + term if name in sums else term + np.zeros_like(term)
                for name in self.own:
                    self.local[number][name] = found[self.roles["states"][name]]
            self.losses.append(losses)
            for name, total in sums.items():
                if self.reduce != "sum" and self.micro > 1:
                    total = total / np.asarray(self.micro, total.dtype)
                given[name].append((weight, self._sent(np.asarray(total, found[name].dtype))))
        merge = {}
        for name, values in given.items():
            merge[name] = merged(values, self.reduce, values[0][1].dtype)
        feeds = {**self.stored, **self.fixed, **hyper, **self.states, **merge}
        if self.mixed:  # joined to what is cut off again behind, or truly read
            feeds.update(batches[0][-1])
        self.outputs = {**feeds, **self.second.run(feeds)}
        if self.mixed:
            other = {name: np.zeros_like(value) for name, value in batches[0][-1].items()}
            again = self.second.run({**feeds, **other})
            if any(again[name].tobytes() != self.outputs[name].tobytes() for name in again):
                raise Unknown("the update reads a batch past its gradients")
        before, self.states = self.states, {name: self.outputs[self.roles["states"][name]] for name in self.shared}
        for table, names in self.lazy.items():
            rows = sorted((touched or {}).get(table, ()))
            gradient = merge[self.roles["params"][table]].reshape(len(before[table]), -1)
            if np.delete(gradient, rows, 0).any():
                raise Fault(f"a row of {table} has a gradient and was not pushed")
            for name in names:
                kept = np.array(before[name])
                kept[rows] = self.states[name][rows]
                self.states[name] = kept

    def all_states(self, trainer: int = 0) -> Values:
        return {**self.states, **self.local[trainer]}

    def _sent(self, value: Array) -> Array:
        if self.wire is None or value.dtype != np.float32:
            return value
        with np.errstate(all="ignore"):
            return value.astype(self.wire).astype(value.dtype)

    # --- parts of the graph -----------------------------------------------------------------------------------------

    def _part(self, wanted: Iterable[str], stops: Iterable[str]) -> list[NodeProto]:
        """The nodes that make ``wanted``, not going behind ``stops``."""
        stops, needed, kept = set(stops), set(wanted), []
        for node in reversed(self.model.graph.node):
            if (needed - stops).intersection(node.output):
                kept.append(node)
                needed |= reads(node)
        return kept[::-1]

    def _needs_batch(self, wanted: Iterable[str], stops: Iterable[str]) -> bool:
        wanted = list(wanted)
        read = {name for node in self._part(wanted, stops) for name in reads(node)} | set(wanted)
        return bool(read.intersection(self.roles["batch"]))

    def _behind(self, cuts: Iterable[str]) -> list[NodeProto]:
        """The nodes that depend on ``cuts``."""
        found, known = [], set(cuts)
        for node in self.model.graph.node:
            if known & reads(node):
                found.append(node)
                known |= set(node.output)
        return found
