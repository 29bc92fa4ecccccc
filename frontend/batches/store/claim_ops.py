"""Finishing and claiming lines: the two writes that every line costs, for many lines at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from frontend.batches.store.claim_state import Contender, Decision, Existing, Pass, RouteView, decide
from frontend.batches.store.protocol import FRESH_US
from frontend.batches.store.rows import ClaimBatch, ClaimGroup, ClaimLine, ClaimResult, DirectFailure, FinishLine
from frontend.batches.store.transaction import Bulk, Op, clock, sql

Started = tuple[ClaimBatch, ClaimLine, int]

FINISH: Final = (
    "UPDATE batch_lines SET state = d.state, status_code = d.status_code, error_code = d.error_code, finished_at = :now"
    " FROM {rows} WHERE batch_lines.batch_id = d.batch_id AND batch_lines.line_no = d.line_no"
    " AND batch_lines.state = 'running' AND batch_lines.execution_id = d.execution_id"
    " RETURNING batch_lines.batch_id, batch_lines.line_no"
)
KEEP_RECORD: Final = (
    "INSERT INTO batch_records (batch_id, line_no, is_error, record)"
    " SELECT d.batch_id, d.line_no, d.is_error, d.record FROM {rows} WHERE true"
    " ON CONFLICT (batch_id, line_no) DO UPDATE SET is_error = excluded.is_error, record = excluded.record"
)
COUNT: Final = (
    "UPDATE batches SET request_completed = request_completed + d.completed,"
    " request_failed = request_failed + d.failed, last_progress_at = :now FROM {rows} WHERE batches.id = d.id"
)
READ_LINES: Final = (
    "SELECT batch_lines.batch_id, batch_lines.line_no, state, attempts, execution_id, segment FROM batch_lines, {rows}"
    " WHERE batch_lines.batch_id = d.batch_id AND batch_lines.line_no = d.line_no"
)
START: Final = (
    "INSERT INTO batch_lines (batch_id, line_no, workspace_id, route_id, state, attempts, execution_id, runner_id,"
    " started_at) SELECT d.batch_id, d.line_no, d.workspace_id, :route, 'running', 1, d.execution_id, :runner,"
    " CAST(:now AS BIGINT) FROM {rows} WHERE true ON CONFLICT (batch_id, line_no) DO NOTHING"
    " RETURNING batch_id, line_no"
)
START_AGAIN: Final = (
    "UPDATE batch_lines SET state = 'running', attempts = d.attempt, execution_id = d.execution_id,"
    " runner_id = :runner, started_at = :now, finished_at = NULL, status_code = NULL, error_code = NULL FROM {rows}"
    " WHERE batch_lines.batch_id = d.batch_id AND batch_lines.line_no = d.line_no AND batch_lines.state = 'failed'"
    " AND batch_lines.attempts = d.attempt - 1 AND batch_lines.segment IS NULL AND batch_lines.route_id = :route"
    " RETURNING batch_lines.batch_id, batch_lines.line_no"
)
FAIL_DIRECT: Final = (
    "INSERT INTO batch_lines (batch_id, line_no, workspace_id, state, attempts, execution_id, status_code, error_code,"
    " runner_id, started_at, finished_at) SELECT :batch, d.line_no, :workspace, 'failed', 1, d.execution_id,"
    " d.status_code, d.error_code, :runner, CAST(:now AS BIGINT), CAST(:now AS BIGINT) FROM {rows} WHERE true"
    " ON CONFLICT (batch_id, line_no) DO NOTHING RETURNING line_no"
)
KEEP_WAITING: Final = (
    "INSERT INTO batch_route_waits (route_id, batch_id, workspace_id, waiting_lines, ready, since, last_claim_at,"
    " updated_at) SELECT :route, d.batch_id, d.workspace_id, d.waiting_lines, 1, d.since, d.last_claim_at,"
    " CAST(:now AS BIGINT) FROM {rows} WHERE true ON CONFLICT (route_id, batch_id) DO UPDATE SET"
    " waiting_lines = excluded.waiting_lines, ready = 1,"
    " last_claim_at = coalesce(excluded.last_claim_at, batch_route_waits.last_claim_at),"
    " updated_at = excluded.updated_at"
)
KEEP_TURN: Final = (
    "INSERT INTO batch_route_turns (route_id, workspace_id, last_claim_at, turn_pass, turn_base)"
    " SELECT :route, d.workspace_id, d.last_claim_at, d.turn_pass, d.turn_base FROM {rows} WHERE true"
    " ON CONFLICT (route_id, workspace_id) DO UPDATE SET last_claim_at = excluded.last_claim_at,"
    " turn_pass = excluded.turn_pass, turn_base = excluded.turn_base"
)
RUNNING, WAITING, TURNS = 1, 2, 3
_FRESH_WAITS: Final = (
    "FROM batch_route_waits WHERE route_id = :route AND updated_at > :oldest AND updated_at <= :newest{ready}"
)
ROUTE_VIEW: Final = (
    f"SELECT {RUNNING}, workspace_id, batch_id, count(*), CAST(NULL AS BIGINT), CAST(NULL AS BIGINT),"
    " CAST(NULL AS BIGINT) FROM batch_lines WHERE route_id = :route AND state = 'running'"
    " GROUP BY workspace_id, batch_id"
    f" UNION ALL SELECT {WAITING}, batch_id, workspace_id, since, last_claim_at, waiting_lines, NULL {_FRESH_WAITS}"
    f" UNION ALL SELECT {TURNS}, id, NULL, batch_weight, last_claim_at, turn_pass, turn_base FROM workspaces"
    " LEFT JOIN batch_route_turns ON route_id = :route AND workspace_id = id"
    f" WHERE id IN :workspaces[text] OR id IN (SELECT workspace_id {_FRESH_WAITS})"
)


def finish(lines: Sequence[FinishLine]) -> Op[tuple[bool, ...]]:
    """End executions; a line that is no longer this execution's changes nothing, one ended before answers True."""
    if not lines:
        return ()
    now = yield from clock()
    rows = yield Bulk(
        FINISH,
        {
            "batch_id": ("text", [line.batch_id for line in lines]),
            "line_no": ("bigint", [line.line_no for line in lines]),
            "execution_id": ("text", [line.execution_id for line in lines]),
            "state": ("text", [line.state for line in lines]),
            "status_code": ("bigint", [line.status_code for line in lines]),
            "error_code": ("text", [line.error_code for line in lines]),
        },
        {"now": now},
    )
    updated = {(row[0], row[1]) for row in rows}
    ended = [line for line in lines if (line.batch_id, line.line_no) in updated]
    yield from keep_records([(line.batch_id, line.line_no, line.state == "failed", line.record) for line in ended])
    yield from _count([(line.batch_id, line.state == "succeeded", 1) for line in ended], now)
    left = [line for line in lines if (line.batch_id, line.line_no) not in updated]
    repeated = (yield from _ended_before(left)) if left else set()
    return tuple((line.batch_id, line.line_no) in updated or line.execution_id in repeated for line in lines)


def fail_direct(runner_id: str, batch_id: str, lines: Sequence[DirectFailure]) -> Op[tuple[bool, ...]]:
    """Record lines that never ran as failed."""
    now = yield from clock()
    stopped, workspaces = yield from _owned(runner_id, [batch_id], now, counts=True)
    if batch_id in stopped or not lines:
        return (False,) * len(lines)
    rows = yield Bulk(
        FAIL_DIRECT,
        {
            "line_no": ("bigint", [line.line_no for line in lines]),
            "execution_id": ("text", [line.execution_id for line in lines]),
            "status_code": ("bigint", [line.status_code for line in lines]),
            "error_code": ("text", [line.error_code for line in lines]),
        },
        {"batch": batch_id, "workspace": workspaces[batch_id], "runner": runner_id, "now": now},
    )
    inserted = {row[0] for row in rows}
    yield from keep_records([(batch_id, line.line_no, True, line.record) for line in lines if line.line_no in inserted])
    yield from _count([(batch_id, False, len(inserted))], now)
    left = [line for line in lines if line.line_no not in inserted]
    repeated: set[str] = set()
    if left:
        known = yield from sql(
            "SELECT execution_id FROM batch_lines WHERE execution_id IN :executions[text] AND batch_id = :batch"
            " AND state = 'failed'",
            executions=[line.execution_id for line in left],
            batch=batch_id,
        )
        repeated = {row[0] for row in known}
    return tuple(line.line_no in inserted or line.execution_id in repeated for line in lines)


def claim(runner_id: str, group: ClaimGroup) -> Op[tuple[tuple[ClaimResult, ...], ...]]:
    """Decide a group under the route's lock; see claim_state.py for the rule."""
    now = yield from clock(lock=f"batch_route:{group.route_id}")
    batch_ids = [batch.batch_id for batch in group.batches]
    retries = any(line.attempt > 1 for batch in group.batches for line in batch.lines)
    stopped, workspaces = yield from _owned(runner_id, batch_ids, now, counts=retries)
    for batch in group.batches:
        assert workspaces.get(batch.batch_id, batch.workspace_id) == batch.workspace_id, "claim for a wrong workspace"
    view = yield from route_view(group.route_id, now, [batch.workspace_id for batch in group.batches])
    existing = yield from _existing(group)
    known = frozenset(view.contenders)
    decision = decide(group, view, existing, stopped, now)
    yield from _write_starts(runner_id, group, decision, now)
    yield from _write_demand(group, view, decision, stopped, known, now)
    return tuple(tuple(decision.answers[batch_id]) for batch_id in batch_ids)


def route_view(route_id: str, now: int, workspaces: Sequence[str], *, ready_only: bool = True) -> Op[RouteView]:
    """Return running lines, fresh wait rows and turns of a route: in one statement, since its lock is held."""
    rows = yield from sql(
        ROUTE_VIEW.format(ready=" AND ready = 1 AND waiting_lines > 0" if ready_only else ""),
        route=route_id,
        # The upper bound: after the clock stepped back, a dead owner's row must not look fresh until it catches up.
        oldest=now - FRESH_US,
        newest=now + FRESH_US,
        workspaces=sorted(set(workspaces)),
    )
    running = [row[1:4] for row in rows if row[0] == RUNNING]
    waits = [row[1:6] for row in rows if row[0] == WAITING]
    turns = [(row[1], *row[3:7]) for row in rows if row[0] == TURNS]
    return RouteView(
        {(workspace_id, batch_id): int(lines) for workspace_id, batch_id, lines in running},
        {batch_id: Contender(batch_id, *more) for batch_id, *more in waits},
        turns={workspace_id: last for workspace_id, _, last, _, _ in turns if last is not None},
        weights={workspace_id: weight for workspace_id, weight, _, _, _ in turns if weight != 1},
        passes={workspace_id: Pass(at, base) for workspace_id, _, _, at, base in turns if at},
    )


def _owned(
    runner_id: str, batch_ids: Sequence[str], now: int, *, counts: bool
) -> Op[tuple[frozenset[str], dict[str, str]]]:
    """Return the batches that may start nothing, and the workspaces of those that exist.

    The row lock makes a takeover wait until this claim has committed: then it sees the line and interrupts it. It is
    shared unless the transaction ``counts``: two holders of a shared lock that both go on to update would wait for
    each other.
    """
    rows = yield from sql(
        "SELECT id, workspace_id, runner_id, status_detail, expires_at FROM batches WHERE id IN :ids[text] ORDER BY id",
        lock="FOR NO KEY UPDATE" if counts else "FOR SHARE",
        ids=list(batch_ids),
    )
    free = {row[0] for row in rows if row[2] == runner_id and row[3] == "in_progress" and row[4] > now}
    return frozenset(batch_ids) - free, {row[0]: row[1] for row in rows}


def _existing(group: ClaimGroup) -> Op[dict[tuple[str, int], Existing]]:
    asked = [(batch.batch_id, line.line_no) for batch in group.batches for line in batch.lines]
    rows = yield Bulk(
        READ_LINES, {"batch_id": ("text", [one[0] for one in asked]), "line_no": ("bigint", [one[1] for one in asked])}
    )
    return {(row[0], row[1]): Existing(row[2], row[3], row[4], row[5]) for row in rows}


def _write_starts(runner_id: str, group: ClaimGroup, decision: Decision, now: int) -> Op[None]:
    new = [start for start in decision.starts if start[1].attempt == 1]
    again = [start for start in decision.starts if start[1].attempt > 1]
    same = {"route": group.route_id, "runner": runner_id, "now": now}
    started: set[tuple[str, int]] = set()
    if new:
        columns = _places(new) | {"workspace_id": ("text", [batch.workspace_id for batch, _, _ in new])}
        started |= {(row[0], row[1]) for row in (yield Bulk(START, columns, same))}
    if again:
        columns = _places(again) | {"attempt": ("bigint", [line.attempt for _, line, _ in again])}
        rows = yield Bulk(START_AGAIN, columns, same)
        retried = [(row[0], row[1]) for row in rows]
        started |= set(retried)
        yield Bulk(
            "UPDATE batches SET request_failed = request_failed - d.lines FROM {rows} WHERE batches.id = d.id",
            per_batch(retried),
        )
        for batch_id in sorted({place[0] for place in retried}):
            yield from sql(
                "DELETE FROM batch_records WHERE batch_id = :batch AND line_no IN :lines[bigint]",
                batch=batch_id,
                lines=[line_no for owner, line_no in retried if owner == batch_id],
            )
    # Somebody claimed the line through another route since we looked.
    for batch, line, _ in decision.starts:
        if (batch.batch_id, line.line_no) not in started:
            decision.answers[batch.batch_id][batch.lines.index(line)] = ClaimResult.TAKEN


def _write_demand(
    group: ClaimGroup, view: RouteView, decision: Decision, stopped: frozenset[str], known: frozenset[str], now: int
) -> Op[None]:
    """Keep the group's places in the queue, with what they were given."""
    given: dict[str, list[int]] = {}
    for batch, _, stamp in decision.starts:
        given.setdefault(batch.batch_id, []).append(stamp)
    if not given and all(batch.batch_id in known or batch.batch_id in stopped for batch in group.batches):
        return
    asked = [batch for batch in group.batches if batch.batch_id not in stopped]
    yield Bulk(
        KEEP_WAITING,
        {
            "batch_id": ("text", [batch.batch_id for batch in asked]),
            "workspace_id": ("text", [batch.workspace_id for batch in asked]),
            "waiting_lines": (
                "bigint",
                [max(0, batch.waiting_lines - len(given.get(batch.batch_id, ()))) for batch in asked],
            ),
            "since": ("bigint", [now for _ in asked]),
            "last_claim_at": ("bigint", [max(given.get(batch.batch_id, ()), default=None) for batch in asked]),
        },
        {"route": group.route_id, "now": now},
    )
    turns: dict[str, int] = {}
    for batch, _, stamp in decision.starts:
        turns[batch.workspace_id] = stamp
    if turns:
        passes = [view.passes.get(workspace_id, Pass()) for workspace_id in turns]
        yield Bulk(
            KEEP_TURN,
            {
                "workspace_id": ("text", list(turns)),
                "last_claim_at": ("bigint", list(turns.values())),
                "turn_pass": ("bigint", [one.at for one in passes]),
                "turn_base": ("bigint", [one.base for one in passes]),
            },
            {"route": group.route_id},
        )


def _places(starts: Sequence[Started]) -> dict[str, Any]:
    return {
        "batch_id": ("text", [batch.batch_id for batch, _, _ in starts]),
        "line_no": ("bigint", [line.line_no for _, line, _ in starts]),
        "execution_id": ("text", [line.execution_id for _, line, _ in starts]),
    }


def per_batch(places: Sequence[tuple[str, int]]) -> dict[str, Any]:
    """Return the columns ``id`` and ``lines``: batches in order, and how many places each has."""
    lines: dict[str, int] = {}
    for batch_id, _ in places:
        lines[batch_id] = lines.get(batch_id, 0) + 1
    return {"id": ("text", sorted(lines)), "lines": ("bigint", [lines[batch_id] for batch_id in sorted(lines)])}


def keep_records(results: Sequence[tuple[str, int, bool, bytes | None]]) -> Op[None]:
    """Store results: (batch, line, is an error, record), those without a record left out."""
    kept = [result for result in results if result[3] is not None]
    if kept:
        yield Bulk(
            KEEP_RECORD,
            {
                "batch_id": ("text", [result[0] for result in kept]),
                "line_no": ("bigint", [result[1] for result in kept]),
                "is_error": ("bigint", [int(result[2]) for result in kept]),
                "record": ("bytea", [result[3] for result in kept]),
            },
        )


def _count(ended: Sequence[tuple[str, bool, int]], now: int) -> Op[None]:
    """Add to the counters of batches, in the order of their ids so that two runners never wait in a circle."""
    totals: dict[str, list[int]] = {}
    for batch_id, succeeded, lines in ended:
        totals.setdefault(batch_id, [0, 0])[0 if succeeded else 1] += lines
    ids = sorted(totals)
    if ids:
        yield Bulk(
            COUNT,
            {
                "id": ("text", ids),
                "completed": ("bigint", [totals[batch_id][0] for batch_id in ids]),
                "failed": ("bigint", [totals[batch_id][1] for batch_id in ids]),
            },
            {"now": now},
        )


def _ended_before(lines: Sequence[FinishLine]) -> Op[set[str]]:
    """Return the executions among these that this very finish ended already (its answer was lost)."""
    rows = yield Bulk(
        READ_LINES,
        {
            "batch_id": ("text", [line.batch_id for line in lines]),
            "line_no": ("bigint", [line.line_no for line in lines]),
        },
    )
    ended = {(row[0], row[1], row[2], row[4]) for row in rows}
    return {
        line.execution_id for line in lines if (line.batch_id, line.line_no, line.state, line.execution_id) in ended
    }
