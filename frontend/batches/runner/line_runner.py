"""Runs claimed lines: reads them, hands them to the executor, turns answers into ends, returns what was not sent.

A line that was not sent has not run: its claim is given back, and it waits like any other. When the (batch, route)
pause is over the route is tried by a connection, without any claim, and then by one line. A line is given back, too, if
its text cannot be had in time, or if the batch's stop or a drain meets it before it is sent. A line that an upstream
declined (429, 503) was answered: it fails, and runs again only if the batch asked for retries.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from frontend.batches.objects import StorageUnavailable
from frontend.batches.runner import retry_state
from frontend.batches.runner.figures import Figures
from frontend.batches.runner.gates import Ask, Gate, first_closed
from frontend.batches.runner.inputs import read_what_is_there
from frontend.batches.runner.job import Execution, Job
from frontend.batches.runner.lanes import Retry
from frontend.batches.runner.observer import RouteObserver
from frontend.batches.runner.outage import Persistence
from frontend.batches.runner.pause_state import after_overload, after_success
from frontend.batches.runner.results import NO_CUSTOM_ID, UNREADABLE, Result, answered, read_input, without_response
from frontend.batches.runner.timings import Timings, ns
from frontend.batches.store.rows import FinishLine
from frontend.openai.calls import Executor, GatewayCall, Sent, UpstreamAnswer
from frontend.openai.errors import error_body

log = logging.getLogger("batches")

MAX_BYTES_IN_FLIGHT: Final = 64 * 1024 * 1024
"""Of input lines, and of results on their way to the store; beyond it nothing starts. One larger line runs, alone."""
MAX_ENDS_PER_TURN: Final = 1024
MAX_END_BYTES_PER_TURN: Final = 8 * 1024 * 1024
OVERLOAD: Final = frozenset({429, 503})
PASSING: Final = frozenset({429, 502, 503, 504})
"""Failures of sending that pass; others (a refused body, an unknown route) are the line's result."""


@dataclass(slots=True)
class End:
    """An execution that is over, or was not sent, on its way to the store; ``retry`` if it goes on after a pause."""

    execution: Execution
    line: FinishLine
    retry: Retry | None
    ok: bool


class LineRunner:
    """Lines under way in this process; used on one event loop.

    Attributes:
        running_on: lines by route, until their end is taken.
    """

    def __init__(
        self,
        executor: Executor,
        persistence: Persistence,
        gates: Sequence[Gate],
        observer: RouteObserver,
        times: Timings,
        figures: Figures,
        wake: Callable[[], None],
        *,
        workers: int,
        is_local: Callable[[str], bool] = lambda route: False,
        clock_ns: Callable[[], int] = time.monotonic_ns,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self._ended: deque[End] = deque()
        self._returned: deque[End] = deque()
        self.running_on: dict[str, int] = {}
        self._executor = executor
        self._persistence = persistence
        self._gates = gates
        self._observer = observer
        self._times = times
        self._figures = figures
        self._wake = wake
        self._workers = workers
        self._is_local = is_local
        self._clock_ns = clock_ns
        self._jitter = jitter
        self._busy = 0
        self._bytes = 0
        self._ended_bytes = 0
        self._draining = False
        self._tasks: set[asyncio.Task[None]] = set()
        figures.capacity = workers

    @property
    def free(self) -> int:
        """Worker permits."""
        return self._workers - self._busy

    @property
    def bytes_free(self) -> int:
        return MAX_BYTES_IN_FLIGHT - self._bytes - self._ended_bytes

    def take_ended(self) -> list[End]:
        """Return what a turn should take to the store now, oldest first."""
        ends: list[End] = []
        size = 0
        while self._ended and len(ends) < MAX_ENDS_PER_TURN and size < MAX_END_BYTES_PER_TURN:
            end = self._ended.popleft()
            size += len(end.line.record or b"")
            self.running_on[end.execution.route] -= 1
            ends.append(end)
        self._ended_bytes -= size
        return ends

    def take_returned(self) -> list[End]:
        """Return claims to give back; their ``line`` says what stands of a retry until it is sent."""
        returned: list[End] = []
        while self._returned and len(returned) < MAX_ENDS_PER_TURN:
            end = self._returned.popleft()
            self.running_on[end.execution.route] -= 1
            returned.append(end)
        return returned

    def drain(self) -> None:
        """Send nothing more."""
        self._draining = True

    def launch(self, job: Job, executions: list[Execution]) -> None:
        """Run lines of one route that were just claimed."""
        job.running += len(executions)
        route = executions[0].route
        self.running_on[route] = self.running_on.get(route, 0) + len(executions)
        for execution in executions:
            self._enter(execution)
        if route in job.away:
            # It may have gone while these were claimed.
            tries = route not in job.probing and not job.pause(route).runs(self._clock_ns())
            self._return_all(executions[tries:])
            executions = executions[:tries]
            for execution in executions:
                execution.probe = True
                job.probing.add(route)
                job.reached.discard(route)
        if executions:
            self._spawn(self._read_and_run(job, executions))

    def try_away(self, job: Job, now_ns: int) -> None:
        """Connect to servers that lines wait for and that were away, where pauses are over and gates open."""
        for route in job.away - job.probing - job.reached:
            ask = Ask(job.id, job.batch.workspace_id, route, now_ns)
            wanted = any(route in lane.demand() for lane in job.lanes)
            if wanted and not job.pause(route).runs(now_ns) and first_closed(self._gates, ask) is None:
                job.probing.add(route)
                self._spawn(self._reach(job, route, now_ns))

    async def close(self) -> None:
        """Cut off what still runs."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _reach(self, job: Job, route: str, began_ns: int) -> None:
        reached = False
        try:
            reached = await self._executor.reach(route)
        finally:
            job.probing.discard(route)
            if reached:
                job.reached.add(route)
            else:
                self._found_away(job, route, began_ns, None, declined=False)
            self._wake()

    async def _read_and_run(self, job: Job, executions: list[Execution]) -> None:
        numbers = [execution.line_no for execution in executions]
        route, began_ns = executions[0].route, self._clock_ns()
        try:
            async with asyncio.timeout(self._times.unsent_s):
                raws = await self._persistence.insist(
                    lambda: read_what_is_there(job.work, numbers), give_up=lambda: self._may_not_send(job)
                )
        except (StorageUnavailable, TimeoutError):
            self._found_away(job, route, began_ns, None, declined=False)
            self._return_all(executions)
            return
        now_ns = self._clock_ns()
        late = now_ns - began_ns >= ns(self._times.pass_s)
        if late and first_closed(self._gates, Ask(job.id, job.batch.workspace_id, route, now_ns)) is not None:
            self._return_all(executions)
            return
        for execution, raw in zip(executions, raws, strict=True):
            execution.line = None if raw is None else read_input(raw)
            if execution.line is None:
                self._leave(execution)
                self._end_unread(execution)
            else:
                self._spawn(self._execute(execution))

    def _may_not_send(self, job: Job) -> bool:
        return job.stop is not None or job.lost or self._draining

    async def _execute(self, execution: Execution) -> None:
        job, line = execution.job, execution.line
        assert line is not None
        if self._may_not_send(job):
            self._return_all([execution])
            return
        execution.started_ns = self._clock_ns()
        principal = job.principal
        if principal is None:
            # Revoked between the claim and now.
            body = error_body("the API key of this batch was revoked", "authentication_error", None, "invalid_api_key")
            answer = UpstreamAnswer(401, body, "", Sent.NOT_SENT, "", code="invalid_api_key")
        else:
            call = GatewayCall(
                line.url, bytes(line.body), execution.lane.model, principal,
                route=execution.route, priority=execution.priority, batch=True,
            )  # fmt: skip
            try:
                answer = await self._executor.execute(call)
            except Exception:
                log.exception("batch.line_broke batch=%s line=%d", job.id, execution.line_no)
                body = error_body("the gateway failed to run this request", "server_error", None, "internal_error")
                answer = UpstreamAnswer(500, body, execution.route, Sent.MAYBE_RUN, "", code="internal_error")
        self._leave(execution)
        self._answered(execution, answer)

    def _enter(self, execution: Execution) -> None:
        execution.job.active += 1
        self._busy += 1
        self._bytes += execution.bytes
        self._figures.busy = self._busy

    def _leave(self, execution: Execution) -> None:
        """Give the permit back."""
        self._busy -= 1
        self._figures.busy = self._busy
        self._bytes -= execution.bytes
        execution.job.active -= 1
        if execution.probe:
            execution.probe = False
            execution.job.probing.discard(execution.route)

    def _answered(self, execution: Execution, answer: UpstreamAnswer) -> None:
        job, route, now_ns = execution.job, execution.route, self._clock_ns()
        never_ran = answer.status in PASSING and (
            answer.sent is Sent.NOT_SENT or (answer.sent is Sent.DECLINED and self._is_local(route))
        )
        overload = answer.status in OVERLOAD
        if overload and answer.sent is not Sent.NOT_SENT:
            self._observer.overload(route)
        elif not never_ran:
            self._observer.line(route, (now_ns - execution.started_ns) / 1e9)
            if answer.status == 400 and execution.priority is not None and b"priority" in answer.body:
                self._observer.hint_refused(route)
        declined = answer.sent is not Sent.NOT_SENT
        if never_ran:
            self._figures.overloads += overload
            self._found_away(job, route, execution.started_ns, answer.retry_after_s, declined=declined)
            self._give_back(execution, answer)
            return
        if overload:
            self._figures.overloads += 1
            job.pauses[route] = after_overload(
                job.pause(route), now_ns, execution.started_ns, answer.retry_after_s, self._times, declined=declined
            )
        else:
            job.away.discard(route)
        if answer.sent is Sent.ANSWERED and answer.status < 500 and not overload:
            job.pauses[route] = after_success(job.pause(route))
        assert execution.line is not None
        self._end(execution, answered(job.id, execution.line_no, execution.line.custom_id, answer))

    def _found_away(
        self, job: Job, route: str, started_ns: int, retry_after_s: float | None, *, declined: bool
    ) -> None:
        """Leave a route alone for a while, and then let one line try it."""
        job.away.add(route)
        job.reached.discard(route)
        job.pauses[route] = after_overload(
            job.pause(route), self._clock_ns(), started_ns, retry_after_s, self._times, declined=declined
        )

    def _return_all(self, executions: Sequence[Execution]) -> None:
        for execution in executions:
            self._leave(execution)
            self._give_back(execution)

    def _give_back(self, execution: Execution, answer: UpstreamAnswer | None = None) -> None:
        """Return a claim without a permit; a retry is left failed as it met its server, or its text, last."""
        job, number, line = execution.job, execution.line_no, execution.line
        retry, result = None, Result(False, None, None, b"")
        if execution.attempt > 1:
            retry = Retry(self._clock_ns(), number, execution.attempt, execution.route)
            custom_id = NO_CUSTOM_ID if line is None else line.custom_id
            if answer is not None:
                result = answered(job.id, number, custom_id, answer)
            else:
                # With a status that lets it be sent again by whoever finds it.
                result = replace(without_response(job.id, number, custom_id, UNREADABLE), status=503)
        end = FinishLine(
            job.id, number, execution.execution_id, "failed", result.status, result.code, result.record or None
        )  # fmt: skip
        execution.line = None
        self._returned.append(End(execution, end, retry, ok=False))
        self._wake()

    def _end_unread(self, execution: Execution) -> None:
        """End a line whose text cannot be had, or be understood: nothing was sent."""
        stop = execution.job.stop
        code = UNREADABLE if stop is None else stop.value
        self._end(execution, without_response(execution.job.id, execution.line_no, NO_CUSTOM_ID, code))

    def _end(self, execution: Execution, result: Result) -> None:
        job = execution.job
        at_ns = None
        if not result.ok and job.stop is None:
            at_ns = retry_state.retry_at_ns(
                result.status, execution.attempt, job.batch.retry_limit, self._clock_ns(), self._jitter(), self._times
            )
        retry = None if at_ns is None else Retry(at_ns, execution.line_no, execution.attempt + 1, execution.route)
        line = FinishLine(
            job.id,
            execution.line_no,
            execution.execution_id,
            "succeeded" if result.ok else "failed",
            result.status,
            result.code,
            result.record or None,
        )
        execution.line = None
        self._ended_bytes += len(result.record)
        self._ended.append(End(execution, line, retry, result.ok))
        self._wake()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("batch.task_broke", exc_info=error)
