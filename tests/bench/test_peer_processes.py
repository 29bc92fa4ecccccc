"""Process trees: seen whole, measured, and ended even when they do not want to."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from bench.peers import processes
from real_node import until

STUBBORN = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; print('up', flush=True); time.sleep(600)"])
print(child.pid, flush=True)
time.sleep(600)
"""


def test_a_stat_line_with_any_name_is_read() -> None:
    line = "12 (a) b (c) S 7 12 12 0 -1 4194560 100 0 0 0 30 20 0 0 20 0 1 0 555 1 1"
    assert processes.parse_stat(line) == processes.Stat(12, "S", 7, 50, 555)


def test_own_process_is_seen_and_measured() -> None:
    pid = os.getpid()
    assert pid in processes.tree(pid)
    assert processes.cpu_seconds(processes.tree(pid)) > 0
    assert processes.memory_bytes([pid]) > 2**20
    assert processes.descriptor_kinds([pid]).total() >= 3
    assert processes.mappings([pid]) > 10
    assert processes.tree(2**22 + 1) == {}


@pytest.mark.process
def test_a_tree_that_ignores_its_end_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "STOP_TIMEOUT_S", 0.2)
    root = subprocess.Popen([sys.executable, "-c", STUBBORN], stdout=subprocess.PIPE, process_group=0)
    assert root.stdout is not None
    lines = {root.stdout.readline().strip(), root.stdout.readline().strip()}
    child = int((lines - {b"up"}).pop())
    members = processes.tree(root.pid)
    assert child in members
    processes.stop_tree(root.pid, members)
    root.wait(5)
    root.stdout.close()
    until("the child is gone", lambda: child not in processes.tree(child))
