"""Signals wait for the end of a block, or become a refusal; handlers are afterwards as they were."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import suppress

import pytest

from gopt.errors import StoppedError
from gopt.system.signals import INTERRUPT, STOPS, Handler, defer_signals, handle_signals, raise_on_signals

ALL = (*INTERRUPT, *STOPS)


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """As in a process of its own, and afterwards as it was: a job in the background ignores interrupts."""
    before = {number: signal.getsignal(number) for number in ALL}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in STOPS:
        signal.signal(number, signal.SIG_DFL)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_an_interrupt_comes_at_the_end_of_the_block():
    done = []
    with pytest.raises(KeyboardInterrupt), defer_signals():
        signal.raise_signal(signal.SIGINT)
        done.append("the rest")
    assert done == ["the rest"]


def test_an_interrupt_comes_although_the_block_fails():
    with pytest.raises(KeyboardInterrupt), defer_signals():
        signal.raise_signal(signal.SIGINT)
        raise ZeroDivisionError


def test_blocks_within_blocks_wait_for_the_outer_one():
    done = []
    with pytest.raises(KeyboardInterrupt), defer_signals():
        with defer_signals():
            signal.raise_signal(signal.SIGINT)
        done.append("the rest")
    assert done == ["the rest"]


@pytest.mark.parametrize("number", STOPS)
def test_a_stop_is_a_refusal(number):
    with pytest.raises(StoppedError) as caught, raise_on_signals():
        signal.raise_signal(number)
    assert caught.value.exit_code == 128 + number and number.name in caught.value.message
    assert signal.getsignal(number) is signal.SIG_DFL


def test_what_goes_on_after_an_error_does_not_go_on_after_a_stop():
    done = []
    with pytest.raises(StoppedError), raise_on_signals():
        with suppress(Exception):
            signal.raise_signal(signal.SIGTERM)
        done.append("the rest")
    assert done == []


class Dropped:
    """Python drops what its destructor raises."""

    def __del__(self) -> None:
        signal.raise_signal(signal.SIGTERM)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_stop_that_python_drops_comes_at_the_end():
    with pytest.raises(StoppedError), raise_on_signals():
        Dropped()


@pytest.mark.parametrize("moment", [(signal.SIGTERM, True), (signal.SIGTERM, False), (signal.SIGHUP, False)])
def test_handlers_are_restored_although_one_raises_meanwhile(moment, monkeypatch):
    """As the first handler is set, and as each is restored: a handler that stayed would take every later signal."""
    put, seen = signal.signal, []

    def changed(number: signal.Signals, handler: Handler) -> Handler:
        was = put(number, handler)
        if (number, callable(handler)) == moment and not seen:
            seen.append(number)
            raise KeyboardInterrupt
        return was

    with pytest.raises(KeyboardInterrupt):
        monkeypatch.setattr(signal, "signal", changed)
        with raise_on_signals():
            pass
    monkeypatch.undo()
    assert [signal.getsignal(number) for number in STOPS] == [signal.SIG_DFL, signal.SIG_DFL]


def test_a_stop_within_steps_that_belong_together_waits():
    done = []
    with pytest.raises(StoppedError), raise_on_signals(), defer_signals():
        signal.raise_signal(signal.SIGTERM)
        done.append("the rest")
    assert done == ["the rest"]


def test_what_is_ignored_stays_so():
    """As under nohup."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with raise_on_signals():
        signal.raise_signal(signal.SIGHUP)
    with defer_signals():
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


def test_another_thread_sets_no_handlers():
    seen = []

    def work() -> None:
        with handle_signals(lambda *_: None, ALL, lambda _: True):
            seen.append([signal.getsignal(number) for number in ALL])

    before = [signal.getsignal(number) for number in ALL]
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [before]
