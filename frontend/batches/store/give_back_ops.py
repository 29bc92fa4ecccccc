"""Claims whose line was never sent: given back, as if they had not been made."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from frontend.batches.store.claim_ops import READ_LINES, keep_records, per_batch
from frontend.batches.store.rows import FinishLine
from frontend.batches.store.transaction import Bulk, Op, clock

FORGET: Final = (
    "DELETE FROM batch_lines WHERE (batch_id, line_no, execution_id) IN"
    " (SELECT d.batch_id, d.line_no, d.execution_id FROM {rows})"
    " AND state = 'running' AND runner_id = :runner AND attempts = 1 RETURNING batch_id, line_no"
)
FAIL_AGAIN: Final = (
    "UPDATE batch_lines SET state = 'failed', attempts = attempts - 1, status_code = d.status_code,"
    " error_code = d.error_code, finished_at = :now FROM {rows} WHERE batch_lines.batch_id = d.batch_id"
    " AND batch_lines.line_no = d.line_no AND batch_lines.execution_id = d.execution_id AND state = 'running'"
    " AND runner_id = :runner AND attempts > 1 RETURNING batch_lines.batch_id, batch_lines.line_no"
)
COUNT_AGAIN: Final = "UPDATE batches SET request_failed = request_failed + d.lines FROM {rows} WHERE batches.id = d.id"


def give_back(runner_id: str, lines: Sequence[FinishLine]) -> Op[tuple[bool, ...]]:
    """Undo claims: of a first one no row is left, of a retry the failure that its line here tells."""
    if not lines:
        return ()
    now = yield from clock()
    places: dict[str, Any] = {
        "batch_id": ("text", [line.batch_id for line in lines]),
        "line_no": ("bigint", [line.line_no for line in lines]),
        "execution_id": ("text", [line.execution_id for line in lines]),
    }
    forgotten = yield Bulk(FORGET, places, {"runner": runner_id})
    failed = yield Bulk(
        FAIL_AGAIN,
        places
        | {
            "status_code": ("bigint", [line.status_code for line in lines]),
            "error_code": ("text", [line.error_code for line in lines]),
        },
        {"runner": runner_id, "now": now},
    )
    retries = {(row[0], row[1]) for row in failed}
    given = {(row[0], row[1]) for row in forgotten} | retries
    if retries:
        again = [line for line in lines if (line.batch_id, line.line_no) in retries]
        yield from keep_records([(line.batch_id, line.line_no, True, line.record) for line in again])
        # Their claim took them out of the count. No progress: the clock of stalled batches goes on.
        yield Bulk(COUNT_AGAIN, per_batch(list(retries)))
    left = [line for line in lines if (line.batch_id, line.line_no) not in given]
    return (
        tuple((line.batch_id, line.line_no) in given for line in lines)
        if not left
        else (yield from _with_repeated(lines, given, left))
    )


def _with_repeated(
    lines: Sequence[FinishLine], given: set[tuple[str, int]], left: Sequence[FinishLine]
) -> Op[tuple[bool, ...]]:
    """Answer True also for what was given back before, by a call whose answer was lost."""
    rows = yield Bulk(
        READ_LINES,
        {
            "batch_id": ("text", [line.batch_id for line in left]),
            "line_no": ("bigint", [line.line_no for line in left]),
        },
    )
    known = {(row[0], row[1]): (row[2], row[4]) for row in rows}
    for line in left:
        place = (line.batch_id, line.line_no)
        if place not in known or known[place] == ("failed", line.execution_id):
            given.add(place)
    return tuple((line.batch_id, line.line_no) in given for line in lines)
