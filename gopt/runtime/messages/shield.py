"""Starts MPI processes such that the others survive when one dies.

MPICH's launcher (hydra 5.0) ends all processes of a job when one dies. With ``-disable-auto-cleanup`` it leaves the
others alone where one ends with a code; where one ends by a signal it still kills them, as soon as it has anything to
do: when one of them prints, for example. In any case it sends them SIGUSR1, which ends a process that does not ignore
it. So each process gets a parent that ignores SIGUSR1, as its child then does too, and that ends with a code whatever
its child died of.
"""

from __future__ import annotations

from collections.abc import Sequence

_PARENT = 'trap "" USR1; exec 3>&2 2>/dev/null; (exec "$@" 2>&3 3>&-); exit $?'
"""The shell's own messages, such as ``Killed``, are discarded: the other processes report who is lost."""


def shielded(launcher: Sequence[str], processes: int, command: Sequence[str]) -> list[str]:
    """The command that starts a job whose processes outlive one another. ``launcher``: MPICH's mpiexec, with options.

    The job's exit code is that of a process that died, 128 and the signal's number where it died by one. A process
    whose peers died must end with ``MpiHub.leave``: MPI's own end waits for them.
    """
    parent = ["sh", "-c", _PARENT, "sh"]
    return [*launcher, "-disable-auto-cleanup", "-n", str(processes), *parent, *command]
