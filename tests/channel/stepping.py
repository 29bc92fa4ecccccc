"""Shared memory that stops before every load and store, so that a seed decides who goes next.

Each participant runs in a thread of its own, but only the one that holds the baton moves. At every access the baton may
pass to another one, and stores that wait in somebody's buffer may become visible, as they do on the chosen machine.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from engines.tensor import NDArray
from worker.channel.records import RECORD_WORDS

MAX_STEPS = 200_000


class Stuck(Exception):
    """Everybody who is left waits for something that cannot happen any more."""


class Memory:
    """Words with store buffers, and the baton."""

    def __init__(self, seed: int, machine: str, words: int) -> None:
        self.words = [0] * words
        self.rings = 0
        self._random = random.Random(seed)
        self._machine = machine
        self._buffers: dict[int, list[tuple[int, int]]] = {}
        self._turns: dict[int, threading.Semaphore] = {}
        self._me = threading.local()
        self._steps = 0
        self._failure: BaseException | None = None

    def run(self, *mains: Callable[[], None]) -> None:
        """Run every participant to its end; raise what the first of them raised."""
        threads = [threading.Thread(target=self._participant, args=(index, main)) for index, main in enumerate(mains)]
        for index in range(len(mains)):
            self._turns[index] = threading.Semaphore(0)
            self._buffers[index] = []
        for thread in threads:
            thread.start()
        self._turns[self._random.choice(sorted(self._turns))].release()
        for thread in threads:
            thread.join()
        if self._failure is not None:
            raise self._failure

    def load(self, word: int) -> int:
        self.pause()
        own = [value for stored, value in self._buffers[self._me.index] if stored == word]
        return own[-1] if own else self.words[word]

    def store(self, word: int, value: int) -> None:
        self.pause()
        if self._machine == "program":
            self.words[word] = value
        else:
            self._buffers[self._me.index].append((word, value))

    def flush(self, index: int) -> None:
        """Make everything that a participant stored visible."""
        for word, value in self._buffers[index]:
            self.words[word] = value
        self._buffers[index].clear()

    def flush_all(self) -> None:
        for index in self._buffers:
            self.flush(index)

    def flush_own(self) -> None:
        self.flush(self._me.index)

    def alone(self) -> bool:
        """Whether every other participant has ended."""
        return len(self._turns) == 1

    def pause(self) -> None:
        """Let the seed decide what becomes visible and who goes on."""
        self._steps += 1
        if self._failure is not None or self._steps > MAX_STEPS:
            raise Stuck(f"{self._steps} steps")
        for buffer in self._buffers.values():
            while buffer and self._random.random() < 0.3:
                position = 0
                if self._machine == "weak":
                    firsts = {word: at for at, (word, _) in reversed(list(enumerate(buffer)))}
                    position = self._random.choice(sorted(firsts.values()))
                word, value = buffer.pop(position)
                self.words[word] = value
        chosen = self._random.choice(sorted(self._turns))
        if chosen != self._me.index:
            self._turns[chosen].release()
            self._turns[self._me.index].acquire()

    def _participant(self, index: int, main: Callable[[], None]) -> None:
        self._me.index = index
        self._turns[index].acquire()
        try:
            main()
        except BaseException as error:
            if self._failure is None:
                self._failure = error
        finally:
            # What is in the buffer of somebody who ended becomes visible sooner or later.
            self.flush(index)
            del self._turns[index]
            if self._turns:
                self._turns[self._random.choice(sorted(self._turns))].release()


class Word:
    """One counter or flag."""

    def __init__(self, memory: Memory, word: int) -> None:
        self._memory, self._word = memory, word

    def __getitem__(self, _: int) -> int:
        return self._memory.load(self._word)

    def __setitem__(self, _: int, value: int) -> None:
        self._memory.store(self._word, value)


class RecordWords:
    """All records, flat, from ``first`` on."""

    def __init__(self, memory: Memory, first: int) -> None:
        self._memory, self._first = memory, first

    def __getitem__(self, index: int) -> int:
        return self._memory.load(self._first + index)

    def __setitem__(self, index: int | slice, value: Any) -> None:
        if isinstance(index, slice):
            for at, word in enumerate(value, index.start):
                self._memory.store(self._first + at, word)
        else:
            self._memory.store(self._first + index, int(value))


class RecordRows:
    """The same as rows; a range is read and written word by word."""

    def __init__(self, words: RecordWords) -> None:
        self._words = words

    def __getitem__(self, rows: slice) -> NDArray:
        words = [self._words[index] for index in range(rows.start * RECORD_WORDS, rows.stop * RECORD_WORDS)]
        return np.array(words, dtype=np.uint64).reshape(-1, RECORD_WORDS)

    def __setitem__(self, rows: slice, value: NDArray) -> None:
        for index, word in enumerate(value.ravel().tolist()):
            self._words[rows.start * RECORD_WORDS + index] = word
