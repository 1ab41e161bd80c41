"""Starts MPI processes so that they survive when one of them dies.

MPICH's launcher (hydra 5.0) ends all processes of a job when one dies. With ``-disable-auto-cleanup`` it lets the
others run if one exits with a code; if a signal ends one, it still kills the others as soon as it has work to do, for
example when one prints. In both cases it sends them SIGUSR1, which ends a process that does not ignore it. So each
process gets a parent that ignores SIGUSR1, as its child then does too, and that exits with a code however its child
ended.
"""

from __future__ import annotations

from collections.abc import Sequence

from gopt.runtime.engines.heartbeat import DIED, HEARTBEATS

_PARENT = (
    'trap "" USR1; exec 3>&2 2>/dev/null; (exec "$@" 2>&3 3>&-); code=$?; '
    f'[ -n "${HEARTBEATS}" ] && [ -n "$PMI_RANK" ] && echo $code > "${HEARTBEATS}/{DIED}.$PMI_RANK"; exit $code'
)
"""The shell's own messages, such as ``Killed``, are discarded: the other processes report who is lost. The code with
which its child ended is for them."""


def shielded(launcher: Sequence[str], processes: int, command: Sequence[str]) -> list[str]:
    """The command that starts a job whose processes survive one another. ``launcher``: MPICH's mpiexec, with options.

    The job's exit code is that of a process that died, or 128 plus the number of the signal that ended it. A process
    whose peers died must end with ``MpiHub.leave``: MPI's Finalize waits for them.
    """
    parent = ["sh", "-c", _PARENT, "sh"]
    return [*launcher, "-disable-auto-cleanup", "-n", str(processes), *parent, *command]
