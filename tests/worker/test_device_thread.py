"""The device thread: what it finished is known at once, whether or not it comes to run again."""

from __future__ import annotations

import os
import select
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from worker import device
from worker.device import DeviceThread

pytestmark = pytest.mark.interpreted

WAIT_S = 60.0


def batch() -> Any:
    executable = SimpleNamespace(launch=lambda slot: None, finish=lambda slot: "timing")
    return SimpleNamespace(executable=executable, slot=None, timing=None, failure=None)


def woken(thread: DeviceThread, timeout_s: float) -> bool:
    return bool(select.select([thread], [], [], timeout_s)[0])


def test_an_end_is_seen_while_the_thread_waits_for_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """It starved there: the loop was woken by its descriptor, found nothing finished, and was woken again at once."""
    written, go_on = threading.Event(), threading.Event()
    real = os.eventfd_write

    def write_and_wait(descriptor: int, value: int) -> None:
        real(descriptor, value)
        written.set()
        assert go_on.wait(WAIT_S)

    monkeypatch.setattr(device.os, "eventfd_write", write_and_wait)
    thread = DeviceThread()
    thread.start()
    first = batch()
    assert not thread.acknowledge()
    thread.submit(first)
    assert written.wait(WAIT_S) and woken(thread, WAIT_S)
    thread.clear()
    assert thread.acknowledge() and first.timing == "timing"
    assert not thread.acknowledge(), "once"
    assert not woken(thread, 0), "and it wakes nobody again"
    go_on.set()
    thread.submit(batch())
    assert woken(thread, WAIT_S) and thread.acknowledge()
    thread.close()


def test_a_late_wake_up_says_nothing() -> None:
    """The loop asks on every round, so an end may be known before the descriptor tells of it."""
    thread = DeviceThread()
    thread.start()
    thread.submit(batch())
    assert woken(thread, WAIT_S) and thread.acknowledge()
    assert woken(thread, 0)
    thread.clear()
    assert not woken(thread, 0) and not thread.acknowledge()
    thread.clear()
    thread.close()


def test_two_batches_run_one_after_the_other_and_each_end_is_told_once() -> None:
    thread = DeviceThread()
    thread.start()
    first, second = batch(), batch()
    thread.submit(first)
    thread.submit(second)
    told = 0
    while told < 2:
        assert woken(thread, WAIT_S)
        thread.clear()
        while thread.acknowledge():
            told += 1
            assert (first.timing, second.timing)[told - 1] == "timing"
    assert not thread.acknowledge()
    thread.close()
