"""Keeps the processes of a job alive when a process dies, under a launcher of the user.

MPICH's ``mpiexec`` ends all processes when a process dies, unless started with ``-disable-auto-cleanup``; a process
ended by a signal still ends the others as soon as the launcher has work to do. So each process forks before it uses
MPI: the child works, and the parent exits with a code in any case. ``gopt run --launch`` ends no process itself."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path

from gopt.errors import OptionError
from gopt.runtime.engines.launcher_folder import launcher_folder, signal_name

FLAG = "-disable-auto-cleanup"
_PROXY = "hydra_pmi_proxy"
"""Parent of all processes that MPICH's launcher starts."""
_GROUP = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""The launcher sends these to the process group: the child gets them itself."""


def ancestors() -> list[list[str]]:
    """The commands of the processes above this process, nearest first; empty where the system does not show
    commands."""
    commands: list[list[str]] = []
    number = os.getppid()
    while number > 1:
        try:
            command = Path(f"/proc/{number}/cmdline").read_text().split("\0")
            number = int(Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError):
            break
        commands.append(command)
    return commands


def ended_together(above: Sequence[Sequence[str]]) -> bool | None:
    """Return whether the launcher ends all processes when a process dies.

    None if unknown: another launcher, or MPICH's on another host. ``above``: the result of ``ancestors``."""
    names = [os.path.basename(command[0]) for command in above]
    if not any(name.startswith(_PROXY) for name in names):
        return None
    launcher = next((command for name, command in zip(names, above) if name.startswith("mpiexec")), None)
    launcher = launcher or next((command for name, command in zip(names, above) if name.startswith("mpirun")), None)
    return None if launcher is None else FLAG not in launcher


def check_launcher(processes: int, above: Sequence[Sequence[str]]) -> None:
    """Raise OptionError where a run is to continue without a lost trainer, and the launcher would end all processes."""
    if launcher_folder() is None and ended_together(above):
        raise OptionError(
            "--on-trainer-loss continue: this mpiexec ends all processes when one dies",
            f"start it with mpiexec {FLAG} -n {processes} gopt run …, or with gopt run … --launch {processes}",
        )


def outlive_others(above: Sequence[Sequence[str]]) -> None:
    """Fork, where the launcher is MPICH's and does not end all processes: returns in the child.

    The parent waits and exits with the child's exit code, or 128 plus the number of the child's signal. Call this
    function before MPI is loaded and before threads are started."""
    if launcher_folder() is not None or ended_together(above) is not False:
        return
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # the launcher sends it when a process dies
    before = {number: signal.signal(number, signal.SIG_IGN) for number in _GROUP}
    child = os.fork()
    if child:
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if code < 0:
            name = f"process {os.environ.get('PMI_RANK', child)}"
            os.write(2, f"gopt: note: {name} was killed by {signal_name(-code)}\n".encode())
        os._exit(code if code >= 0 else 128 - code)
    for number, handler in before.items():
        signal.signal(number, handler)
