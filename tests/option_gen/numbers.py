"""The values of ranks as they compute them, in float64, beside the numbers of the expressions that the proof has.

The ranks of a drawn setting, or trainers and servers."""

from __future__ import annotations

import random
import traceback
import warnings
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from draws import Verdict
from gopt.cli.main import main
from rank_files import Array, Call, Values, has_halves
from rank_simulator import World
from split_gen.simulator import Simulation

import gopt
from gopt.errors import GoptError, InputError, OptionError, UnsupportedError
from gopt.ir.graph import COMM, Graph, Node
from gopt.ir.types import TensorType, numpy_dtype
from gopt.verification.proof.evaluation import ExpressionValues, Member, Unevaluable, computed
from gopt.verification.proof.expected import MICRO
from gopt.verification.proof.folder import folder_relation
from gopt.verification.proof.forms import STATE, Expression
from gopt.verification.proof.prove import Prover
from gopt.verification.proof.rank_sweep import SweptValues
from gopt.verification.proof.samples import SampledLeaves
from option_gen.life import split_words
from option_gen.make import Setting

NEAR = 1e-3
"""Of the largest element: constants such as 1 - 0.999 are stored in float32, and the proof takes what is meant."""
NEAR_OF_HALVES = 1e-2
"""An element beside a step of a half may be rounded to the other side."""
SUMMING = ("AllReduce", "Reduce", "ReduceScatter")
"""Calls in float64: terms in float32 that cancel one another leave their digits in a sum of nothing."""
LEAST = 10
"""Values that are compared, at least."""


@dataclass(frozen=True, slots=True)
class Ranks:
    """A setting, or its step with the words of ``gopt split``; ``seed``: of states, 2 of large ones."""

    setting: Setting
    split: tuple[str, ...] = ()
    seed: int = 1

    @classmethod
    def draw(cls, seed: int, step: str | None = None) -> Ranks:
        """Ranks of a seed. RAdam's rectification loses the digits of stored constants."""
        setting, r = Setting.draw(seed, step), random.Random(f"numbers {seed}")
        if "radam" in setting.step:
            return cls.draw(seed + 1_000_003)
        return cls(setting, split_words(r) if r.random() < 0.25 else (), r.choice((1, 2)))

    def told(self) -> str:
        """As a command line."""
        return " ".join([f"{self.setting.step}.onnx", *self.split]) if self.split else self.setting.told()

    def write(self, folder: Path) -> None:
        step = self.setting.file(folder.parent)
        if not self.split:
            gopt.shard(step, self.setting.mesh, prove=False, **self.setting.options(folder.parent)).write(folder)
        elif main(["split", str(step), *self.split, "-o", str(folder), "--quiet"]):
            raise UnsupportedError("gopt split refuses")


def judge(ranks: Ranks, folder: Path) -> Verdict:
    """``right``; ``refused``; ``few`` values to compare; ``WRONG`` and ``CRASH`` are faults."""
    try:
        ranks.write(folder / "ranks")
        programs = run_in_float64(folder / "ranks", ranks.seed)
    except (InputError, OptionError, UnsupportedError) as error:
        return Verdict("refused", str(error))
    except Exception:
        return Verdict("CRASH", traceback.format_exc(limit=-3))
    differences = [each for program in programs for each in program.differences]
    if differences:
        return Verdict("WRONG", "; ".join(differences[:4]))
    return Verdict("right" if sum(program.compared for program in programs) > LEAST else "few")


@dataclass
class WideProgram:
    """A file of a rank, node by node in float64. The values of its first micro-step are compared."""

    rank: int
    graph: Graph
    numbers: SweptValues
    expressions: ExpressionValues
    coordinates: Mapping[str, int]
    near: float = NEAR
    compared: int = 0
    differences: list[str] = field(default_factory=list)
    turns: int = 0

    @property
    def inputs(self) -> list[str]:
        return list(self.graph.inputs)

    def run(self, feeds: Mapping[str, Array]) -> Generator[Call, list[Array], Values]:
        """Yields every call with its operands, in their declared types where nothing is summed; see
        ``rank_files.Program``."""
        graph, self.turns = self.graph, self.turns + 1
        values = {name: _wide(value) for name, value in feeds.items()}
        values |= {name: self._meant(name) for name in graph.initializers if name not in feeds}
        for node in graph.nodes:
            if node.domain == COMM:
                wide = node.op_type in SUMMING
                operands = [
                    (values[name] if wide else _typed(values[name], graph.types[name])) if name else None
                    for name in node.inputs
                ]
                results = yield node.to_proto(), operands
            else:
                read = [values[name] for name in (*node.inputs, *node.captures) if name]
                results = [self._computed(node, index, read) for index in range(len(node.outputs))]
            for name, value in zip(node.outputs, results):
                values[name] = _wide(np.asarray(value))
                self._compare(name, values[name], node.op_type)
        return {name: values[name] for name in graph.outputs}

    def _computed(self, node: Node, index: int, read: Sequence[Array]) -> Array:
        """A result; ones of random nodes, which no expression has numbers of."""
        try:
            return computed(self.graph, node, index, read) if node.outputs[index] else np.ones(())
        except (Unevaluable, GoptError, KeyError):  # as in ExpressionValues
            type = self.graph.type_of(node.outputs[index])
            return np.ones(type.dims if type.static else ())

    def _meant(self, name: str) -> Array:
        stored, meant = np.asarray(self.graph.initializers[name].numpy()), self._due(name)
        return _wide(stored if meant is None else _fitted(meant, stored.shape), stored.dtype)

    def _due(self, name: str) -> Array | None:
        number = self.numbers.get(name)
        try:
            return None if number is None else self.expressions.values([number], self.coordinates)[0]
        except Unevaluable:
            return None

    def _compare(self, name: str, value: Array, made_by: str) -> None:
        due = self._due(name) if self.turns == 1 else None
        if due is not None:
            self.compared += 1
            if not (due.size in (1, value.size) and self._near(value, _fitted(due, value.shape))):
                self.differences.append(f"{name!r} of rank {self.rank}, by {made_by}")

    def _near(self, value: Array, due: Array) -> bool:
        if value.dtype.kind != "f":
            return np.array_equal(value, due)
        largest = np.abs(value[np.isfinite(value)]).max(initial=1e-4)
        return np.allclose(value, due, rtol=0, atol=self.near * largest, equal_nan=True)


def run_in_float64(folder: Path, seed: int) -> list[WideProgram]:
    """All files of all ranks behind a step, from drawn states and batches."""
    prover = Prover(folder_relation(folder))
    prover.run()
    relation, mesh = prover.relation, prover.mesh
    leaves = SampledLeaves(prover.training, mesh, prover.constants, seed)
    leaf = partial(_of_first_micro_step, leaves)
    expressions = ExpressionValues(prover.expressions, leaf, prover.constants.origins)
    near = NEAR_OF_HALVES if has_halves(folder) else NEAR
    programs, coordinates = {}, [mesh.coordinates(rank) for rank in range(mesh.ranks)]
    for rank, values in zip(relation.ranks, prover.ranks):
        server = rank.rank >= mesh.ranks
        where = {} if server else mesh.coordinates(rank.rank)
        for phase, numbers in zip((phase for phase in relation.schedule if phase in rank.graphs), values.files):
            program = WideProgram(rank.rank, rank.graphs[phase], numbers, expressions, where, near)
            programs[rank.rank, "step" if server else phase] = program
    states = {state.tensor: leaves.state(state.tensor) for state in prover.training.states}
    batches = [[leaves.batch({**where, MICRO: turn}) for turn in range(relation.accumulate)] for where in coordinates]
    with warnings.catch_warnings(action="ignore"):
        if relation.plan is None:
            world = World(folder)
            world.runs = [world.plain for _ in world.ranks]  # the first micro-step is the first to run
            held = [world.feeds(rank, states) for rank in world.ranks]
            world.programs = {phase: [programs[rank, phase] for rank in world.ranks] for phase in relation.schedule}
            world.step(held, [[batch | leaves.settings for batch in turn] for turn in zip(*batches)])
        else:
            simulation = Simulation(folder, states, stored=False)
            simulation.programs, simulation.rounds = programs, seed - 1
            simulation.round(batches, leaves.settings)
    return list(programs.values())


def _of_first_micro_step(leaves: SampledLeaves, expression: Expression, coordinates: Member) -> Array | None:
    """A leaf; later micro-steps read a statistic as the earlier ones left it, which no sample has."""
    if expression.op == STATE and coordinates.get(MICRO):
        raise Unevaluable("a statistic that micro-steps move")
    return leaves.leaf(expression, coordinates)


def _wide(value: Array, dtype: np.dtype[Any] | None = None) -> Array:
    """A float in float64, another value in its type."""
    dtype = dtype or value.dtype
    return value.astype(dtype if dtype.kind in "iub" else np.float64)


def _typed(value: Array, type: TensorType) -> Array:
    return np.asarray(value).astype(numpy_dtype(type.dtype))


def _fitted(value: Array, dims: tuple[int, ...]) -> Array:
    return value.reshape(dims) if value.size == np.prod(dims) else np.broadcast_to(value, dims)
