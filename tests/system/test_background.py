"""Work in forked processes: results, errors, and what becomes of the processes."""

from __future__ import annotations

import errno
import os
import select
import signal
import threading

import pytest

from gopt.errors import OptionError, RunError, StoppedError, UnsupportedError
from gopt.system import background
from gopt.system.background import LEAST_NODES, Task, begin, begin_all, held, processes


class Gate:
    """Work that lasts until it is opened; ``gone`` waits until no process works on it."""

    def __init__(self) -> None:
        self._wait, self._open = os.pipe()
        self._gone, self._alive = os.pipe()

    def work(self) -> int:
        os.close(self._open)
        os.read(self._wait, 1)
        return os.getpid()

    def open(self) -> None:
        os.write(self._open, b"x")

    def gone(self) -> bool:
        os.close(self._alive)
        return os.read(self._gone, 1) == b""


def test_work_runs_in_another_process():
    with processes(2):
        assert begin(os.getpid, 0).result() != os.getpid()


@pytest.mark.parametrize("jobs", [None, 1])
def test_without_room_work_runs_here_when_it_is_asked_for(jobs):
    ran: list[int] = []

    def work() -> None:
        ran.append(os.getpid())

    if jobs is None:
        task = begin(work, 1 << 20)
    else:
        with processes(jobs):
            task = begin(work, 1 << 20)
    assert ran == []
    task.result()
    task.result()
    assert ran == [os.getpid()]


def test_as_many_work_at_once_as_asked_for():
    gate = Gate()
    with processes(2):
        first, second = begin(gate.work, 0), begin(os.getpid, 0)
        assert (first.begun, second.begun, second.result()) == (True, False, os.getpid())
        gate.open()
        assert first.result() != os.getpid()
        assert begin(os.getpid, 0).result() != os.getpid()


def test_what_waits_is_begun_once_there_is_room():
    gate = Gate()
    with processes(2):
        first, second = begin(gate.work, 0), begin(os.getpid, 0)
        gate.open()
        first.result()
        assert second.begun
        assert second.result() != os.getpid()


def test_works_of_one_process_are_answered_one_by_one():
    gate = Gate()
    with processes(2):
        first, second = begin_all([os.getpid, gate.work], 0)
        child = first.result()  # there, while the second still works
        gate.open()
        assert child == second.result() != os.getpid()


def test_an_error_of_one_work_leaves_the_next():
    def refuse() -> int:
        raise UnsupportedError("no rule for x")

    with processes(2):
        first, second = begin_all([refuse, os.getpid], 0)
        assert second.result() != os.getpid()
        with pytest.raises(UnsupportedError, match="no rule for x"):
            first.result()


def test_nothing_is_begun_while_it_is_held():
    gate = Gate()
    with processes(2):
        first, waiting = begin(gate.work, 0), begin(os.getpid, 0)
        gate.open()
        with held():
            assert first.result() != os.getpid()
            assert not waiting.begun
            assert begin(os.getpid, 0).result() == waiting.result() == os.getpid()
        assert begin(os.getpid, 0).result() != os.getpid()


@pytest.mark.parametrize(("cores", "nodes", "forks"), [(2, LEAST_NODES, True), (2, LEAST_NODES - 1, False),
                                                       (1, LEAST_NODES, False)])  # fmt: skip
def test_the_default_forks_for_large_graphs_on_several_cores(monkeypatch, cores, nodes, forks):
    monkeypatch.setattr(background, "usable_cores", lambda: cores)
    with processes(None):
        assert (begin(os.getpid, nodes).result() != os.getpid()) is forks


@pytest.mark.parametrize("own_process", [True, False])
def test_beside_threads_of_others_nothing_is_forked(own_process):
    """A child would wait for ever for a lock that another thread held as it was forked."""
    end = threading.Event()
    other = threading.Thread(target=end.wait)
    other.start()
    try:
        with processes(2, own_process=own_process):
            assert (begin(os.getpid, 0).result() != os.getpid()) is own_process
    finally:
        end.set()
        other.join()


def test_a_child_forks_no_further():
    with processes(4):
        ours, theirs = begin(lambda: (os.getpid(), begin(os.getpid, 0).result()), 0).result()
    assert ours == theirs != os.getpid()


def test_errors_are_those_of_the_work():
    def refuse() -> None:
        raise UnsupportedError("no rule for x", "leave it out")

    with processes(2), pytest.raises(UnsupportedError) as caught:
        begin(refuse, 0).result()
    assert (caught.value.message, caught.value.hints) == ("no rule for x", ("leave it out",))
    assert "in refuse" in caught.value.__notes__[0]  # where it was raised, for --debug


def test_errors_of_the_system_keep_their_number():
    def fill() -> None:
        raise OSError(errno.ENOSPC, "full", "here")

    with processes(2), pytest.raises(OSError) as caught:
        begin(fill, 0).result()
    assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, "here")


class OddError(Exception):
    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


def test_an_error_that_cannot_travel_is_told():
    def fail() -> None:
        raise OddError(1, 2)

    with processes(2), pytest.raises(RuntimeError, match="OddError: 1 and 2"):
        begin(fail, 0).result()


@pytest.mark.parametrize(
    ("end", "how"),
    [(lambda: os.kill(os.getpid(), signal.SIGKILL), "SIGKILL"), (lambda: os._exit(3), "no answer|without")],
)
def test_a_child_that_dies_is_an_error(end, how):
    with processes(2), pytest.raises(RunError, match=how) as caught:
        begin(end, 0).result()
    assert "--jobs 1" in caught.value.hints[0]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_in_a_childs_first_moment_ends_it(number, monkeypatch):
    """A child that still had its parent's handlers noted the signal for a parent it is not, and went on."""
    calm = background._reset_child

    def late(parent: int) -> None:
        os.kill(os.getpid(), number)
        for _ in range(100):  # Python calls a handler between two operations
            pass
        calm(parent)

    monkeypatch.setattr(background, "_reset_child", late)
    with processes(2), pytest.raises(RunError, match=signal.Signals(number).name):
        begin(os.getpid, 0).result()
    assert number not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


@pytest.mark.parametrize("error", [None, KeyboardInterrupt])
def test_children_end_with_the_block(error):
    gate = Gate()
    tasks: list[Task[int]] = []
    with pytest.raises(error) if error else processes(2), processes(2):
        tasks.append(begin(gate.work, 0))
        if error:
            raise error
    assert gate.gone()
    assert all(task.begun for task in tasks)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_that_ends_the_parent_is_an_error_with_its_exit_code_and_ends_the_children(number):
    gate = Gate()
    with pytest.raises(StoppedError) as caught, processes(2):
        begin(gate.work, 0)
        signal.raise_signal(number)
    assert caught.value.exit_code == 128 + number
    assert gate.gone()
    assert signal.getsignal(number) == signal.SIG_DFL


def test_what_was_not_taken_in_its_block_is_done_again():
    with processes(2):
        task = begin(os.getpid, 0)
    assert task.result() == os.getpid()


def test_a_child_dies_with_its_parent():
    gate = Gate()
    asked, answer = os.pipe()

    def work() -> int:
        os.write(answer, b"x")  # it works now: only the system can end it
        return gate.work()

    parent = os.fork()
    if not parent:
        with processes(2):
            begin(work, 0)
            os.read(asked, 1)
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(parent, 0)
    assert gate.gone()


def refuse_fork() -> int:
    raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")


def refuse_file(*_: object) -> int:
    raise OSError(errno.EMFILE, "Too many open files")


@pytest.mark.parametrize(("name", "stand_in"), [("fork", refuse_fork), ("memfd_create", refuse_file)])
def test_where_the_system_gives_no_process_work_runs_here(monkeypatch, name, stand_in):
    monkeypatch.setattr(os, name, stand_in)
    before = len(os.listdir("/proc/self/fd"))
    with processes(2):
        assert begin(os.getpid, 0).result() == os.getpid()
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("name", ["fork", "memfd_create"])
def test_a_system_without_the_call_works_here(monkeypatch, name):
    monkeypatch.delattr(os, name)
    with processes(2):
        assert begin(os.getpid, 0).result() == os.getpid()


def test_cores_are_known_where_affinity_is_not(monkeypatch):
    monkeypatch.delattr(os, "sched_getaffinity")
    assert background.usable_cores() >= 1


@pytest.mark.parametrize("jobs", [0, -1, True, 1.5, "2"])
def test_a_number_of_jobs_that_is_none_is_refused(jobs):
    with pytest.raises(OptionError, match="jobs="), processes(jobs):
        pass


@pytest.fixture
def _children_ignored():
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGCHLD, before)


@pytest.mark.usefixtures("_children_ignored")
def test_where_nobody_hears_of_children_answers_come_all_the_same():
    with processes(3):
        assert begin(os.getpid, 0).result() != os.getpid()
        begin(signal.pause, 0)  # killed at the end
        with pytest.raises(RunError, match="without an answer"):
            begin(lambda: os.kill(os.getpid(), signal.SIGKILL), 0).result()


@pytest.mark.parametrize("meanwhile", [True, False])
def test_a_process_dies_with_its_parent_while_it_says_so(meanwhile):
    """Its end is seen at a pipe that it alone holds."""
    alive, gone = os.pipe()
    parent = os.fork()
    if not parent:
        os.close(alive)
        ready, told = os.pipe()
        if not os.fork():
            with background.dying_with_parent():
                if meanwhile:
                    os.write(told, b"x")
                    signal.pause()
            os.write(told, b"x")
            os.close(told)
            select.select([], [], [], 0.3)  # the parent is dead by then, or is not waited for
            os.write(gone, b"lives")
            os._exit(0)
        os.close(gone)
        os.read(ready, 1)
        os.kill(os.getpid(), signal.SIGKILL)
    os.close(gone)
    os.waitpid(parent, 0)
    assert os.read(alive, 10) == (b"" if meanwhile else b"lives")
    os.close(alive)
