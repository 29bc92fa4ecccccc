"""Runs batches: takes them up, keeps their leases, runs their lines, ends them. One per process.

Theory of operation
    Every free batch is taken, none waits unseen: one that may not start yet costs a task and its line index. The store
    decides who runs what: a right to run batches at all (SQLite: one process, others stay passive), a lease per batch,
    a claim per line. What a runner remembers is only ever a copy, so it may be killed at any instant.

    Durations are monotonic here; windows and leases are compared by the store, on the store's clock.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from frontend.batches.objects import Objects
from frontend.batches.runner import access
from frontend.batches.runner.batch_task import Bench, run_batch
from frontend.batches.runner.deferred import Intake
from frontend.batches.runner.dispatcher import Dispatcher
from frontend.batches.runner.figures import Figures
from frontend.batches.runner.finalize import Files
from frontend.batches.runner.gates import Gate
from frontend.batches.runner.job import Job, legitimate
from frontend.batches.runner.leases import Lease, Leases
from frontend.batches.runner.limits import RouteLimits, StoredLimits
from frontend.batches.runner.observer import RouteObserver, Unobserved
from frontend.batches.runner.outage import Persistence
from frontend.batches.runner.timings import Timings, ns
from frontend.batches.store.errors import StoreUnavailable
from frontend.batches.store.protocol import Store
from frontend.batches.store.rows import TakenBatch
from frontend.batches.validation import InputCheck, Models
from frontend.gateway_settings import GatewaySettings
from frontend.openai.calls import Executor

log = logging.getLogger("batches")

TAKE_AT_ONCE: Final = 16
"""Batches taken per look, so that several runners share what arrives."""
LOADS_AT_ONCE: Final = 8
HAND_BACK_NS: Final = 60_000_000_000
"""How long a batch that this runner cannot serve is left to others."""
PUBLISH_LOOK_S: Final = 0.1
BLOCK_LOOK_S: Final = 0.01


class BatchRunner:
    """A runner between ``start`` and ``close``.

    Attributes:
        passive: another process has the right to run batches, once ``asked`` for it.
        broken: set if the runner cannot go on, which only a mistake in it can do; end the process then.

    Args:
        is_local: whether a route is our own worker.
        gates: further conditions for starting a line, in order.
        observer: told what lines meet on their routes.
        has_worker: whether models of our own worker can be run here; without, batches of models that nobody serves
            are handed back instead of failed, for a runner that has it.
    """

    def __init__(
        self,
        settings: GatewaySettings,
        store: Store,
        objects: Objects,
        executor: Executor,
        *,
        models: Models = lambda endpoint, model: "ok",
        provider_of: Callable[[str], str] = lambda route: "none",
        gates: Sequence[Gate] = (),
        limits: RouteLimits | None = None,
        observer: RouteObserver | None = None,
        times: Timings | None = None,
        runner_id: str = "",
        has_worker: bool = True,
        clock_ns: Callable[[], int] = time.monotonic_ns,
        on_state: Callable[[], None] = lambda: None,
    ) -> None:
        batches = settings.batches
        self.runner_id = runner_id or "runner-" + secrets.token_hex(8)
        self.figures = Figures(provider_of)
        self.passive = True
        self.asked = False
        self.broken = asyncio.Event()
        self._times = times or Timings(lease_s=batches.lease_seconds, renew_s=batches.lease_renew_seconds)
        self._store = store
        self._limits = limits or StoredLimits(store, batches.default_max_concurrency)
        self._clock_ns = clock_ns
        self._on_state = on_state
        self._persistence = Persistence(self._times, self.figures)
        self._leases = Leases(self.runner_id, store, self._times, clock_ns)
        self._check = InputCheck(objects)
        self._dispatcher = Dispatcher(
            self.runner_id, store, executor, self._limits, gates, observer or Unobserved(), self._times, self.figures,
            workers=batches.workers, batch_concurrency=batches.batch_concurrency, hands_back=not has_worker,
            is_local=lambda route: provider_of(route) == "local", clock_ns=clock_ns,
        )  # fmt: skip
        self._bench = Bench(
            runner_id=self.runner_id,
            files=Files(store, objects, settings.files.batch_retention_days),
            dispatcher=self._dispatcher,
            intake=Intake(store, objects, self._check, models, batches, self._persistence),
            persistence=self._persistence,
            times=self._times,
            figures=self.figures,
            renew=self._renew_job,
        )
        self._loads = asyncio.Semaphore(LOADS_AT_ONCE)
        self._loops: list[asyncio.Task[None]] = []
        self._batches: dict[asyncio.Task[None], Lease] = {}
        self._draining = False
        self._knows_limits = False
        self._acquired_ns = 0
        self._handed_back: dict[str, int] = {}

    @property
    def jobs(self) -> int:
        """Batches held now."""
        return len(self._leases)

    def wake(self) -> None:
        """Look at once whether lines can start: something that they wait for has changed."""
        self._dispatcher.wake()

    def freed(self, route_id: str) -> None:
        """Ask for a route again at once: another process has left room there."""
        self._dispatcher.freed(route_id)

    async def start(self) -> None:
        """Begin to run batches, or to wait for the right to."""
        await self._check.start()
        loop = asyncio.get_running_loop()
        times = self._times
        for work in (
            self._dispatcher.run(),
            self._every(times.tick_s, self._tick),
            self._every(times.renew_s, self._renew),
            self._every(times.access_s, self._refresh),
            self._every(PUBLISH_LOOK_S, self._publish),
            self._watch_loop(),
        ):
            task = loop.create_task(work)
            task.add_done_callback(self._on_loop_end)
            self._loops.append(task)

    async def drain(self, timeout_s: float) -> bool:
        """Start nothing more, let running lines end, give every lease back; False if lines had to be left."""
        self._draining = True
        self._dispatcher.drain()
        running = [task for task in self._batches if not task.done()]
        late: set[asyncio.Task[None]] = set()
        if running:
            _, late = await asyncio.wait(running, timeout=timeout_s)
        if late:
            log.warning("batches.drain_cut batches=%d", len(late))
        return not late

    async def close(self) -> None:
        """Stop at once; lines that still run become ``interrupted`` for whoever takes their batch over."""
        for task in (*self._batches, *self._loops):
            task.cancel()
        await asyncio.gather(*self._batches, *self._loops, return_exceptions=True)
        self._loops.clear()
        await self._check.close()
        with contextlib.suppress(StoreUnavailable):
            await self._store.runner.release(self.runner_id)

    # Loops

    def _on_loop_end(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled():
            log.critical("batches.broke", exc_info=task.exception())
            self.broken.set()

    async def _every(self, interval_s: float, work: Callable[[], Awaitable[None]]) -> None:
        """Do ``work`` again and again; whatever goes wrong is logged and tried again."""
        while True:
            try:
                await work()
            except StoreUnavailable as error:
                self.figures.outages += 1
                log.warning("batches.outage error=%s", error)
                self._leases.give_up_expired()
            except Exception:
                log.exception("batches.loop_failed")
            await asyncio.sleep(interval_s)

    async def _tick(self) -> None:
        if self._draining:
            return
        overdue = self._clock_ns() - self._acquired_ns > ns(self._times.lease_s)
        if (self.passive or overdue) and not await self._acquire():
            return
        if not self._knows_limits:
            # Before the first claim: what operators have set must hold from the first line on.
            await self._limits.refresh()
            self._knows_limits = True
        while not self._draining:
            asked_ns = self._clock_ns()
            taken = await self._store.runner.take(self.runner_id, self._leases.lease_us, TAKE_AT_ONCE)
            for batch in taken:
                await self._take_up(batch, asked_ns)
            if len(taken) < TAKE_AT_ONCE:
                return
            await asyncio.sleep(self._times.publish_s)

    async def _acquire(self) -> bool:
        """Take or keep the right to run batches; note when it comes or goes."""
        asked_ns = self._clock_ns()
        acquired = await self._store.runner.acquire(self.runner_id, self._leases.lease_us)
        if acquired:
            self._acquired_ns = asked_ns
        first, self.asked = not self.asked, True
        if acquired == self.passive or first:
            log.info("batches.%s runner=%s", "active" if acquired else "passive", self.runner_id)
            self.passive = not acquired
            if not acquired:
                self._leases.lose_all()
            self._on_state()
        return acquired

    async def _renew(self) -> None:
        if not self.passive:
            await self._acquire()
        await self._leases.renew()

    async def _refresh(self) -> None:
        now_ns = self._clock_ns()
        self._handed_back = {batch_id: at_ns for batch_id, at_ns in self._handed_back.items() if at_ns > now_ns}
        await self._limits.refresh()
        if await access.refresh(self._store, self._leases.jobs()):
            self._dispatcher.wake()

    async def _publish(self) -> None:
        """Tell the store what each batch waits for: at once when it changes for others, else now and then."""
        now_ns = self._clock_ns()
        due = [job for job in self._leases.jobs() if self._must_publish(job, now_ns)]
        for start in range(0, len(due), TAKE_AT_ONCE):
            await asyncio.gather(*(self._publish_one(job, now_ns) for job in due[start : start + TAKE_AT_ONCE]))

    def _must_publish(self, job: Job, now_ns: int) -> bool:
        demands = job.demands()
        if not demands and not job.published:
            return False
        age_ns = now_ns - job.published_ns
        if [(d.route_id, d.ready) for d in demands] != [(d.route_id, d.ready) for d in job.published]:
            return age_ns >= ns(self._times.publish_s)
        if [d.reason for d in demands] != [d.reason for d in job.published]:
            return age_ns >= 4 * ns(self._times.publish_s)
        return age_ns >= ns(self._times.heartbeat_s)

    async def _publish_one(self, job: Job, now_ns: int) -> None:
        demands = job.demands()
        await self._store.scheduling.publish_waits(
            self.runner_id, job.id, demands, legitimate=legitimate(demands)
        )  # fmt: skip
        job.published, job.published_ns = demands, now_ns

    async def _watch_loop(self) -> None:
        """Measure how long the event loop keeps others waiting: by the clock, and by its own processor time."""
        figures = self.figures
        while True:
            before_ns, busy_ns = time.monotonic_ns(), time.thread_time_ns()
            await asyncio.sleep(BLOCK_LOOK_S)
            figures.blocked(
                (time.monotonic_ns() - before_ns) / 1e9 - BLOCK_LOOK_S, (time.thread_time_ns() - busy_ns) / 1e9
            )

    # Batches

    async def _take_up(self, taken: TakenBatch, asked_ns: int) -> None:
        batch = taken.batch
        if asked_ns < self._handed_back.get(batch.id, 0):
            await self._store.runner.release_batches(self.runner_id, [batch.id])
            return
        self.figures.taken_over += taken.taken_over
        self.figures.interrupted += taken.interrupted
        log.info(
            "batch.taken batch=%s state=%s taken_over=%s interrupted=%d",
            batch.id, batch.status_detail, taken.taken_over, taken.interrupted,
        )  # fmt: skip
        lease = self._leases.hold(batch.id, asked_ns)
        self.figures.jobs = len(self._leases)
        task = asyncio.get_running_loop().create_task(self._run_batch(taken, lease))
        self._batches[task] = lease
        task.add_done_callback(self._batches.pop)

    async def _run_batch(self, taken: TakenBatch, lease: Lease) -> None:
        try:
            await run_batch(self._bench, taken.batch, lease.enlist, self._loads)
            if lease.job is not None and lease.job.handed_back:
                self._handed_back[taken.batch.id] = self._clock_ns() + HAND_BACK_NS
        except Exception:
            log.exception("batch.broke batch=%s", taken.batch.id)
            # It is taken up again, from what the store knows, once its lease has run out; by us or by another.
            await asyncio.sleep(self._times.tick_s)
        finally:
            self._leases.let_go(lease)
            self.figures.jobs = len(self._leases)
        if not lease.lost:
            await self._persistence.insist(
                lambda: self._store.runner.release_batches(self.runner_id, [taken.batch.id])
            )  # fmt: skip

    async def _renew_job(self, job: Job) -> None:
        leases = [lease for lease in self._leases.held() if lease.job is job]
        await self._persistence.insist(lambda: self._leases.renew(leases))
