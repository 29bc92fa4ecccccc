"""The batches this process holds: their leases, kept alive, and what a renewal says about each."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from frontend.batches.runner.job import Job, Stop
from frontend.batches.runner.timings import Timings
from frontend.batches.store.protocol import Store
from frontend.batches.store.rows import LeaseState

log = logging.getLogger("batches")


@dataclass(slots=True, eq=False)
class Lease:
    """One held batch; ``job`` once it is loaded.

    Attributes:
        until_ns: monotonic; the lease certainly holds until then.
    """

    batch_id: str
    until_ns: int
    job: Job | None = None
    lost: bool = False
    stop: Stop | None = None

    def enlist(self, job: Job) -> None:
        """Let the job know what is known already, and what will be."""
        self.job = job
        self._tell()

    def note(self, state: LeaseState) -> None:
        """Take what a renewal says: lost before cancelled before expired."""
        self.lost = self.lost or not state.owned
        if state.cancel_requested:
            self.stop = Stop.CANCELLED
        elif state.expired and self.stop is None:
            self.stop = Stop.EXPIRED
        self._tell()

    def lose(self) -> None:
        self.lost = True
        self._tell()

    def _tell(self) -> None:
        job = self.job
        if job is None:
            return
        if self.lost and not job.lost:
            log.warning("batch.lease_lost batch=%s running=%d", self.batch_id, job.running)
            job.lost = True
            job.changed.set()
        if self.stop is not None and not job.lost:
            job.halt(self.stop)


class Leases:
    """All of them. A lease that could not be renewed for its whole length counts as lost: somebody else may have it."""

    def __init__(
        self, runner_id: str, store: Store, times: Timings, clock_ns: Callable[[], int] = time.monotonic_ns
    ) -> None:
        self._runner_id = runner_id
        self._store = store
        self._times = times
        self._clock_ns = clock_ns
        self._held: dict[str, Lease] = {}

    @property
    def lease_us(self) -> int:
        return int(self._times.lease_s * 1e6)

    def __len__(self) -> int:
        return len(self._held)

    def held(self) -> list[Lease]:
        return list(self._held.values())

    def jobs(self) -> list[Job]:
        """Return the loaded batches that are still ours."""
        return [lease.job for lease in self._held.values() if lease.job is not None and not lease.lost]

    def hold(self, batch_id: str, asked_ns: int) -> Lease:
        """Note a lease that was taken by a call made at ``asked_ns``."""
        lease = self._held[batch_id] = Lease(batch_id, asked_ns + int(self._times.lease_s * 1e9))
        return lease

    def let_go(self, lease: Lease) -> None:
        """Forget a batch that has ended, or is somebody else's."""
        if self._held.get(lease.batch_id) is lease:
            del self._held[lease.batch_id]

    def lose_all(self) -> None:
        """Another process runs batches now."""
        for lease in self.held():
            lease.lose()

    async def renew(self, leases: Iterable[Lease] | None = None) -> None:
        """Renew some leases, or all. Raises: StoreUnavailable; leases that ran out meanwhile are given up."""
        chosen = self.held() if leases is None else list(leases)
        asked_ns = self._clock_ns()
        try:
            ids = [lease.batch_id for lease in chosen if not lease.lost]
            states = await self._store.runner.renew(self._runner_id, ids, self.lease_us) if ids else {}
        finally:
            now_ns = self._clock_ns()
        for lease in chosen:
            if (state := states.get(lease.batch_id)) is not None:
                lease.until_ns = asked_ns + int(self._times.lease_s * 1e9)
                lease.note(state)
            elif not lease.lost and now_ns >= lease.until_ns:
                lease.lose()

    def give_up_expired(self) -> None:
        """Give up leases that could not be renewed in time."""
        now_ns = self._clock_ns()
        for lease in self.held():
            if not lease.lost and now_ns >= lease.until_ns:
                lease.lose()
