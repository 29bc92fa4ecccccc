"""Watches over batches for an installation: judges the alert rules, keeps incidents, tells the webhook.

Every process that has one may do it; the one that holds the duty does, and another takes over within ``LEASE_S`` of its
end. What is open is in the store, so a process may be killed at any instant: its successor opens nothing twice. A
message to the webhook may come twice then, under the same name.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import secrets
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Final

from frontend.batches.periodic import Periodic
from frontend.batches.scheduling.delivery_state import Deliveries, Event, is_stale
from frontend.batches.scheduling.incident_state import FAILED_US, Firing, Key, Picture, ending, judge
from frontend.batches.scheduling.outlook import Outlook, Outlooks
from frontend.batches.scheduling.webhook import NotTold, Webhook
from frontend.batches.store.errors import StoreUnavailable
from frontend.batches.store.protocol import Store
from frontend.batches.store.route_rows import IncidentRow
from frontend.batches.store.rows import SECOND_US, BatchRow
from frontend.gateway_settings import AlertSettings
from worker.channel.series import Series

log = logging.getLogger("batches")

DUTY: Final = "alerts"
EVERY_S: Final = 60.0
LOOK_S: Final = 5.0
LEASE_S: Final = 30.0
PRUNE_S: Final = 3600.0
KEEP_US: Final = 90 * 24 * 3600 * SECOND_US
UNTOLD_AT_ONCE: Final = 100
MAX_BATCHES: Final = 2000
PAGE: Final = 200


class AlertDuty:
    """Between ``start`` and ``close``; used on one event loop.

    Args:
        webhook: not started; closed here.
        opened: set while the store can be asked.
    """

    def __init__(
        self,
        store: Store,
        settings: AlertSettings,
        outlooks: Outlooks,
        webhook: Webhook | None = None,
        *,
        opened: asyncio.Event | None = None,
        process_id: str = "",
        every_s: float = EVERY_S,
        look_s: float = LOOK_S,
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._store = store
        self._rules = settings.rules
        self._outlooks = outlooks
        self._webhook = webhook
        self._opened = opened
        self._process_id = process_id or "alerts-" + secrets.token_hex(8)
        self._every_s = every_s
        self._look_s = look_s
        self._clock_ns = clock_ns
        self._pending: frozenset[Key] = frozenset()
        self._deliveries = Deliveries()
        self._told: Counter[str] = Counter()
        self._fired: Counter[str] = Counter()
        self._open: Counter[str] | None = None
        self._at_risk = 0
        self._judged_ns: int | None = None
        self._pruned_ns: int | None = None
        self._parts: list[Periodic] = []

    async def start(self) -> None:
        """Begin to watch; without rules there is nothing to do."""
        if not self._rules:
            return
        work: list[Callable[[], Awaitable[None]]] = [self.look]
        if self._webhook is not None:
            await self._webhook.start()
            work.append(self.deliver)
        self._parts = [Periodic("alerts", self._once_open(one), self._look_s) for one in work]
        for part in self._parts:
            part.start()

    async def close(self) -> None:
        """Stop, and leave the duty to others at once; idempotent."""
        parts, self._parts = self._parts, []
        for part in parts:
            await part.close()
        if self._webhook is not None:
            await self._webhook.close()
        if parts and (self._opened is None or self._opened.is_set()):
            with contextlib.suppress(StoreUnavailable):
                await self._store.alerts.release_duties(self._process_id)

    async def look(self) -> None:
        """Judge the rules if this process has the duty and it is time to. Raises: StoreUnavailable."""
        if not await self._store.alerts.hold_duty(DUTY, self._process_id, int(LEASE_S * SECOND_US)):
            self._open = None
            self._judged_ns = None
            self._pending = frozenset()
            return
        now_ns = self._clock_ns()
        if self._judged_ns is None or now_ns - self._judged_ns >= self._every_s * 1e9:
            await self.judge()
            self._judged_ns = now_ns
        if self._pruned_ns is None or now_ns - self._pruned_ns >= PRUNE_S * 1e9:
            await self._store.alerts.prune_incidents(KEEP_US)
            self._pruned_ns = now_ns

    async def judge(self) -> None:
        """Open and resolve what the rules say of this moment. Raises: StoreUnavailable."""
        incidents = await self._store.alerts.open_incidents()
        changes = judge(self._rules, await self._look_at(), incidents, self._pending)
        by_key = {(one.rule, one.subject): one for one in incidents}
        for key in changes.resolves:
            await self._resolve(by_key[key])
        for firing in changes.opens:
            await self._open_one(firing)
        self._pending = changes.pending
        gone = set(changes.resolves)
        left = [one.rule for one in incidents if (one.rule, one.subject) not in gone]
        self._open = Counter(left + [firing.rule for firing in changes.opens])

    async def deliver(self) -> None:
        """Tell the webhook what is due, if this process has the duty. Raises: StoreUnavailable."""
        if self._open is None or self._webhook is None:
            return
        untold = await self._store.alerts.undelivered(UNTOLD_AT_ONCE)
        now_us = await self._store.now_us()
        for event in untold:
            if is_stale(event, now_us):
                await self._give_up(event, "too old")
        for event in self._deliveries.due([one for one in untold if not is_stale(one, now_us)], self._clock_ns()):
            if not await self._tell(event, now_us):
                return

    def series(self) -> Iterable[Series]:
        """Yield this process's counters, and what is open if it has the duty."""
        for name, count in sorted(self._fired.items()):
            yield Series(
                name="gateway_batch_alerts_total", kind="counter", value=count,
                help="Incidents opened by alert rules.", labels={"rule": name},
            )  # fmt: skip
        for outcome in ("delivered", "failed", "given_up") if self._webhook is not None else ():
            yield Series(
                name="gateway_batch_alert_messages_total", kind="counter", value=self._told[outcome],
                help="Attempts to tell the webhook of an incident.", labels={"outcome": outcome},
            )  # fmt: skip
        if self._open is None:
            return
        for rule in self._rules:
            yield Series(
                name="gateway_batch_alerts_open", kind="gauge", value=self._open[rule.name],
                help="Open incidents of alert rules.", labels={"rule": rule.name},
            )  # fmt: skip
        yield Series(
            name="gateway_batches_at_risk", kind="gauge", value=self._at_risk,
            help="Unfinished batches that will probably expire before they are done.",
        )  # fmt: skip

    # Inside

    def _once_open(self, work: Callable[[], Awaitable[None]]) -> Callable[[], Awaitable[None]]:
        async def once_open() -> None:
            if self._opened is not None:
                await self._opened.wait()
            await work()

        return once_open

    async def _look_at(self) -> Picture:
        store = self._store
        kinds = {rule.kind for rule in self._rules}
        now_us = await store.now_us()
        stalled: dict[int, Sequence[BatchRow]] = {}
        for minutes in {rule.window_minutes for rule in self._rules if rule.kind == "batch_stalled"}:
            stalled[minutes] = await store.scheduling.stalled(minutes * 60 * SECOND_US)
        ended = await store.views.ended_since(now_us - FAILED_US) if "batch_failed" in kinds else ()
        outlooks: Mapping[str, Outlook] = {}
        unfinished: dict[str, BatchRow] = {}
        if "batch_at_risk" in kinds:
            outlooks = await self._outlooks.all()
            unfinished = await self._unfinished()
        self._at_risk = sum(outlook.at_risk for outlook in outlooks.values())
        workspaces = {row.id: row for row in await store.keys.workspaces()}
        return Picture(now_us, workspaces, stalled, ended, unfinished, outlooks)

    async def _unfinished(self) -> dict[str, BatchRow]:
        found: dict[str, BatchRow] = {}
        for offset in range(0, MAX_BATCHES, PAGE):
            page = await self._store.batches.list_batches(None, PAGE, offset=offset, active=True)
            found |= {row.id: row for row in page.rows}
            if not page.has_more:
                break
        return found

    async def _resolve(self, incident: IncidentRow) -> None:
        batch = await self._store.batches.get(None, incident.subject)
        rule = next((rule for rule in self._rules if rule.name == incident.rule), None)
        details = json.loads(incident.details) | {"ended_by": ending(rule, batch)}
        if batch is not None and batch.completed_at is not None:
            details["ended_state"] = batch.state
        if await self._store.alerts.resolve(incident.rule, incident.subject, json.dumps(details)):
            log.info(
                "alert.resolved rule=%s batch=%s by=%s", incident.rule, incident.subject, details["ended_by"]
            )  # fmt: skip

    async def _open_one(self, firing: Firing) -> None:
        incident = IncidentRow(
            "inc_" + secrets.token_hex(16), firing.rule, firing.subject, firing.workspace_id, firing.summary,
            json.dumps(firing.details),
        )  # fmt: skip
        if await self._store.alerts.open_incident(incident):
            self._fired[firing.rule] += 1
            log.warning("alert.opened rule=%s batch=%s summary=%s", firing.rule, firing.subject, firing.summary)

    async def _tell(self, event: Event, now_us: int) -> bool:
        """Tell one event; False if the receiver cannot be reached now."""
        assert self._webhook is not None
        incident, what = event
        name = (incident.id, what)
        try:
            await self._webhook.tell(incident, what, now_us // SECOND_US)
        except NotTold as error:
            self._told["failed"] += 1
            log.warning("alert.not_told incident=%s event=%s error=%s", incident.id, what, error)
            if self._deliveries.failed(name, self._clock_ns(), reached=error.reached):
                await self._give_up(event, "tried too often")
            return error.reached
        self._deliveries.told(name)
        self._told["delivered"] += 1
        await self._store.alerts.mark_delivered(incident.id, what)
        return True

    async def _give_up(self, event: Event, why: str) -> None:
        incident, what = event
        self._told["given_up"] += 1
        log.error("alert.given_up incident=%s event=%s reason=%s", incident.id, what, why)
        await self._store.alerts.mark_delivered(incident.id, what)
