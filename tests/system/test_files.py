"""New files: made where nothing is, never through a link, and synced when that is asked for."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from gopt.system.files import (
    create,
    digest_of,
    is_regular_file,
    make_folders,
    reason,
    remove,
    sync,
    sync_folder,
    write_new,
)


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def synced(monkeypatch) -> list[str]:
    """Names of what is synced, in order."""
    names: list[str] = []
    real = os.fsync

    def note(number: int) -> None:
        names.append(os.path.basename(os.readlink(f"/proc/self/fd/{number}")))
        real(number)

    monkeypatch.setattr(os, "fsync", note)
    return names


@pytest.mark.parametrize("kind", ["file", "link", "broken link", "folder"])
def test_nothing_that_is_there_is_written_over(kind):
    Path("victim").write_bytes(b"mine")
    if kind == "file":
        Path("new").write_bytes(b"mine")
    elif kind == "folder":
        Path("new").mkdir()
    else:
        Path("new").symlink_to("victim" if kind == "link" else "nowhere")
    with pytest.raises(FileExistsError):
        write_new(Path("new"), b"other")
    assert Path("victim").read_bytes() == b"mine" and not Path("nowhere").exists()


def test_a_file_is_whole_when_the_block_ends():
    data = os.urandom(3 << 20)
    with create(Path("new")) as file:
        for start in range(0, len(data), 100_001):
            file.write(data[start : start + 100_001])
    assert Path("new").read_bytes() == data
    write_new(Path("other"), data)
    assert digest_of(Path("new")) == digest_of(Path("other")) != digest_of(Path(__file__))


def test_a_write_that_takes_a_part_goes_on(monkeypatch):
    """A disk may take fewer bytes than it is given."""
    real = os.write
    monkeypatch.setattr(os, "write", lambda number, data: real(number, bytes(data)[:7]))
    write_new(Path("new"), b"more than seven bytes")
    assert Path("new").read_bytes() == b"more than seven bytes"


def test_the_file_is_closed_after_an_error():
    with pytest.raises(ZeroDivisionError), create(Path("new")) as file:
        raise ZeroDivisionError
    assert file.closed


def test_a_folder_is_synced_behind_its_files(synced):
    Path("top").mkdir()
    for name in ("b", "a"):
        Path("top", name).touch()
    sync_folder(Path("top"))
    assert synced == ["a", "b", "top"]


def test_folders_are_made_and_their_names_synced(synced):
    make_folders(Path("a/b/c").absolute())
    assert Path("a/b/c").is_dir() and set(synced) == {"b", "a", Path.cwd().name}
    make_folders(Path("a/b/c").absolute())
    assert len(synced) == 3, "nothing is missing any more"


@pytest.mark.parametrize("below", ["", "a", "a/b"])
def test_a_file_in_the_place_of_a_parent_is_named(below):
    Path("step.onnx").touch()
    with pytest.raises(NotADirectoryError) as caught:
        make_folders(Path("step.onnx", below).absolute())
    assert reason(caught.value) == f"{str(Path('step.onnx').absolute())!r} is a file, not a folder"
    assert Path("step.onnx").is_file()


@pytest.mark.parametrize(("number", "raises"), [(errno.EINVAL, False), (errno.EIO, True), (errno.ENOSPC, True)])
def test_a_file_system_that_syncs_no_folders(number, raises, monkeypatch):
    def fail(_: int) -> None:
        raise OSError(number, os.strerror(number))

    Path("file").touch()
    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError):
        sync(Path("file"))
    if raises:
        with pytest.raises(OSError):
            sync(Path())
    else:
        sync(Path())


def test_a_link_is_removed_and_not_what_it_leads_to():
    Path("folder").mkdir()
    Path("folder/file").touch()
    Path("link").symlink_to("folder")
    assert not is_regular_file(Path("link")) and is_regular_file(Path("folder/file"))
    remove(Path("link"))
    assert Path("folder/file").exists() and not Path("link").is_symlink()
    remove(Path("folder"))
    remove(Path("nowhere"))
    assert not Path("folder").exists()


def test_reasons():
    assert reason(OSError(errno.EDQUOT, "Disk quota exceeded")) == "the disk is full"
    assert reason(OSError(errno.EACCES, "Permission denied")) == "Permission denied"
    assert reason(OSError("no number")) == "no number"
