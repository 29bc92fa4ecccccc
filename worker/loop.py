"""The worker's loop: drain rings, decide, execute, answer. Everything that changes state happens on this thread.

Each round: look at descriptors and rings; turn records into queued requests; answer what expired, was cancelled or was
refused; if the device is free, ask the scheduler and start one execution; hand the replies of this round over in bulk.

Answers: every request record gets exactly one reply record. ``Attached.live`` holds the requests that still owe one.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable
from typing import Final

from engines.select import EngineSet
from worker.answers import Answers
from worker.arrival import Arrival, Attached
from worker.channel.channel import Channel
from worker.channel.node_link import Order, Report, State, SyncLink
from worker.channel.pulse import BEAT_INTERVAL_S, Pulse
from worker.channel.reception import Events
from worker.channel.series import Series
from worker.channel.server import ChannelServer
from worker.config import RuntimeSettings
from worker.control import Control
from worker.executions import Executions
from worker.intake import Intake
from worker.models import LoadedModel, Loader
from worker.registry import Registry
from worker.scheduling.scheduler import Scheduler

log = logging.getLogger("worker.loop")

BEAT_NS: Final = int(BEAT_INTERVAL_S * 1e9)
LONGEST_REST_NS: Final = 1_000_000
"""While the device thread runs a batch, records wait at most so long: a refusal or cancellation is not late with it."""
SHORTEST_REST_NS: Final = 100_000
"""Below this, sleeping and waking cost more than the records that come meanwhile."""


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
        self._intake = Intake(registry.loaded)
        self._answers = Answers(self._release)
        self._executions = Executions(scheduler, registry, self._answers, pulse, clock_ns)
        self._attached: dict[int, Attached] = {}
        self._took = False
        self._draining = False
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
        self._device_fd = self._executions.open()
        self._server.watch(self._device_fd)
        for descriptor in (self._loader, self._link):
            if descriptor is not None:
                self._server.watch(descriptor.fileno())
        self._report_state()
        while not self._finished():
            self.step()
        self._executions.close()
        self._loader.close()
        if self._executions.lost is not None:
            raise self._executions.lost
        return 0

    def step(self) -> None:
        """One round of the loop; blocks until something happens or something is due."""
        now_ns = self._clock_ns()
        if self._pulse is not None:
            self._pulse.beat(now_ns)
        executions = self._executions
        events = self._server.poll(
            self._timeout_ns(now_ns),
            self._rest_ns(now_ns),
            spin=not executions.running,
            executed_ns=executions.executed_ns,
        )
        self._on_events(events)
        now_ns = self._clock_ns()
        self._executions.collect()
        rung = self._server.rung()
        self._took = bool(rung)
        if rung:
            self._take(rung, now_ns)
        if now_ns >= self._scheduler.no_expiry_before_ns:
            for shed in self._scheduler.expire(now_ns):
                self._executions.shed(shed)
        self._executions.start(now_ns)
        self._executions.answer()
        self._answers.flush()

    def _finished(self) -> bool:
        executions = self._executions
        if executions.lost is not None or (self._link is not None and self._link.gone):
            return True
        return self._draining and not executions.running and not any(a.live for a in self._attached.values())

    def _timeout_ns(self, now_ns: int) -> int:
        executions = self._executions
        due_ns = min(self._scheduler.no_expiry_before_ns, now_ns + BEAT_NS)
        if not executions.running:
            due_ns = min(due_ns, executions.idle_until_ns)
        elif self._scheduler.queued and now_ns < executions.ahead_from_ns:
            due_ns = min(due_ns, executions.ahead_from_ns)
        return max(0, due_ns - now_ns)

    def _rest_ns(self, now_ns: int) -> int:
        # Under load only: where nothing came in the last round, one wake-up costs less than looking every so often.
        if not self._took or not self._executions.running:
            return 0
        return max(SHORTEST_REST_NS, min(self._executions.ahead_from_ns - now_ns, LONGEST_REST_NS))

    # Events

    def _on_events(self, events: Events) -> None:
        for channel in events.attached:
            self._attached[channel.id] = Attached(channel)
            self._engines.attach(channel.arena, f"arena of {channel.name}")
            log.info("channel.attached frontend=%s pid=%d", channel.name, channel.pid)
        for channel in events.detached:
            self._detach(channel)
        for descriptor in events.fds:
            if descriptor == self._device_fd:
                self._executions.clear()
            elif descriptor == self._loader.fileno():
                self._on_loaded()
            elif self._link is not None and descriptor == self._link.fileno():
                self._on_orders(self._link.receive())
        for connection, ask in events.asks:
            self._server.answer(connection, self._control.answer(ask, self._clock_ns()))
        if self._link is not None and self._link.wants_write:
            self._link.flush()

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
        for attached in self._attached.values():
            # They name models by id, and what an id means has changed.
            attached.blocks.clear()
        self._server.publish_models(self._registry.entries())
        self._report_state()
        if self._registry.state(draining=False)[0] is not State.STARTING:
            # What models are made of lives long: a full collection during service need not walk it.
            gc.collect()
            gc.freeze()

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
        if not attached.live:
            self._release(attached)

    def _release(self, attached: Attached) -> None:
        # Not before: a running batch reads and writes the arena of the dead.
        self._attached.pop(attached.channel.id, None)
        attached.blocks.clear()
        self._engines.detach(attached.channel.arena)
        attached.channel.release()

    # Requests in

    def _take(self, channels: list[Channel], now_ns: int) -> None:
        arrivals: list[Arrival] = []
        cancels: list[Arrival] = []
        for channel in channels:
            attached = self._attached.get(channel.id)
            if attached is None or attached.gone:
                continue
            requests, cancelled, refusals = self._intake.read(attached)
            arrivals += requests
            cancels += [attached.live[request_id] for request_id in cancelled if request_id in attached.live]
            for refusal in refusals:
                self._answers.refuse(attached, refusal)
        if arrivals:
            self._executions.idle_until_ns = 0
            for shed in self._scheduler.offer_many(arrivals, now_ns):
                self._executions.shed(shed)
        for request in cancels:
            withdrawn = self._scheduler.cancel(request.key, now_ns)
            if withdrawn is not None:
                self._executions.shed(withdrawn)
