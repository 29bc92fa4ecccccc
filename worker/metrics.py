"""What only execution can know (errors, copies, where time went), and everything the worker counts as series.

Only the worker's loop writes here. Queue waits, batch sizes, rows and sheds are the scheduler's own counters; this file
joins both into what operators scrape and into the statistics KServe clients ask for.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final

from worker.channel.records import Reason
from worker.channel.series import Series
from worker.scheduling.types import ModelSnapshot
from worker.scheduling.waits import ROW_BOUNDS, WAIT_BOUNDS_NS

SHED_REASONS: Final = ("deadline", "laxity", "cancelled", "queue_full", "unloaded")
_WAIT_BOUNDS_S: Final = tuple(bound / 1e9 for bound in WAIT_BOUNDS_NS)
_ROW_BOUNDS: Final = tuple(float(bound) for bound in ROW_BOUNDS)


@dataclass(slots=True)
class Durations:
    """Count and total of one KServe duration statistic."""

    count: int = 0
    ns: int = 0

    def add(self, ns: int) -> None:
        self.count += 1
        self.ns += ns

    def value(self) -> dict[str, int]:
        return {"count": self.count, "ns": self.ns}


@dataclass(slots=True)
class BatchDurations:
    """Executions at one compiled size: how many, and where their time went."""

    count: int = 0
    copy_in_ns: int = 0
    compute_ns: int = 0
    copy_out_ns: int = 0


@dataclass(slots=True)
class ModelCounters:
    """Cumulative counters of one model version, over the worker's life.

    Attributes:
        requests: answered with outputs; the four times are sums over them.
        reasons: executions, also failed ones, by ``Reason``.
    """

    name: str
    version: str
    fail: Durations = field(default_factory=Durations)
    requests: int = 0
    queue_ns: int = 0
    copy_in_ns: int = 0
    compute_ns: int = 0
    copy_out_ns: int = 0
    failed_executions: int = 0
    last_inference_ms: int = 0
    batches: dict[int, BatchDurations] = field(default_factory=dict)
    reasons: list[int] = field(default_factory=lambda: [0] * len(Reason))

    def served(
        self, batch_size: int, requests: int, queue_ns: int, copy_in_ns: int, compute_ns: int, copy_out_ns: int
    ) -> None:
        """Count one successful execution and the requests it answered.

        Each request is charged the whole execution, as KServe statistics do; ``queue_ns`` is the sum over them.
        """
        batch = self.batches.get(batch_size)
        if batch is None:
            batch = self.batches[batch_size] = BatchDurations()
        batch.count += 1
        batch.copy_in_ns += copy_in_ns
        batch.compute_ns += compute_ns
        batch.copy_out_ns += copy_out_ns
        self.requests += requests
        self.queue_ns += queue_ns
        self.copy_in_ns += copy_in_ns * requests
        self.compute_ns += compute_ns * requests
        self.copy_out_ns += copy_out_ns * requests
        self.last_inference_ms = time.time_ns() // 1_000_000

    def statistics(self, snapshot: ModelSnapshot) -> dict[str, Any]:
        """Return the KServe statistics object (protocols.md 1.9); counts that both keep are the scheduler's."""
        none = {"count": 0, "ns": 0}
        answered = self.requests
        success_ns = self.queue_ns + self.copy_in_ns + self.compute_ns + self.copy_out_ns
        return {
            "name": self.name,
            "version": self.version,
            "last_inference": self.last_inference_ms,
            "inference_count": snapshot.rows,
            "execution_count": snapshot.dispatches,
            "inference_stats": {
                "success": {"count": answered, "ns": success_ns},
                "fail": self.fail.value(),
                "queue": {"count": answered, "ns": self.queue_ns},
                "compute_input": {"count": answered, "ns": self.copy_in_ns},
                "compute_infer": {"count": answered, "ns": self.compute_ns},
                "compute_output": {"count": answered, "ns": self.copy_out_ns},
                "cache_hit": none,
                "cache_miss": none,
            },
            "batch_stats": [
                {
                    "batch_size": size,
                    "compute_input": {"count": batch.count, "ns": batch.copy_in_ns},
                    "compute_infer": {"count": batch.count, "ns": batch.compute_ns},
                    "compute_output": {"count": batch.count, "ns": batch.copy_out_ns},
                }
                for size, batch in sorted(self.batches.items())
            ],
            "memory_usage": [],
        }


def model_series(counters: ModelCounters, snapshot: ModelSnapshot, worker: str) -> Iterable[Series]:
    """Yield every series of one model version; all exist from the start with 0 (MO-04)."""
    labels = {"model": counters.name, "version": counters.version, "worker": worker, "gpu": ""}

    def counter(name: str, help_text: str, value: float, **extra: str) -> Series:
        return Series(name=name, kind="counter", help=help_text, labels=labels | extra, value=value)

    def gauge(name: str, help_text: str, value: float) -> Series:
        return Series(name=name, kind="gauge", help=help_text, labels=labels, value=value)

    def histogram(
        name: str, help_text: str, bounds: tuple[float, ...], counts: tuple[int, ...], total: float
    ) -> Series:
        return Series(
            name=name, kind="histogram", help=help_text, labels=labels, bounds=bounds, counts=counts, sum=total
        )

    yield counter("worker_dispatch_total", "Executions carried out.", snapshot.dispatches)
    for why, executions in zip(Reason, counters.reasons, strict=True):
        if why is not Reason.NONE:
            help_text = "Executions by why the batch had the size it had."
            yield counter("worker_dispatch_reason_total", help_text, executions, reason=why.name.lower())
    yield counter("worker_failed_dispatch_total", "Executions that failed.", counters.failed_executions)
    yield counter("worker_compute_seconds_total", "Device seconds of executions.", snapshot.compute_ns / 1e9)
    yield counter("worker_requests_served_total", "Requests that an execution served.", snapshot.requests)
    yield counter("worker_rows_served_total", "Rows executed, without padding.", snapshot.rows)
    yield counter("worker_padding_rows_total", "Rows executed as padding.", snapshot.padding_rows)
    for reason in SHED_REASONS:
        shed = snapshot.sheds.get(reason, 0)
        help_text = "Requests refused, dropped or withdrawn before execution."
        yield counter("worker_requests_shed_total", help_text, shed, reason=reason)
    yield gauge("worker_queue_depth", "Requests waiting in the model's queue.", snapshot.queue_depth)
    yield gauge("worker_model_max_batch_size", "Most rows one execution may carry.", snapshot.max_batch_rows)
    yield gauge("worker_model_weight", "Relative share of device time under fair.", snapshot.weight)
    yield gauge("worker_model_recent_compute_seconds", "Decayed device seconds used.", snapshot.recent_compute_s)
    yield histogram(
        "worker_queue_wait_seconds", "Seconds from a request's arrival to the start of its execution.",
        _WAIT_BOUNDS_S, snapshot.wait_counts, snapshot.wait_sum_ns / 1e9,
    )  # fmt: skip
    yield histogram(
        "worker_batch_rows", "Rows per execution, without padding.", _ROW_BOUNDS, snapshot.row_counts, snapshot.rows
    )
