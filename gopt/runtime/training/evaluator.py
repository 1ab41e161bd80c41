"""Evaluates the states of a running job on held-out data, by a model of the forward.

Each rank evaluates one part of the batches. The values of all batches are added in order, so the result is the same on
any number of ranks."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from gopt.analysis.training import StateKind
from gopt.artifact.manifest import Manifest
from gopt.artifact.manifest_entries import InputKind
from gopt.errors import InputError, OptionError
from gopt.ir.graph import Graph
from gopt.ir.load import load
from gopt.ir.types import TensorType
from gopt.runtime.execution_plan import plan_execution
from gopt.runtime.executor import Executor
from gopt.runtime.training.array_source import ArraySource, Batch, MicroStep, SampleOrder, taken
from gopt.runtime.training.batch_stream import array, named
from gopt.runtime.training.batch_types import samples_in
from gopt.runtime.training.data import batch_function, open_data
from gopt.runtime.training.evaluation import BestRule, Evaluation, EvaluationPlan, KeptChoice
from gopt.runtime.training.fitted_arrays import closed, fitted
from gopt.runtime.training.gathered_states import gathered_states
from gopt.runtime.training.loaded_rank import LoadedRank
from gopt.runtime.training.sample_files import on_disk
from gopt.text.sanitize import clean_line, listed, show

MOST_BATCHES = 10_000_000
"""Of a function: one that yields more has no end."""


@dataclass(slots=True)
class Evaluator:
    """Evaluates the states of one rank's job."""

    plan: EvaluationPlan
    rank: LoadedRank
    types: dict[str, TensorType]
    """The inputs of the batch, at the size of a batch."""
    open: frozenset[str]
    """Inputs that take any number of samples."""
    states: frozenset[str]
    metrics: tuple[str, ...]
    choice: KeptChoice | None
    _executor: Executor
    _source: ArraySource | Callable[[int, int], Iterable[Any]]

    @classmethod
    def of(cls, plan: EvaluationPlan, rank: LoadedRank, samples: int) -> Evaluator:
        """``samples``: of a batch, where the model leaves the number open. The model runs on the rank's device. Raises
        InputError for a model or data that does not fit, OptionError for a metric that the model does not compute."""
        graph, manifest = load(plan.model), rank.manifest
        states = fed_states(graph, manifest, str(plan.model))
        metrics = _metrics(graph, str(plan.model))
        graph.outputs = {name: graph.outputs[name] for name in metrics}
        free = [name for name in graph.inputs if name not in states and name not in graph.initializers]
        setting = next((entry.name for entry in manifest.inputs_of(InputKind.HYPER) if entry.name in free), None)
        if setting is not None:
            raise InputError(
                f"{plan.model} reads {show(setting)}, as a step of training does",
                "evaluate the forward alone: gopt export --eval and gopt merge --inference write it",
            )
        fed, axis = {name: graph.inputs[name] for name in free}, manifest.samples_axis
        types, open_ = _batch_types(fed, samples, axis, str(plan.model))
        choice = None if plan.best is None else KeptChoice(_direction(plan.best, metrics), plan.patience)
        executor = Executor(plan_execution(graph, device=rank.device), rank.device.sessions())
        source = _source(plan.data, types, axis)
        return cls(plan, rank, types, open_, states, metrics, choice, executor, source)

    def due(self, step: int, last: bool) -> bool:
        """Return whether states are evaluated after a step; ``last``: the job ends with it."""
        return last or bool(self.plan.every and step % self.plan.every == 0)

    def evaluate(self, step: int) -> Evaluation:
        """Evaluate the rank's states behind a step; every rank calls this method and gets the same result. Raises
        InputError for data that does not fit."""
        begin = time.perf_counter()
        rank, engine, device = self.rank, self.rank.engine, self.rank.device
        fed = self._executor.hold(gathered_states(rank.manifest, engine, rank.held, rank.to_host, self.states))
        mine = []
        for number, samples, batch in self._batches(engine.rank, rank.mesh.ranks):
            outputs = self._executor.run({**batch, **fed})
            mine.append((number, samples, [float(device.to_host(outputs[name]).reshape(())) for name in self.metrics]))
        results = sorted(itertools.chain.from_iterable(engine.gather(mine)))
        total = sum(samples for _, samples, _ in results)
        if not total:
            raise InputError(f"--eval-data {self._name} has no samples", "give held-out samples")
        sums = np.zeros(len(self.metrics))
        for _, samples, values in results:
            sums += samples * np.asarray(values)
        values = dict(zip(self.metrics, (sums / total).tolist()))
        found_one = Evaluation(values, total, time.perf_counter() - begin)
        return found_one if self.choice is None else self.choice.judged(found_one, step)

    @property
    def _name(self) -> str:
        return show(self.plan.data) if isinstance(self.plan.data, str) else "of Python"

    def _batches(self, part: int, parts: int) -> Iterator[tuple[int, int, Batch]]:
        """The batches of one part, each with the position among all batches and the number of samples."""
        source = self._source
        if isinstance(source, ArraySource):
            yield from self._stored(source, part, parts)
            return
        for turn, samples in enumerate(source(part, parts)):
            if turn >= MOST_BATCHES:
                raise InputError(f"--eval-data {self._name} does not end", "let it yield each held-out batch once")
            arrays = {name: array(value) for name, value in named(samples, turn, [*self.types]).items()}
            batch = {name: fitted(name, self._fitting(name, arrays.get(name)), arrays.get(name)) for name in self.types}
            yield turn * parts + part, self._samples(batch), batch

    def _stored(self, source: ArraySource, part: int, parts: int) -> Iterator[tuple[int, int, Batch]]:
        counts = source.held
        whole = 1 if counts is None else counts.count // counts.size
        for number in range(part, whole, parts):
            batch = source.batch(MicroStep(number, 0, 1))
            yield number, self._samples(batch), batch
        rest = 0 if counts is None else counts.count % counts.size
        if rest and counts is not None and whole % parts == part and self._takes_rest(source):
            rows = np.arange(counts.count - rest, counts.count)
            batch = {
                name: np.ascontiguousarray(values[rows]) if values.shape != self.types[name].dims
                else np.asarray(values)
                for name, values in source.arrays.items()
            }  # fmt: skip
            yield whole, rest, batch

    def _takes_rest(self, source: ArraySource) -> bool:
        """Return whether the model takes a last batch of fewer samples."""
        moving = [name for name, values in source.arrays.items() if values.shape != self.types[name].dims]
        if self.rank.manifest.samples_axis:
            return False
        return all(name in self.open and taken(self.types[name].dims, source.arrays[name].shape) > 1 for name in moving)

    @property
    def left_out(self) -> int:
        """Samples at the end of the data that make no whole batch and that the model does not take."""
        counts = self._source.held if isinstance(self._source, ArraySource) else None
        if counts is None or not isinstance(self._source, ArraySource) or self._takes_rest(self._source):
            return 0
        return counts.count % counts.size

    def _fitting(self, name: str, value: Any) -> TensorType:
        """The type of an input at the number of samples of a value."""
        type, shape = self.types[name], np.shape(value)
        return TensorType(type.dtype, shape) if name in self.open and shape else type

    def _samples(self, batch: Batch) -> int:
        return samples_in(self.rank.manifest, {name: value.shape for name, value in batch.items()})


def fed_states(graph: Graph, manifest: Manifest, path: str) -> frozenset[str]:
    """The states read by a model, as inputs of its graph. Raises InputError for states that do not fit, and for
    constants of the model that would stay as they are while the job goes on."""
    states = {state.tensor: state for state in manifest.states}
    names = [name for name in (*graph.initializers, *graph.inputs) if name in states]
    for name in names:
        type = graph.inputs.get(name) or graph.initializers[name].type
        if type != states[name].type:
            raise InputError(
                f"{path}: {show(name)} is {type}, the step's is {states[name].type}",
                "export both of one module: gopt export --eval",
            )
        graph.inputs[name] = type
        graph.initializers.pop(name, None)
    if not names:
        raise InputError(
            f"{path} reads no state of the step: its results would never change",
            "let its parameters have the step's names, as gopt export --eval writes them",
        )
    constants = [name for name in graph.inputs if name in graph.initializers]
    if constants:
        raise InputError(
            f"{path}: the input {show(constants[0])} has a value, and is no state of the step",
            "export both of one module: gopt export --eval",
        )
    _refuse_frozen(graph, manifest, frozenset(names), path)
    return frozenset(names)


def _refuse_frozen(graph: Graph, manifest: Manifest, fed: frozenset[str], path: str) -> None:
    """Raise InputError where a constant of the model may be a parameter of the step under another name."""
    constants: dict[int, str] = {}
    for name, tensor in graph.initializers.items():
        if tensor.type.dtype.startswith(("float", "bfloat")) and tensor.type.elements > 1:
            constants.setdefault(tensor.type.elements, name)
    for state in manifest.states:
        if state.kind is StateKind.PARAMETER and state.tensor not in fed and state.type.elements in constants:
            raise InputError(
                f"{path} has no {show(state.tensor)}, a parameter of the step, and a constant of as many elements, "
                f"{show(constants[state.type.elements])}, which would stay as it is",
                "give the parameter its name in the step, as gopt export --eval does",
            )


def _metrics(graph: Graph, path: str) -> tuple[str, ...]:
    metrics = tuple(name for name, type in graph.outputs.items() if type.static and type.elements == 1)
    if not metrics:
        raise InputError(
            f"{path} has no output of one number to evaluate", "let it compute the loss: gopt export --eval"
        )
    return metrics


def _direction(rule: BestRule, metrics: tuple[str, ...]) -> BestRule:
    if rule.metric not in metrics:
        choices = listed([*map(clean_line, metrics)], 6)
        raise OptionError(
            f"--keep-best {clean_line(rule.metric)}: the evaluation computes {choices}", "name one of them"
        )
    if rule.mode is None and rule.metric != metrics[0]:
        raise OptionError(
            f"--keep-best {clean_line(rule.metric)} does not say whether low or high values are better",
            f"write --keep-best {clean_line(rule.metric)}:max, or {clean_line(rule.metric)}:min",
        )
    return replace(rule, mode=rule.mode or "min")


def _batch_types(
    inputs: Mapping[str, TensorType], samples: int, axis: int, path: str
) -> tuple[dict[str, TensorType], frozenset[str]]:
    shapes = {name: type.shape or () for name, type in inputs.items()}
    symbols = {size: samples for shape in shapes.values() for size in shape[axis : axis + 1] if isinstance(size, str)}
    types = {}
    for name, shape in shapes.items():
        sizes = (samples if size is None and dim == axis else size for dim, size in enumerate(shape))
        types[name] = type = closed(TensorType(inputs[name].dtype, tuple(sizes)), symbols)
        if not type.static or inputs[name].shape is None:
            raise InputError(
                f"{path}: the input {show(name)} has the open shape {inputs[name]}",
                f"leave its dimension {axis} open alone",
            )
    if not types:
        raise InputError(f"{path} has no input for held-out data", "let it read a batch: gopt export --eval")
    return types, frozenset(name for name, type in inputs.items() if not type.static)


def _source(
    data: str | Iterable[Any], types: Mapping[str, TensorType], axis: int
) -> ArraySource | Callable[[int, int], Any]:
    if isinstance(data, str) and on_disk(data):
        source = open_data(data, types, SampleOrder(axis=axis))
        assert isinstance(source, ArraySource)
        if lost := [name for name in types if name not in source.types]:
            raise InputError(f"--eval-data {show(data)} has no {show(lost[0])}", "give held-out samples of each input")
        return source
    if isinstance(data, str):
        return batch_function(data)
    if iter(data) is data:
        raise OptionError(
            "the data of the evaluation is a generator, which ends after one", "give a list or a data loader"
        )
    return lambda part, parts: itertools.islice(iter(data), part, None, parts)
