"""What a batch runner counts, as plain integers, and their snapshot as series."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final

from worker.channel.series import Series

EVENTS: Final = ("submitted", "completed", "failed", "cancelled", "expired")
OUTCOMES: Final = ("completed", "failed")
PROVIDERS: Final = ("vllm", "openai_compatible", "openai", "local", "none")
"""Kinds of routes; ``none`` for lines that no route serves."""


@dataclass(slots=True)
class Figures:
    """Counters of one runner; only its event loop writes here.

    Attributes:
        batches: by event; ``submitted`` when a batch is begun here.
        lines: ended lines by (provider, outcome); a failure that is retried counts as a retry, not here.
        fenced: results dropped because the line was no longer ours.
        returned: claims given back: their lines had not been sent.
        overloads: 429 and 503 answers.
    """

    provider_of: Callable[[str], str]
    batches: dict[str, int] = field(default_factory=dict)
    lines: dict[tuple[str, str], int] = field(default_factory=dict)
    retries: int = 0
    fenced: int = 0
    returned: int = 0
    interrupted: int = 0
    taken_over: int = 0
    overloads: int = 0
    outages: int = 0
    busy: int = 0
    capacity: int = 0
    jobs: int = 0
    longest_block_s: float = 0.0
    longest_busy_s: float = 0.0

    def event(self, name: str) -> None:
        """Count something that happened to a batch."""
        self.batches[name] = self.batches.get(name, 0) + 1

    def ended(self, route: str | None, *, ok: bool) -> None:
        """Count a line's end."""
        key = (self.provider_of(route) if route else "none", "completed" if ok else "failed")
        self.lines[key] = self.lines.get(key, 0) + 1

    def blocked(self, late_s: float, busy_s: float) -> None:
        """Note by how much a timer was late, and how much of that the loop itself was at work."""
        if late_s > self.longest_block_s:
            self.longest_block_s = late_s
        if (busy_s := min(late_s, busy_s)) > self.longest_busy_s:
            self.longest_busy_s = busy_s

    def series(self) -> Iterable[Series]:
        """Yield every figure."""
        for event in EVENTS:
            yield event_series(event, self.batches.get(event, 0))
        for provider in PROVIDERS:
            for outcome in OUTCOMES:
                yield _counter(
                    "gateway_batch_lines_total", "Ended batch lines.", self.lines.get((provider, outcome), 0),
                    mode="gateway", provider=provider, outcome=outcome,
                )  # fmt: skip
        for name, text, value in (
            ("retries", "Executions of lines beyond their first.", self.retries),
            ("fenced", "Results dropped: the line belonged to another runner by then.", self.fenced),
            ("returned", "Claims given back because their line could not be sent.", self.returned),
            ("interrupted", "Lines whose runner died while they ran; they are not run again.", self.interrupted),
            ("overloads", "Answers 429 and 503 to lines.", self.overloads),
        ):
            yield _counter(f"gateway_batch_lines_{name}_total", text, value)
        yield _counter("gateway_batch_takeovers_total", "Batches taken over from a dead runner.", self.taken_over)
        yield _counter("gateway_batch_store_outages_total", "Store calls that had to be repeated.", self.outages)
        for state, value in (("capacity", self.capacity), ("busy", self.busy)):
            yield _gauge("gateway_batch_workers", "Lines that may run, and that run.", value, state)
        yield _gauge("gateway_batch_jobs", "Batches that this runner holds.", self.jobs, "held")
        for state, longest_s in (("waited", self.longest_block_s), ("busy", self.longest_busy_s)):
            text = "Longest that the runner's event loop let a timer wait, and was itself at work meanwhile."
            yield _gauge("gateway_batch_loop_block_seconds", text, longest_s, state)


def event_series(event: str, value: int) -> Series:
    """Return the series of something that happens to batches."""
    return _counter("gateway_batches_total", "Batches by what happened to them.", value, mode="gateway", event=event)


def _counter(name: str, text: str, value: float, **labels: str) -> Series:
    return Series(name=name, kind="counter", help=text, labels=labels, value=value)


def _gauge(name: str, text: str, value: float, state: str) -> Series:
    return Series(name=name, kind="gauge", help=text, labels={"state": state}, value=value)
