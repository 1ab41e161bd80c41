"""A rank in a training loop of the user: ``gopt.torch``."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from os import PathLike, fspath
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.utils.data import Dataset
from torch.utils.data.distributed import DistributedSampler

from gopt.artifact.manifest_entries import InputKind
from gopt.documents.torch_record import TorchRecord
from gopt.errors import GoptError, InputError, OptionError, RunError
from gopt.frontends.pytorch.dcp_pieces import PiecesLoad, PiecesSave, chunks_of, empty_values
from gopt.frontends.pytorch.loop_batches import Batch, fitted_batch, number
from gopt.frontends.pytorch.loop_comparison import InputComparison, due
from gopt.frontends.pytorch.state_file import module_values, training_values
from gopt.ir.load import load as load_graph
from gopt.ir.tensor import Tensor
from gopt.ir.types import TensorType, numpy_dtype
from gopt.offline.folder_contents import read_folder
from gopt.offline.state_values import DCP_FILE, StepValues
from gopt.options.types import hinted
from gopt.runtime.execution_plan import plan_execution
from gopt.runtime.executor import Executor, HeldInput, no_timing
from gopt.runtime.pytorch.device import device_of_rank
from gopt.runtime.pytorch.engine import TorchCalls, TorchEngine, named
from gopt.runtime.pytorch.tensors import tensor_over, torch_dtype
from gopt.runtime.session import Array, first_line
from gopt.runtime.training.checkpoint import Checkpoints, writers
from gopt.runtime.training.draws import DEFAULT_SEED, DrawnInputs
from gopt.runtime.training.evaluator import fed_states
from gopt.runtime.training.gathered_states import gathered_states
from gopt.runtime.training.hyper_parameters import refuse_unknown
from gopt.runtime.training.job import read_manifest
from gopt.runtime.training.loaded_rank import LoadedRank
from gopt.runtime.training.schedules import default_schedule
from gopt.runtime.training.start_values import sync_axes
from gopt.text.sanitize import listed

PathText = str | PathLike[str]
_OWN_PART = "yield the samples of this rank alone from it: torch.utils.data.get_worker_info, rank.number"


@hinted
def load(
    folder: PathText,
    *,
    device: str | None = None, compiled: bool | None = None, state: PathText | None = None,
    sync_init: str | None = None, seed: int = DEFAULT_SEED, evaluation: PathText | None = None,
    deadline: float = 120.0,
) -> Rank:  # fmt: skip
    """This process's rank of an output folder; all ranks load together.

    ``device``: ``cpu``, ``cuda`` or ``cuda:N``; by default a GPU where there is one. ``compiled``: whether Inductor
    compiles the step; by default on GPUs. ``state``: values that the folder lacks. ``sync_init``: axes along
    which the first rank gives the start values of states in common. ``seed``: of random inputs, such as dropout masks.
    ``evaluation``: the model of ``gopt export --eval``. ``deadline``: seconds to wait for another rank in a call.
    Raises InputError, OptionError and RunError."""
    return Rank(
        Path(folder), device, compiled, None if state is None else fspath(state), sync_init, seed,
        None if evaluation is None else Path(evaluation), deadline,
    )  # fmt: skip


class Rank:
    """A rank of an output folder, on a device, with states. ``number``: of the rank; ``steps``: how many were made."""

    def __init__(
        self, folder: Path, device: str | None, compiled: bool | None, state: str | None, sync_init: str | None,
        seed: int, evaluation: Path | None, deadline: float,
    ) -> None:  # fmt: skip
        manifest, mesh = read_manifest(folder)
        self.device = device_of_rank(compiled, device)
        self._engine = TorchEngine(mesh, self.device.torch_device, deadline, lambda text: print(text, file=sys.stderr))
        self._rank = rank = LoadedRank(folder, self._engine, self.device)
        self.number = self._engine.rank
        self.manifest = manifest
        self.steps = 0
        self._types = {entry.name: entry.type for entry in manifest.inputs_of(InputKind.BATCH)}
        self._draws = DrawnInputs.of(manifest, seed)
        self._hyper = {entry.name: entry for entry in manifest.inputs_of(InputKind.HYPER)}
        self._reading = {name for name, graph in rank.graphs.items() if not graph.inputs.keys().isdisjoint(self._types)}
        self._calls = TorchCalls(self._engine, lambda call: None, no_timing)
        self._comparison = InputComparison(self._engine, [*map(mesh.batch_of, range(mesh.ranks))])
        rank.held = rank.start_values(state, startup=True)
        rank.prepare(sync_axes(sync_init, mesh))
        rank.hold()
        self._evaluated: dict[str, HeldInput] | None = None
        """The present states as ``evaluate`` reads them, once it has."""
        self._evaluation = None if evaluation is None else _Evaluation(self, evaluation)

    @property
    def device_mesh(self) -> Any:
        """The mesh of the folder as PyTorch's ``DeviceMesh``."""
        return self._engine.device_mesh

    @property
    def inputs(self) -> Mapping[str, TensorType]:
        """The inputs of a batch of one rank and micro-step, by name, in order; without random numbers, which the rank
        draws."""
        return {name: type for name, type in self._types.items() if name not in self._draws.draws}

    @property
    def micro_steps(self) -> int:
        """Batches of one step."""
        return self._rank.micro_steps

    @hinted
    def sampler(self, dataset: Dataset[Any], *, shuffle: bool = True, seed: int = 0) -> Any:
        """A DistributedSampler over ranks with different data: ranks with equal batches get equal samples. Call
        ``set_epoch`` before each pass. Raises OptionError for a dataset without a length."""
        if not isinstance(dataset, Sized):
            raise OptionError("the dataset has no length, so that no sampler can deal it", _OWN_PART)
        return DistributedSampler(
            dataset, num_replicas=self._rank.parts, rank=self._rank.part, shuffle=shuffle, seed=seed, drop_last=True
        )

    # --- steps ---

    @hinted
    def step(self, batch: Batch, **hyper: Any) -> dict[str, torch.Tensor]:
        """Train one step; returns the losses and metrics of this rank's batch, on the device, without a wait.

        ``batch``: tensors or arrays by the names of the inputs, or in the order of the inputs; with micro-steps a list
        of as many such batches. ``hyper``: hyper-parameters, numbers or tensors; without one the step's own value
        counts. Raises InputError for a batch that does not fit, OptionError for a hyper-parameter."""
        rank, times = self._rank, self._rank.micro_steps
        batches = [batch] if times == 1 else self._split(batch, times)
        feeds = {name: HeldInput(value) for name, value in self._settings(hyper).items()}
        losses: dict[str, list[torch.Tensor]] = {}
        shown: dict[str, torch.Tensor] = {}
        weights: list[torch.Tensor] = []
        fitted = self._compared(batches, hyper)
        for phase, turn in rank.actions:
            reads = phase in self._reading
            if reads and turn not in fitted:
                fitted[turn] = self._fitted(batches[turn], self.steps * times + turn)
            inputs = fitted[turn] if reads else {}
            fed = {name: HeldInput(value) for name, value in rank.record.feeds(inputs).items()}
            results = rank.run_phase(phase, turn, {**feeds, **fed}, self._calls)
            shown.update(results)
            for name in self.manifest.losses:
                if name in results:
                    losses.setdefault(name, []).append(results[name])
            if rank.weight and self.manifest.loss in results:
                weights.append(results[rank.weight] if rank.weight in results else inputs[rank.weight])
        self.steps += 1
        self._evaluated = None
        return shown | {name: _mean(values, weights) for name, values in losses.items()}

    def _compared(self, batches: Sequence[Batch], hyper: Mapping[str, Any]) -> dict[int, dict[str, torch.Tensor]]:
        """Now and then compare what the ranks were given, before the step; the inputs by micro-step where compared."""
        fitted: dict[int, dict[str, torch.Tensor]] = {}
        self._comparison.note(hyper)
        if due(self.steps + 1):
            turns = sorted({turn for phase, turn in self._rank.actions if phase in self._reading})
            fitted = {turn: self._fitted(batches[turn], self.steps * self.micro_steps + turn) for turn in turns}
            values = (fitted[turn][name] for turn in turns for name in self.inputs)
            self._comparison.check(values if turns else None)
        return fitted

    def _split(self, batch: Batch, times: int) -> Sequence[Batch]:
        if isinstance(batch, list) and len(batch) == times:
            return batch
        raise InputError(
            f"a step of this folder has {times} micro-steps", f"give a list of {times} batches, one for each"
        )

    def _settings(self, hyper: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        refuse_unknown(hyper, [*self._hyper])
        values = {}
        for name, entry in self._hyper.items():
            if name in hyper:
                value = hyper[name]
            elif entry.default is not None:
                value = default_schedule(name, entry.default).at(self.steps)
            else:
                raise OptionError(f"the step needs a value for {name!r}", f"call step(batch, {name}=1e-3)")
            values[name] = number(name, entry.type, value, self.device.torch_device)
        return values

    def _fitted(self, batch: Batch, number: int) -> dict[str, torch.Tensor]:
        """The inputs of a micro-step on the device, with random numbers for inputs outside the batch."""
        types, tensors = fitted_batch(batch, self._types, [*self.inputs], self.device.torch_device)
        drawn = replace(self._draws, types=types).batch(number, self._rank.part, tensors)
        return tensors | {name: self.device.to_device(array) for name, array in drawn.items()}

    # --- checkpoints ---

    @hinted
    def save(self, folder: PathText, *, keep: int = 2) -> Path:
        """Write a checkpoint of gopt, for ``gopt run --resume``, ``merge``, ``reshard`` and ``load``; returns its
        path. ``keep``: how many checkpoints stay in the folder. Raises RunError where it cannot be written."""
        checkpoints = self._checkpoints(folder, keep)
        self._comparison.check()
        return checkpoints.save_alone(self._engine, self.steps, self._rank.held, self._rank.to_host)

    @hinted
    def load(self, folder: PathText, *, step: int | None = None) -> None:
        """Take the states of a checkpoint of gopt, the newest by default; any engine may have written it. Raises
        OptionError without a checkpoint."""
        checkpoints = self._checkpoints(folder)
        complete = checkpoints.steps()
        if not complete or step not in (None, *complete):
            otherwise = "rank.load_dcp reads it" if (Path(folder) / DCP_FILE).is_file() else "there is no checkpoint"
            known = f"there are {listed([*map(str, complete)])}" if complete else otherwise
            raise OptionError(f"{folder} has no checkpoint{'' if step is None else f' of step {step}'}", known)
        self.steps = complete[-1] if step is None else step
        self._take(checkpoints.load(self.number, self.steps))

    def _checkpoints(self, folder: PathText, keep: int = 2) -> Checkpoints:
        if keep < 1:
            raise OptionError(f"keep is {keep}: no checkpoint would stay", "give a number from 1 on")
        seed = self._draws.seed if self._draws.draws else None
        return Checkpoints(Path(folder), self._rank.folder, self.manifest, keep, draws=seed)

    def _take(self, arrays: Mapping[str, Any]) -> None:
        self._rank.put(arrays)
        self._evaluated = None

    # --- whole states ---

    @hinted
    def full_states(self) -> dict[str, torch.Tensor]:
        """Every state of the source under its name, gathered from all ranks into host memory."""
        return {name: tensor_over(array.copy()) for name, array in self._gathered([*self._source_types]).items()}

    @hinted
    def full_state_dict(self) -> dict[str, torch.Tensor]:
        """The argument of ``module.load_state_dict`` of the exported module; of other steps parameters and statistics
        by their names."""
        return module_values(self._values())

    @hinted
    def optimizer_state_dict(self) -> Any:
        """The argument of ``optimizer.load_state_dict``; a list where the step has several optimizers. Raises
        OptionError for a step not exported from PyTorch."""
        return training_values(self._values())["optimizer"]

    def _values(self) -> StepValues:
        graph, types = self._source, self._source_types
        tensors = {name: Tensor(types[name], array=array.copy()) for name, array in self._gathered([*types]).items()}
        graph = replace(graph, initializers={**graph.initializers, **tensors})
        kinds = {state.tensor: state.kind for state in self.manifest.states}
        return StepValues(graph, kinds, TorchRecord.of(graph.metadata, str(self._rank.folder)), self.steps)

    @property
    def _source_types(self) -> dict[str, TensorType]:
        """The states of the source, and their types."""
        return {state.tensor: state.type for state in self.manifest.states}

    def _gathered(self, names: Collection[str]) -> dict[str, Array]:
        return gathered_states(self.manifest, self._engine, self._rank.held, self._rank.to_host, names)

    @cached_property
    def _source(self) -> Any:
        return read_folder(self._rank.folder).graph

    @hinted
    def save_dcp(self, folder: PathText) -> None:
        """Write a checkpoint of ``torch.distributed.checkpoint``: ``states`` by the names of the source, and ``steps``.
        Each rank writes the pieces of its own states; of states in common the first rank with them. Raises RunError
        where it cannot be written."""
        mine = frozenset(writers(self.manifest, self.number).get(self.number, ()))
        states = [state for state in self._rank.states if state.input in mine and not state.copy]
        values = {state.input: self._rank.held[state.input] for state in states}
        content = {"states": chunks_of(states, self._source_types, values), "steps": self.steps}
        self._comparison.check()
        with named("save_dcp"), _failing(f"cannot write checkpoint {folder}", RunError):
            dcp.save(content, checkpoint_id=fspath(folder), planner=PiecesSave())

    @hinted
    def load_dcp(self, folder: PathText) -> None:
        """Take the states of a checkpoint that ``save_dcp`` wrote, on any mesh. Each rank reads the pieces of its
        states. Raises OptionError for a folder of this machine without such a checkpoint, InputError for another's."""
        if "://" not in fspath(folder) and not (Path(folder) / DCP_FILE).is_file():
            raise OptionError(f"{folder} has no checkpoint of torch.distributed.checkpoint", "rank.save_dcp writes one")
        values: dict[str, torch.Tensor] = {}
        content: dict[str, Any] = {"steps": 0}
        entries = (state for rank in self.manifest.ranks for state in self.manifest.states_of(rank))
        for copies in (False, True)[: 1 + any(state.copy for state in entries)]:  # on all ranks together
            states = [state for state in self._rank.states if state.copy is copies]
            values |= (memory := empty_values(states, self._source_types))
            chunks = chunks_of(states, self._source_types, memory)
            with named("load_dcp"), _failing(f"cannot read {folder} as a checkpoint of save_dcp", InputError):
                dcp.load(content, checkpoint_id=fspath(folder), planner=PiecesLoad(chunks))
        self.steps = content["steps"]
        types = {name: self._rank.input_type(name) for name in values}
        self._take({
            name: value.to(torch_dtype(numpy_dtype(types[name].dtype))).reshape(types[name].dims)
            for name, value in values.items()
        })  # fmt: skip

    # --- evaluation ---

    @hinted
    def evaluate(self, batch: Batch) -> dict[str, torch.Tensor]:
        """The outputs of the model ``evaluation`` on a batch of this rank, with the present states. Raises OptionError
        without such a model."""
        if self._evaluation is None:
            raise OptionError("there is no model to evaluate", "load(folder, evaluation='step.eval.onnx')")
        if self._evaluated is None:
            whole = self._gathered(self._evaluation.states)
            self._evaluated = {name: HeldInput(self.device.to_device(array)) for name, array in whole.items()}
        return self._evaluation(batch, self._evaluated)


class _Evaluation:
    """A model of the forward in evaluation mode; ``states``: the source's states that the model reads."""

    def __init__(self, rank: Rank, path: Path) -> None:
        graph = load_graph(path)
        self._rank, self.states = rank, fed_states(graph, rank.manifest, str(path))
        self._types = {
            name: type for name, type in graph.inputs.items()
            if name not in self.states and name not in graph.initializers
        }  # fmt: skip
        self._executor = Executor(plan_execution(graph, device=rank.device), rank.device.sessions())

    def __call__(self, batch: Batch, states: Mapping[str, HeldInput]) -> dict[str, torch.Tensor]:
        _, tensors = fitted_batch(batch, self._types, [*self._types], self._rank.device.torch_device)
        fed = {name: HeldInput(tensor) for name, tensor in tensors.items()}
        return dict(self._executor.run({**states, **fed}))


@contextmanager
def _failing(what: str, kind: type[GoptError]) -> Iterator[None]:
    """Raise failures of PyTorch's checkpoints, the first of all ranks, as an error of gopt: theirs is no Exception."""
    try:
        yield
    except CheckpointException as error:
        cause = next(iter(error.failures.values()))[0]
        raise kind(f"{what}: {first_line(cause)}") from None


def _mean(values: Sequence[torch.Tensor], weights: Sequence[torch.Tensor]) -> torch.Tensor:
    """The mean over micro-steps, with their weights if any."""
    if len(values) == 1:
        return values[0]
    stacked = torch.stack([value.reshape(()) for value in values])
    if not weights:
        return stacked.mean()
    share = torch.stack([weight.reshape(()).to(stacked.dtype) for weight in weights])
    return torch.where(share != 0, stacked * share, 0).sum() / share.sum()
