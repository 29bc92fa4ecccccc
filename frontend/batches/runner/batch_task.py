"""One leased batch from taking it up to letting it go: load, run its lines, gather results, end it, settle it.

Every step may be repeated after an outage, and by another process after a crash; none waits for anything but the store,
the storage and the batch's own lines.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

import numpy as np

from frontend.batches.objects import ObjectCorrupt, ObjectMissing
from frontend.batches.runner import segments
from frontend.batches.runner.access import principal_of
from frontend.batches.runner.deferred import Intake
from frontend.batches.runner.dispatcher import Dispatcher
from frontend.batches.runner.figures import Figures
from frontend.batches.runner.finalize import Files, finalize
from frontend.batches.runner.job import Job, Stop
from frontend.batches.runner.lanes import Lane, Retry, lanes_of
from frontend.batches.runner.outage import Persistence
from frontend.batches.runner.results import NO_CUSTOM_ID, answered, read_input
from frontend.batches.runner.retry_state import RETRYABLE
from frontend.batches.runner.timings import Timings
from frontend.batches.store.rows import BatchRow, DirectFailure
from frontend.batches.work_file import RECORD, LineIndex, WorkFile, open_work_file
from frontend.openai.calls import Sent, UpstreamAnswer

log = logging.getLogger("batches")

DIRECT_LINES: Final = 256
"""Lines that fail without being run, per transaction."""
LINES_PAGE: Final = 2048


@dataclass(frozen=True, slots=True)
class Bench:
    """What every batch of a runner works with."""

    runner_id: str
    files: Files
    dispatcher: Dispatcher
    intake: Intake
    persistence: Persistence
    times: Timings
    figures: Figures
    renew: Callable[[Job], Awaitable[None]]
    """Renews one lease now and notes on the job what it says."""


async def run_batch(bench: Bench, batch: BatchRow, enlist: Callable[[Job], None], loads: asyncio.Semaphore) -> None:
    """Run a batch to its end, or to the loss of its lease, or until the runner drains.

    Args:
        enlist: told of the job as soon as there is one.
        loads: how many batches may be read in at once.
    """
    store = bench.files.store
    if batch.finished:
        await bench.persistence.insist(lambda: store.runner.settle(bench.runner_id, batch.id))
        return
    if batch.work_file_id is None:
        accepted = await bench.intake.accept(bench.runner_id, batch)
        if accepted is None:
            return
        batch = accepted
    async with loads:
        job = await _load(bench, batch)
    enlist(job)
    await bench.renew(job)
    if job.stop is None and batch.finalizing_at is not None and job.waiting:
        # Somebody began to end it with lines left: that can only have been for its window.
        job.halt(Stop.EXPIRED)
    if job.stop is None and not job.lost:
        begun = await bench.persistence.insist(lambda: store.runner.begin(bench.runner_id, batch.id))
        if begun:
            bench.figures.event("submitted")
        else:
            await bench.renew(job)
    await _run_lines(bench, job)
    if job.lost or ((job.draining or job.handed_back) and job.stop is None and job.waiting):
        return
    await _end(bench, job)


async def _load(bench: Bench, batch: BatchRow) -> Job:
    store = bench.files.store
    persistence = bench.persistence
    principal = await persistence.insist(lambda: principal_of(store, batch))
    work = await _open(bench, batch)
    done = await persistence.insist(lambda: store.runner.claimed_lines(batch.id))
    models = [(lane.model, lane.line_nos) for lane in work.index.lanes()]
    lanes = await asyncio.to_thread(lanes_of, models, np.asarray(done, dtype=np.int64))
    job = Job(batch, work, lanes, principal)
    job.next_segment = await persistence.insist(lambda: segments.next_segment(store, batch.id))
    if len(work.index) == 0:
        job.halt(Stop.INPUT_LOST)
    if done:
        await _resume(bench, job)
    return job


async def _open(bench: Bench, batch: BatchRow) -> WorkFile:
    """Return the private copy; one without lines if it cannot be read at all."""
    assert batch.work_file_id is not None
    store, objects = bench.files.store, bench.files.objects
    work_file_id = batch.work_file_id
    file = await bench.persistence.insist(lambda: store.files.get_internal(work_file_id))
    try:
        if file is None or file.storage_path is None:
            raise ObjectMissing("the private copy of the input is gone")
        path, size = file.storage_path, file.bytes
        return await bench.persistence.insist(lambda: open_work_file(objects, path, size))
    except (ObjectMissing, ObjectCorrupt) as error:
        log.error("batch.input_lost batch=%s error=%s", batch.id, error)
        return WorkFile(objects, "", LineIndex((), np.zeros(0, RECORD)))


async def _resume(bench: Bench, job: Job) -> None:
    """Take up what a former runner left: results that wait for a segment, failures that may be retried."""
    store, batch = bench.files.store, job.batch
    lanes = {lane.model: lane for lane in job.lanes}
    after = -1
    while page := await bench.persistence.insist(lambda: store.runner.lines(batch.id, after, LINES_PAGE)):  # noqa: B023
        after = page[-1].line_no
        for line in page:
            if line.segment is not None or line.state not in ("succeeded", "failed"):
                continue
            again = (
                line.state == "failed"
                and line.status_code in RETRYABLE
                and line.attempts <= batch.retry_limit
                and line.route_id is not None
            )
            if again:
                assert line.route_id is not None
                lane = lanes[job.work.index.model(line.line_no)]
                lane.put_back(Retry(0, line.line_no, line.attempts + 1, line.route_id))
            else:
                job.keep(line.line_no, 0)


async def _run_lines(bench: Bench, job: Job) -> None:
    """Return when nothing of the batch runs and nothing will start."""
    dispatcher = bench.dispatcher
    dispatcher.add(job)
    try:
        while not job.over:
            await job.changed.wait()
            job.changed.clear()
            if job.suspect:
                job.suspect = False
                await bench.renew(job)
            if job.stop is not None or job.lost:
                dispatcher.stopped(job)
                continue
            for lane in job.lanes:
                if lane.refusal is not None and lane.waiting:
                    await _fail_lane(bench, job, lane)
            await _gather(bench, job)
    finally:
        dispatcher.remove(job)


async def _gather(bench: Bench, job: Job) -> None:
    """Move results into a segment if there are enough."""
    times, files = bench.times, bench.files
    while not job.lost and (len(job.kept) >= times.segment_lines or job.kept_bytes >= times.segment_bytes):
        order = list(job.kept)

        async def write(order: list[int] = order) -> list[int] | None:
            seq = await segments.next_segment(files.store, job.id)
            return await segments.write_segment(
                files.store, files.objects, bench.runner_id, job.batch, seq, order, times.segment_bytes
            )

        moved = await bench.persistence.insist(write, give_up=lambda: job.lost)
        if moved is None:
            job.lost = True
            return
        if not moved:
            # Results without a record, or moved by a call whose answer was lost.
            job.kept, job.kept_bytes = job.kept[len(order) :], 0
            return
        gone = set(moved)
        job.kept_bytes = job.kept_bytes * (len(job.kept) - len(gone)) // max(1, len(job.kept))
        job.kept = [line_no for line_no in job.kept if line_no not in gone]


async def _fail_lane(bench: Bench, job: Job, lane: Lane) -> None:
    """Fail lines that nothing can run; retries that wait keep the failure they have."""
    refusal = lane.refusal
    assert refusal is not None
    for retry in list(lane.retries):
        lane.take_retry(retry)
        job.keep(retry.line_no, 0)
    store = bench.files.store
    while (numbers := lane.next_new(DIRECT_LINES)) and job.stop is None and not job.lost:
        raws = await bench.persistence.insist(lambda: job.work.read_lines(numbers))
        failures = []
        for line_no, raw in zip(numbers, raws, strict=True):
            line = None if raw is None else read_input(raw)
            custom_id = NO_CUSTOM_ID if line is None else line.custom_id
            request_id = "req_" + secrets.token_hex(16)
            answer = UpstreamAnswer(refusal.status, refusal.body, "", Sent.NOT_SENT, request_id, code=refusal.code)
            record = answered(job.id, line_no, custom_id, answer).record
            failures.append(
                DirectFailure(line_no, secrets.token_hex(16), refusal.status, refusal.code, record)
            )  # fmt: skip
        stored = await bench.persistence.insist(
            lambda: store.runner.fail_lines(bench.runner_id, job.id, failures)  # noqa: B023
        )
        if not any(stored):
            # Stopped, or not ours any more.
            job.suspect = True
            job.changed.set()
            return
        for failure in failures:
            bench.figures.ended(None, ok=False)
            job.keep(failure.line_no, len(failure.record or b""))
        lane.drop(numbers)
        await _gather(bench, job)
    job.changed.set()


async def _end(bench: Bench, job: Job) -> None:
    wait_s = bench.times.outage_first_s
    ended: BatchRow | None = None
    while True:
        try:
            ended = await bench.persistence.insist(
                lambda: finalize(
                    bench.files, bench.runner_id, job.id, job.work if len(job.work.index) else None, job.stop, job.kept
                ),
                give_up=lambda: job.lost,
            )
            break
        except Exception:
            if job.lost:
                return
            # A batch must end; whatever is wrong may be mended meanwhile, and the log says what it is.
            log.exception("batch.finalize_failed batch=%s wait_s=%.1f", job.id, wait_s)
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, bench.times.sweep_s)
    if ended is None:
        return
    log.info(
        "batch.ended batch=%s state=%s completed=%d failed=%d total=%d",
        job.id, ended.state, ended.request_completed, ended.request_failed, ended.request_total,
    )  # fmt: skip
    bench.figures.event(ended.state)
    store = bench.files.store
    await bench.persistence.insist(lambda: store.runner.settle(bench.runner_id, job.id))
