"""A draft beside the target that takes the target's place in one step, and the fate of a dead process's drafts."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from gopt.system import staging_names
from gopt.system.files import NEW, is_regular_file, remove, sync, sync_folder, writer
from gopt.system.lock import LockState, lock_existing
from gopt.system.rename import Unsupported, exchange, rename_noreplace
from gopt.system.signals import defer_signals

_TRIES = 100


class DisplacedTargetError(OSError):
    """Raised when the old target is intact but was moved aside, to ``filename``."""


@dataclass(slots=True)
class Staged:
    """A draft of ``target``: a folder or a file, locked while this process works on it."""

    path: Path
    target: Path
    _lock: int
    _mine: bool = True
    """True if ``path`` may be removed."""

    @contextmanager
    def open(self) -> Iterator[BinaryIO]:
        """The file, to be written. Raises OSError."""
        with writer(os.open(self.path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)) as file:
            yield file

    def commit_over(self) -> None:
        """As ``commit``, a file in the place of another file or link, or of nothing."""
        self.commit((lambda _: None) if os.path.lexists(self.target) else None)

    def commit(self, check: Callable[[Path], None] | None = None) -> None:
        """Replace the target and remove the old target; without ``check`` the target must not exist.

        ``check`` gets the path of the old target once moved aside, and raises to restore it. After any error, and if
        the process dies at any time, the old or the new target exists as a whole; on file systems that cannot exchange
        names, perhaps beside the target under a name known to ``sweep``. Raises FileExistsError, OSError."""
        if self.path.is_dir():
            sync_folder(self.path)
        else:
            sync(self.path)
        with defer_signals():
            if check is None:
                rename_noreplace(self.path, self.target)
                _or_undo(lambda: sync(self.target.parent), lambda: os.rename(self.target, self.path))
            else:
                self._replace(check)

    def _replace(self, check: Callable[[Path], None]) -> None:
        folder = self.target.parent
        if self.target.is_dir() and not self.path.is_dir() and not self.target.is_symlink():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(self.target))

        def see() -> None:
            check(self.path)
            sync(folder)

        try:
            exchange(self.path, self.target)
        except Unsupported:
            if self.path.is_dir():
                self._step_aside(check)
            else:
                check(self.target)
                os.replace(self.path, self.target)
                sync(folder)
        else:
            _or_undo(see, self._exchange_back)
            remove(self.path)

    def _exchange_back(self) -> None:
        self._mine = False
        exchange(self.path, self.target)
        self._mine = True

    def _step_aside(self, check: Callable[[Path], None]) -> None:
        """Without an exchange: the old target is moved aside, and stays intact until the new target is in place."""
        lock = lock_existing(self.target)
        aside = staging_names.fresh_name(self.target, staging_names.OLD)

        def see() -> None:
            check(aside)
            rename_noreplace(self.path, self.target)
            _or_undo(lambda: sync(self.target.parent), lambda: os.rename(self.target, self.path))

        try:
            os.rename(self.target, aside)
            _or_undo(see, lambda: self._back(aside))
            remove(aside)
        finally:
            if lock is not None:
                os.close(lock[0])

    def _back(self, aside: Path) -> None:
        try:
            os.rename(aside, self.target)
        except OSError as error:
            raise DisplacedTargetError(error.errno, error.strerror, str(aside)) from error

    def close(self) -> None:
        """Remove the draft unless committed, and release the lock."""
        with defer_signals():
            if self._mine and os.path.lexists(self.path):
                remove(self.path)
            with suppress(OSError):
                os.close(self._lock)
            if self._mine and os.path.lexists(self.path):
                remove(self.path)  # with the lock's descriptor, where there was no other


def _or_undo(work: Callable[[], None], undo: Callable[[], None]) -> None:
    try:
        work()
    except BaseException:
        undo()
        raise


@contextmanager
def staged_folder(target: Path) -> Iterator[Staged]:
    """An empty folder to commit as the target; otherwise removed at the end. Raises OSError.

    The target's drafts of dead processes are removed before; a needed draft is put back."""
    yield from _drafted(target, lambda path: os.mkdir(path, 0o777))


@contextmanager
def staged_file(target: Path) -> Iterator[Staged]:
    """As ``staged_folder``, an empty file."""
    yield from _drafted(target, lambda path: os.close(os.open(path, NEW, 0o666)))


def replace_file(target: Path, data: bytes) -> None:
    """Give a file this content atomically; the same content is left alone, a link is replaced. Raises OSError."""
    if is_regular_file(target) and target.stat().st_size == len(data) and target.read_bytes() == data:
        sweep(target.parent, target)
        return
    with staged_file(target) as staged:
        with staged.open() as file:
            file.write(data)
        staged.commit_over()


def _drafted(target: Path, make: Callable[[Path], None]) -> Iterator[Staged]:
    sweep(target.parent, target)
    staged: Staged | None = None
    try:
        with defer_signals():
            staged = create_staged(target, make)
        yield staged
    except OSError as error:
        _name_target(error, staged, target)
        raise
    finally:
        if staged is not None:
            staged.close()


def _name_target(error: OSError, staged: Staged | None, target: Path) -> None:
    """Let an error name the target, or a file in the target, instead of the draft, or of nothing: a write has no
    path."""
    draft = str(target if staged is None else staged.path)
    if error.filename is None:
        error.filename = str(target)
    elif isinstance(error.filename, str) and error.filename.startswith(draft):
        error.filename = str(target) + error.filename.removeprefix(draft)


def create_staged(target: Path, make: Callable[[Path], None]) -> Staged:
    """Create and lock a draft under a fresh name; raises OSError. The caller closes the draft."""
    for _ in range(_TRIES):
        path = staging_names.fresh_name(target)
        try:
            make(path)
            lock = lock_existing(path)
        except FileExistsError:
            raise  # of another process
        except BaseException:  # also where it was made, and could not be closed
            remove(path)
            raise
        if lock is None:
            continue  # swept away before it was locked
        number, state = lock
        if state is not LockState.BUSY:
            return Staged(path, target, number)
        os.close(number)  # it is being swept away
    raise OSError(f"every new name beside {target} was taken away")


def sweep(folder: Path, target: Path | None = None) -> None:
    """Remove drafts of dead processes in a folder, for one target or all, and restore a missing target."""
    result = []
    with suppress(OSError):
        result = staging_names.find_staged(folder, target)
    for item in result:
        with suppress(OSError), defer_signals():
            lock = lock_existing(item.path)
            if lock is None:
                continue
            number, state = lock
            try:
                if state is LockState.MINE and os.fstat(number).st_uid == os.geteuid():
                    _settle(item)
            finally:
                os.close(number)


def _settle(entry: staging_names.StagedEntry) -> None:
    if entry.kind == staging_names.OLD and not os.path.lexists(entry.target):
        rename_noreplace(entry.path, entry.target)
    else:
        remove(entry.path)
