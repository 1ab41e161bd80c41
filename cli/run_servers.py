"""``gopt run`` for a split: trainers and servers as threads, or as the processes of a launcher."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from gopt.errors import OptionError, StoppedError

if TYPE_CHECKING:
    from gopt.verbs.run_options import RunOptions

HEARTBEAT = 1.0
"""Seconds between signs of life of a process."""
HEARTBEAT_TIMEOUT = 10.0
"""Seconds without one, at least, after which it is lost; half the deadline where that is more."""


def has_servers(folder: str) -> bool:
    """Return whether a folder is a split; False for an unreadable folder, reported by the run."""
    from gopt.artifact.manifest_check import read_manifest
    from gopt.errors import GoptError

    try:
        return read_manifest(folder)[0].parameter_server is not None
    except GoptError:
        return False


def role_names(folder: str, roles: int) -> list[str]:
    """``trainer 0``, …, ``server 0``, …: the roles of so many trainers and servers of a split; empty for ranks of
    ``gopt shard``."""
    from gopt.artifact.manifest_check import read_manifest

    plan = read_manifest(folder)[0].parameter_server
    if plan is None:
        return []
    return [f"trainer {number}" for number in range(roles - plan.servers)] + [
        f"server {n}" for n in range(plan.servers)
    ]


def check_engine(args: dict[str, Any], split: bool) -> None:
    """Refuse an engine with no messages."""
    if split and args["engine"] in ("nccl", "torch"):
        raise OptionError(
            f"--engine {args['engine']} cannot run a split: it has no messages between single ranks",
            "take threads or mpi",
        )


def endpoints(job: Any, options: RunOptions, servers: list[Any]) -> Any:
    """The job with the trainers and servers; at the end the chief lists in ``servers`` each server's summary."""
    from gopt.runtime.parameter_server.waits import straggler

    def summarise(all_servers: Sequence[Any]) -> None:
        servers.extend(all_servers)
        if late := straggler(all_servers):
            _print_note(late)
        if skipped := max((server.skipped for server in all_servers), default=0):
            _print_note(f"{skipped} round{'s' * (skipped != 1)} of {all_servers[0].rounds} were not applied")

    return options.server_job(job, _print_note, summarise)


def launch_options(folder: str, args: dict[str, Any]) -> dict[str, Any]:
    """The arguments of ``launch`` for a split; raises OptionError where the number of processes differs from the
    roles'."""
    from pathlib import Path

    from gopt.runtime.parameter_server.job import ServerJob
    from gopt.runtime.training.job import Job

    job = Job(folder=Path(folder), data=args["data"], steps=args["steps"])
    server_job = ServerJob.read(job, args["trainers"], args["roles"])
    server_job.processes(args["launch"])
    return {
        "names": [server_job.describe_process(number) for number in range(args["launch"])],
        "outlive": True,
    }


def run_threads(job: Any, options: RunOptions, args: dict[str, Any], debug: bool) -> int:
    """All endpoints as threads of this process."""
    from gopt.runtime.training.stop_signal import listen_for_stop
    from gopt.verbs.training import RunHooks, train_endpoints

    from .run_report import report_resume, report_steps, signal_note, stopped_error

    servers: list[Any] = []
    server_job = endpoints(job, options, servers)
    with (
        listen_for_stop(job.checkpoint is not None, signal_note) as stop,
        report_steps(job, server_job.manifest, args, "threads", servers=servers, roles=_roles(server_job)) as tell,
    ):
        hooks = RunHooks(tell, report_resume(job, server_job.manifest), stop, _print_report)
        step, stopped = train_endpoints(server_job, options.deadline, hooks)
    if stopped:
        raise stopped_error(job, step, stopped)
    return 0


def run_process(job: Any, options: RunOptions, args: dict[str, Any], debug: bool) -> int:
    """This process has one or several of the roles."""
    from gopt.runtime.engines.heartbeat import ERROR_GRACE, StatusPublisher
    from gopt.runtime.engines.mpi import exchange, load_mpi, raise_on_all_ranks, unlink_mpich_files
    from gopt.runtime.engines.rank_status import ENDED
    from gopt.runtime.messages.mpi import MpiHub
    from gopt.runtime.messages.roster import Settings
    from gopt.runtime.parameter_server.outlive import ancestors, check_launcher, outlive_others
    from gopt.runtime.parameter_server.peers import watch_peers
    from gopt.runtime.parameter_server.run import run_endpoints
    from gopt.runtime.training.stop_signal import listen_for_stop
    from gopt.verbs.training import RunHooks

    from .main import exit_code, explain_error
    from .run_report import report_resume, report_steps, stopped_error

    above, continues = ancestors(), _continues(job, options)
    if continues:
        outlive_others(above)
    world = load_mpi().COMM_WORLD
    servers: list[Any] = []
    if options.on_trainer_loss == "continue":
        raise_on_all_ranks(lambda: check_launcher(world.size, above))
    server_job = raise_on_all_ranks(lambda: endpoints(job, options, servers))
    processes = raise_on_all_ranks(lambda: server_job.processes(world.size))
    limit = options.deadline
    settings = Settings(deadline=limit, heartbeat=HEARTBEAT, heartbeat_timeout=max(HEARTBEAT_TIMEOUT, limit / 2))
    hub = raise_on_all_ranks(lambda: MpiHub(server_job.roster(processes), settings))
    beat = StatusPublisher.open(world.rank, lambda item: exchange(world, item))
    unlink_mpich_files()  # all have opened them: that was collective
    watch_peers(hub, world.rank, beat.others)
    step = stopped = 0
    try:
        chief = 0 in hub.roster.local(world.rank)
        with listen_for_stop(job.checkpoint is not None, lambda _: None) as stop:
            start = report_resume(job, server_job.manifest)
            if chief:
                with report_steps(
                    job, server_job.manifest, args, "mpi", servers=servers, roles=_roles(server_job)
                ) as tell:
                    hooks = RunHooks(tell, start, stop, _print_report)
                    step, stopped = run_endpoints(server_job, hub, tell, hooks.of_servers(job, beat.at))
            else:
                hooks = RunHooks(_ignore, start, stop, _print_report)
                step, stopped = run_endpoints(server_job, hub, _ignore, hooks.of_servers(job, beat.at))
        if stopped and chief:
            beat.explain(128 + stopped, partial(explain_error, stopped_error(job, step, stopped), debug))
        beat.at(step, -1, ENDED)
    except (Exception, StoppedError) as error:
        code, failure = exit_code(error), hub.failure
        if failure is not None and failure.source not in hub.mailboxes:
            code = failure.exit_code
            time.sleep(2 * ERROR_GRACE)  # the process that failed first reports why, and ends this one
        beat.report(code, partial(explain_error, error, debug))
        world.Abort(code)
    if hub.lost:
        hub.leave(128 + stopped if stopped else 0)
    return 128 + stopped if stopped else 0


def _continues(job: Any, options: RunOptions) -> bool:
    """Return whether the run continues without a lost trainer."""
    from gopt.artifact.manifest_check import read_manifest

    plan = read_manifest(job.folder)[0].parameter_server
    return options.on_trainer_loss == "continue" or (plan is not None and not plan.mode.rounds)


def _roles(server_job: Any) -> dict[str, int]:
    return {"trainers": server_job.trainers, "servers": server_job.servers}


def _print_note(text: str) -> None:
    from .terminal import print_note

    print_note(text)


def _print_report(report: Any) -> None:
    """Print on stderr what came of a run without rounds."""
    _print_note(str(report))


def _ignore(_: object) -> None:
    return None
