"""Checkpoints: a safetensors file per rank, and an index, written last, in a folder that is renamed once complete.

A crash at any moment leaves earlier checkpoints unchanged.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

from gopt.artifact.checkpoint_index import (
    BEST_DIR,
    INDEX_FILE,
    BestEntry,
    CheckpointIndex,
    check_states_file,
    complete_steps,
    open_index,
    rank_states_file,
    read_index,
    step_dir,
)
from gopt.artifact.integrity import FileEntry
from gopt.artifact.manifest import Manifest, Piece
from gopt.artifact.manifest_entries import LocalState
from gopt.artifact.safetensors_file import safetensors_chunks
from gopt.errors import InputError, OptionError, RunError
from gopt.ir.external_data import load_state
from gopt.ir.types import TensorType
from gopt.runtime.exchanged_values import exchanged
from gopt.runtime.host_value import array_dtype
from gopt.runtime.session import Array
from gopt.runtime.training.array_source import SampleOrder
from gopt.runtime.training.checkpoint_folder import (
    check_checkpoint_folder,
    check_step,
    check_there,
    check_unlocked,
    identity,
    open_checkpoint_folder,
    prune,
    remove_step,
    unwritable,
)
from gopt.system.files import sync, write_new
from gopt.system.hashed import create_hashed
from gopt.system.staging import Staged, staged_folder
from gopt.text.sanitize import show

exchanged(FileEntry)
NOTHING: Mapping[str, Array] = MappingProxyType({})


class Agreement(Protocol):
    """The writers of a checkpoint: the number of this rank, and a gather of small objects among all ranks."""

    @property
    def rank(self) -> int: ...

    def gather(self, item: Any) -> list[Any]: ...


@dataclass(slots=True)
class Checkpoints:
    """The checkpoints of one job in the folder ``root``. ``folder``: the sharded step, with a manifest. ``keep``: how
    many checkpoints stay. ``trainers``: of a split, the number in this run."""

    root: Path
    folder: Path
    manifest: Manifest
    keep: int = 2
    trainers: int | None = None
    draws: int | None = None
    """The seed of the random numbers that the job draws; None where it draws none."""
    order: SampleOrder | None = None
    """The order of samples on disk."""
    run: str = field(default="", init=False)
    """The identity of the job, on the first rank while the folder is open."""
    _lock: int = field(default=-1, init=False)
    """The folder's lock, on the first rank while it is open."""
    _manifest: Manifest = field(init=False)
    """The manifest for this run's trainers."""
    _ahead: int = field(default=0, init=False)
    _loaded: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self._manifest = self.manifest if self.trainers is None else self.manifest.with_trainers(self.trainers)

    def check(self, resume: bool) -> None:
        """Raise OptionError where the folder cannot have this run's checkpoints, RunError while another job has
        locked it."""
        check_checkpoint_folder(self.root, self.folder)
        check_unlocked(self.root)
        if not resume and (steps := self.steps()):
            raise OptionError(
                f"{self.root} holds checkpoints of an earlier run, up to step {steps[-1]}",
                "continue from there with --resume, or choose another --checkpoint",
            )
        if not resume and os.path.lexists(self.root / BEST_DIR):
            raise OptionError(
                f"{self.root} holds {BEST_DIR}, the best checkpoint of an earlier run",
                "continue with --resume, move it away, or choose another --checkpoint",
            )

    @contextmanager
    def open(self, engine: Agreement, start: int) -> Iterator[None]:
        """Lock the folder for this job, on the first rank; ``start`` is the step from which the job continues.

        Raises RunError when another job has locked it, and where nothing can be written.
        """
        if engine.rank:
            yield
            return
        opened = open_checkpoint_folder(self.root, self.folder, self.manifest, self.keep)
        with opened as (self.run, self._lock):
            newest = max(self.steps(), default=start)
            if newest != start:
                raise RunError(
                    f"{self.root} has new checkpoints of another job, up to step {newest}", "start this run again"
                )
            yield
            try:
                check_there(self.root, self._lock)
            except FileNotFoundError as error:
                raise unwritable(self.root, error, "where it is now, its checkpoints are whole") from error

    def steps(self) -> list[int]:
        """Steps with a complete checkpoint, in ascending order."""
        return complete_steps(self.root)

    def path(self, step: int) -> Path:
        return self.root / step_dir(step)

    def best(self) -> CheckpointIndex | None:
        """The index of the best step, or None. Raises RunError as ``load``."""
        path = self.root / BEST_DIR
        return read_index(path, self.manifest, identity(self.root)) if (path / INDEX_FILE).is_file() else None

    def save(
        self, engine: Agreement, step: int, values: Mapping[str, Any], to_host: Callable[[Any], Array],
        extra: Mapping[str, Array] = NOTHING, best: BestEntry | None = None,
    ) -> None:  # fmt: skip
        """Write a checkpoint; every rank calls it.

        ``to_host`` returns a state's array in host memory. ``extra``: values that this rank alone saves beside the
        states, by names of no state. ``best``: the checkpoint replaces the best step. Raises RunError, the same on all
        ranks, when the checkpoint cannot be written."""
        try:
            with ExitStack() as opened:
                written = writers(self._manifest, engine.rank).get(engine.rank, ())
                mine = {name: to_host(values[name]) for name in written}
                self._save(engine, step, {**mine, **extra}, opened, best)
        except _WriteFailedError as refused:
            engine.gather(None)  # the first rank has removed its files: from now on ranks may end the job
            raise refused.args[0] from refused

    def save_alone(
        self, engine: Agreement, step: int, values: Mapping[str, Any], to_host: Callable[[Any], Array]
    ) -> Path:
        """Write a checkpoint outside a run; every rank calls this function. Returns the path.

        The first rank alone looks for the lock of another job: for the others a lock may be the first rank's. Raises
        RunError as ``open`` and ``save``, and OptionError for a folder of ranks."""
        check_checkpoint_folder(self.root, self.folder)
        with self.open(engine, max(self.steps(), default=step)):
            self.save(engine, step, values, to_host)
        return self.path(step)

    def _save(
        self, engine: Agreement, step: int, mine: Mapping[str, Array], opened: ExitStack, best: BestEntry | None
    ) -> None:
        target = self.path(step) if best is None else self.root / BEST_DIR
        folders: list[Staged] = []

        def begin() -> str:
            if engine.rank:
                return ""
            check_there(self.root, self._lock)  # else this step would stand without manifest and source
            if best is None:
                remove_step(target)
            folders.append(opened.enter_context(staged_folder(target)))
            return folders[0].path.name

        staged = self.root / _on_all_ranks(engine, target, begin)[0]
        path = staged / rank_states_file(engine.rank)
        entries = _on_all_ranks(engine, target / path.name, lambda: (path.name, _write(path, mine)))

        def finish() -> None:
            if folders:
                files = dict(entry for entry in entries if entry is not None)
                dealt = self._dealt(step) + self._ahead if self._ahead else None
                order = self.order
                index = CheckpointIndex(
                    step=step, manifest=self._manifest.digest(), run=self.run, draws=self.draws,
                    shuffle=None if order is None else order.shuffle,
                    last=None if order is None else str(order.last),
                    batch_size=None if order is None else order.size, batches=dealt, best=best, files=files,
                )  # fmt: skip
                write_new(staged / INDEX_FILE, index.text().encode())
                folders[0].commit(check_step if os.path.lexists(target) else None)
                prune(self.root, self.keep)

        _on_all_ranks(engine, target, finish)

    def start_from(self, step: int) -> int:
        """The batches by which the data is ahead of this run's trainers at a step, from which the run goes on.

        Raises RunError where a trainer has no file, and no other file has its own values."""
        folder = self.path(step)
        index = open_index(folder)
        of_run = index.of_run(self.manifest)
        self._check_own(folder, of_run, index.files)
        dealt = self._dealt(step, of_run) if index.batches is None else index.batches
        self._ahead = dealt - self._dealt(step)
        return self._ahead

    def _check_own(self, folder: Path, of_run: Manifest, files: Collection[str]) -> None:
        apart = [state for state in self._manifest.states_of(self._manifest.ranks[0]) if state.local and state.copy]
        lost = next((rank for rank in range(of_run.mesh.ranks) if rank_states_file(rank) not in files), None)
        if self.trainers is not None and lost is not None and apart:
            raise RunError(
                f"trainer {lost} was lost before checkpoint {folder}, and no other file has its own value of "
                f"{show(apart[0].pieces[0].tensor)}, which goes its own way between two exchanges",
                f"let all begin from the servers' values: gopt reshard {folder} --trainers {self.trainers} -o DIR",
            )

    def _dealt(self, step: int, manifest: Manifest | None = None) -> int:
        """Batches that trainers get in so many steps."""
        manifest = manifest or self._manifest
        return step * max(manifest.schedule.values()) * manifest.mesh.ranks

    def load(self, rank: int, step: int) -> dict[str, Array]:
        """The saved states of one rank. The size and digest of each file are checked first.

        A trainer without a file gets the values of the first trainer with a file. Raises RunError for a checkpoint of
        another sharded step, or a damaged one."""
        folder = self.path(step)
        index = read_index(folder, self.manifest, identity(self.root))
        files, of_run = index.files, index.of_run(self.manifest)
        source = self._loaded = self._source(rank, of_run, files)
        values: dict[str, Array] = {}
        by_writer = {source: list[str]()} if rank_states_file(source) in files else {}  # load_extra reads it
        for writer, names in (by_writer | writers(of_run, source)).items():
            path = folder / rank_states_file(writer)
            check_states_file(path, files.get(path.name))
            try:
                tensors = load_state(path)
                values.update({name: tensors[name].copied() for name in names})
            except (InputError, KeyError) as error:
                raise RunError(
                    f"checkpoint {path} is damaged: {error}", f"move {folder} away: --resume takes the one before it"
                ) from error
        return values

    def _source(self, rank: int, of_run: Manifest, files: Collection[str]) -> int:
        """The rank of a checkpoint whose values a rank takes: for a trainer without a file, the first rank with a
        file."""
        if self.trainers is None:
            return rank
        if rank >= self.trainers:
            return rank - self.trainers + of_run.mesh.ranks
        ranks = [writer for writer in range(of_run.mesh.ranks) if rank_states_file(writer) in files]
        return rank if rank in ranks else next(iter(ranks), 0)

    def load_extra(self, step: int, name: str) -> Array | None:
        """The value that the rank loaded last saved under a name beside the states, or None."""
        tensor = load_state(self.path(step) / rank_states_file(self._loaded)).get(name)
        return None if tensor is None else tensor.copied()


def writers(manifest: Manifest, rank: int) -> dict[int, list[str]]:
    """The first rank that holds each state of a rank -> those states. This rank writes the states for all ranks with
    the same values."""
    apart = manifest.parameter_server is not None

    def written(states: Iterable[LocalState]) -> list[LocalState]:
        """States without the parameters that a trainer pulls."""
        return [state for state in states if not (apart and state.copy and not state.local)]

    owner: dict[tuple[str, tuple[Piece, ...]], int] = {}
    for entry in manifest.ranks:
        for state in written(entry.state):
            owner.setdefault(_key(state), entry.rank)
    inputs: dict[int, list[str]] = {}
    for state in manifest.common.state:
        inputs.setdefault(rank if state.local else 0, []).append(state.input)
    for state in written(manifest.ranks[rank].state):
        inputs.setdefault(rank if state.local else owner[_key(state)], []).append(state.input)
    return inputs


def _key(state: LocalState) -> tuple[str, tuple[Piece, ...]]:
    return state.input, state.pieces


def _write(path: Path, arrays: Mapping[str, Array]) -> FileEntry:
    """Write a safetensors file; returns its size and digest."""
    types = {name: TensorType(array_dtype(array), array.shape) for name, array in arrays.items()}
    with create_hashed(path) as file:
        file.writelines(safetensors_chunks(types, arrays.values()))
    sync(path)
    return FileEntry(file.nbytes, file.sha256)


class _WriteFailedError(Exception):
    """Carries the error that all ranks raise."""


def _on_all_ranks(engine: Agreement, path: Path, work: Callable[[], Any]) -> list[Any]:
    """The results of all ranks; raises _WriteFailedError on all ranks when a rank could not write ``path``."""
    result, refused = None, None
    try:
        result = work()
    except OSError as error:
        refused = unwritable(path, error)
    answers = engine.gather((result, refused and refused.message))
    for rank, answer in enumerate(answers):
        if answer is not None and (text := answer[1]):
            refusal = RunError(f"rank {rank}: {text}", "the checkpoints before it are whole")
            refusal.named = True  # type: ignore[attr-defined]
            raise _WriteFailedError(refusal)
    return [answer[0] for answer in answers if answer is not None]  # a trainer that is lost gives none
