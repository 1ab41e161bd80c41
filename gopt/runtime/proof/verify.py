"""Prove the ranks equal to their source: run both, on a different batch per rank, and compare every state and loss.

The reference is the source cut at its gradients: each rank's batch gives local gradients, their mean goes through the
source's own update. The cut itself is confirmed by value: a gradient must be proportional to a finite difference of
the loss.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gopt.analysis.coupling.synchronise import Shared
from gopt.analysis.loss_reduction import LossReduction
from gopt.analysis.roles import recover
from gopt.analysis.take_over import take_over
from gopt.analysis.training import Training
from gopt.errors import InputError, UnsupportedError
from gopt.given import check_folder
from gopt.graph.load import load
from gopt.graph.model import COMM
from gopt.graph.types import numpy_dtype
from gopt.mesh import DATA_AXES, Mesh
from gopt.runtime.engines.threads import run_ranks
from gopt.runtime.program import Program
from gopt.runtime.proof import draws
from gopt.runtime.proof.compare import Difference, Ledger, Values, Verification, distance, ratio, tolerance_of
from gopt.runtime.proof.confirm import confirm_gradients
from gopt.runtime.proof.expected import Expected
from gopt.runtime.proof.ranks import joined, read_rank
from gopt.runtime.proof.reference import PROBE
from gopt.runtime.proof.variants import ASLEEP, AWAKE, INFINITE, PLAIN, Variant, Varied, has_finite_check
from gopt.runtime.session import SessionCache
from gopt.sources.collectives import DECLARED, parse_groups, recognise
from gopt.sources.expand import expand

Transport = Callable[[Sequence[Any], Sequence[Values], Mesh], list[Values]]


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
        if self.training.random:
            names = ", ".join(node.label for node in self.training.random)
            raise UnsupportedError(f"random nodes without a fixed seed cannot be compared: {names}")
        if len(self.manifest["ranks"]) != self.mesh.ranks:
            raise InputError(f"{self.folder} holds {len(self.manifest['ranks'])} of {self.mesh.ranks} ranks")
        cache = SessionCache()
        reduction = LossReduction.parse(self.manifest.get("loss_reduction", "mean"))
        shared = Shared.from_json(self.manifest.get("synchronised", {"values": [], "constants": []}))
        self.expected = Expected(self.training, self.mesh, cache, reduction, shared)
        common = self.manifest["common"]["state"]
        self.ranks = [
            read_rank(self.folder, record, common, self.phases, self.expected.gradients, cache)
            for record in self.manifest["ranks"]
        ]
        stored = self._joined("input", [rank.values for rank in self.ranks])
        types = self.training.graph.types
        self.stored = {name: flat.reshape(types[name].dims) for name, flat in stored.items()}
        self.which = self._data_ranks()
        self.kinds = {state.tensor: state.kind for state in self.training.states}

    def _joined(self, key: str, values: Sequence[Values]) -> Values:
        return joined(self.ranks, key, values, self.training.graph.types)

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
            result.gradients = confirm_gradients(self.training, feeds, seed, self.expected.call)
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
            name: np.full(types[name].dims, given[name], numpy_dtype(types[name].dtype))
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
        held = [each.feeds(start) for each in self.ranks]
        for step in range(1, steps + 1):
            batches = [
                [draws.draw_batch(self.training, generator, bounds) for _ in range(max(self.which) + 1)]
                for _ in range(max(self.phases.values()))
            ]
            wanted, losses = self.expected.step(variant, wanted, settings, batches)
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
                start, held = wanted, [each.feeds(wanted) for each in self.ranks]

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
                varied = [self._varied(variant, number, program) for number, program in enumerate(programs)]
                for r, output in enumerate(self.transport(varied, feeds, self.mesh)):
                    self.ranks[r].carry(held[r], output)
                    made[r].update(output)
                    if loss in output:
                        value, wanted = np.asarray(output[loss], np.float64), losses[turn][self.which[r]]
                        ledger.whole(r, loss, "loss", value, wanted, np.zeros_like(value))
        return made

    def _varied(self, variant: Variant, rank: int, program: Program) -> Varied:
        last = self.which[rank] == max(self.which)
        return Varied(program, variant, self.expected.gradients, self.expected.marked if last else "")

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


def _read_manifest(folder: Path) -> dict[str, Any]:
    check_folder(folder)
    path = folder / "manifest.json"
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
