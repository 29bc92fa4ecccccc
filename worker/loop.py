"""The worker's loop: drain rings, decide, execute, answer. Everything that changes state happens on this thread.

Each round: look at descriptors and rings; turn records into queued requests; answer what expired, was cancelled or was
refused; if the device is free, ask the scheduler and start one execution; hand the replies of this round over in bulk.

An execution whose learned cost is short runs inline. Others run on the device thread while the loop goes on with
everything but dispatching, so a long execution delays no refusal, expiry or cancellation.

Answers: every request record gets exactly one reply record. ``Attached.live`` holds the requests that still owe one.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable

from engines.device.errors import DeviceLost
from engines.errors import Kind, ServingError
from engines.select import EngineSet
from worker.channel.channel import Channel
from worker.channel.node_link import Order, Report, SyncLink
from worker.channel.pulse import BEAT_INTERVAL_S, Pulse
from worker.channel.reception import Events
from worker.channel.records import reply_words
from worker.channel.series import Series
from worker.channel.server import ChannelServer
from worker.config import RuntimeSettings
from worker.control import Control
from worker.device import DeviceThread
from worker.dispatch import Batch, Dispatcher, place_of
from worker.intake import Attached, Intake
from worker.models import LoadedModel, Loader
from worker.registry import Registry
from worker.scheduling.scheduler import Scheduler
from worker.scheduling.types import Dispatch, Reason, Request, Shed, WaitUntil

log = logging.getLogger("worker.loop")

INLINE_COST_NS = 2_000_000
"""Longest expected execution that runs on the loop: far below the 50 ms within which an expiry must be answered, and
far above what handing a batch to another thread costs (20 to 50 us)."""
BEAT_NS = int(BEAT_INTERVAL_S * 1e9)
LONGEST_REST_NS = 1_000_000
"""While the device thread runs a batch, records wait at most so long: a refusal or cancellation is not late with it."""
SHORTEST_REST_NS, LEAD_NS = 100_000, 300_000
"""Records are taken in so long before an execution is expected to end, so that the next batch is there by then."""


class Loop:
    """One worker, running. ``run`` returns the process's exit status."""

    def __init__(
        self,
        name: str,
        server: ChannelServer,
        scheduler: Scheduler,
        registry: Registry,
        loader: Loader,
        link: SyncLink | None,
        pulse: Pulse | None,
        clock_ns: Callable[[], int] = time.monotonic_ns,
        engines: EngineSet | None = None,
    ) -> None:
        self._server = server
        self._scheduler = scheduler
        self._registry = registry
        self._loader = loader
        self._link = link
        self._pulse = pulse
        self._clock_ns = clock_ns
        self._engines = engines or EngineSet(RuntimeSettings())
        self._lost: DeviceLost | None = None
        self._dispatcher = Dispatcher()
        self._device = DeviceThread()
        self._intake = Intake(registry.loaded)
        self._attached: dict[int, Attached] = {}
        self._touched: set[Channel] = set()
        self._running: Batch | None = None
        self._expected_end_ns, self._took = 0, False
        self._retries: deque[Dispatch] = deque()
        self._draining = False
        self._idle_until_ns = 0
        self._name = name
        self._control = Control(name, registry, scheduler, self)

    def series(self) -> list[Series]:
        """Return the loop's own figures."""
        labels = {"worker": self._name}
        return [
            Series(
                name="worker_channels", kind="gauge", help="Frontends attached.", labels=labels,
                value=sum(not attached.gone for attached in self._attached.values()),
            ),
            Series(
                name="worker_requests_live", kind="gauge", help="Requests accepted and not answered yet.",
                labels=labels, value=sum(len(attached.live) for attached in self._attached.values()),
            ),
        ]  # fmt: skip

    def run(self) -> int:
        """Serve until drained or until the node is gone; raise DeviceLost when only a new process can go on."""
        self._device.start()
        for descriptor in (self._device, self._loader, self._link):
            if descriptor is not None:
                self._server.watch(descriptor.fileno())
        self._report_state()
        while not self._finished():
            self.step()
        self._device.close()
        self._loader.close()
        if self._lost is not None:
            raise self._lost
        return 0

    def step(self) -> None:
        """One round of the loop; blocks until something happens or something is due."""
        now_ns = self._clock_ns()
        if self._pulse is not None:
            self._pulse.beat(now_ns)
        self._on_events(self._server.poll(self._timeout_ns(now_ns), self._rest_ns(now_ns), spin=self._running is None))
        now_ns = self._clock_ns()
        self._on_device()
        rung = self._server.rung()
        self._took = bool(rung)
        for channel in rung:
            self._take(channel, now_ns)
        for shed in self._scheduler.expire(now_ns):
            self._shed(shed)
        if self._running is None:
            self._dispatch(now_ns)
        for channel in self._touched:
            channel.flush()
        self._touched.clear()

    def _finished(self) -> bool:
        if self._lost is not None or (self._link is not None and self._link.gone):
            return True
        return self._draining and self._running is None and not any(a.live for a in self._attached.values())

    def _timeout_ns(self, now_ns: int) -> int:
        if self._running is None and self._idle_until_ns <= now_ns:
            return 0
        due_ns = min(self._scheduler.next_expiry_ns(), now_ns + BEAT_NS)
        if self._running is None:
            due_ns = min(due_ns, self._idle_until_ns)
        return max(0, due_ns - now_ns)

    def _rest_ns(self, now_ns: int) -> int:
        # Under load only: where nothing came in the last round, one wake-up costs less than looking every so often.
        if self._running is None or not self._took:
            return 0
        return max(SHORTEST_REST_NS, min(self._expected_end_ns - LEAD_NS - now_ns, LONGEST_REST_NS))

    # Events

    def _on_events(self, events: Events) -> None:
        for channel in events.attached:
            self._attached[channel.id] = Attached(channel)
            self._engines.attach(channel.arena, f"arena of {channel.name}")
            log.info("channel.attached frontend=%s pid=%d", channel.name, channel.pid)
        for channel in events.detached:
            self._detach(channel)
        for descriptor in events.fds:
            if descriptor == self._device.fileno():
                self._device.clear()
            elif descriptor == self._loader.fileno():
                self._on_loaded()
            elif self._link is not None and descriptor == self._link.fileno():
                self._on_orders(self._link.receive())
        for connection, ask in events.asks:
            self._server.answer(connection, self._control.answer(ask, self._clock_ns()))
        if self._link is not None and self._link.wants_write:
            self._link.flush()

    def _on_device(self) -> None:
        if self._running is not None and self._device.acknowledge():
            batch, self._running = self._running, None
            self._finish(batch)

    def _on_loaded(self) -> None:
        for outcome in self._loader.take():
            if isinstance(outcome, LoadedModel):
                self._scheduler.add_model(outcome.spec)
                for (variant, batch_size), compute_ns in outcome.warm_ns.items():
                    self._scheduler.seed_cost(outcome.spec.model_id, variant, batch_size, compute_ns)
                self._registry.add(outcome)
                self._control.loaded(outcome, self._clock_ns())
            else:
                self._registry.replace(outcome.entry)
        self._server.publish_models(self._registry.entries())
        self._report_state()

    def _on_orders(self, orders: list[Order]) -> None:
        assert self._link is not None
        for order in orders:
            match order.do:
                case "drain":
                    self.drain()
                case "series":
                    self._link.send(Report(series=tuple(self._control.series(self._clock_ns())), id=order.id))
                case "status":
                    self._link.send(Report(status=self._control.status(self._clock_ns()), id=order.id))

    def drain(self) -> None:
        """Take nothing new, finish what was accepted, then ``run`` returns."""
        if not self._draining:
            self._draining = True
            self._server.draining()
            self._report_state()

    def _report_state(self) -> None:
        if self._link is not None:
            state, detail = self._registry.state(self._draining)
            self._link.send(Report(state=state, detail=detail))

    def _detach(self, channel: Channel) -> None:
        attached = self._attached.get(channel.id)
        if attached is None:
            return
        log.info("channel.detached frontend=%s withdrawn=%d", channel.name, len(attached.live))
        attached.gone = True
        now_ns = self._clock_ns()
        for request_id, request in list(attached.live.items()):
            if self._scheduler.cancel(request.key, now_ns) is not None:
                del attached.live[request_id]
        self._release_if_unused(attached)

    def _release_if_unused(self, attached: Attached) -> None:
        # A running batch reads and writes the arena of the dead: its mapping goes with the last such batch.
        if attached.gone and not attached.live:
            self._attached.pop(attached.channel.id, None)
            self._touched.discard(attached.channel)
            self._dispatcher.forget(attached.channel)
            self._engines.detach(attached.channel.arena)
            attached.channel.release()

    # Requests in

    def _take(self, channel: Channel, now_ns: int) -> None:
        attached = self._attached.get(channel.id)
        if attached is None or attached.gone:
            return
        requests, cancels, refusals = self._intake.read(attached)
        if requests:
            self._idle_until_ns = 0
            for shed in self._scheduler.offer_many(requests, now_ns):
                self._shed(shed)
        for request_id in cancels:
            request = attached.live.get(request_id)
            shed_or_none = None if request is None else self._scheduler.cancel(request.key, now_ns)
            if shed_or_none is not None:
                self._shed(shed_or_none)
        for refusal in refusals:
            channel.fail(refusal.request_id, refusal.kind, refusal.text)
            self._touched.add(channel)

    # Answers

    def _shed(self, shed: Shed) -> None:
        self._fail(shed.request, shed.kind, shed.text)

    def _fail(self, request: Request, kind: Kind, text: str) -> None:
        place = place_of(request)
        attached = self._attached.get(place.channel.id)
        if attached is None or attached.live.pop(place.request_id, None) is None:
            return
        if attached.gone:
            self._release_if_unused(attached)
            return
        place.channel.fail(place.request_id, kind, text)
        self._touched.add(place.channel)

    # Dispatch

    def _dispatch(self, now_ns: int) -> None:
        dispatch = self._next_retry(now_ns)
        if dispatch is None:
            decision = self._scheduler.next(now_ns)
            for shed in self._scheduler.take_sheds():
                self._shed(shed)
            if not isinstance(decision, Dispatch):
                self._idle_until_ns = decision.at_ns if isinstance(decision, WaitUntil) else now_ns + BEAT_NS
                return
            dispatch = decision
        self._idle_until_ns = 0
        loaded = self._registry.loaded(dispatch.model_id)
        assert loaded is not None, "the scheduler dispatched a model that is not loaded"
        try:
            batch = self._dispatcher.begin(dispatch, loaded, now_ns)
        except ServingError as error:
            self._scheduler.record(dispatch, 0, now_ns)
            self._fail_all(dispatch, error.kind, str(error))
            self._lost = error if isinstance(error, DeviceLost) else None
            return
        if self._pulse is not None:
            self._pulse.executing(self._clock_ns())
        estimate_ns = self._scheduler.estimate_ns(dispatch.model_id, dispatch.variant, dispatch.batch_size)
        if estimate_ns is None or estimate_ns > INLINE_COST_NS:
            self._running = batch
            self._expected_end_ns = batch.staged_ns + (estimate_ns or 0)
            self._device.submit(batch)
        else:
            Dispatcher.execute(batch)
            self._finish(batch)

    def _finish(self, batch: Batch) -> None:
        if self._pulse is not None:
            self._pulse.executing(0)
        executed_ns = self._clock_ns()
        if batch.failure is None:
            try:
                self._dispatcher.complete(batch)
            except ServingError as error:
                batch.failure = error
        batch.loaded.counters.reasons[batch.dispatch.reason] += 1
        # A run whose answers cannot be used served nobody: the scheduler counts what it served.
        compute_ns = 0 if batch.timing is None or batch.failure is not None else batch.timing.compute_ns
        self._scheduler.record(batch.dispatch, compute_ns, executed_ns)
        if batch.failure is None:
            self._succeed(batch, executed_ns)
        else:
            self._fail_batch(batch, batch.failure)

    def _succeed(self, batch: Batch, executed_ns: int) -> None:
        assert batch.timing is not None
        dispatch = batch.dispatch
        counters = batch.loaded.counters
        now_ns = self._clock_ns()
        compute_ns = batch.timing.compute_ns
        copy_in_ns = batch.staged_ns - batch.started_ns + batch.timing.copy_in_ns
        copy_out_ns = now_ns - executed_ns + batch.timing.copy_out_ns
        counters.executed(dispatch.batch_size, copy_in_ns, compute_ns, copy_out_ns)
        total_queue_ns = 0
        count = len(batch.order)
        for request in batch.order:
            queue_ns = max(0, batch.started_ns - request.arrival_ns)
            total_queue_ns += queue_ns
            place = place_of(request)
            attached = self._attached.get(place.channel.id)
            if attached is None or attached.live.pop(place.request_id, None) is None:
                continue
            if attached.gone:
                self._release_if_unused(attached)
                continue
            place.channel.reply(
                reply_words(
                    place.request_id, Kind.OK, dispatch.reason, max(0, dispatch.batch_size), queue_ns, compute_ns,
                    dispatch.rows, count, 0, 0, now_ns, dispatch.seq,
                )
            )  # fmt: skip
            self._touched.add(place.channel)
        counters.answered(count, total_queue_ns, copy_in_ns, compute_ns, copy_out_ns)

    def _fail_batch(self, batch: Batch, failure: ServingError) -> None:
        counters = batch.loaded.counters
        counters.failed_executions += 1
        dispatch = batch.dispatch
        if isinstance(failure, DeviceLost):
            self._lost = failure
            self._fail_all(dispatch, failure.kind, str(failure))
            return
        if len(dispatch.requests) == 1:
            request = dispatch.requests[0]
            counters.fail.add(self._clock_ns() - request.arrival_ns)
            log.warning("dispatch.failed model=%s rows=%d reason=%s", batch.loaded.entry.name, dispatch.rows, failure)
            self._fail(request, failure.kind, str(failure))
            return
        # One bad request must not fail its neighbours: each runs again alone, once, and is judged by itself.
        log.warning(
            "dispatch.split model=%s requests=%d reason=%s", batch.loaded.entry.name, len(dispatch.requests), failure
        )
        for request in batch.order:
            self._retries.append(self._alone(batch.loaded, dispatch, request))

    @staticmethod
    def _alone(loaded: LoadedModel, dispatch: Dispatch, request: Request) -> Dispatch:
        sizes = loaded.signature.batch_sizes
        batch_size = next((size for size in sizes if size >= request.rows), -1)
        return Dispatch(0, dispatch.model_id, dispatch.variant, batch_size, request.rows, [request], Reason.RETRIED)

    def _next_retry(self, now_ns: int) -> Dispatch | None:
        while self._retries:
            dispatch = self._retries.popleft()
            request = dispatch.requests[0]
            if self._registry.loaded(dispatch.model_id) is None:
                self._fail(request, Kind.NOT_READY, "the model was unloaded")
            elif request.deadline_ns <= now_ns:
                self._fail(request, Kind.DEADLINE_EXCEEDED, "the deadline passed while the batch was run again")
            else:
                return dispatch
        return None

    def _fail_all(self, dispatch: Dispatch, kind: Kind, text: str) -> None:
        counters = self._registry.counters(dispatch.model_id)
        now_ns = self._clock_ns()
        for request in dispatch.requests:
            counters.fail.add(now_ns - request.arrival_ns)
            self._fail(request, kind, text)
