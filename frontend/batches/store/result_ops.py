"""Results of finished lines: durable records first, then segments that replace them."""

from __future__ import annotations

from collections.abc import Sequence

from frontend.batches.store.file_ops import commit_file
from frontend.batches.store.lease_ops import OWNED
from frontend.batches.store.rows import RecordRow, WrittenFile
from frontend.batches.store.transaction import Op, clock, sql


def add_segment(runner_id: str, batch_id: str, seq: int, written: WrittenFile, line_nos: Sequence[int]) -> Op[bool]:
    """Commit a segment, stamp its lines, drop their records; repeating it is harmless."""
    now = yield from clock()
    owner = yield from sql(
        f"SELECT workspace_id FROM batches WHERE {OWNED} AND completed_at IS NULL",
        batch=batch_id,
        runner=runner_id,
        lock="FOR SHARE",
    )
    if not owner:
        return False
    known = yield from sql(
        "SELECT file_id FROM batch_segments WHERE batch_id = :batch AND seq = :seq", batch=batch_id, seq=seq
    )
    if known:
        return bool(known[0][0] == written.file_id)
    yield from commit_file(written, now)
    yield from sql(
        "INSERT INTO batch_segments (batch_id, seq, workspace_id, file_id, lines, created_at)"
        " VALUES (:batch, :seq, :workspace, :file, :lines, :now)",
        batch=batch_id,
        seq=seq,
        workspace=owner[0][0],
        file=written.file_id,
        lines=len(line_nos),
        now=now,
    )
    # A line that is already in an earlier segment keeps that: first record wins.
    yield from sql(
        "UPDATE batch_lines SET segment = :seq WHERE batch_id = :batch AND line_no IN :lines[bigint]"
        " AND segment IS NULL AND state IN ('succeeded', 'failed')",
        seq=seq,
        batch=batch_id,
        lines=list(line_nos),
    )
    yield from sql(
        "DELETE FROM batch_records WHERE batch_id = :batch AND line_no IN :lines[bigint]",
        batch=batch_id,
        lines=list(line_nos),
    )
    return True


def records(batch_id: str, after_line: int, limit: int) -> Op[tuple[RecordRow, ...]]:
    """Return records of lines that have ended (a retried line's record went with its claim)."""
    rows = yield from sql(
        "SELECT line_no, is_error, record FROM batch_records WHERE batch_id = :batch AND line_no > :after"
        " ORDER BY line_no LIMIT CAST(:limit AS BIGINT)",
        batch=batch_id,
        after=after_line,
        limit=limit,
    )
    return tuple(RecordRow(row[0], bool(row[1]), bytes(row[2])) for row in rows)
