"""The end of a batch: results become the output and error files, then one commit makes everything visible.

It may be repeated, by anyone who holds the lease, as often as crashes ask for it: nothing is visible before the
terminal commit, and that happens once. The first attempt writes under the ids that the batch has reserved; a later one
under new ids, so that a finalizer that was stopped in the middle and comes back cannot touch what the other one
announced. Files of attempts that came to nothing have uncommitted rows, and are swept.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from frontend.batches.job_state import stop_state
from frontend.batches.objects import Objects, ObjectWriter, object_path
from frontend.batches.runner.inputs import read_what_is_there
from frontend.batches.runner.job import Stop
from frontend.batches.runner.results import NO_CUSTOM_ID, read_input, without_response
from frontend.batches.runner.segments import JSON_LINES, kept_results
from frontend.batches.store.protocol import Store
from frontend.batches.store.rows import SECOND_US, BatchRow, NewFile, TerminalState, WrittenFile
from frontend.batches.work_file import WorkFile

WRITE_BYTES: Final = 256 * 1024
READ_LINES: Final = 512
DAY_US: Final = 24 * 3600 * SECOND_US


@dataclass(frozen=True, slots=True)
class Files:
    """Where results go and how long they are kept unless the batch says otherwise."""

    store: Store
    objects: Objects
    retention_days: int


class _ResultFile:
    """A result file that exists only if it gets a line."""

    def __init__(self, files: Files, batch: BatchRow, file_id: str, what: str) -> None:
        self._files = files
        self._batch = batch
        self._id = file_id
        self._name = f"{batch.id}_{what}.jsonl"
        self._writer: ObjectWriter | None = None
        self._buffer = bytearray()

    async def add(self, record: bytes) -> None:
        self._buffer += record
        self._buffer += b"\n"
        if len(self._buffer) >= WRITE_BYTES:
            await self._flush()

    async def commit(self) -> WrittenFile | None:
        """Return the file, complete and durable but not visible yet; None if no line came."""
        if not self._buffer and self._writer is None:
            return None
        await self._flush()
        assert self._writer is not None
        written = await self._writer.commit()
        return WrittenFile(self._id, written.bytes, written.sha256)

    async def abort(self) -> None:
        if self._writer is not None:
            await self._writer.abort()

    async def _flush(self) -> None:
        if self._writer is None:
            seconds = self._batch.output_expires_after_seconds
            keep_us = self._files.retention_days * DAY_US
            await self._files.store.files.insert(
                NewFile(
                    self._id, self._batch.workspace_id, "batch_output", "batch_output", self._name, JSON_LINES,
                    object_path(self._id), self._batch.api_key_id, self._batch.user_id,
                    keep_us if seconds is None else min(keep_us, seconds * SECOND_US),
                )
            )  # fmt: skip
            self._writer = await self._files.objects.open_writer(object_path(self._id))
        data, self._buffer = self._buffer, bytearray()
        await self._writer.write(data)


async def finalize(
    files: Files, runner_id: str, batch_id: str, work: WorkFile | None, stop: Stop | None, order: Sequence[int] = ()
) -> BatchRow | None:
    """End a batch none of whose lines runs; return it as it ended, None if the lease is lost (nothing changed then).

    Args:
        work: its private copy; None if there is none, or it cannot be read.
        stop: why it ends before its time.
        order: lines whose results are still in the store, in the order of their ends.

    Raises:
        StoreUnavailable, StorageUnavailable: try again; nothing is visible, or all of it is.
    """
    store = files.store
    ids = ["file-" + secrets.token_hex(16) for _ in range(2)]
    batch = await store.runner.mark_finalizing(runner_id, batch_id, *ids)
    if batch is None:
        # Not ours any more; or ended, by us, in a call whose answer was lost.
        ended = await store.batches.get(None, batch_id)
        return ended if ended is not None and ended.finished and ended.runner_id == runner_id else None
    if stop is None and batch.cancel_requested_at is not None:
        stop = Stop.CANCELLED
    output, error = _ResultFile(files, batch, ids[0], "output"), _ResultFile(files, batch, ids[1], "error")
    try:
        lost = await _write_results(files, batch, work, stop, order, output, error)
        written = await output.commit(), await error.commit()
    except BaseException:
        await output.abort()
        await error.abort()
        raise
    return await store.runner.finalize(
        runner_id,
        batch_id,
        _state(stop),
        error_code="input_unavailable" if stop is Stop.INPUT_LOST else None,
        errors=_lost_input() if stop is Stop.INPUT_LOST else None,
        output=written[0],
        error=written[1],
        lost_results=lost,
    )


async def _write_results(
    files: Files, batch: BatchRow, work: WorkFile | None, stop: Stop | None, order: Sequence[int],
    output: _ResultFile, error: _ResultFile,
) -> int:  # fmt: skip
    """Fill the files; return how many lines succeeded whose results are gone."""
    seen = bytearray(batch.request_total)
    async for page in kept_results(files.store, files.objects, batch.id, order):
        for kept in page:
            # The first one counts: a segment that was written twice changes nothing.
            if kept.line_no < len(seen) and not seen[kept.line_no]:
                seen[kept.line_no] = 1
                await (error if kept.is_error else output).add(kept.record)
    missing = [line_no for line_no, found in enumerate(seen) if not found]
    if not missing:
        return 0
    claimed = set(await files.store.runner.claimed_lines(batch.id))
    code = Stop.INPUT_LOST.value if stop is None else stop.value
    for start in range(0, len(missing), READ_LINES):
        numbers = missing[start : start + READ_LINES]
        for line_no, raw in zip(numbers, await read_what_is_there(work, numbers), strict=True):
            line = read_input(raw) if raw is not None else None
            custom_id = NO_CUSTOM_ID if line is None else line.custom_id
            why = "result_unavailable" if line_no in claimed else code
            await error.add(without_response(batch.id, line_no, custom_id, why).record)
    return await _succeeded(files.store, batch.id, [line_no for line_no in missing if line_no in claimed])


async def _succeeded(store: Store, batch_id: str, numbers: Sequence[int]) -> int:
    wanted, found, after = set(numbers), 0, -1
    while wanted and (page := await store.runner.lines(batch_id, after, READ_LINES)):
        after = page[-1].line_no
        found += sum(line.state == "succeeded" and line.line_no in wanted for line in page)
    return found


def _state(stop: Stop | None) -> TerminalState:
    if stop is Stop.INPUT_LOST:
        return "failed"
    return stop_state(
        budget_refused=False, cancel_requested=stop is Stop.CANCELLED, expired=stop is Stop.EXPIRED
    )  # fmt: skip


def _lost_input() -> str:
    message = "The batch's copy of its input could not be read; the requests that have no result were not run."
    entry = {"code": "input_unavailable", "message": message, "line": None, "param": "input_file_id"}
    return msgspec.json.encode({"object": "list", "data": [entry]}).decode()
