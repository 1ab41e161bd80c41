"""``gopt run`` for the ranks of ``gopt shard``: as threads, or as the processes of a launcher."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from gopt.errors import RunError, StoppedError

from .run_report import report_resume, report_steps, signal_note, stopped_error
from .terminal import print_error

if TYPE_CHECKING:
    from gopt.verbs.run_options import RunOptions


def run_threads(job: Any, manifest: Any, options: RunOptions, args: dict[str, Any]) -> int:
    from gopt.runtime.training.stop_signal import listen_for_stop
    from gopt.verbs.training import RunHooks, train_ranks

    with (
        listen_for_stop(job.checkpoint is not None, signal_note) as stop,
        report_steps(job, manifest, args, "threads") as tell,
    ):
        hooks = RunHooks(tell, report_resume(job, manifest), stop)
        step, stopped = train_ranks(job, manifest.mesh.mesh(), options.deadline, hooks)
    if stopped:
        raise stopped_error(job, step, stopped)
    return 0


def run_process(job: Any, manifest: Any, args: dict[str, Any], kind: str, debug: bool) -> int:
    """This process is one rank of many."""
    from gopt.runtime.engines.heartbeat import StatusPublisher, follow
    from gopt.runtime.engines.rank_status import ENDED
    from gopt.runtime.training.stop_signal import listen_for_stop
    from gopt.runtime.training.train import Trainer

    from .main import exit_code, explain_error

    beat: StatusPublisher | None = None

    def explain(text: str) -> None:
        step, call = (beat.step, beat.call) if beat is not None else (0, -1)
        line = f"rank {host.rank}, step {step + 1}{f', call {call}' if call >= 0 else ''}: {text}"
        if beat is None:
            print_error(line)
        else:
            beat.report(RunError("").exit_code, lambda: print_error(line))

    host, together, prepare = _TRANSPORTS[kind](manifest.mesh.mesh(), args, explain)
    beat = StatusPublisher.open(host.rank, host.gather)
    follow(host.watchdog, beat, host.rank)
    engine: Any = host
    try:
        engine, *device = prepare()
        with listen_for_stop(job.checkpoint is not None, lambda _: None) as stop:
            trainer = together(lambda: Trainer(job, engine, beat.at, *device, stop_signal=stop))
            if engine.rank == 0:
                with report_steps(job, manifest, args, kind, lambda: host.shared_calls) as tell:
                    say = report_resume(job, manifest)
                    trainer.run(tell, lambda: say(trainer.step, trainer.note))
            else:
                trainer.run(lambda _: None)
        if trainer.stopped and engine.rank == 0:
            error = stopped_error(job, trainer.step, trainer.stopped)
            beat.explain(128 + trainer.stopped, partial(explain_error, error, debug))
        beat.at(trainer.step, -1, ENDED)
    except (Exception, StoppedError) as error:  # a defect too: a rank that only left would let the others wait
        beat.report(exit_code(error), partial(explain_error, error, debug))
        engine.fail(error)
    except SystemExit:  # another rank says why
        beat.at(beat.step, beat.call, ENDED)
        raise
    return 128 + trainer.stopped if trainer.stopped else 0


Explain = Callable[[str], None]


def _over_mpi(mesh: Any, args: dict[str, Any], explain: Explain) -> tuple[Any, Any, Any]:
    """The transport of processes, a function that runs work on all processes together, and a function that prepares a
    Trainer's arguments: the engine, and an unusual device or unusual calls."""
    from gopt.runtime.engines.mpi import MpiEngine, raise_on_all_ranks

    host = raise_on_all_ranks(lambda: MpiEngine(mesh, args["deadline"], explain))
    return host, raise_on_all_ranks, lambda: (host,)


def _over_nccl(mesh: Any, args: dict[str, Any], explain: Explain) -> tuple[Any, Any, Any]:
    from gopt.runtime.engines.nccl import on_gpus

    host, together, _ = _over_mpi(mesh, args, explain)
    return host, together, lambda: on_gpus(mesh, host)


def _over_torch(mesh: Any, args: dict[str, Any], explain: Explain) -> tuple[Any, Any, Any]:
    from gopt.runtime.engines.base import exit_together
    from gopt.runtime.pytorch.device import device_of_rank, use_deterministic
    from gopt.runtime.pytorch.engine import TorchCalls, TorchEngine

    if args["deterministic"]:
        use_deterministic()
    device = device_of_rank(args["compiled"])
    host = TorchEngine(mesh, device.torch_device, args["deadline"], explain)
    return host, partial(exit_together, host.gather, host.rank), lambda: (host, device, TorchCalls)


_TRANSPORTS = {"mpi": _over_mpi, "nccl": _over_nccl, "torch": _over_torch}
