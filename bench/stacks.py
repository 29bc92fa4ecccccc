"""What processor time is spent on, by stacks that ``perf script`` has printed: reading them, and dividing the time.

Pure. A sample belongs to one row: if the kernel ran, to what it was called for; if a library ran that does a job of its
own (the model, numbers), to that library; otherwise to the stage of the innermost compiled function of ours, with the
interpreter's and the C library's time inside it. Functions that the C compiler put into others count for those, and
Python code that is not compiled counts for the compiled function that called it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain

from bench.stages import stage_of
from bench.symbols import Symbols

KERNEL = "[kernel.kallsyms]"
FIELDS = "pid,tid,time,ip,sym,dso"
"""What ``perf script`` is asked to print."""
NOT_COMPILED = "Python that is not compiled"

SYSTEM_CALLS: tuple[tuple[str, str], ...] = (
    ("sock_write_iter|__sys_send(to|msg)|sock_sendmsg", "write sockets"),
    ("sock_read_iter|__sys_recv(from|msg)|sock_recvmsg", "read sockets"),
    ("eventfd_(read|write)", "doorbells (eventfd)"),
    (".*membarrier.*", "memory barriers"),
    (".*sys_epoll_.*|do_epoll_.*", "epoll"),
    (".*futex.*", "futex"),
    (".*sched_yield", "yield"),
    (".*sys_(p?poll|p?select6?)", "poll"),
    (".*nanosleep.*", "sleep"),
    (".*sys_(mmap|munmap|madvise|brk|mprotect)", "map memory"),
    (".*exc_page_fault", "page faults"),
    ("asm_sysvec_.*|asm_common_interrupt", "interrupts"),
    ("exit_to_user_mode_loop", "preempted by another process"),
    ("ksys_(read|write)|.*sys_(read|write)", "begin and end of reads and writes"),
)
"""A function of the kernel's, and what is done inside it. The first that any frame fits counts."""

LIBRARIES: tuple[tuple[str, str], ...] = (
    ("onnxruntime", "ONNX Runtime"),
    ("simdjson", "simdjson, numbers read"),
    ("orjson", "orjson, numbers written"),
)
"""A part of the library's path and its row."""
EVENT_LOOP = "uvloop"
IN_LOOP = "event loop (uvloop)"

_FRAME = re.compile(r"^\s+[0-9a-f]+ (?P<symbol>.+?)(\+0x[0-9a-f]+)? \((?P<library>.*)\)$")
_HEAD = re.compile(r"^\s*(?P<pid>\d+)/(?P<tid>\d+)\s+(?P<at_s>\d+\.\d+):\s*$")
_system_calls = [(re.compile(form), name) for form, name in SYSTEM_CALLS]


@dataclass(frozen=True)
class Frame:
    """A function and the file that it lies in."""

    symbol: str
    library: str


@dataclass(frozen=True)
class Stack:
    """One sample; ``frames`` from the innermost outwards, ``at_s`` by perf's clock."""

    pid: int
    tid: int
    at_s: float
    frames: tuple[Frame, ...]


@dataclass
class Account:
    """Samples of one role, by row and by function."""

    rows: Counter[str] = field(default_factory=Counter)
    functions: Counter[str] = field(default_factory=Counter)

    def add(self, stack: Stack, symbols: Symbols) -> None:
        """Count a sample."""
        self.rows[row_of(stack, symbols)] += 1
        self.functions[innermost(stack, symbols)[0] or _leaf(stack)] += 1

    def costs_us(self, cpu_us: float, top: int) -> tuple[dict[str, float], dict[str, float]]:
        """Divide the processor time of a request among all rows and the costliest functions."""
        scale = cpu_us / max(1, self.rows.total())
        return (
            {name: round(count * scale, 2) for name, count in self.rows.most_common()},
            {name: round(count * scale, 2) for name, count in self.functions.most_common(top)},
        )


def read(lines: Iterable[str]) -> Iterator[Stack]:
    """Yield the samples of a text with ``FIELDS``; other lines are passed over."""
    head: re.Match[str] | None = None
    frames: list[Frame] = []
    for line in chain(lines, [""]):
        found = _FRAME.match(line.rstrip("\n")) if head is not None else None
        if found is not None:
            frames.append(Frame(found["symbol"], found["library"]))
            continue
        if head is not None and frames:
            yield Stack(int(head["pid"]), int(head["tid"]), float(head["at_s"]), tuple(frames))
        frames = []
        head = _HEAD.match(line)


def innermost(stack: Stack, symbols: Symbols) -> tuple[str | None, tuple[Frame, ...]]:
    """Return the innermost compiled function of ours, None if there is none, and the frames that it called."""
    for number, frame in enumerate(stack.frames):
        if (ours := symbols.frame(frame.symbol)) is not None:
            return ours, stack.frames[:number]
    return None, stack.frames


def row_of(stack: Stack, symbols: Symbols) -> str:
    """Return what a sample's time is spent on; see the head of this file."""
    if stack.frames[0].library == KERNEL:
        return f"kernel: {_system_call([frame.symbol for frame in stack.frames if frame.library == KERNEL])}"
    ours, called = innermost(stack, symbols)
    for part, name in LIBRARIES:
        if any(part in frame.library for frame in called):
            return f"library: {name}"
    if ours is not None:
        return stage_of([ours])
    return IN_LOOP if any(EVENT_LOOP in frame.library for frame in called) else NOT_COMPILED


def _system_call(symbols: list[str]) -> str:
    for form, name in _system_calls:
        if any(form.fullmatch(symbol) for symbol in symbols):
            return name
    return "other"


def _leaf(stack: Stack) -> str:
    frame = stack.frames[0]
    library = frame.library.rpartition("/")[2]
    return library if frame.symbol == "[unknown]" else f"{frame.symbol} ({library})"
