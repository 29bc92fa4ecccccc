"""From decisions to executions: what runs on the device, what comes next, what ended and what becomes of it.

An execution whose learned cost is short runs inline. Others run on the device thread while the loop goes on with
everything but deciding, so a long execution delays no refusal, expiry or cancellation.

The device should not wait for this process's bookkeeping, so around the end of a long execution:
    order   the next batch is decided and started first, and the ended one is answered while it runs
    ahead   if nothing that may still arrive belongs into the next batch, it is brought together and handed to the
            device thread shortly before the running one is expected to end

One bad request must not fail its neighbours: each request of a failed batch runs again alone, once.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from typing import Final, cast

from engines.device.errors import DeviceLost
from engines.errors import Kind, ServingError
from worker.answers import Answers
from worker.arrival import Arrival
from worker.channel.pulse import BEAT_INTERVAL_S, Pulse
from worker.device import DeviceThread
from worker.dispatch import Batch, Dispatcher
from worker.models import LoadedModel
from worker.registry import Registry
from worker.scheduling.scheduler import Scheduler
from worker.scheduling.types import Dispatch, Reason, Request, Shed, WaitUntil

# The logger's name is older than this file, and operators filter by it.
log = logging.getLogger("worker.loop")

INLINE_COST_NS: Final = 2_000_000
"""Longest expected execution that runs on the loop: far below the 50 ms within which an expiry must be answered, and
far above what handing a batch to another thread costs (20 to 50 us)."""

LEAD_NS: Final = 300_000
"""How long before an execution is expected to end records are taken in and the next batch may be brought together: what
that takes, and as early as a decision may be made. Executions beside which this is long run inline."""
NEVER_NS: Final = 2**63 - 1
LONGEST_IDLE_NS: Final = int(BEAT_INTERVAL_S * 1e9)


class Executions:
    """One device, from the loop's side.

    Attributes:
        running: batches at the device thread, the one that runs first, then one more at most.
        expected_end_ns: of the first of them.
        lost: the device needs a new process.
        executed_ns: what the last one took on the device.
        idle_until_ns: when to decide again though nothing arrives and nothing runs.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        registry: Registry,
        answers: Answers,
        pulse: Pulse | None,
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._scheduler = scheduler
        self._registry = registry
        self._answers = answers
        self._pulse = pulse
        self._clock_ns = clock_ns
        self._dispatcher = Dispatcher()
        self._device = DeviceThread()
        self._ended: Batch | None = None
        self._retries: deque[Dispatch] = deque()
        self.running: deque[Batch] = deque()
        self.expected_end_ns = 0
        self.lost: DeviceLost | None = None
        self.idle_until_ns = 0
        self.executed_ns = 0

    def open(self) -> int:
        """Start the device thread; return the descriptor that is readable when it has finished a batch."""
        self._device.start()
        return self._device.fileno()

    def close(self) -> None:
        """End the device thread after the batch it runs; does not wait."""
        self._device.close()

    def clear(self) -> None:
        """Make the descriptor unreadable again."""
        self._device.clear()

    def collect(self) -> None:
        """Take note of what the device thread has finished; ``answer`` tells the callers."""
        while self.running and self._device.acknowledge():
            self._end(self.running.popleft())

    def start(self, now_ns: int) -> None:
        """Decide what comes next and start it, if the device is free or about to be; ``answer`` comes after it."""
        if not self.running:
            self._start_next(now_ns)
        elif now_ns >= self.ahead_from_ns:
            dispatch = self._scheduler.next_settled(max(now_ns, self.expected_end_ns))
            if dispatch is not None:
                # An executable has two slots: one runs, and the other may hold what the last batch computed.
                self.answer()
                batch = self._begun(dispatch, now_ns)
                if batch is not None:
                    self._hand_over(batch)

    @property
    def ahead_from_ns(self) -> int:
        """When the next batch may be brought together although one runs; never, if that has been done."""
        if len(self.running) == 1 and not self._retries:
            return self.expected_end_ns - LEAD_NS
        return NEVER_NS

    def _start_next(self, now_ns: int) -> None:
        dispatch = self._next_retry(now_ns) if self._retries else None
        if dispatch is None:
            decision = self._scheduler.next(now_ns)
            for shed in self._scheduler.take_sheds():
                self.shed(shed)
            if not isinstance(decision, Dispatch):
                self.idle_until_ns = decision.at_ns if isinstance(decision, WaitUntil) else now_ns + LONGEST_IDLE_NS
                return
            dispatch = decision
        self.idle_until_ns = 0
        batch = self._begun(dispatch, now_ns)
        if batch is None:
            return
        if self._pulse is not None:
            self._pulse.executing(batch.staged_ns)
        if batch.estimate_ns > INLINE_COST_NS:
            self._hand_over(batch)
            return
        if self._ended is not None:
            # Its callers should not wait for this execution too.
            self.answer()
            self._answers.flush()
        Dispatcher.execute(batch)
        self._end(batch)

    def _begun(self, dispatch: Dispatch, now_ns: int) -> Batch | None:
        """Return the dispatch with its inputs brought together; None if that failed, which was answered."""
        loaded = self._registry.loaded(dispatch.model_id)
        assert loaded is not None, "the scheduler dispatched a model that is not loaded"
        try:
            batch = self._dispatcher.begin(dispatch, loaded, now_ns)
        except ServingError as error:
            self._scheduler.record(dispatch, 0, now_ns)
            self._fail_all(dispatch, error)
            return None
        estimate_ns = self._scheduler.estimate_ns(dispatch.model_id, dispatch.variant, dispatch.batch_size)
        batch.estimate_ns = NEVER_NS if estimate_ns is None else estimate_ns
        batch.staging_ns = batch.staged_ns - now_ns
        return batch

    def _hand_over(self, batch: Batch) -> None:
        self.running.append(batch)
        if len(self.running) == 1:
            self.expected_end_ns = batch.staged_ns + batch.estimate_ns
        self._device.submit(batch)

    def answer(self) -> None:
        """Write the outputs and replies of the batch that ended last, if that is still to be done."""
        batch, self._ended = self._ended, None
        if batch is None:
            return
        began_ns = self._clock_ns()
        if batch.groups:
            self._dispatcher.complete(batch)
        now_ns = self._clock_ns()
        timing = batch.timing
        assert timing is not None
        queue_ns = self._answers.succeed(batch, timing.compute_ns, now_ns)
        batch.loaded.counters.served(
            batch.dispatch.batch_size,
            len(batch.order),
            queue_ns,
            batch.staging_ns + timing.copy_in_ns,
            timing.compute_ns,
            now_ns - began_ns + batch.scattered_ns + timing.copy_out_ns,
        )

    def shed(self, shed: Shed) -> None:
        """Answer a request that will not run."""
        self._answers.fail(cast("Arrival", shed.request), shed.kind, shed.text)

    def _end(self, batch: Batch) -> None:
        """Account for an execution; its callers are answered later if it went well."""
        if self._ended is not None:
            self.answer()
        executed_ns = self._clock_ns()
        if self.running:
            following = self.running[0]
            following.started_ns = executed_ns
            self.expected_end_ns = executed_ns + following.estimate_ns
        if self._pulse is not None:
            self._pulse.executing(executed_ns if self.running else 0)
        if batch.failure is None and not batch.groups:
            # Before it counts as served: outputs whose size depends on the data may be larger than their room.
            try:
                self._dispatcher.complete(batch)
            except ServingError as error:
                batch.failure = error
            batch.scattered_ns = self._clock_ns() - executed_ns
        batch.loaded.counters.reasons[batch.dispatch.reason] += 1
        # A run whose answers cannot be used served nobody: the scheduler counts what it served.
        compute_ns = 0 if batch.timing is None or batch.failure is not None else batch.timing.compute_ns
        self.executed_ns = compute_ns
        self._scheduler.record(batch.dispatch, compute_ns, executed_ns)
        if batch.failure is None:
            self._ended = batch
        else:
            self._fail_batch(batch, batch.failure)

    def _fail_batch(self, batch: Batch, failure: ServingError) -> None:
        counters = batch.loaded.counters
        counters.failed_executions += 1
        dispatch = batch.dispatch
        if isinstance(failure, DeviceLost):
            self._fail_all(dispatch, failure)
            return
        if len(batch.order) == 1:
            request = batch.order[0]
            counters.fail.add(self._clock_ns() - request.arrival_ns)
            log.warning("dispatch.failed model=%s rows=%d reason=%s", batch.loaded.entry.name, dispatch.rows, failure)
            self._answers.fail(request, failure.kind, str(failure))
            return
        log.warning(
            "dispatch.split model=%s requests=%d reason=%s", batch.loaded.entry.name, len(dispatch.requests), failure
        )
        for request in batch.order:
            self._retries.append(_alone(batch.loaded, dispatch, request))

    def _fail_all(self, dispatch: Dispatch, error: ServingError) -> None:
        if isinstance(error, DeviceLost):
            self.lost = error
        counters = self._registry.counters(dispatch.model_id)
        now_ns = self._clock_ns()
        for request in dispatch.requests:
            counters.fail.add(now_ns - request.arrival_ns)
            self._answers.fail(cast("Arrival", request), error.kind, str(error))

    def _next_retry(self, now_ns: int) -> Dispatch | None:
        while self._retries:
            dispatch = self._retries.popleft()
            request = cast("Arrival", dispatch.requests[0])
            if self._registry.loaded(dispatch.model_id) is None:
                self._answers.fail(request, Kind.NOT_READY, "the model was unloaded")
            elif request.deadline_ns <= now_ns:
                text = "the deadline passed while the batch was run again"
                self._answers.fail(request, Kind.DEADLINE_EXCEEDED, text)
            else:
                return dispatch
        return None


def _alone(loaded: LoadedModel, dispatch: Dispatch, request: Request) -> Dispatch:
    sizes = loaded.signature.batch_sizes
    batch_size = next((size for size in sizes if size >= request.rows), -1)
    return Dispatch(0, dispatch.model_id, dispatch.variant, batch_size, request.rows, [request], Reason.RETRIED)
