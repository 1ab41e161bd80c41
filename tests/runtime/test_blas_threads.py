"""Products of a block run on one thread; behind the outermost block there are as many as before."""

from __future__ import annotations

import threading

import pytest

from gopt.runtime import blas_threads
from gopt.runtime.blas_threads import one_blas_thread


def test_blocks_may_be_nested_and_overlap():
    calls = blas_threads._library()
    if calls is None:
        pytest.skip("this NumPy has another library")
    get, before = calls[0], calls[0]()
    entered, leave = threading.Event(), threading.Event()

    def other() -> None:
        with one_blas_thread():
            entered.set()
            leave.wait(60)

    thread = threading.Thread(target=other)
    with one_blas_thread():
        thread.start()
        assert entered.wait(60)
        assert get() == 1
    assert get() == 1, "another thread is inside still"
    leave.set()
    thread.join()
    assert get() == before


def test_without_the_library_a_block_runs_all_the_same(monkeypatch):
    monkeypatch.setattr(blas_threads, "_library", lambda: None)
    with one_blas_thread():
        pass
