"""What the tables themselves refuse: every illegal move, whoever makes it."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from frontend.batches.job_state import BATCH_NEXT, LINE_NEXT, STATUS_NEXT, TERMINAL, IllegalTransition, check_batch
from frontend.batches.store.errors import RuleBroken
from frontend.batches.store.route_rows import AuditRow, SignalRow
from frontend.batches.store.rows import ClaimResult, SchedulingRow
from store_world import World

TERMINAL_SQL = "state = '{0}', status_detail = '{0}', completed_at = 1"


def refused(world: World, text: str) -> bool:
    try:
        world.sql(text)
    except RuleBroken:
        return True
    return False


def batch_in(world: World, state: str) -> str:
    workspace = world.workspace()
    batch = world.batch(workspace.id, 2)
    if state != "queued":
        world.sql(
            "UPDATE batches SET state = 'in_progress', status_detail = 'in_progress', in_progress_at = 1"
            f" WHERE id = '{batch.id}'"
        )
    if state in TERMINAL:
        world.sql(f"UPDATE batches SET {TERMINAL_SQL.format(state)} WHERE id = '{batch.id}'")
    return batch.id


def test_batch_states_move_exactly_as_the_table_says(world: World) -> None:
    """Rule 6."""
    for now, wanted in product(BATCH_NEXT, BATCH_NEXT):
        if now == wanted:
            continue
        batch_id = batch_in(world, now)
        if wanted in TERMINAL:
            change = TERMINAL_SQL.format(wanted)
        else:
            status = "validating" if wanted == "queued" else "in_progress"
            change = f"state = '{wanted}', status_detail = '{status}', completed_at = NULL, in_progress_at = 1"
        legal = wanted in BATCH_NEXT[now]
        assert refused(world, f"UPDATE batches SET {change} WHERE id = '{batch_id}'") != legal, (now, wanted)
        if legal:
            check_batch(now, wanted)
        else:
            with pytest.raises(IllegalTransition):
                check_batch(now, wanted)


def test_statuses_move_exactly_as_the_table_says(world: World) -> None:
    """Rule 7."""
    unfinished = [status for status in STATUS_NEXT if status not in TERMINAL]
    for now, wanted in product(unfinished, unfinished):
        if now == wanted:
            continue
        batch_id = batch_in(world, "queued")
        if now != "validating":
            world.sql(f"UPDATE batches SET status_detail = '{now}' WHERE id = '{batch_id}'")
        update = f"UPDATE batches SET status_detail = '{wanted}' WHERE id = '{batch_id}'"
        assert refused(world, update) != (wanted in STATUS_NEXT[now]), (now, wanted)


def test_line_states_move_exactly_as_the_table_says(world: World) -> None:
    """Rules 10 to 12."""
    batch = world.running_batch(world.workspace().id, 30)
    line = 0
    for now, wanted in product(LINE_NEXT, LINE_NEXT):
        if now == wanted:
            continue
        line += 1
        assert world.claim(batch, [line]) == [ClaimResult.CLAIMED]
        where = f"WHERE batch_id = '{batch.id}' AND line_no = {line}"
        if now != "running":
            world.sql(f"UPDATE batch_lines SET state = '{now}', finished_at = 1 {where}")
        change = (
            "state = 'running', finished_at = NULL, attempts = attempts + 1"
            if wanted == "running"
            else f"state = '{wanted}', finished_at = 1"
        )
        assert refused(world, f"UPDATE batch_lines SET {change} {where}") != (wanted in LINE_NEXT[now]), (now, wanted)


BATCH_REFUSES = (
    "id = 'batch_x'", "workspace_id = (SELECT min(id) FROM workspaces)", "api_key_id = 'x'", "user_id = 'x'",
    "mode = 'native'", "endpoint = 'x'", "input_file_id = 'x'", "work_file_id = 'x'",
    "completion_window_hours = 48", "retry_limit = 2", "created_at = 1", "expires_at = 1",
    "request_completed = -1", "request_completed = 3", "request_failed = 2, request_completed = 1",
    "state = 'paused'", "status_detail = 'paused'", "completed_at = 1", "settled_at = 1", "output_file_id = 'x'",
    "error_file_id = 'x'", "error_code = 'Not lower'", "error_code = ''", "metadata = '{'", "errors = 'x'",
    "runner_id = NULL", "runner_lease_until = NULL", "completion_window_hours = 36", "retry_limit = 3",
    "output_expires_after_seconds = 3599", "in_progress_at = 1", "work_file_id = NULL",
)  # fmt: skip


def test_batch_refuses_what_breaks_its_rules(world: World) -> None:
    """Rule 1.2: immutable and write-once columns, and every CHECK."""
    world.workspace("a")
    batch = world.running_batch(world.workspace("b").id, 2)
    before = world.get(batch)
    for change in BATCH_REFUSES:
        assert refused(world, f"UPDATE batches SET {change} WHERE id = '{batch.id}'"), change
    assert world.get(batch) == before


def test_ended_batch_refuses_changes_of_its_result(world: World) -> None:
    batch = world.running_batch(world.workspace().id, 2)
    world.sql(
        f"UPDATE batches SET {TERMINAL_SQL.format('failed')}, output_file_id = 'o', settled_at = 5"
        f" WHERE id = '{batch.id}'"
    )
    for change in (
        "output_file_id = 'x'", "error_file_id = 'x'", "settled_at = 6", "settled_at = NULL", "completed_at = 2",
        "request_failed = 1", "request_total = 3",
    ):  # fmt: skip
        assert refused(world, f"UPDATE batches SET {change} WHERE id = '{batch.id}'"), change


LINE_REFUSES = (
    "batch_id = 'x'", "line_no = 7", "workspace_id = 'x'", "route_id = 'S'", "attempts = 2", "attempts = 0",
    "finished_at = 1", "state = 'succeeded'", "state = 'done', finished_at = 1", "status_code = 99",
    "status_code = 600", "error_code = 'A'", "segment = 1", "line_no = 50000",
)  # fmt: skip


def test_line_refuses_what_breaks_its_rules(world: World) -> None:
    batch = world.running_batch(world.workspace().id, 2)
    world.claim(batch, [0])
    for change in LINE_REFUSES:
        assert refused(world, f"UPDATE batch_lines SET {change} WHERE batch_id = '{batch.id}'"), change


def test_segment_of_a_line_is_written_once_and_ends_retries(world: World) -> None:
    batch = world.running_batch(world.workspace().id, 2)
    world.claim(batch, [0])
    world.finish(batch, 0, ok=False)
    world.sql(f"UPDATE batch_lines SET segment = 1 WHERE batch_id = '{batch.id}'")
    for change in ("segment = 2", "segment = NULL", "state = 'running', attempts = 2, finished_at = NULL"):
        assert refused(world, f"UPDATE batch_lines SET {change} WHERE batch_id = '{batch.id}'"), change


def test_history_is_never_deleted_or_rewritten(world: World) -> None:
    batch = world.running_batch(world.workspace().id, 2)
    world.claim(batch, [0])
    world.finish(batch, 0)
    file = world.file(batch.workspace_id)
    world.sql(f"INSERT INTO batch_segments VALUES ('{batch.id}', 0, '{batch.workspace_id}', '{file.id}', 1, 1)")
    settings = SchedulingRow("R", 4)
    audit = AuditRow("batch_scheduling.updated", None, None, "R", "{}")
    world.run(world.store.scheduling.put_settings(settings, audit))
    for text in (
        "DELETE FROM batches", "DELETE FROM batch_lines", "DELETE FROM batch_segments",
        "UPDATE batch_segments SET lines = 2", "DELETE FROM audit_log", "UPDATE audit_log SET action = 'x'",
        "DELETE FROM deployment_batch_scheduling",
    ):  # fmt: skip
        assert refused(world, text), text


SETTINGS_REFUSE: tuple[dict[str, Any], ...] = (
    {"max_concurrency": 0}, {"max_concurrency": 257}, {"yield_live_threshold": 0}, {"priority": 0},
    {"priority": 1_000_001}, {"metrics_url": "http://10.0.0.5/metrics"}, {"metrics_max_waiting": 1},
    {"reopen_after_s": 0}, {"reopen_after_s": 601},
    {"metrics_url": "http://x/", "metrics_max_waiting": 0}, {"window_days": 1}, {"window_timezone": "UTC"},
    {"window_timezone": "UTC", "window_days": 128, "window_start_minute": 0, "window_end_minute": 0},
    {"window_timezone": "UTC", "window_days": 1, "window_start_minute": 1440, "window_end_minute": 0},
)  # fmt: skip


def test_settings_refuse_what_breaks_their_rules(world: World) -> None:
    for changes in SETTINGS_REFUSE:
        row = SchedulingRow("R", **{"max_concurrency": 2} | changes)
        with pytest.raises(RuleBroken):
            world.run(world.store.scheduling.put_settings(row, AuditRow("a", None, None, "R", "{}")))
    assert world.run(world.store.scheduling.settings("R")) is None
    assert world.run(world.store.scheduling.audit_log(5)) == ()


def test_settings_are_replaced_whole_with_their_audit_row(world: World) -> None:
    scheduling = world.store.scheduling
    first = SchedulingRow(
        "R", 4, 2, "http://10.0.0.5:8000/metrics", 0, None, 90, 10, "America/New_York", 31, 1140, 420, 0, "key_1"
    )
    stored = world.run(scheduling.put_settings(first, AuditRow("u", "w", "k", "R", '{"max_concurrency": 4}')))
    assert world.run(scheduling.settings("R")) == stored
    world.run(scheduling.put_settings(SchedulingRow("R", 2), None))
    (row,) = world.run(scheduling.all_settings())
    assert (row.max_concurrency, row.metrics_url, row.window_days) == (2, None, None)
    (audit,) = world.run(scheduling.audit_log(5))
    assert (audit.action, audit.subject, audit.details) == ("u", "R", '{"max_concurrency": 4}')
    assert world.run(scheduling.audit_log(5, before_seq=audit.seq)) == ()


def test_signal_keeps_what_an_evaluation_did_not_read(world: World) -> None:
    """Rule 22."""
    scheduling = world.store.scheduling
    busy = SignalRow("R", "server_busy", live_in_flight=0, metrics_checked_at=7, metrics_ok=True, metrics_waiting=3)
    world.run(scheduling.put_signal(busy))
    world.run(scheduling.put_signal(SignalRow("R", "outside_window")))
    (row,) = world.run(scheduling.signals())
    assert (row.paused_reason, row.live_in_flight, row.metrics_ok, row.metrics_waiting) == (
        "outside_window",
        0,
        True,
        3,
    )
    failed = SignalRow("R", "metrics_unavailable", metrics_checked_at=8, metrics_ok=False, metrics_error="timeout")
    world.run(scheduling.put_signal(failed))
    (row,) = world.run(scheduling.signals())
    assert (row.metrics_ok, row.metrics_waiting, row.metrics_error) == (False, None, "timeout")
    for reopens_at in (5, None):
        world.run(scheduling.put_signal(SignalRow("R", "live_traffic", reopens_at=reopens_at)))
        assert world.run(scheduling.signals())[0].reopens_at == reopens_at, "of this evaluation alone"
    with pytest.raises(RuleBroken):
        world.run(scheduling.put_signal(SignalRow("R", "fair_share")))


def test_rule_32_live_counts_of_a_dead_process_stop_counting(world: World) -> None:
    """Acceptance test 8's end: within 6 s."""
    processes = world.store.processes
    world.run(processes.heartbeat("p1", {"R": 3, "S": 1}))
    world.run(processes.heartbeat("p2", {"R": 2}))
    assert world.run(processes.live_elsewhere("p2")) == {"R": 3, "S": 1}
    assert world.run(processes.live_elsewhere("p3")) == {"R": 5, "S": 1}
    world.run(processes.heartbeat("p1", {"S": 0}))
    assert world.run(processes.live_elsewhere("p2")) == {}
    world.run(processes.leave("p2"))
    world.run(processes.heartbeat("p1", {"R": 3}))
    assert world.run(processes.live_elsewhere("p9")) == {"R": 3}
    world.advance(6.1)
    assert world.run(processes.live_elsewhere("p9")) == {}
    world.advance(3600)
    world.run(processes.heartbeat("p4", {}))
    assert world.sql("SELECT process_id FROM gateway_processes") == [("p4",)]
