"""Figures, table and picture of ``bench/batch_gates.py``. The figures are pure and tested."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Span = tuple[float, float]
SMOOTH = 6
"""Samples that a drawn rate is taken over."""
BUSY = 0.1
"""Share of the machine that others may use in a round that counts."""


@dataclass(frozen=True, slots=True)
class Pass:
    """One measured stretch of time; seconds from its start.

    Attributes:
        calls: start and end of every live call.
        lines: batch lines that succeeded within it.
        samples: how many lines had succeeded, by time.
        others: share of the machine's processor time that went to others, see ``other_work``.
    """

    took_s: float
    calls: Sequence[Span]
    lines: int
    samples: Sequence[tuple[float, int]]
    others: float = 0.0

    def idle_s(self) -> float:
        """Return the seconds without any live call."""
        return self.took_s - covered_s(self.calls)

    def latencies_ms(self) -> list[float]:
        return [(end - start) * 1e3 for start, end in self.calls]

    def first_ms(self, quiet_s: float = 5.0) -> float:
        """Return the longest of the calls that begin a burst: those that start within 0.1 s of its first one."""
        found, last_s = 0.0, -quiet_s
        begun_s = 0.0
        for start_s, end_s in sorted(self.calls):
            if start_s - last_s >= quiet_s:
                begun_s = start_s
            if start_s - begun_s <= 0.1:
                found = max(found, (end_s - start_s) * 1e3)
            last_s = max(last_s, end_s)
        return found

    def summary(self) -> str:
        found = sorted(self.latencies_ms())
        p99 = f"p99 {percentile(found, 99):.0f} ms" if found else "no live calls"
        return (
            f"{len(found)} calls, {p99}, {self.lines} lines in {self.took_s:.0f} s, {self.idle_s():.0f} s idle, "
            f"others {self.others:.0%}"
        )


def covered_s(spans: Sequence[Span]) -> float:
    """Return how long at least one of the spans lasts."""
    total_s, reached_s = 0.0, float("-inf")
    for start_s, end_s in sorted(spans):
        total_s += max(0.0, end_s - max(start_s, reached_s))
        reached_s = max(reached_s, end_s)
    return total_s


def percentile(ascending: Sequence[float], percent: float) -> float:
    """Return the smallest value that at least so many percent are not above."""
    return ascending[max(0, -(-len(ascending) * int(percent * 10) // 1000) - 1)]


Round = Mapping[str, Pass]
"""One pass of every way, by its name, and of batches ``alone``; what is not a bar need not be in every round."""


def is_busy(one: Round) -> bool:
    """Whether others used so much of the machine during some way that the round says little."""
    return any(way.others > BUSY for way in one.values())


def figures(rounds: Sequence[Round]) -> dict[str, Any]:
    """Return what is told of each way: over all quiet rounds, with the spread from round to round.

    Of all rounds if none was quiet.
    """
    quiet = [one for one in rounds if not is_busy(one)]
    told = quiet or rounds
    found: dict[str, Any] = {
        "alone_lines_per_s": spread([_alone(one) for one in told]),
        "rounds": len(rounds),
        "busy_rounds": [number for number, one in enumerate(rounds, 1) if is_busy(one)],
        "others_share": [max(way.others for way in one.values()) for one in rounds],
        "ways": {},
    }
    for name in (name for name in rounds[0] if name != "alone"):
        # One that is measured once is told of that round, whatever it was.
        of = [one for one in told if name in one] or [one for one in rounds if name in one]
        found["ways"][name] = _way(name, of)
    return found


def _alone(one: Round) -> float:
    return one["alone"].lines / one["alone"].took_s


def _way(name: str, rounds: Sequence[Round]) -> dict[str, Any]:
    passes = [one[name] for one in rounds]
    pooled = sorted(value for one in passes for value in one.latencies_ms())
    base = sorted(value for one in rounds for value in one["live only"].latencies_ms())
    return {
        "calls": len(pooled),
        "p50_ms": percentile(pooled, 50),
        "p95_ms": percentile(pooled, 95),
        "p99_ms": percentile(pooled, 99),
        "p99_ms_per_round": [_p99_ms(one) for one in passes],
        "first_of_burst_ms": max(one.first_ms() for one in passes),
        "live_per_s": len(pooled) / sum(one.took_s - one.idle_s() for one in passes),
        "lines": sum(one.lines for one in passes),
        "lines_per_s": sum(one.lines for one in passes) / sum(one.took_s for one in passes),
        "share_of_idle_capacity": spread([one[name].lines / (_alone(one) * one[name].idle_s()) for one in rounds]),
        # In every call of these rounds, since one round has few calls; and from round to round.
        "p99_over_live_only": percentile(pooled, 99) / percentile(base, 99),
        "p99_over_live_only_per_round": spread([_p99_ms(one[name]) / _p99_ms(one["live only"]) for one in rounds]),
    }


def _p99_ms(one: Pass) -> float:
    return percentile(sorted(one.latencies_ms()), 99)


def spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "least": min(values), "most": max(values)}


def table(found: Mapping[str, Any]) -> str:
    """Return the figures as Markdown."""
    rows = [
        "| | live calls | p50 ms | p95 ms | p99 ms | first of a burst, ms | p99 / live only: all calls "
        "| median of rounds | lines/s | share of idle capacity |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, one in found["ways"].items():
        shared = _spread_text(one["share_of_idle_capacity"], ".0%") if one["lines"] else "-"
        rows.append(
            f"| {name} | {one['calls']} | {one['p50_ms']:.0f} | {one['p95_ms']:.0f} | {one['p99_ms']:.0f} "
            f"| {one['first_of_burst_ms']:.0f} | {one['p99_over_live_only']:.2f} "
            f"| {_spread_text(one['p99_over_live_only_per_round'], '.2f')} | {one['lines_per_s']:.1f} | {shared} |"
        )
    busy = ", ".join(map(str, found["busy_rounds"])) or "none"
    used = ", ".join(f"{share:.0%}" for share in found["others_share"])
    rows.append("")
    rows.append(f"Batches alone: {_spread_text(found['alone_lines_per_s'], '.1f')} lines/s.")
    rows.append(f"{found['rounds']} rounds, busy: {busy}. Most that others used of the machine in each: {used}.")
    if len(found["busy_rounds"]) == found["rounds"]:
        rows.append("**No round was quiet: these figures say little.**")
    return "\n".join(rows)


def _spread_text(one: Mapping[str, float], form: str) -> str:
    return f"{one['median']:{form}} ({one['least']:{form}} to {one['most']:{form}})"


def draw(passes: Round, path: Path, title: str) -> None:
    """Draw one pass of every way: latency of each live call, and lines per second."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    ways = [name for name in passes if name != "alone"]
    figure, axes = pyplot.subplots(2, len(ways), figsize=(5 * len(ways), 7), sharex=True, sharey="row", squeeze=False)
    for column, name in enumerate(ways):
        last = passes[name]
        above, below = axes[0][column], axes[1][column]
        above.plot([start for start, _ in last.calls], last.latencies_ms(), ".", markersize=3, color="#1f77b4")
        above.set(title=name, ylabel="ms of a live call" if column == 0 else "")
        # Lines end together: over less time than this the curve would show that, and not how many there are.
        pairs = list(zip(last.samples, last.samples[SMOOTH:], strict=False))
        times = [later[0] for _, later in pairs]
        rates = [(later[1] - earlier[1]) / (later[0] - earlier[0]) for earlier, later in pairs]
        below.step(times, rates, where="pre", color="#d62728")
        below.set(xlabel="s", ylabel="batch lines/s" if column == 0 else "")
        above.grid(alpha=0.3)
        below.grid(alpha=0.3)
    # After everything is drawn: a limit that is set ends the scaling to what comes later.
    for one in (axes[0][0], axes[1][0]):
        one.set_ylim(bottom=0)
    figure.suptitle(title)
    figure.tight_layout()
    figure.savefig(path, dpi=90)
    pyplot.close(figure)


def redraw(path: Path, title: str) -> None:
    """Draw the picture of a saved result again, beside it."""
    saved = json.loads(path.read_text())["first_round"]
    draw({name: Pass(**one) for name, one in saved.items()}, path.with_suffix(".png"), title)
