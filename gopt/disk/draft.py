"""A draft beside its target that takes its place in one step, and what becomes of drafts that a dead process left."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from gopt.disk import names
from gopt.disk.files import NEW, is_plain, remove, sync, sync_folder, writer
from gopt.disk.lock import Taken, hold
from gopt.disk.rename import Unsupported, exchange, place
from gopt.disk.signals import deferred

_TRIES = 100


class LeftAsideError(OSError):
    """What was there is whole, but beside its place: under ``filename``."""


@dataclass(slots=True)
class Draft:
    """What will be ``target``: a folder or a file that is locked for as long as this process works on it."""

    path: Path
    target: Path
    _lock: int
    _mine: bool = True
    """Whether what lies under ``path`` may be removed."""

    @contextmanager
    def open(self) -> Iterator[BinaryIO]:
        """The file, to be written. Raises OSError."""
        with writer(os.open(self.path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)) as file:
            yield file

    def put_over(self) -> None:
        """As ``put``, a file in the place of another file or link, or of none."""
        self.put((lambda _: None) if os.path.lexists(self.target) else None)

    def put(self, check: Callable[[Path], None] | None = None) -> None:
        """Take the target's place, and remove what was there; without ``check`` the place must be free.

        ``check`` is given the path of what was there, once it is out of the way, and raises to have it back. Whatever
        is raised, and whenever the process dies, the old or the new one stands there whole; where the file system
        exchanges no names, it may lie beside it under a name that ``sweep`` knows. Raises FileExistsError, OSError.
        """
        if self.path.is_dir():
            sync_folder(self.path)
        else:
            sync(self.path)
        with deferred():
            if check is None:
                place(self.path, self.target)
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
        """One after the other: what was there stays whole beside its place until the new one stands."""
        held = hold(self.target)
        aside = names.fresh(self.target, names.OLD)

        def see() -> None:
            check(aside)
            place(self.path, self.target)
            _or_undo(lambda: sync(self.target.parent), lambda: os.rename(self.target, self.path))

        try:
            os.rename(self.target, aside)
            _or_undo(see, lambda: self._back(aside))
            remove(aside)
        finally:
            if held is not None:
                os.close(held[0])

    def _back(self, aside: Path) -> None:
        try:
            os.rename(aside, self.target)
        except OSError as error:
            raise LeftAsideError(error.errno, error.strerror, str(aside)) from error

    def close(self) -> None:
        """Remove what has not taken its place, and let go."""
        with deferred():
            if self._mine and os.path.lexists(self.path):
                remove(self.path)
            with suppress(OSError):
                os.close(self._lock)


def _or_undo(work: Callable[[], None], undo: Callable[[], None]) -> None:
    try:
        work()
    except BaseException:
        undo()
        raise


@contextmanager
def draft_folder(target: Path) -> Iterator[Draft]:
    """An empty folder that may become the target, and vanishes at the end otherwise. Raises OSError.

    The target's own drafts that dead processes left are removed before; one that is needed is put back.
    """
    yield from _drafted(target, lambda path: os.mkdir(path, 0o777))


@contextmanager
def draft_file(target: Path) -> Iterator[Draft]:
    """As ``draft_folder``, an empty file."""
    yield from _drafted(target, lambda path: os.close(os.open(path, NEW, 0o666)))


def put_file(target: Path, data: bytes) -> None:
    """Give a file this content, in one step; one that has it is left alone, a link is replaced. Raises OSError."""
    if is_plain(target) and target.stat().st_size == len(data) and target.read_bytes() == data:
        return
    with draft_file(target) as draft:
        with draft.open() as file:
            file.write(data)
        draft.put_over()


def _drafted(target: Path, make: Callable[[Path], None]) -> Iterator[Draft]:
    sweep(target.parent, target)
    draft: Draft | None = None
    try:
        with deferred():
            draft = claim(target, make)
        yield draft
    finally:
        if draft is not None:
            draft.close()


def claim(target: Path, make: Callable[[Path], None]) -> Draft:
    """Make something under a fresh name and lock it; raises OSError. The caller closes it."""
    for _ in range(_TRIES):
        path = names.fresh(target)
        make(path)
        try:
            held = hold(path)
        except BaseException:
            remove(path)
            raise
        if held is None:
            continue  # swept away before it was locked
        number, taken = held
        if taken is not Taken.BUSY:
            return Draft(path, target, number)
        os.close(number)  # it is being swept away
    raise OSError(f"every new name beside {target} was taken away")


def sweep(folder: Path, target: Path | None = None) -> None:
    """Remove drafts in a folder, of one target or of all, whose process has died, and put back what a target lacks."""
    found = []
    with suppress(OSError):
        found = names.drafts(folder, target)
    for each in found:
        with suppress(OSError), deferred():
            held = hold(each.path)
            if held is None:
                continue
            number, taken = held
            try:
                if taken is Taken.MINE and os.fstat(number).st_uid == os.geteuid():
                    _settle(each)
            finally:
                os.close(number)


def _settle(found: names.Found) -> None:
    if found.kind == names.OLD and not os.path.lexists(found.target):
        place(found.path, found.target)
    else:
        remove(found.path)
