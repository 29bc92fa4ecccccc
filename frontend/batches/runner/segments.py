"""Results between the end of a line and the result files: kept in the store, gathered into segment files.

A line's result is in the store with its end, in one commit: that is the durable journal, and it survives on every
machine that can take the batch over. Segments keep the store small: at 256 lines or 8 MiB the results go into one
internal file, ``{"n":line,"e":0 or 1,"r":result line}`` per line, and leave the store in the transaction that notes
the segment. Whatever a crash leaves in between is a file that nobody refers to.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import AsyncIterator, Collection, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec
from msgspec import Raw

from frontend.batches.objects import ObjectCorrupt, ObjectMissing, Objects, object_path
from frontend.batches.store.protocol import Store
from frontend.batches.store.rows import BatchRow, NewFile, RecordRow, SegmentRow, WrittenFile

log = logging.getLogger("batches")

PAGE_LINES: Final = 32
"""Results read from the store at once: they may be large."""
MAX_LINES: Final = 256
"""Of one segment, give or take a page; and ``most_bytes``, give or take one."""
JSON_LINES: Final = "application/jsonl"


@dataclass(frozen=True, slots=True)
class Kept:
    """One line's result: a complete line of the output (or error) file, without a line break."""

    line_no: int
    is_error: bool
    record: bytes


class _Entry(msgspec.Struct):
    n: int
    e: int
    r: Raw


_entry: Final = msgspec.json.Decoder(_Entry)


async def next_segment(store: Store, batch_id: str) -> int:
    """Return the number that a batch's next segment gets."""
    return max((segment.seq for segment in await store.runner.segments(batch_id)), default=-1) + 1


async def write_segment(
    store: Store,
    objects: Objects,
    runner_id: str,
    batch: BatchRow,
    seq: int,
    order: Sequence[int],
    most_bytes: int,
) -> list[int] | None:
    """Move results from the store into a segment file; return the lines moved, None if the lease is lost.

    Args:
        order: lines whose results are final, in the order of their ends. Others in the store stay there: a failure
            may be there before the runner has heard that it is, and then be sent again.
        most_bytes: of the segment; what is left waits for the next one.

    Raises:
        StoreUnavailable, StorageUnavailable: nothing was moved; or it was, which the next call finds out.
    """
    records = await _final_records(store, batch.id, frozenset(order), most_bytes)
    if not records:
        return []
    place = {line_no: index for index, line_no in enumerate(order)}
    records.sort(key=lambda record: place.get(record.line_no, len(place)))
    file_id = "file-" + secrets.token_hex(16)
    await store.files.insert(
        NewFile(file_id, batch.workspace_id, "batch_output", None, "segment.jsonl", JSON_LINES, object_path(file_id))
    )
    writer = await objects.open_writer(object_path(file_id))
    try:
        for record in records:
            await writer.write(b'{"n":%d,"e":%d,"r":%b}\n' % (record.line_no, record.is_error, record.record))
        written = await writer.commit()
    except BaseException:
        await writer.abort()
        raise
    lines = [record.line_no for record in records]
    whole = WrittenFile(file_id, written.bytes, written.sha256)
    return lines if await store.runner.add_segment(runner_id, batch.id, seq, whole, lines) else None


async def kept_results(
    store: Store, objects: Objects, batch_id: str, order: Sequence[int]
) -> AsyncIterator[list[Kept]]:
    """Yield all results of a batch in pages: segments by number, then what is still in the store.

    A segment that is missing or damaged yields what can be read of it; the rest is lost, and logged.
    """
    for segment in await store.runner.segments(batch_id):
        async for page in _read_segment(store, objects, segment):
            yield page
    place = {line_no: index for index, line_no in enumerate(order)}
    after = -1
    while records := await store.runner.records(batch_id, after, PAGE_LINES):
        after = records[-1].line_no
        page = [Kept(record.line_no, record.is_error, record.record) for record in records]
        yield sorted(page, key=lambda kept: place.get(kept.line_no, len(place)))


async def _final_records(store: Store, batch_id: str, final: Collection[int], most_bytes: int) -> list[RecordRow]:
    """Return results for one segment."""
    found: list[RecordRow] = []
    after = -1
    while len(found) < MAX_LINES and sum(len(record.record) for record in found) < most_bytes:
        page = await store.runner.records(batch_id, after, PAGE_LINES)
        if not page:
            break
        after = page[-1].line_no
        found += [record for record in page if record.line_no in final]
    return found


async def _read_segment(store: Store, objects: Objects, segment: SegmentRow) -> AsyncIterator[list[Kept]]:
    file = await store.files.get_internal(segment.file_id)
    if file is None or file.storage_path is None:
        log.error("batch.segment_lost batch=%s seq=%d reason=no file", segment.batch_id, segment.seq)
        return
    rest = bytearray()
    found = 0
    try:
        async for piece in objects.open_reader(file.storage_path, 0, file.bytes):
            lines = piece.split(b"\n")
            if len(lines) == 1:
                rest += piece
                continue
            lines[0] = bytes(rest) + lines[0]
            rest = bytearray(lines.pop())
            page = [kept for kept in map(_read_entry, lines) if kept is not None]
            found += len(page)
            yield page
    except (ObjectMissing, ObjectCorrupt) as error:
        log.error("batch.segment_lost batch=%s seq=%d reason=%s", segment.batch_id, segment.seq, error)
    if found != segment.lines:
        log.error(
            "batch.segment_damaged batch=%s seq=%d lines=%d readable=%d",
            segment.batch_id, segment.seq, segment.lines, found,
        )  # fmt: skip


def _read_entry(line: bytes) -> Kept | None:
    try:
        if not line.isascii():
            line.decode()
        entry = _entry.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return Kept(entry.n, bool(entry.e), bytes(entry.r))
