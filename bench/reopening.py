"""What a live gate that stays closed for a while buys and costs: simulated, with fixed times and with learned ones.

    .venv/bin/python bench/reopening.py > bench/results/reopening.md

The server of ``bench/latency_model.py`` on a virtual clock: live callers for a minute, a minute without, in turn. Each
caller pauses (exponential) after an answer before it calls again. Batch lines start, up to a cap, whenever the gate is
open. Learned times are those of ``frontend/batches/scheduling/reopen_state.py`` itself.
"""

from __future__ import annotations

import heapq
import random
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Protocol

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.gates_report import percentile
from bench.latency_model import step_s
from frontend.batches.scheduling.reopen_state import Absence

SECOND = 1_000_000_000
CAP, TOKENS = 8, 20
ACTIVE_S, IDLE_S, CYCLES = 60.0, 60.0, 10
SEEDS = (1, 2, 3)
CALLERS, PAUSES_S = (1, 4, 8), (0.1, 0.3, 1.0, 3.0, 10.0)


class Gate(Protocol):
    def saw(self, there: bool, now_ns: int) -> None: ...

    def reopens_ns(self, now_ns: int) -> int | None:
        """Return when it opens if nobody calls; None if it is open while nobody does."""
        ...


class Fixed:
    """Stays closed for the same time after every call."""

    def __init__(self, after_s: float) -> None:
        self.name = f"{after_s:g} s" if after_s else "at once"
        self._after_ns = int(after_s * SECOND)
        self._left_ns = -self._after_ns

    def saw(self, there: bool, now_ns: int) -> None:
        if there:
            self._left_ns = now_ns

    def reopens_ns(self, now_ns: int) -> int | None:
        at_ns = self._left_ns + self._after_ns
        return at_ns if at_ns > now_ns else None


class Learned:
    """As ``reopen_after_s`` does it."""

    def __init__(self, limit_s: float) -> None:
        self.name = f"learned, {limit_s:g} s at most"
        self._limit_ns = int(limit_s * SECOND)
        self._absence = Absence()

    def saw(self, there: bool, now_ns: int) -> None:
        self._absence.saw(there, None, now_ns, self._limit_ns)

    def reopens_ns(self, now_ns: int) -> int | None:
        return self._absence.reopens_ns(now_ns, self._limit_ns)


@dataclass(slots=True, eq=False)
class Request:
    """One on the server; ``caller`` None: a batch line."""

    caller: int | None
    began_s: float
    tokens: int = TOKENS


@dataclass(frozen=True, slots=True)
class Outcome:
    """``share``: lines that ended, of those that batches alone reach in the time without any live call."""

    p99_s: float
    share: float


def simulate(callers: int, pause_s: float, gate: Gate | None, seed: int) -> Outcome:
    """Return what comes of one gate; None: no batch at all."""
    pauses = random.Random(seed)
    now_s, idle_s, lines = 0.0, 0.0, 0
    latencies: list[float] = []
    running: list[Request] = []
    due = [(pauses.expovariate(1 / pause_s), caller) for caller in range(callers)]
    heapq.heapify(due)
    while now_s < (ACTIVE_S + IDLE_S) * CYCLES:
        while due[0][0] <= now_s:
            at_s, caller = heapq.heappop(due)
            cycle, within_s = divmod(at_s, ACTIVE_S + IDLE_S)
            if within_s < ACTIVE_S:
                running.append(Request(caller, at_s))
                heapq.heappush(due, (float("inf"), caller))
            else:
                heapq.heappush(due, ((cycle + 1) * (ACTIVE_S + IDLE_S) + pauses.expovariate(1 / pause_s), caller))
        live = any(one.caller is not None for one in running)
        now_ns = int(now_s * SECOND)
        reopens_ns = None
        if gate is not None:
            gate.saw(live, now_ns)
            reopens_ns = gate.reopens_ns(now_ns)
            if not live and reopens_ns is None:
                running += [Request(None, now_s) for _ in range(CAP - len(running))]
        if not running:
            next_s = due[0][0] if reopens_ns is None else min(due[0][0], reopens_ns / SECOND + 1e-6)
            idle_s += next_s - now_s
            now_s = next_s
            continue
        took_s = step_s(len(running))
        idle_s += 0.0 if live else took_s
        now_s += took_s
        for one in running:
            one.tokens -= 1
            if one.tokens:
                continue
            if one.caller is None:
                lines += 1
            else:
                latencies.append(now_s - one.began_s)
                due.remove((float("inf"), one.caller))
                heapq.heapify(due)
                heapq.heappush(due, (now_s + pauses.expovariate(1 / pause_s), one.caller))
        running = [one for one in running if one.tokens]
    alone_per_s = CAP / (step_s(CAP) * TOKENS)
    return Outcome(percentile(sorted(latencies), 99), lines / (alone_per_s * idle_s))


def gates() -> list[Fixed | Learned]:
    return [*(Fixed(after_s) for after_s in (0, 1, 2, 5, 10, 30)), *(Learned(limit_s) for limit_s in (5, 10, 30))]


def main() -> None:
    print("p99 of live calls over that without batches / lines as a share of the idle capacity.")
    print("Simulated by `bench/reopening.py`: a minute of live callers, a minute without, in turn.")
    print(f"\n| callers | pause | {' | '.join(gate.name for gate in gates())} |")
    print("|---|---|" + "---|" * len(gates()))
    for callers in CALLERS:
        for pause_s in PAUSES_S:
            without = {seed: simulate(callers, pause_s, None, seed) for seed in SEEDS}
            cells = []
            for number in range(len(gates())):
                # A gate remembers: each run has its own.
                found = {seed: simulate(callers, pause_s, gates()[number], seed) for seed in SEEDS}
                slower = fmean(found[seed].p99_s / without[seed].p99_s for seed in SEEDS)
                cells.append(f"{slower:.2f} / {fmean(one.share for one in found.values()):.0%}")
            print(f"| {callers} | {pause_s:g} s | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
