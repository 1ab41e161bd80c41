"""Prove the ranks equal to their source: run both, on a different batch per rank, and compare every state and loss.

The reference is the source cut at its gradients: each rank's batch gives local gradients, their mean goes through the
source's own update. The cut itself is confirmed by value: a gradient must be proportional to a finite difference of
the loss.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gopt.analysis.roles import recover
from gopt.analysis.take_over import take_over
from gopt.analysis.through import over_data
from gopt.analysis.training import Kind, Phase, Training
from gopt.errors import InputError, UnsupportedError
from gopt.graph.load import load
from gopt.graph.model import COMM, Graph, Node
from gopt.graph.types import FLOATS, TensorType
from gopt.mesh import DATA_AXES, Mesh
from gopt.runtime import draws
from gopt.runtime.compare import Difference, Ledger, Verification, distance, ratio, tolerance_of
from gopt.runtime.confirm import confirm_gradients
from gopt.runtime.program import CallBack, Program
from gopt.runtime.reference import PROBE, equal_members, local_graph, probed, update_graph
from gopt.runtime.session import SessionCache
from gopt.runtime.threads import run_ranks
from gopt.sources.collectives import DECLARED, parse_groups, recognise
from gopt.sources.expand import expand

Values = dict[str, np.ndarray]
Transport = Callable[[Sequence[Any], Sequence[Values], Mesh], list[Values]]


@dataclass(frozen=True, slots=True)
class Variant:
    """One repetition: local gradients are multiplied by ``scale``; ``infinite`` puts one infinity on the last rank."""

    name: str
    scale: float = 1.0
    infinite: bool = False


PLAIN = Variant("gradients as they are")
ASLEEP = Variant("gradients × 1/64", scale=1 / 64)
AWAKE = Variant("gradients × 64", scale=64.0)
INFINITE = Variant("one infinite gradient", infinite=True)


@dataclass(slots=True)
class Rank:
    """One rank's programs by phase, which of its inputs hold which pieces, and its accumulators."""

    programs: dict[str, Program]
    states: list[dict[str, Any]]
    sums: list[dict[str, Any]]
    values: Values
    """Stored values by input name; what is large is mapped, not read."""

    def type_of(self, input: str) -> TensorType:
        """The type of a state as the rank's files have it."""
        return next(p.graph.inputs[input] for p in self.programs.values() if input in p.graph.inputs)

    def carry(self, held: Values, outputs: Values) -> None:
        """Put what a phase made of states and accumulators in their place."""
        for each in (*self.states, *self.sums):
            if each["output"] in outputs:
                held[each["input"]] = np.asarray(outputs[each["output"]])


class Verifier:
    """The source and the ranks of one output folder, ready to run."""

    def __init__(self, folder: str | os.PathLike[str], model: str | os.PathLike[str] | None = None) -> None:
        self.transport: Transport = run_ranks
        """What runs one phase of all ranks: threads, unless somebody puts another engine in."""
        self.folder = Path(folder)
        self.manifest = _read_manifest(self.folder)
        self.mesh = Mesh(tuple((name, size) for name, size in self.manifest["mesh"]["axes"]))
        listed = self.manifest.get("phases", [{"name": "step", "times": 1}])
        self.phases = {each["name"]: each["times"] for each in listed}
        self.training = _training(self.folder, model, self.mesh)
        self.call = equal_members(self.mesh)
        if self.training.random:
            names = ", ".join(node.label for node in self.training.random)
            raise UnsupportedError(f"random nodes without a fixed seed cannot be compared: {names}")
        if len(self.manifest["ranks"]) != self.mesh.ranks:
            raise InputError(f"{self.folder} holds {len(self.manifest['ranks'])} of {self.mesh.ranks} ranks")
        cache = SessionCache()
        self.local = Program(local_graph(self.training), cache)
        self.update = Program(update_graph(self.training), cache)
        self.local_names = set(self.training.gradients.values())
        self.ranks = [self._rank(record, cache) for record in self.manifest["ranks"]]
        stored = self._joined("input", [rank.values for rank in self.ranks])
        types = self.training.graph.types
        self.stored = {name: flat.reshape(types[name].dims) for name, flat in stored.items()}
        self.which = self._data_ranks()
        self.kinds = {state.tensor: state.kind for state in self.training.states}

    def _rank(self, record: Mapping[str, Any], cache: SessionCache) -> Rank:
        states = [*self.manifest["common"]["state"], *record["state"]]
        graphs, stored = {}, {}
        for phase in self.phases:
            path = self.folder / record["files"].get(phase, "")
            if not path.is_file():
                raise InputError(f"rank {record['rank']} has no file {path}")
            graph = load(path, own=True)
            stored.update({name: t.numpy() for name, t in graph.initializers.items() if name in graph.inputs})
            graphs[phase] = graph
        for state in states:
            held = sum(piece["stop"] - piece["start"] for piece in state["pieces"])
            types = [graph.inputs[state["input"]] for graph in graphs.values() if state["input"] in graph.inputs]
            made = any(state["output"] in graph.outputs for graph in graphs.values())
            if not types or any(type.elements != held for type in types) or not made:
                raise InputError(f"rank {record['rank']}: its files and the manifest disagree on {state['input']!r}")
        programs = {phase: Program(probed(graph, self.local_names), cache) for phase, graph in graphs.items()}
        return Rank(programs, states, record.get("accumulators", []), stored)

    def _joined(self, key: str, values: Sequence[Values]) -> Values:
        """Tensors put together from what every rank holds: ``values`` by rank, named as ``key`` of a state names them.

        Flat arrays; a tensor of which an element is missing is left out, and so are narrow copies.
        """
        types = self.training.graph.types
        parts: dict[str, dict[int, np.ndarray]] = {}
        for rank, held in zip(self.ranks, values):
            for state in rank.states:
                if state[key] not in held or state.get("copy"):
                    continue
                flat, place = np.asarray(held[state[key]]).reshape(-1), 0
                for piece in state["pieces"]:
                    length = piece["stop"] - piece["start"]
                    parts.setdefault(piece["tensor"], {})[piece["start"]] = flat[place : place + length]
                    place += length
        whole = {name: np.concatenate([held[start] for start in sorted(held)]) for name, held in parts.items()}
        return {name: flat for name, flat in whole.items() if flat.size == types[name].elements}

    def run(
        self,
        *,
        steps: int = 3,
        seed: int = 0,
        hyper: Mapping[str, float] | None = None,
        variants: Sequence[Variant] | None = None,
        tamper: Callable[[int, Values], None] | None = None,
        confirm: bool = True,
        advance: Callable[[str], None] = lambda _: None,
    ) -> Verification:
        """Run ``steps`` steps of every variant and compare. ``tamper`` may change a rank's feeds: for tests."""
        result = Verification(self._tolerance(), steps, self.mesh.ranks)
        result.notes.append("states with no stored value were drawn from the seed") if self._drawn() else None
        start = self._start(seed)
        settings = self._hyper(hyper or {})
        for variant in self._variants() if variants is None else variants:
            advance(variant.name)
            self._compare(result, variant, steps, seed, start, settings, tamper)
        if confirm:
            advance("confirming gradients by finite differences")
            generator, bounds = np.random.default_rng(seed), draws.index_bounds(self.training)
            batches = [draws.draw_batch(self.training, generator, bounds) for _ in range(2)]
            feeds = [{**start, **settings, **batch} for batch in batches]
            result.gradients = confirm_gradients(self.training, feeds, seed, self.call)
        return result

    def groups(self) -> list[str]:
        """Every group over which some rank makes a call."""
        graphs = [program.graph for rank in self.ranks for program in rank.programs.values()]
        nodes = [node for graph in graphs for node in graph.nodes if node.domain == COMM and node.op_type != PROBE]
        return sorted({str(node.attributes["group"]) for node in nodes})

    def _tolerance(self) -> float:
        """By the narrowest type that takes part, in the source or on the wire."""
        graphs = [program.graph for program in self.ranks[0].programs.values()]
        return max(tolerance_of(graph) for graph in (self.training.graph, *graphs))

    def _drawn(self) -> bool:
        return any(state.tensor not in self.stored for state in self.training.states)

    def _variants(self) -> Iterable[Variant]:
        yield PLAIN
        if self.mesh.ranks > 1:
            yield ASLEEP
            yield AWAKE
            if has_finite_check(self.training):
                yield INFINITE

    def _start(self, seed: int) -> Values:
        generator = np.random.default_rng(seed + 1)
        values = {}
        for state in self.training.states:
            drawn = draws.initial_state(self.training, state, generator)
            values[state.tensor] = np.array(self.stored.get(state.tensor, drawn))
        return values

    def _hyper(self, given: Mapping[str, float]) -> Values:
        types = self.training.graph.types
        unknown = set(given) - set(self.training.hyper)
        if unknown:
            raise InputError(f"{sorted(unknown)[0]!r} is no hyper-parameter of the model")
        return {
            name: np.full(types[name].dims, given[name], draws.numpy_dtype(types[name].dtype))
            if name in given
            else draws.hyper(types[name])
            for name in self.training.hyper
        }

    def _data_ranks(self) -> list[int]:
        """For every rank, which batch it sees: ranks that differ along data axes alone see different ones."""
        seen: dict[tuple[int, ...], int] = {}
        return [
            seen.setdefault(tuple(v for k, v in self.mesh.coordinates(rank).items() if k in DATA_AXES), len(seen))
            for rank in range(self.mesh.ranks)
        ]

    def _compare(
        self, result: Verification, variant: Variant, steps: int, seed: int, start: Values, settings: Values,
        tamper: Callable[[int, Values], None] | None,
    ) -> None:  # fmt: skip
        bounds = draws.index_bounds(self.training)
        generator = np.random.default_rng(seed + 2)
        wanted = dict(start)
        held = [self._feeds(each, start) for each in self.ranks]
        for step in range(1, steps + 1):
            batches = [
                [draws.draw_batch(self.training, generator, bounds) for _ in range(max(self.which) + 1)]
                for _ in range(max(self.phases.values()))
            ]
            wanted, losses = self._reference(variant, wanted, settings, batches)
            ledger = Ledger(result, variant.name, step)
            outputs = self._run_phases(variant, held, settings, batches, losses, ledger, tamper)
            copies: list[tuple[int, Mapping[str, Any], np.ndarray]] = []
            for r, rank in enumerate(self.ranks):
                for state in rank.states:
                    value = np.asarray(outputs[r][state["output"]])
                    if state.get("copy"):
                        copies.append((r, state, value))
                    elif not state.get("local"):
                        self._enter(ledger, r, state, value.reshape(-1), wanted, start)
            ledger.close(wanted, start)
            self._check_copies(ledger, copies, outputs)
            if variant is not PLAIN:
                # Blown-up gradients make training chaotic: each step is judged on its own, from equal states.
                start, held = wanted, [self._feeds(each, wanted) for each in self.ranks]

    def _run_phases(
        self, variant: Variant, held: Sequence[Values], settings: Values, batches: Sequence[Sequence[Values]],
        losses: Sequence[Sequence[np.ndarray]], ledger: Ledger, tamper: Callable[[int, Values], None] | None,
    ) -> list[Values]:  # fmt: skip
        """One step of all ranks: every phase as often as it is due; ``held`` follows. Returns what was made last."""
        loss, made = self.training.loss, [Values() for _ in self.ranks]
        for phase, times in self.phases.items():
            for turn in range(times):
                given = [{**held[r], **settings, **batches[turn][self.which[r]]} for r in range(len(self.ranks))]
                programs = [rank.programs[phase] for rank in self.ranks]
                feeds = [
                    {k: v for k, v in values.items() if k in program.graph.inputs}
                    for program, values in zip(programs, given)
                ]
                for number, feed in enumerate(feeds if tamper is not None else ()):
                    tamper(number, feed)  # type: ignore[misc]
                varied = [_Varied(self, variant, number, program) for number, program in enumerate(programs)]
                for r, output in enumerate(self.transport(varied, feeds, self.mesh)):
                    self.ranks[r].carry(held[r], output)
                    made[r].update(output)
                    if loss in output:
                        value, wanted = np.asarray(output[loss], np.float64), losses[turn][self.which[r]]
                        ledger.whole(r, loss, "loss", value, wanted, np.zeros_like(value))
        return made

    def _enter(
        self, ledger: Ledger, rank: int, state: Mapping[str, Any], flat: np.ndarray, wanted: Values, start: Values
    ) -> None:
        """Compare the pieces of one rank's state: a whole tensor at once, a part as a share of its tensor."""
        place = 0
        for piece in state["pieces"]:
            name, low, high = piece["tensor"], piece["start"], piece["stop"]
            value, reference = flat[place : place + high - low], wanted[name].reshape(-1)
            place += high - low
            kind = self.kinds[name].value
            if (low, high) == (0, reference.size):
                ledger.whole(rank, name, kind, value, reference, start[name].reshape(-1))
            else:
                ledger.part(rank, name, kind, distance(value, reference[low:high]))
        if place != flat.size:
            ledger.result.note(Difference(ledger.variant, ledger.step, rank, state["input"], "size", float("inf")))

    def _check_copies(
        self, ledger: Ledger, copies: Sequence[tuple[int, Mapping[str, Any], np.ndarray]], outputs: Sequence[Values]
    ) -> None:
        """A narrow copy must be exactly the cast of the wide state as the ranks now hold it."""
        wide = self._joined("output", outputs) if copies else {}
        for rank, state, value in copies:
            name = state["pieces"][0]["tensor"]
            with np.errstate(over="ignore"):
                wanted = wide[name].astype(value.dtype)
            error = ratio(distance(value.reshape(-1), wanted), 0.0)
            ledger.result.note(Difference(ledger.variant, ledger.step, rank, state["input"], "copy", error))

    def _feeds(self, rank: Rank, start: Values) -> Values:
        feeds = {}
        for state in rank.states:
            parts = [start[p["tensor"]].reshape(-1)[p["start"] : p["stop"]] for p in state["pieces"]]
            value = np.concatenate(parts) if len(parts) != 1 else parts[0].copy()
            type = rank.type_of(state["input"])
            with np.errstate(over="ignore"):
                feeds[state["input"]] = value.astype(draws.numpy_dtype(type.dtype), copy=False).reshape(type.dims)
        for each in rank.sums:
            feeds[each["input"]] = np.zeros(each["shape"], draws.numpy_dtype(each["dtype"]))
        return feeds

    def _reference(
        self, variant: Variant, states: Values, settings: Values, batches: Sequence[Sequence[Values]]
    ) -> tuple[Values, list[list[np.ndarray]]]:
        """One step of the source on the mean gradient of all batches: ``batches`` and losses by micro-step and rank."""
        training = self.training
        statistics = [state for state in training.states if state.kind is Kind.STATISTIC]
        held = [dict(states) for _ in batches[0]]
        local: dict[str, list[np.ndarray]] = {name: [] for name in training.gradients.values()}
        losses = []
        for turn in batches:
            outputs = [self._alone(self.local, {**own, **settings, **batch}) for own, batch in zip(held, turn)]
            losses.append([np.asarray(out[training.loss], np.float64) for out in outputs])
            for r, out in enumerate(outputs):
                held[r].update({state.tensor: np.asarray(out[state.updated]) for state in statistics})
                for name, found in local.items():
                    found.append(self.vary(variant, name, np.asarray(out[name]), r == len(turn) - 1))
        means = {name: _mean(found) for name, found in local.items()}
        updated = self._alone(self.update, {**states, **settings, **means})
        new = {}
        for state in training.states:
            if state.kind is Kind.STATISTIC:
                new[state.tensor] = _mean([own[state.tensor] for own in held])
            else:
                new[state.tensor] = np.asarray(updated[state.updated])
        return new, losses

    def _alone(self, program: Program, values: Values) -> Values:
        """Run the source, as one rank, on those of the values that it reads."""
        return program.run({name: values[name] for name in program.graph.inputs if name in values}, self.call)

    def vary(self, variant: Variant, name: str, value: np.ndarray, last: bool) -> np.ndarray:
        """A local gradient as the variant wants it."""
        with np.errstate(over="ignore"):
            varied = (value.astype(np.float32) * variant.scale).astype(value.dtype) if variant.scale != 1 else value
        if variant.infinite and last and name == next(iter(self.training.gradients.values())):
            varied = varied.copy()
            varied.reshape(-1)[0] = np.inf
        return varied


@dataclass(frozen=True, slots=True)
class _Varied:
    """One rank's program whose local gradients are changed on their way into a call."""

    verifier: Verifier
    variant: Variant
    rank: int
    program: Program

    def run(self, feeds: Values, call: CallBack) -> Values:
        verifier = self.verifier
        last = verifier.which[self.rank] == max(verifier.which)

        def varied(index: int, node: Node, inputs: list[np.ndarray]) -> Any:
            if node.op_type != PROBE and not over_data(node):
                return call(index, node, inputs)
            given = [
                verifier.vary(self.variant, name, value, last) if name in verifier.local_names else value
                for name, value in zip(node.inputs, inputs)
            ]
            return given if node.op_type == PROBE else call(index, node, given)

        return self.program.run(feeds, varied)


def _mean(values: Sequence[np.ndarray]) -> np.ndarray:
    with np.errstate(all="ignore"):
        mean: np.ndarray = np.mean([each.astype(np.float64) for each in values], axis=0).astype(values[0].dtype)
    return mean


def has_finite_check(training: Training) -> bool:
    """Whether an update looks for infinities: a test on gradients whose result gates a state."""
    tests = {"IsInf", "IsNaN"}
    gradient_values = set(training.gradients.values())
    behind = set(gradient_values)
    found = False
    for node, phase in zip(training.graph.nodes, training.phases):
        if phase is not Phase.UPDATE or not any(name in behind for name in node.reads):
            continue
        behind.update(node.outputs)
        infinite = any(_is_infinity(training.graph, name) for name in node.inputs)
        found = found or node.op_type in tests or (node.is_a("Equal", "Less", "Greater", "LessOrEqual") and infinite)
    return found


def _is_infinity(graph: Graph, name: str) -> bool:
    tensor = graph.initializers.get(name)
    if tensor is None or tensor.type.dtype not in FLOATS or tensor.type.elements != 1:
        return False
    return bool(np.isinf(np.asarray(tensor.numpy(), np.float64)).all())


def _read_manifest(folder: Path) -> dict[str, Any]:
    path = folder / "manifest.json"
    if not path.is_file():
        raise InputError(f"{folder} is no output folder of gopt: it has no manifest.json", "make one with gopt shard")
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise InputError(f"cannot read {path}: {error}") from None
    if not isinstance(record, dict) or record.get("format") != "gopt-manifest/1":
        raise InputError(f"{path} is no manifest of this version")
    return record


def _training(folder: Path, model: str | os.PathLike[str] | None, mesh: Mesh) -> Training:
    """The source with the roles that were settled when it was sharded."""
    from gopt.api import roles_from

    kept = load(folder / "source.onnx", own=True)
    roles = roles_from(kept.metadata["gopt.roles"])
    if model is None:
        return recover(expand(kept), roles)
    given = expand(load(model))
    recognise(given, parse_groups(kept.metadata.get(DECLARED, "")))
    return take_over(recover(given, roles), roles, mesh)


def verify(
    folder: str | os.PathLike[str], model: str | os.PathLike[str] | None = None, *, steps: int = 3, seed: int = 0
) -> Verification:
    """Compare the ranks in ``folder`` with their source over ``steps`` steps; ``model`` replaces the kept source.

    Raises InputError for a folder that is incomplete, UnsupportedError for a source with random nodes, RunError when
    a rank fails.
    """
    return Verifier(folder, model).run(steps=steps, seed=seed)
