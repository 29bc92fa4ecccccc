"""The runner's loop: ends of lines go to the store, claims come back, claimed lines are run.

Theory of operation
    One turn at a time: everything that ended since the last one and everything that may start now go to the store in
    one call, so that a thousand lines cost a few commits. While the store works, lines run. A turn whose answer was
    lost is repeated word for word: claims and ends name their execution, so the repetition changes nothing that
    happened. A line's end and its result are one commit: whatever dies afterwards, the result is kept.

    A claim whose line was not sent is given back before the next turn, so that what the store takes for running was
    handed to a server, or is on its way there.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from frontend.batches.runner import wishes
from frontend.batches.runner.figures import Figures
from frontend.batches.runner.gates import Gate
from frontend.batches.runner.job import Job
from frontend.batches.runner.lanes import Lane, Refusal
from frontend.batches.runner.limits import RouteLimits
from frontend.batches.runner.line_runner import End, LineRunner
from frontend.batches.runner.observer import RouteObserver
from frontend.batches.runner.outage import Persistence
from frontend.batches.runner.timings import Timings, ns
from frontend.batches.runner.wishes import Room, Round
from frontend.batches.store.protocol import Store
from frontend.batches.store.rows import ClaimGroup, ClaimResult, FinishLine, TurnResult
from frontend.openai.calls import Executor
from frontend.openai.errors import error_body

log = logging.getLogger("batches")


class Dispatcher:
    """Runs the lines of its jobs; used on one event loop.

    Args:
        workers: lines that run at once.
        batch_concurrency: of one batch; 0 for no limit.
        hands_back: lines that nobody serves are left to another runner instead of failed.
        is_local: whether a route is our own worker, whose refusals mean that nothing ran.
    """

    def __init__(
        self,
        runner_id: str,
        store: Store,
        executor: Executor,
        limits: RouteLimits,
        gates: Sequence[Gate],
        observer: RouteObserver,
        times: Timings,
        figures: Figures,
        *,
        workers: int,
        batch_concurrency: int = 0,
        hands_back: bool = False,
        is_local: Callable[[str], bool] = lambda route: False,
        clock_ns: Callable[[], int] = time.monotonic_ns,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self._hands_back = hands_back
        self._runner_id = runner_id
        self._store = store
        self._executor = executor
        self._limits = limits
        self._gates = gates
        self._observer = observer
        self._times = times
        self._figures = figures
        self._batch_concurrency = batch_concurrency
        self._clock_ns = clock_ns
        self._persistence = Persistence(times, figures)
        self._lines = LineRunner(
            executor, self._persistence, gates, observer, times, figures, self.wake,
            workers=workers, is_local=is_local, clock_ns=clock_ns, jitter=jitter,
        )  # fmt: skip
        self._jobs: list[Job] = []
        self._resting: dict[str, int] = {}
        self._freed: set[str] = set()
        """Routes that others left room on since this turn was asked for: a refusal may be out of date already."""
        self._turns = 0
        self._wake = asyncio.Event()
        self._draining = False

    def add(self, job: Job) -> None:
        """Begin to run a batch's lines."""
        job.draining = self._draining
        self._jobs.append(job)
        self._resting.clear()
        self.wake()

    def remove(self, job: Job) -> None:
        """Forget a batch; lines of it that still run end without effect on it."""
        if job in self._jobs:
            self._jobs.remove(job)

    def wake(self) -> None:
        """Look again at once: something that lines wait for has changed."""
        self._wake.set()

    def freed(self, route: str) -> None:
        """Ask for a route again at once: another process has left room there."""
        self._freed.add(route)
        self._resting.pop(route, None)
        self.wake()

    def drain(self) -> None:
        """Start nothing more; every job is over once its running lines have ended."""
        self._draining = True
        for job in self._jobs:
            job.draining = True
        self._lines.drain()
        for job in self._jobs:
            job.changed.set()
        self.wake()

    def stopped(self, job: Job) -> None:
        """Let a batch that has just been stopped come to its end."""
        self.wake()

    async def run(self) -> None:
        """Take turns until cancelled."""
        try:
            while True:
                self._wake.clear()
                if returned := self._lines.take_returned():
                    await self._give_back(returned)
                now_ns = self._clock_ns()
                ends = self._lines.take_ended()
                for end in ends:
                    self._resting.pop(end.execution.route, None)
                asked = self._ask(now_ns)
                if ends or asked.groups:
                    result = await self._turn([end.line for end in ends], asked.groups)
                    self._apply_ends(ends, result.finished)
                    for route in {end.execution.route for end in ends}:
                        self._observer.freed(route)
                    self._apply_claims(asked, result.claimed)
                else:
                    await self._rest(now_ns)
        finally:
            await self._lines.close()

    async def _turn(self, ends: Sequence[FinishLine], groups: Sequence[ClaimGroup]) -> TurnResult:
        """Have the store do a turn, whatever it takes: an end that is dropped, or a claim whose answer is not heard,
        would be a line that runs for ever."""
        finished: Sequence[bool] | None = None
        wait_s = self._times.outage_first_s
        while True:
            try:
                result = await self._ask_store(ends if finished is None else (), groups)
                return result if finished is None else TurnResult(tuple(finished), result.claimed)
            except Exception:
                log.exception("batches.turn_refused ends=%d groups=%d", len(ends), len(groups))
            if finished is None and ends:
                # One thing the store will not have must not hold up the rest.
                finished = [await self._end_alone(end) for end in ends]
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, self._times.outage_longest_s)

    async def _ask_store(self, ends: Sequence[FinishLine], groups: Sequence[ClaimGroup]) -> TurnResult:
        return await self._persistence.insist(lambda: self._store.runner.turn(self._runner_id, ends, groups))

    async def _end_alone(self, end: FinishLine) -> bool:
        plain = FinishLine(end.batch_id, end.line_no, end.execution_id, "failed", None, "internal_error", None)
        for one in (end, plain):
            try:
                return (await self._ask_store((one,), ())).finished[0]
            except Exception:
                log.exception("batch.end_refused batch=%s line=%d", end.batch_id, end.line_no)
        return False

    async def _give_back(self, returned: Sequence[End]) -> None:
        """Let lines that were not sent wait again, here and in the store."""
        lines = [end.line for end in returned]
        try:
            given = await self._persistence.insist(lambda: self._store.runner.give_back(self._runner_id, lines))
        except Exception:
            # They must not stay claimed: that would be lines that run for ever.
            log.exception("batches.return_refused lines=%d", len(lines))
            self._apply_ends(
                [replace(end, retry=None) for end in returned], [await self._end_alone(one) for one in lines]
            )
            return
        again: dict[Lane, list[int]] = {}
        for end, mine in zip(returned, given, strict=True):
            execution, job = end.execution, end.execution.job
            job.running -= 1
            if not mine:
                self._figures.fenced += 1
                continue
            self._figures.returned += 1
            if end.retry is None:
                again.setdefault(execution.lane, []).append(execution.line_no)
            elif job.stop is None:
                execution.lane.put_back(end.retry)
            else:
                self._figures.ended(execution.route, ok=False)
                job.keep(execution.line_no, len(end.line.record or b""))
        for lane, numbers in again.items():
            lane.give_back(numbers)
        for end in returned:
            if end.execution.job.over or end.execution.lane.refusal is not None:
                end.execution.job.changed.set()
        for route in {end.execution.route for end in returned}:
            self._resting.pop(route, None)
            self._observer.freed(route)

    def _ask(self, now_ns: int) -> Round:
        if self._draining:
            return Round()
        self._turns += 1
        self._freed.clear()
        for job in self._jobs:
            if job.stop is None and not job.lost:
                self._plan(job, now_ns)
                self._lines.try_away(job, now_ns)
        resting = {route for route, until_ns in self._resting.items() if now_ns < until_ns}
        seekers = wishes.seekers_of(self._jobs, self._turns, self._gates, resting, now_ns)
        room = Room(self._lines.free, self._lines.bytes_free, self._lines.running_on)
        return wishes.round_of(
            seekers, room, self._limits, self._batch_concurrency, now_ns, counted=self._observer.running
        )

    def _plan(self, job: Job, now_ns: int) -> None:
        """Choose the routes of the lanes' heads; say which lanes cannot run at all."""
        for lane in job.lanes:
            if lane.refusal is not None or not lane.waiting:
                continue
            if job.principal is None:
                lane.refusal = _revoked()
                job.changed.set()
            elif lane.planned_ns is None or now_ns - lane.planned_ns >= ns(self._times.replan_s):
                self._plan_lane(job, lane, now_ns)

    def _plan_lane(self, job: Job, lane: Lane, now_ns: int) -> None:
        plan = self._executor.plan(job.batch.endpoint, lane.model)
        lane.cooling = not plan.route
        if plan.route:
            lane.route, lane.planned_ns, lane.unserved_since_ns = plan.route, now_ns, None
        elif plan.cooling_s is not None:
            lane.unserved_since_ns = None
        elif lane.unserved_since_ns is None:
            lane.unserved_since_ns = now_ns
        if lane.unserved_since_ns is not None and now_ns - lane.unserved_since_ns >= ns(self._times.unserved_s):
            if self._hands_back:
                job.handed_back = True
            else:
                lane.refusal = _no_model(lane.model)
            job.changed.set()

    def _apply_ends(self, ends: list[End], stored: Sequence[bool]) -> None:
        for end, mine in zip(ends, stored, strict=True):
            execution, job = end.execution, end.execution.job
            job.running -= 1
            if not mine:
                self._figures.fenced += 1
            elif end.retry is not None and job.stop is None and not self._draining:
                self._figures.retries += 1
                execution.lane.put_back(end.retry)
            else:
                self._figures.ended(execution.route, ok=end.ok)
                job.keep(execution.line_no, len(end.line.record or b""))
            times = self._times
            if job.over or len(job.kept) >= times.segment_lines or job.kept_bytes >= times.segment_bytes:
                job.changed.set()

    def _apply_claims(self, asked: Round, answers: Sequence[Sequence[Sequence[ClaimResult]]]) -> None:
        rest_until_ns = self._clock_ns() + ns(self._times.pass_s)
        for group, seekers, of_group in zip(asked.groups, asked.seekers, answers, strict=True):
            begun = 0
            given = [ClaimResult.CLAIMED in of_batch for of_batch in of_group]
            for seeker, batch, of_batch in zip(seekers, group.batches, of_group, strict=True):
                job = seeker.job
                if ClaimResult.STOPPED in of_batch:
                    job.suspect = True
                    job.changed.set()
                if not of_batch:
                    continue
                priority = self._limits.priority(group.route_id)
                others = sum(given) > (ClaimResult.CLAIMED in of_batch)
                executions = wishes.started(
                    seeker, group.route_id, batch.lines, of_batch, priority, others=others
                )  # fmt: skip
                if executions:
                    begun += len(executions)
                    if group.route_id in job.away:
                        # The claim wrote that nothing waits behind the line that tries.
                        job.published_ns = 0
                    self._lines.launch(job, executions)
                if job.over:
                    job.changed.set()
            if not begun and group.route_id not in self._freed:
                # Nothing changes there until a line of the route ends, here or elsewhere.
                self._resting[group.route_id] = rest_until_ns

    async def _rest(self, now_ns: int) -> None:
        """Wait until a line ends, a pause is over, or it is time for another pass."""
        until_ns = now_ns + ns(self._times.pass_s)
        for job in self._jobs:
            due = [pause.until_ns for pause in job.pauses.values()]
            due += [lane.retries[0].due_ns for lane in job.lanes if lane.retries]
            until_ns = min([until_ns, *(at_ns for at_ns in due if at_ns > now_ns)])
        try:
            async with asyncio.timeout((until_ns - now_ns) / 1e9):
                await self._wake.wait()
        except TimeoutError:
            pass


def _no_model(model: str) -> Refusal:
    code = "model_not_found"
    return Refusal(404, code, error_body(f"The model '{model}' does not exist", "invalid_request_error", "model", code))


def _revoked() -> Refusal:
    code = "invalid_api_key"
    return Refusal(
        401, code, error_body("the API key of this batch was revoked", "authentication_error", None, code)
    )  # fmt: skip
