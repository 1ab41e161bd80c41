"""``gopt verify --replay``: a recorded run without rounds is run again in the order of the record.

The replay is compared with the run's final states, to the bit, and with the source, message by message."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from gopt.artifact.integrity import check_files
from gopt.artifact.manifest_check import read_manifest
from gopt.artifact.path_diagnostics import check_folder
from gopt.artifact.server_entries import Mode
from gopt.errors import InputError, OptionError
from gopt.runtime.engines.threads import DEADLINE
from gopt.runtime.messages.failures import LateError
from gopt.runtime.messages.order import OrderError, Replayed
from gopt.runtime.parameter_server.run import Hooks, run_in_threads
from gopt.runtime.parameter_server.run_record import RunRecord, read_record
from gopt.runtime.session import SessionCache
from gopt.runtime.training.job import Progress
from gopt.system.progress import ProgressCallback, no_progress
from gopt.verification.compare import tolerance_of
from gopt.verification.folder_check import check_roles
from gopt.verification.replay.source_replay import SourceReplay
from gopt.verification.result import Difference, Verification
from gopt.verification.verify import source_training

RUN = "the recorded run"
"""Variant of the result: the replay beside the run."""
WIRE_TOLERANCES = {"float16": 2e-2, "bfloat16": 5e-2}


def replay(
    folder: str | os.PathLike[str], path: str | os.PathLike[str], data: str | None = None,
    deadline: float | None = None, advance: ProgressCallback = no_progress,
) -> Verification:  # fmt: skip
    """Replay the record at ``path`` of a run of ``folder``. ``data``: the present path of the samples, None for the
    same place.

    Raises OptionError for a folder without such runs, InputError for a damaged folder or record, or a record of another
    folder or other data."""
    home = Path(folder)
    check_folder(home)
    manifest, _ = read_manifest(home)
    plan = manifest.parameter_server
    if plan is None or plan.mode.rounds:
        what = "holds ranks of gopt shard" if plan is None else "is a split in rounds"
        raise OptionError(f"--replay is for splits without rounds, and {home} {what}", f"gopt verify {home}")
    check_files(home, manifest.files)
    record = read_record(path, home, data)
    try:
        return _replayed(home, record, os.fspath(path), deadline, advance)
    except OptionError as error:
        raise InputError(f"{os.fspath(path)}: {error.message}", *error.hints) from error


def _replayed(
    home: Path, record: RunRecord, name: str, deadline: float | None, advance: ProgressCallback
) -> Verification:  # fmt: skip
    manifest, mesh = read_manifest(home)
    plan = manifest.parameter_server
    assert plan is not None
    with tempfile.TemporaryDirectory(prefix="gopt-replay-") as scratch:
        again = Path(scratch) / "record.json"
        server_job = record.job.server_job(home, Path(scratch) / "checkpoints", again)
        roster = server_job.roster()
        arrivals = record.arrivals(roster, name)
        advance("reading the source")
        training, _ = source_training(home, None, manifest, mesh)
        check_roles(manifest, training, home)
        wires = [WIRE_TOLERANCES.get(key.wire, 0.0) for key in plan.keys]
        result = Verification(max(tolerance_of(training.graph), *wires, 0.0), record.job.steps, roster.size)
        watch = None
        if plan.mode is Mode.GEO:
            result.say("mode geo: the replay is compared with the run; local steps are not compared with the source")
        else:
            watch = SourceReplay(training, server_job, SessionCache(deadline), result)
        steps: list[Progress] = []

        def tell(progress: Progress) -> None:
            steps.append(progress)
            advance("replaying steps", progress.step, record.job.steps)

        hooks = Hooks() if watch is None else Hooks(server=watch.server)
        try:
            run_in_threads(server_job, tell, hooks, deadline=deadline or DEADLINE, order=Replayed(arrivals))
        except (OrderError, LateError) as error:
            result.note(Difference(RUN, len(steps) + 1, 0, "the order of messages", "message", float("inf")))
            result.say(f"the recorded order cannot be followed: {error.message}")
            return result
        if watch is not None:
            watch.finish()
        _compare(result, record, read_record(again, home), name)
    return result


def _compare(result: Verification, ran: RunRecord, again: RunRecord, name: str) -> None:
    """Compare messages and states of the replay with the run's."""
    if ran.digests.keys() != again.digests.keys():
        raise InputError(f"{name}: states: the run holds others than the record lists", "record the run again")
    ranks = {holder: rank for rank, holder in enumerate(again.received)}

    def note(holder: str, what: str, kind: str, equal: bool) -> None:
        error = 0.0 if equal else float("inf")
        result.note(Difference(RUN, ran.job.steps, ranks[holder], what, kind, error))

    for holder, messages in again.received.items():
        note(holder, f"messages of {holder}", "message", messages == ran.received[holder])
    for (holder, state), digest in again.digests.items():
        note(holder, state, "state", ran.digests[holder, state] == digest)
