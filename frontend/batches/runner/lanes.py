"""The lines of a batch that still want to start, one lane per model. Pure.

A lane gives new lines in input order; a failed line that is to be sent again comes back into its lane, pinned to its
route, and goes before new lines once its pause is over. Lines are looked at before a claim and taken after it, so a
refused claim changes nothing.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from frontend.batches.runner.gates import Reason


@dataclass(frozen=True, slots=True, order=True)
class Retry:
    """A failed line that may be sent again from ``due_ns`` on, as its ``attempt``-th."""

    due_ns: int
    line_no: int
    attempt: int
    route: str


@dataclass(frozen=True, slots=True)
class Wish:
    """A line that wants to start; ``retry`` None for a new one."""

    line_no: int
    attempt: int = 1
    retry: Retry | None = None


@dataclass(frozen=True, slots=True)
class Refusal:
    """What every line of a lane gets instead of being run: an HTTP status and an error body."""

    status: int
    code: str
    body: bytes


@dataclass(slots=True, eq=False)
class Lane:
    """Lines of one model.

    Attributes:
        lines: numbers of new lines in input order; those before ``position`` were taken.
        retries: by due time.
        route: where new lines were planned to go; empty if nowhere.
        planned_ns: when; None asks for a new plan.
        cooling: every route of the model is held back by its circuit breaker.
        unserved_since_ns: since when no route serves the model at all.
        refusal: its lines fail without being run.
        reasons: why nothing of it starts on a route now.
    """

    model: str
    lines: npt.NDArray[np.int32]
    position: int = 0
    retries: list[Retry] = field(default_factory=list)
    route: str = ""
    planned_ns: int | None = None
    cooling: bool = False
    unserved_since_ns: int | None = None
    refusal: Refusal | None = None
    reasons: dict[str, Reason | None] = field(default_factory=dict)

    @property
    def new(self) -> int:
        """New lines that wait."""
        return len(self.lines) - self.position

    @property
    def waiting(self) -> int:
        """Everything that wants to start, now or after its pause."""
        return self.new + len(self.retries)

    def due(self, now_ns: int) -> Iterator[Retry]:
        """Yield retries whose pause is over, the longest waiting first."""
        for retry in self.retries:
            if retry.due_ns > now_ns:
                return
            yield retry

    def next_new(self, count: int, skip: int = 0) -> list[int]:
        """Return up to ``count`` new lines behind the first ``skip``, without taking them."""
        start = self.position + skip
        numbers: list[int] = self.lines[start : start + count].tolist()
        return numbers

    def take_new(self, count: int) -> None:
        """Take the first ``count`` new lines; the plan was for them."""
        assert 0 <= count <= self.new
        self.position += count
        self.planned_ns = None

    def give_back(self, numbers: Sequence[int]) -> None:
        """Let taken lines that never ran wait again, in their places in the input; plans anew."""
        again = np.asarray(numbers, dtype=np.int32)
        self.lines = np.sort(np.concatenate((again, self.lines[self.position :])), kind="stable")
        self.position = 0
        self.planned_ns = None

    def drop(self, numbers: Sequence[int]) -> None:
        """Take new lines wherever they are by now: others may have been given back before them meanwhile."""
        left = self.lines[self.position :]
        self.lines = left[~np.isin(left, np.asarray(numbers, dtype=np.int32))]
        self.position = 0
        self.planned_ns = None

    def demand(self) -> dict[str, int]:
        """Return how many lines wait for each route."""
        found: dict[str, int] = {}
        if self.new and self.route:
            found[self.route] = self.new
        for retry in self.retries:
            found[retry.route] = found.get(retry.route, 0) + 1
        return found

    def startable(self, route: str, now_ns: int) -> int:
        """Return how many lines could start on a route now, as far as their own pauses go."""
        new = self.new if self.route == route and not self.cooling else 0
        return new + sum(retry.route == route for retry in self.due(now_ns))

    def put_back(self, retry: Retry) -> None:
        """Let a failed line wait for its next attempt."""
        insort(self.retries, retry)

    def take_retry(self, retry: Retry) -> None:
        self.retries.remove(retry)


def lanes_of(models: Sequence[tuple[str, npt.NDArray[np.int64]]], done: npt.NDArray[np.int64]) -> list[Lane]:
    """Return the lanes of a batch without the lines that have been claimed before."""
    lanes = []
    for model, numbers in models:
        left = numbers[~np.isin(numbers, done)] if len(done) else numbers
        lanes.append(Lane(model, left.astype(np.int32)))
    return lanes
