"""Names that are exchanged or taken in one step, and file systems that know neither."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from gopt.system import rename
from gopt.system.rename import Unsupported, exchange, rename_noreplace


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("one").write_text("one")
    Path("other").mkdir()
    Path("other/file").write_text("other")


def unknown(number: int | None) -> object:
    """A system that has no such call (None), or a file system that answers with this error."""
    return lambda: None if number is None else (lambda one, other, flag: number)


def test_a_file_and_a_folder_take_each_others_name():
    exchange(Path("one"), Path("other"))
    assert Path("other").read_text() == "one" and Path("one/file").read_text() == "other"


def test_an_exchange_needs_both():
    with pytest.raises(FileNotFoundError) as caught:
        exchange(Path("one"), Path("nowhere"))
    assert (caught.value.filename, caught.value.filename2) == ("one", "nowhere")
    assert not isinstance(caught.value, Unsupported) and Path("one").read_text() == "one"


@pytest.mark.parametrize("number", [None, errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP])
def test_a_system_that_exchanges_nothing(number, monkeypatch):
    monkeypatch.setattr(rename, "renameat2", unknown(number))
    with pytest.raises(Unsupported):
        exchange(Path("one"), Path("other"))
    rename_noreplace(Path("one"), Path("new"))
    assert Path("new").read_text() == "one" and not Path("one").exists()


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("target", ["other", "link"])
def test_a_name_that_is_taken(known, target, monkeypatch):
    """A link that leads nowhere takes a name as well."""
    Path("link").symlink_to("nowhere")
    if not known:
        monkeypatch.setattr(rename, "renameat2", unknown(errno.EINVAL))
    with pytest.raises(FileExistsError):
        rename_noreplace(Path("one"), Path(target))
    assert Path("one").read_text() == "one" and os.readlink("link") == "nowhere"
