"""Observes a node from inside, in every Python process whose PYTHONPATH begins here.

With RINGSERVE_TRACE=FOLDER it notes when milestones are passed: each function is replaced right after its module was
loaded. A process writes what it noted to FOLDER/PID when it ends: pairs of int64, nanoseconds of the monotonic clock
(one for all processes) and the milestone's number.

With RINGSERVE_SAMPLE=FOLDER frontends and workers sample what they spend processor time on; see ``sampler``.
"""

from __future__ import annotations

import array
import atexit
import importlib.machinery
import os
import sys
import time
from typing import Any

SAMPLED = ("frontend", "worker")
"""Words on the command line of the processes that serve requests."""
MAX_EVENTS = 4_000_000
"""Later ones are not noted."""


def install(folder: str) -> None:
    """Wrap the milestones of modules as they are loaded; write at exit."""
    from milestones import PLACES

    events = array.array("q")
    by_module: dict[str, dict[str, list[tuple[int, bool]]]] = {}
    for number, (place, leave) in enumerate(PLACES):
        module, _, path = place.partition(":")
        by_module.setdefault(module, {}).setdefault(path, []).append((number, leave))
    load = importlib.machinery.SourceFileLoader.exec_module

    def exec_module(self: Any, module: Any) -> None:
        load(self, module)
        for path, numbers in by_module.get(module.__name__, {}).items():
            wrap(module, path, numbers, events)

    importlib.machinery.SourceFileLoader.exec_module = exec_module  # type: ignore[method-assign]

    def write() -> None:
        if events:
            with open(os.path.join(folder, str(os.getpid())), "wb") as file:
                events.tofile(file)

    leave = os._exit

    def leave_at_once(status: int) -> None:
        write()
        leave(status)

    atexit.register(write)
    # The worker ends so, and would skip what is registered.
    os._exit = leave_at_once  # type: ignore[assignment]


def wrap(module: Any, path: str, numbers: list[tuple[int, bool]], events: array.array[int]) -> None:
    """Replace a function by one that notes its milestones; one that is not there is left to the driver to report."""
    owner = module
    *owners, name = path.split(".")
    for part in owners:
        owner = getattr(owner, part, None)
    found = vars(owner).get(name) if owner is not None else None
    if found is None:
        return
    static = isinstance(found, staticmethod)
    function = found.__func__ if static else found
    before = [number for number, leave in numbers if not leave]
    after = [number for number, leave in numbers if leave]
    clock_ns, extend = time.monotonic_ns, events.extend

    def traced(*args: Any, **kwargs: Any) -> Any:
        for number in before:
            if len(events) < 2 * MAX_EVENTS:
                extend((clock_ns(), number))
        result = function(*args, **kwargs)
        for number in after:
            if len(events) < 2 * MAX_EVENTS:
                extend((clock_ns(), number))
        return result

    setattr(owner, name, staticmethod(traced) if static else traced)


def main() -> None:
    """Do what the environment asks for."""
    trace, sample = os.environ.get("RINGSERVE_TRACE"), os.environ.get("RINGSERVE_SAMPLE")
    sys.path.append(os.path.dirname(os.path.abspath(__file__)))
    if trace:
        install(trace)
    if sample and any(word in SAMPLED for word in sys.orig_argv):
        from sampler import Sampler

        Sampler(sample).start()


main()
