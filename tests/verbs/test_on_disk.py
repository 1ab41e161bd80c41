"""Objects in place of paths: they lie in a temporary folder as long as somebody reads it."""

from __future__ import annotations

import gc

from helpers import source

import gopt
from gopt.verbs.on_disk import TemporaryFolder, keep_alive, on_disk


def test_a_folder_is_gone_when_it_was_read():
    with on_disk(gopt.shard(source("mlp_sgd"), 2)) as path:
        assert (path / "manifest.json").is_file()
    assert not path.parent.exists()


def test_a_path_is_itself(tmp_path):
    with on_disk(str(tmp_path)) as path:
        assert path == tmp_path
    assert tmp_path.exists()


def test_what_is_read_late_stays():
    class Reader:
        pass

    home, reader = TemporaryFolder(), Reader()
    path = home.path
    keep_alive(reader, home)
    del home
    gc.collect()
    assert path.exists()
    del reader
    gc.collect()
    assert not path.exists()
