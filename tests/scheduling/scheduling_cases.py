"""Short ways to write requests, specs and whole runs in the scheduler's tests."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from worker.scheduling.scheduler import Scheduler
from worker.scheduling.types import NO_DEADLINE, Dispatch, ModelSpec, Request, SchedulerOptions

MS = 1_000_000
SECOND = 1_000_000_000


def spec(model_id: int = 1, name: str = "", sizes: tuple[int, ...] = (1, 8, 32), **fields: Any) -> ModelSpec:
    fields = {"variants": 2, "coalesces": sizes != (0,), **fields}
    return ModelSpec(model_id=model_id, name=name or f"m{model_id}", batch_sizes=sizes, **fields)


def request(
    key: int, model_id: int = 1, rows: int = 1, at_ns: int = 0, deadline_ns: int = NO_DEADLINE, **fields: Any
) -> Request:
    fields = {"variant": 0, **fields}
    return Request(key=key, model_id=model_id, rows=rows, arrival_ns=at_ns, deadline_ns=deadline_ns, **fields)


def scheduler(*specs: ModelSpec, **options: Any) -> Scheduler:
    made = Scheduler(SchedulerOptions(**options))
    for one in specs:
        made.add_model(one)
    return made


def accept(target: Scheduler, requests: Iterable[Request], now_ns: int = 0) -> None:
    assert target.offer_many(requests, now_ns) == []


def dispatch(target: Scheduler, now_ns: int = 0) -> Dispatch:
    decision = target.next(now_ns)
    assert isinstance(decision, Dispatch)
    return decision


def run(target: Scheduler, now_ns: int = 0, compute_ns: int = MS) -> Dispatch:
    """Dispatch and record one execution at the same instant."""
    done = dispatch(target, now_ns)
    target.record(done, compute_ns, now_ns)
    return done


def keys(done: Dispatch) -> list[int]:
    return [one.key for one in done.requests]
