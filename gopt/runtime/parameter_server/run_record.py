"""The record of a run without rounds: the order of messages received by each trainer and server, and the states at the
end. ``gopt verify --replay`` runs the same job again in this order."""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

import numpy as np

from gopt import documents
from gopt.artifact.json_writer import pretty_json
from gopt.artifact.manifest import MANIFEST_FILE
from gopt.artifact.serialize import SOURCE_FILE
from gopt.artifact.server_entries import ServerPlanEntry
from gopt.documents.records import (
    OPTIONAL,
    Bounds,
    Count,
    Digest,
    Positive,
    from_document,
    key,
    one_of,
    to_document,
)  # fmt: skip
from gopt.errors import InputError, OptionError, RunError, UnsupportedError
from gopt.ir.load import load
from gopt.ir.node_kinds import draws
from gopt.operators.kinds import RANDOM
from gopt.runtime.messages.endpoint import Endpoint
from gopt.runtime.messages.message import Kind
from gopt.runtime.messages.order import Arrival
from gopt.runtime.messages.roster import Roster
from gopt.runtime.parameter_server.faults import FaultOptions, OnNan, StopFault
from gopt.runtime.parameter_server.job import ServerJob
from gopt.runtime.session import Array
from gopt.runtime.training.job import Job
from gopt.runtime.training.sample_files import on_disk, sample_paths
from gopt.system.files import digest_of, is_regular_file, reason
from gopt.system.staging import replace_file
from gopt.text.sanitize import show

FORMAT = "gopt-record/1"
PIECE = 1 << 18
"""Characters that travel at a time: a gather takes small values."""


@dataclass(frozen=True, slots=True)
class ReadFile:
    """A file, samples in several files, or ``module:function``, that a run read."""

    name: str
    """The name is the path of the file, or module:function, as the run was given it."""
    sha256: Annotated[str, Bounds(pattern="^([0-9a-f]{64})?$")]
    """The digest is the SHA-256 of the content of the file, or of the digests of several, in hexadecimal digits; it is
    empty for a function."""

    @classmethod
    def of(cls, name: str) -> ReadFile:
        if is_regular_file(Path(name)):
            return cls(name, digest_of(Path(name)).hex())
        files = [path for path in (sample_paths(name) if on_disk(name) else []) if is_regular_file(Path(path))]
        return cls(name, hashlib.sha256(b"".join(digest_of(Path(file)) for file in files)).hexdigest() if files else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRecord:
    """The options of a run that determine its results."""

    trainers: Positive
    """The run had this many trainers."""
    steps: Positive
    """The run ended after this step."""
    data: ReadFile
    """The file, or function, has the samples (--data)."""
    state: ReadFile | None
    """The file has values of states that the folder lacks (--state); null stands for none."""
    settings: Mapping[str, str]
    """The table has the values and schedules of hyper-parameters (--set). The text is the value or schedule of the
    hyper-parameter that the key names."""
    shuffle: Count | None
    """The seed shuffles the samples (--shuffle); null stands for the order of the file."""
    draws: Count | None = field(default=None, metadata=OPTIONAL)
    """The seed is the one of the random numbers that the run drew (--draws); the key is absent where the run drew
    none."""
    startup: bool
    """The value is false where the run started from stored values (--no-startup)."""
    every: Count
    """Checkpoints, at which trainers come together, were this many steps apart; 0 stands for one at the end."""
    nan: OnNan
    """Servers did this with gradients that are not finite (--nan)."""
    stop: StopFault | None
    """The run ended with this trainer's data (--stop); null stands for data that must last."""
    staleness: Count | None
    """No trainer was further ahead of the slowest one than this many steps (--staleness); null stands for no limit."""

    @classmethod
    def of(cls, server_job: ServerJob) -> JobRecord:
        job, faults = server_job.job, server_job.faults
        return cls(
            trainers=server_job.trainers, steps=job.steps, data=ReadFile.of(str(job.data)),
            state=None if job.state is None else ReadFile.of(job.state), settings=dict(job.settings),
            shuffle=job.shuffle, draws=server_job.seed, startup=job.startup,
            every=job.every if job.checkpoint is not None else 0, nan=faults.nan, stop=faults.stop,
            staleness=faults.staleness,
        )  # fmt: skip

    def server_job(self, folder: Path, checkpoint: Path, record: Path) -> ServerJob:
        """The same job again. ``checkpoint``: a new folder; ``record``: the file for the record of the new run. Raises
        OptionError for a job that the folder cannot run."""
        job = Job(
            folder=folder, data=self.data.name, steps=self.steps, settings=self.settings, shuffle=self.shuffle,
            draws=self.draws, state=None if self.state is None else self.state.name, startup=self.startup,
            every=self.every, checkpoint=checkpoint, record=record,
        )  # fmt: skip
        written = ServerJob.read(job, self.trainers)
        faults = FaultOptions(self.nan, self.stop, staleness=self.staleness)
        faults.check(written.plan)
        return ServerJob(job, written.manifest, written.plan, written.trainers, faults=faults)


@dataclass(frozen=True, slots=True)
class Received:
    """A received message."""

    sender: str = field(metadata=key("from"))
    """The message came from this trainer or server."""
    kind: Annotated[str, one_of(*Kind.__members__)]
    """The message is of this kind."""
    key: Count
    """The message is of the bucket, or with rows of the table, of this number."""
    round: Count
    """The message belongs to this round of its sender."""


@dataclass(frozen=True, slots=True)
class HeldState:
    """A state at the end of a run."""

    holder: str = field(metadata=key("at"))
    """This trainer or server holds the state."""
    state: str
    """The state has this name in the file of its holder."""
    sha256: Digest
    """The digest is the SHA-256 of the bytes of the value, in hexadecimal digits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """The record of a run without rounds, which gopt run --record writes and gopt verify --replay reads, has the order
    in which each trainer and server received messages, and the states that each held at the end."""

    format: str = FORMAT
    """The format is the name and version of this format."""
    folder: Digest
    """The digest identifies the split that was run: SHA-256, in hexadecimal digits, of its manifest.json."""
    job: JobRecord
    """The table has the options of the run that its results depend on."""
    received: Mapping[str, tuple[Received, ...]]
    """The table has what each trainer and server received, by its name. The list has the messages in the order in which
    they were received."""
    states: tuple[HeldState, ...]
    """The list has every state of every trainer and server at the end of the run."""

    def arrivals(self, roster: Roster, name: str) -> dict[int, list[Arrival]]:
        """The messages of each endpoint. Raises InputError for a sender or receiver outside the job; ``name``: of the
        record."""
        numbers = {name: number for number, name in enumerate(roster.names)}
        named = [*self.received, *(message.sender for messages in self.received.values() for message in messages)]
        unknown = next((name for name in named if name not in numbers), None)
        if unknown is not None or len(self.received) != len(numbers):
            raise InputError(f"{name}: received: the job has {', '.join(numbers)}{_not_there(unknown)}")
        return {
            numbers[holder]: [
                Arrival(numbers[message.sender], Kind[message.kind], message.key, message.round) for message in messages
            ]
            for holder, messages in self.received.items()
        }

    def check_steps(self, name: str) -> None:
        """Raise InputError where the trainers' steps are not as many as the job's. Data that ends a run leaves some
        steps out. ``name``: of the record."""
        ended = Counter(
            (holder, message.sender) for holder, messages in self.received.items() for message in messages
            if message.kind == Kind.BARRIER.name
        )  # fmt: skip
        done, steps = max(ended.values(), default=self.job.steps), self.job.steps
        if done > steps or (done < steps and self.job.stop is None):
            raise InputError(
                f"{name}: job.steps is {steps}, and the messages end after {done} steps",
                "the record was edited: record the run again",
            )

    @property
    def digests(self) -> dict[tuple[str, str], str]:
        """Holder and state -> SHA-256 of the value."""
        return {(state.holder, state.state): state.sha256 for state in self.states}


def _not_there(unknown: str | None) -> str:
    return "" if unknown is None else f", and no {unknown!r}"


def digest_of_folder(folder: Path) -> str:
    """The digest of a record's folder: the manifest's, with the digest of all start values inside."""
    return digest_of(folder / MANIFEST_FILE).hex()


def read_record(path: str | os.PathLike[str], folder: Path, data: str | None = None) -> RunRecord:
    """Read the record of a run of a folder. ``data``: the present path of the samples, None for the same place. Raises
    InputError for a damaged record, or a record of another folder or other files."""
    record = from_document(RunRecord, documents.read_json(path, documents.RECORD))
    if data is not None:
        record = replace(record, job=replace(record.job, data=ReadFile(data, record.job.data.sha256)))
    if record.job.trainers >= len(record.received):
        raise InputError(f"{os.fspath(path)}: received: it lists {len(record.received)} of the trainers and servers")
    record.check_steps(os.fspath(path))
    if record.folder != digest_of_folder(folder):
        raise InputError(
            f"{os.fspath(path)} is the record of another folder than {folder}", "name the folder that was run"
        )
    for what, read in (("--data", record.job.data), ("--state", record.job.state)):
        if read is not None and read.sha256 != ReadFile.of(read.name).sha256:
            missing = "" if is_regular_file(Path(read.name)) else f"there is no {read.name}, "
            raise InputError(
                f"{missing}which the run of {os.fspath(path)} read as {what}" if missing else
                f"{read.name} is not what the run of {os.fspath(path)} read as {what}",
                "--data FILE says where its samples are now" if what == "--data" else "put the file back there",
            )  # fmt: skip
    return record


def check_recordable(job: Job, plan: ServerPlanEntry) -> None:
    """Check the option ``--record``. Raises OptionError for a run whose order decides nothing, UnsupportedError for new
    random numbers in each run, and RunError where the record cannot be written."""
    if job.record is None:
        return
    if not isinstance(job.data, str):
        raise OptionError("--record needs data that can be read again: a file, or module:function", "name one")
    if plan.mode.rounds:
        raise OptionError(
            "--record is for runs without rounds: in rounds every order of messages gives the same bits",
            "leave it out; gopt verify DIR compares the rounds with the source",
        )
    nodes = load(job.folder / SOURCE_FILE, own=True).nodes
    drawn = next((node for node in nodes if draws(node) or (node.is_in(RANDOM) and "seed" in node.attributes)), None)
    if drawn is not None:
        raise UnsupportedError(
            f"--record: {drawn.op_type} {show(drawn.label)} draws random numbers: a replay would draw others",
            "make the random numbers an input of the step",
        )
    if job.record.is_file():
        raise OptionError(f"{job.record} exists already", "choose another path with --record, or remove it")
    if not job.record.parent.is_dir() or job.record.is_dir():
        raise RunError(f"cannot write {job.record}: it is a folder, or lies in none", "choose another path")


def keep_record(
    endpoint: Endpoint, server_job: ServerJob, states: Callable[[], Mapping[str, Array]], signal: int
) -> None:  # fmt: skip
    """Write the record of a run that went to the end; all endpoints call this function, the first writes.

    ``signal``: the signal that stopped the run, or 0. Raises RunError for a run without anything to replay."""
    path = server_job.job.record
    if path is None:
        return
    mine = [Received(endpoint.roster.names[e.source], e.kind.name, e.key, e.round) for e in endpoint.arrivals]
    endpoint_states = [HeldState(endpoint.name, name, _digest(value)) for name, value in states().items()]
    text = json.dumps([[to_document(message) for message in mine], [to_document(state) for state in endpoint_states]])
    every = _gathered(endpoint, text)
    if endpoint.number:
        return
    if signal > 0:
        server_job.faults.tell(f"--record: {path} is not written: a signal ended the run, and no replay gets one")
        return
    lost = [endpoint.roster.names[number] for number, text in enumerate(every) if text is None]
    if lost:
        raise RunError(f"--record: {path} is not written: {lost[0]} was lost, and no replay loses it there")
    records = [json.loads(text) for text in every if text is not None]
    record = RunRecord(
        folder=digest_of_folder(server_job.job.folder), job=JobRecord.of(server_job),
        received={
            name: tuple(from_document(Received, message) for message in messages)
            for name, (messages, _) in zip(endpoint.roster.names, records)
        },
        states=tuple(from_document(HeldState, state) for _, states in records for state in states),
    )  # fmt: skip
    _write(path, pretty_json(to_document(record)).encode())


def _digest(value: Array) -> str:
    return hashlib.sha256(np.ascontiguousarray(value).tobytes()).hexdigest()


def _gathered(endpoint: Endpoint, text: str) -> Sequence[str | None]:
    """The texts of all endpoints, None for a lost endpoint."""
    pieces = [text[start : start + PIECE] for start in range(0, len(text), PIECE)]
    counts = endpoint.gather(len(pieces), what="the record")
    texts: list[str | None] = [None if count is None else "" for count in counts]
    for turn in range(max(count or 0 for count in counts)):
        came = endpoint.gather(pieces[turn] if turn < len(pieces) else "", what="the record")
        texts = [None if text is None or more is None else text + more for text, more in zip(texts, came)]
    return texts


def _write(path: Path, data: bytes) -> None:
    try:
        documents.parse_json(data, documents.RECORD, str(path))  # what is written can be read
    except InputError as error:
        raise RunError(f"--record: {error.message}", "record fewer steps", *error.hints) from error
    try:
        replace_file(path, data)
    except OSError as error:
        raise RunError(f"cannot write {path}: {reason(error)}", "choose another path with --record") from error
