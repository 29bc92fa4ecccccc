"""What the main thread of this process spends its processor time on, by stack. Standard library only.

The kernel's profiling timer interrupts while the process uses the processor, and each sample carries the processor time
that the main thread itself used since the one before. So time asleep, preempted or spent by other threads is nobody's,
and the samples' times add up to what the thread used. (A sampler outside sees where a process was preempted instead.)

The interpreter runs the handler at its next chance: after a call into C, in the caller, or at the entry of a function.
There the time belongs to whoever called it: for a callback of the event loop that is the loop's polling and reading.

Marks, made by the driver as files: FOLDER/0/begin, FOLDER/0/end, then FOLDER/1/begin ...; the sums between two of them
go to FOLDER/0/PID.
"""

from __future__ import annotations

import atexit
import json
import opcode
import os
import signal
import time
from types import CodeType, FrameType

INTERVAL_S = 0.001
"""Asked for; kernels look at this timer on their own tick, often 4 ms."""
MAX_STACKS = 20_000
"""Further ones are counted together."""
OTHER = "(more stacks)"
_RESUME = opcode.opmap["RESUME"]


class Sampler:
    """One process's samples; belongs to its main thread."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._entries: dict[int, tuple[CodeType, int]] = {}
        self._busy = False
        self._last_ns = 0
        self._take_up(0)

    def start(self) -> None:
        """Sample from now on until the process ends."""
        signal.signal(signal.SIGPROF, self._on_sample)
        # Interrupted system calls go on by themselves.
        signal.siginterrupt(signal.SIGPROF, False)
        signal.setitimer(signal.ITIMER_PROF, INTERVAL_S, INTERVAL_S)
        # The interpreter takes its handlers away before it ends, and the signal would then be deadly.
        atexit.register(signal.setitimer, signal.ITIMER_PROF, 0)

    def _take_up(self, number: int) -> None:
        """Wait for the marks of the next run."""
        self._number = number
        self._begin = os.path.join(self._folder, str(number), "begin")
        self._end = os.path.join(self._folder, str(number), "end")
        self._counting = False
        # Code objects are kept, or another one might get the same id.
        self._stacks: dict[tuple[int, ...], tuple[list[CodeType], list[int]]] = {}
        self._samples = 0
        self._own_ns = 0

    def _on_sample(self, number: int, frame: FrameType | None) -> None:
        if self._busy:
            return
        self._busy = True
        now_ns = time.thread_time_ns()
        if self._counting and os.access(self._end, os.F_OK):
            self._write()
        elif self._counting:
            self._add(frame, now_ns - self._last_ns)
        elif os.access(self._begin, os.F_OK):
            self._counting = True
        self._last_ns = time.thread_time_ns()
        if self._counting:
            self._own_ns += self._last_ns - now_ns
        self._busy = False

    def _add(self, frame: FrameType | None, used_ns: int) -> None:
        if frame is not None and self._entering(frame):
            frame = frame.f_back
        codes = []
        while frame is not None:
            codes.append(frame.f_code)
            frame = frame.f_back
        key = tuple(map(id, codes))
        found = self._stacks.get(key)
        if found is None:
            if len(self._stacks) >= MAX_STACKS:
                key, codes = (), []
            found = self._stacks.setdefault(key, (codes, [0, 0]))
        found[1][0] += used_ns
        found[1][1] += 1
        self._samples += 1

    def _entering(self, frame: FrameType) -> bool:
        """Return whether a frame has not begun yet."""
        code = frame.f_code
        known = self._entries.get(id(code))
        if known is None:
            words = code.co_code
            first = next((at for at in range(0, len(words), 2) if words[at] == _RESUME), -1)
            known = self._entries[id(code)] = (code, first)
        return frame.f_lasti == known[1]

    def _write(self) -> None:
        stacks = [
            [[f"{code.co_qualname} ({code.co_filename})" for code in reversed(codes)] or [OTHER], *sums]
            for codes, sums in self._stacks.values()
        ]
        document = {"samples": self._samples, "own_ns": self._own_ns, "stacks": stacks}
        path = os.path.join(self._folder, str(self._number), str(os.getpid()))
        with open(f"{path}.part", "w", encoding="utf-8") as file:
            json.dump(document, file)
        os.replace(f"{path}.part", path)
        self._take_up(self._number + 1)
