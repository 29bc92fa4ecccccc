-- Times: UTC microseconds since 1970. Booleans: 0 or 1. JSON columns hold text.

CREATE TABLE workspaces (
    id TEXT NOT NULL PRIMARY KEY,
    name TEXT NOT NULL UNIQUE CHECK (length(name) BETWEEN 1 AND 256),
    kind TEXT NOT NULL CHECK (kind IN ('personal', 'team', 'project')),
    created_at INTEGER NOT NULL
) STRICT;

CREATE TABLE api_keys (
    id TEXT NOT NULL PRIMARY KEY,
    workspace_id TEXT NOT NULL REFERENCES workspaces (id),
    role TEXT NOT NULL CHECK (role IN ('member', 'workspace_admin', 'platform_admin', 'auditor')),
    name TEXT NOT NULL CHECK (length(name) <= 256),
    prefix TEXT NOT NULL CHECK (length(prefix) BETWEEN 1 AND 16),
    key_hash TEXT NOT NULL UNIQUE CHECK (length(key_hash) = 64),
    created_at INTEGER NOT NULL,
    revoked_at INTEGER
) STRICT;
CREATE INDEX api_keys_of_workspace ON api_keys (workspace_id, created_at);

CREATE TABLE files (
    id TEXT NOT NULL PRIMARY KEY,
    workspace_id TEXT NOT NULL REFERENCES workspaces (id),
    purpose TEXT NOT NULL CHECK (purpose IN ('batch_input', 'batch_output', 'user_file')),
    api_purpose TEXT,
    filename TEXT NOT NULL CHECK (length(filename) BETWEEN 1 AND 255),
    content_type TEXT NOT NULL,
    bytes INTEGER NOT NULL CHECK (bytes >= 0),
    sha256 TEXT NOT NULL CHECK (length(sha256) IN (0, 64)),
    created_by_key_id TEXT,
    created_by_user_id TEXT,
    created_at INTEGER NOT NULL,
    committed_at INTEGER,
    expires_at INTEGER,
    deleted_at INTEGER,
    storage_path TEXT,
    key_id TEXT,
    CHECK (committed_at IS NULL OR length(sha256) = 64)
) STRICT;
CREATE INDEX files_of_workspace ON files (workspace_id, created_at, id) WHERE api_purpose IS NOT NULL;
CREATE INDEX files_to_sweep ON files (created_at)
    WHERE storage_path IS NOT NULL AND (deleted_at IS NOT NULL OR expires_at IS NOT NULL OR committed_at IS NULL);

CREATE TABLE batches (
    id TEXT NOT NULL PRIMARY KEY,
    workspace_id TEXT NOT NULL REFERENCES workspaces (id),
    api_key_id TEXT NOT NULL,
    user_id TEXT,
    mode TEXT NOT NULL CHECK (mode IN ('gateway', 'native')),
    endpoint TEXT NOT NULL,
    public_model TEXT NOT NULL,
    state TEXT NOT NULL CHECK (state IN ('queued', 'in_progress', 'completed', 'failed', 'cancelled', 'expired')),
    status_detail TEXT NOT NULL CHECK (status_detail IN
        ('validating', 'in_progress', 'finalizing', 'cancelling', 'completed', 'failed', 'cancelled', 'expired')),
    input_file_id TEXT NOT NULL,
    work_file_id TEXT,
    output_file_id TEXT,
    error_file_id TEXT,
    completion_window_hours INTEGER NOT NULL CHECK (completion_window_hours IN (24, 48, 72, 168)),
    retry_limit INTEGER NOT NULL CHECK (retry_limit BETWEEN 0 AND 2),
    request_total INTEGER NOT NULL CHECK (request_total >= 0),
    request_completed INTEGER NOT NULL DEFAULT 0 CHECK (request_completed >= 0),
    request_failed INTEGER NOT NULL DEFAULT 0 CHECK (request_failed >= 0),
    error_code TEXT CHECK (length(error_code) BETWEEN 1 AND 64 AND error_code NOT GLOB '*[^a-z_]*'),
    errors TEXT CHECK (errors IS NULL OR json_valid(errors)),
    metadata TEXT CHECK (metadata IS NULL OR json_valid(metadata)),
    output_expires_after_seconds INTEGER CHECK (output_expires_after_seconds BETWEEN 3600 AND 2592000),
    reserved_output_id TEXT,
    reserved_error_id TEXT,
    created_at INTEGER NOT NULL,
    in_progress_at INTEGER,
    finalizing_at INTEGER,
    completed_at INTEGER,
    cancel_requested_at INTEGER,
    expires_at INTEGER NOT NULL,
    last_progress_at INTEGER,
    last_waited_at INTEGER,
    settled_at INTEGER,
    runner_id TEXT,
    runner_lease_until INTEGER,
    CHECK (request_completed + request_failed <= request_total),
    CHECK ((completed_at IS NOT NULL) = (state IN ('completed', 'failed', 'cancelled', 'expired'))),
    CHECK ((state IN ('completed', 'failed', 'cancelled', 'expired')) = (status_detail = state AND state <> 'in_progress')),
    CHECK (state <> 'in_progress' OR (in_progress_at IS NOT NULL AND work_file_id IS NOT NULL)),
    CHECK (settled_at IS NULL OR completed_at IS NOT NULL),
    CHECK (completed_at IS NOT NULL OR (output_file_id IS NULL AND error_file_id IS NULL)),
    CHECK ((runner_id IS NULL) = (runner_lease_until IS NULL))
) STRICT;
CREATE INDEX batches_of_workspace ON batches (workspace_id, created_at, id);
CREATE INDEX batches_by_age ON batches (created_at, id);
CREATE INDEX batches_unsettled ON batches (created_at, id) WHERE settled_at IS NULL;
CREATE INDEX batches_active ON batches (workspace_id) WHERE completed_at IS NULL;

CREATE TRIGGER batches_immutable BEFORE UPDATE OF id, workspace_id, api_key_id, user_id, mode, endpoint, input_file_id,
    completion_window_hours, retry_limit, created_at, expires_at ON batches
WHEN old.id IS NOT new.id OR old.workspace_id IS NOT new.workspace_id OR old.api_key_id IS NOT new.api_key_id
    OR old.user_id IS NOT new.user_id OR old.mode IS NOT new.mode OR old.endpoint IS NOT new.endpoint
    OR old.input_file_id IS NOT new.input_file_id OR old.completion_window_hours IS NOT new.completion_window_hours
    OR old.retry_limit IS NOT new.retry_limit OR old.created_at IS NOT new.created_at
    OR old.expires_at IS NOT new.expires_at
BEGIN SELECT RAISE(ABORT, 'batches: an immutable column was changed'); END;

CREATE TRIGGER batches_write_once BEFORE UPDATE OF work_file_id, output_file_id, error_file_id, reserved_output_id,
    reserved_error_id, settled_at, cancel_requested_at, in_progress_at, completed_at ON batches
WHEN (old.work_file_id IS NOT NULL AND old.work_file_id IS NOT new.work_file_id)
    OR (old.output_file_id IS NOT NULL AND old.output_file_id IS NOT new.output_file_id)
    OR (old.error_file_id IS NOT NULL AND old.error_file_id IS NOT new.error_file_id)
    OR (old.reserved_output_id IS NOT NULL AND old.reserved_output_id IS NOT new.reserved_output_id)
    OR (old.reserved_error_id IS NOT NULL AND old.reserved_error_id IS NOT new.reserved_error_id)
    OR (old.settled_at IS NOT NULL AND old.settled_at IS NOT new.settled_at)
    OR (old.cancel_requested_at IS NOT NULL AND old.cancel_requested_at IS NOT new.cancel_requested_at)
    OR (old.in_progress_at IS NOT NULL AND old.in_progress_at IS NOT new.in_progress_at)
    OR (old.completed_at IS NOT NULL AND old.completed_at IS NOT new.completed_at)
BEGIN SELECT RAISE(ABORT, 'batches: a write-once column was changed'); END;

CREATE TRIGGER batches_final BEFORE UPDATE OF output_file_id, error_file_id, request_total, request_completed,
    request_failed ON batches
WHEN old.completed_at IS NOT NULL AND (old.output_file_id IS NOT new.output_file_id
    OR old.error_file_id IS NOT new.error_file_id OR old.request_total <> new.request_total
    OR old.request_completed <> new.request_completed OR old.request_failed <> new.request_failed)
BEGIN SELECT RAISE(ABORT, 'batches: an ended batch was changed'); END;

CREATE TRIGGER batches_state BEFORE UPDATE OF state ON batches
WHEN old.state <> new.state AND NOT (
    (old.state = 'queued' AND new.state IN ('in_progress', 'completed', 'failed', 'cancelled', 'expired'))
    OR (old.state = 'in_progress' AND new.state IN ('completed', 'failed', 'cancelled', 'expired')))
BEGIN SELECT RAISE(ABORT, 'batches: illegal state transition'); END;

CREATE TRIGGER batches_status BEFORE UPDATE OF status_detail ON batches
WHEN old.status_detail <> new.status_detail AND NOT (
    (old.status_detail = 'validating' AND new.status_detail <> 'validating')
    OR (old.status_detail = 'in_progress' AND new.status_detail <> 'validating')
    OR (old.status_detail IN ('finalizing', 'cancelling')
        AND new.status_detail IN ('completed', 'failed', 'cancelled', 'expired')))
BEGIN SELECT RAISE(ABORT, 'batches: illegal status transition'); END;

CREATE TRIGGER batches_kept BEFORE DELETE ON batches
BEGIN SELECT RAISE(ABORT, 'batches: rows are never deleted'); END;

CREATE TABLE batch_lines (
    batch_id TEXT NOT NULL REFERENCES batches (id),
    line_no INTEGER NOT NULL CHECK (line_no BETWEEN 0 AND 49999),
    workspace_id TEXT NOT NULL,
    route_id TEXT,
    state TEXT NOT NULL CHECK (state IN ('running', 'succeeded', 'failed', 'interrupted')),
    attempts INTEGER NOT NULL CHECK (attempts BETWEEN 1 AND 3),
    execution_id TEXT NOT NULL,
    status_code INTEGER CHECK (status_code BETWEEN 100 AND 599),
    error_code TEXT CHECK (length(error_code) BETWEEN 1 AND 64 AND error_code NOT GLOB '*[^a-z_]*'),
    segment INTEGER CHECK (segment >= 0),
    runner_id TEXT NOT NULL,
    started_at INTEGER NOT NULL,
    finished_at INTEGER,
    PRIMARY KEY (batch_id, line_no),
    CHECK ((state = 'running') = (finished_at IS NULL)),
    CHECK (state <> 'running' OR (segment IS NULL AND route_id IS NOT NULL))
) STRICT, WITHOUT ROWID;
CREATE INDEX batch_lines_running_on_route ON batch_lines (route_id, workspace_id) WHERE state = 'running';
CREATE INDEX batch_lines_running_in_batch ON batch_lines (batch_id) WHERE state = 'running';

CREATE TRIGGER batch_lines_immutable BEFORE UPDATE OF batch_id, line_no, workspace_id, route_id ON batch_lines
WHEN old.batch_id IS NOT new.batch_id OR old.line_no IS NOT new.line_no OR old.workspace_id IS NOT new.workspace_id
    OR old.route_id IS NOT new.route_id
BEGIN SELECT RAISE(ABORT, 'batch_lines: an immutable column was changed'); END;

CREATE TRIGGER batch_lines_segment BEFORE UPDATE OF segment ON batch_lines
WHEN old.segment IS NOT NULL AND old.segment IS NOT new.segment
BEGIN SELECT RAISE(ABORT, 'batch_lines: segment is written once'); END;

CREATE TRIGGER batch_lines_state BEFORE UPDATE OF state, attempts, segment ON batch_lines
WHEN NOT (
    (old.state = new.state AND old.attempts = new.attempts)
    OR (old.state = 'running' AND new.state IN ('succeeded', 'failed', 'interrupted') AND old.attempts = new.attempts)
    OR (old.state = 'failed' AND new.state = 'running' AND new.attempts = old.attempts + 1 AND old.segment IS NULL)
    OR (old.state = 'succeeded' AND new.state = 'interrupted' AND new.attempts = old.attempts AND old.segment IS NULL))
BEGIN SELECT RAISE(ABORT, 'batch_lines: illegal state transition'); END;

CREATE TRIGGER batch_lines_kept BEFORE DELETE ON batch_lines
BEGIN SELECT RAISE(ABORT, 'batch_lines: rows are never deleted'); END;

CREATE TABLE batch_records (
    batch_id TEXT NOT NULL REFERENCES batches (id),
    line_no INTEGER NOT NULL,
    is_error INTEGER NOT NULL CHECK (is_error IN (0, 1)),
    record BLOB NOT NULL,
    PRIMARY KEY (batch_id, line_no)
) STRICT;

CREATE TABLE batch_segments (
    batch_id TEXT NOT NULL REFERENCES batches (id),
    seq INTEGER NOT NULL CHECK (seq >= 0),
    workspace_id TEXT NOT NULL,
    file_id TEXT NOT NULL REFERENCES files (id),
    lines INTEGER NOT NULL CHECK (lines BETWEEN 1 AND 50000),
    created_at INTEGER NOT NULL,
    PRIMARY KEY (batch_id, seq)
) STRICT;
CREATE TRIGGER batch_segments_insert_only BEFORE UPDATE ON batch_segments
BEGIN SELECT RAISE(ABORT, 'batch_segments: insert only'); END;
CREATE TRIGGER batch_segments_kept BEFORE DELETE ON batch_segments
BEGIN SELECT RAISE(ABORT, 'batch_segments: insert only'); END;

CREATE TABLE idempotency_keys (
    workspace_id TEXT NOT NULL REFERENCES workspaces (id),
    key TEXT NOT NULL CHECK (length(key) BETWEEN 1 AND 256),
    body_sha256 TEXT NOT NULL CHECK (length(body_sha256) = 64),
    batch_id TEXT NOT NULL REFERENCES batches (id),
    created_at INTEGER NOT NULL,
    PRIMARY KEY (workspace_id, key)
) STRICT;
CREATE INDEX idempotency_keys_by_age ON idempotency_keys (created_at);

CREATE TABLE batch_route_waits (
    route_id TEXT NOT NULL,
    batch_id TEXT NOT NULL REFERENCES batches (id),
    workspace_id TEXT NOT NULL,
    waiting_lines INTEGER NOT NULL CHECK (waiting_lines BETWEEN 0 AND 50000),
    reason TEXT CHECK (reason IN ('rate_limited', 'outside_window', 'live_traffic', 'metrics_unavailable',
        'server_busy', 'workers', 'concurrency', 'fair_share', 'route_cooling')),
    ready INTEGER NOT NULL CHECK (ready IN (0, 1)),
    since INTEGER NOT NULL,
    last_claim_at INTEGER,
    updated_at INTEGER NOT NULL,
    PRIMARY KEY (route_id, batch_id)
) STRICT;
CREATE INDEX batch_route_waits_of_batch ON batch_route_waits (batch_id);

CREATE TABLE batch_route_turns (
    route_id TEXT NOT NULL,
    workspace_id TEXT NOT NULL,
    last_claim_at INTEGER NOT NULL,
    PRIMARY KEY (route_id, workspace_id)
) STRICT;

CREATE TABLE deployment_batch_scheduling (
    route_id TEXT NOT NULL PRIMARY KEY,
    max_concurrency INTEGER NOT NULL DEFAULT 2 CHECK (max_concurrency BETWEEN 1 AND 256),
    yield_live_threshold INTEGER CHECK (yield_live_threshold BETWEEN 1 AND 100000),
    metrics_url TEXT CHECK (length(metrics_url) BETWEEN 12 AND 2048),
    metrics_max_waiting INTEGER CHECK (metrics_max_waiting BETWEEN 0 AND 100000),
    metrics_max_running INTEGER CHECK (metrics_max_running BETWEEN 0 AND 100000),
    metrics_max_kv_cache_percent INTEGER CHECK (metrics_max_kv_cache_percent BETWEEN 1 AND 100),
    priority INTEGER CHECK (priority BETWEEN 1 AND 1000000),
    window_timezone TEXT CHECK (length(window_timezone) BETWEEN 1 AND 64),
    window_days INTEGER CHECK (window_days BETWEEN 1 AND 127),
    window_start_minute INTEGER CHECK (window_start_minute BETWEEN 0 AND 1439),
    window_end_minute INTEGER CHECK (window_end_minute BETWEEN 0 AND 1439),
    updated_at INTEGER NOT NULL,
    updated_by TEXT NOT NULL,
    CHECK ((metrics_url IS NULL) = (metrics_max_waiting IS NULL AND metrics_max_running IS NULL
        AND metrics_max_kv_cache_percent IS NULL)),
    CHECK ((window_timezone IS NULL) = (window_days IS NULL) AND (window_days IS NULL) = (window_start_minute IS NULL)
        AND (window_start_minute IS NULL) = (window_end_minute IS NULL))
) STRICT;
CREATE TRIGGER deployment_batch_scheduling_kept BEFORE DELETE ON deployment_batch_scheduling
BEGIN SELECT RAISE(ABORT, 'deployment_batch_scheduling: rows are never deleted'); END;

CREATE TABLE deployment_batch_signals (
    route_id TEXT NOT NULL PRIMARY KEY,
    paused_reason TEXT CHECK (paused_reason IN ('outside_window', 'live_traffic', 'server_busy', 'metrics_unavailable')),
    checked_at INTEGER NOT NULL,
    live_in_flight INTEGER CHECK (live_in_flight >= 0),
    metrics_checked_at INTEGER,
    metrics_ok INTEGER CHECK (metrics_ok IN (0, 1)),
    metrics_waiting INTEGER CHECK (metrics_waiting >= 0),
    metrics_running INTEGER CHECK (metrics_running >= 0),
    metrics_kv_cache_permille INTEGER CHECK (metrics_kv_cache_permille BETWEEN 0 AND 1000),
    metrics_error TEXT CHECK (length(metrics_error) BETWEEN 1 AND 64 AND metrics_error NOT GLOB '*[^a-z_]*')
) STRICT;

CREATE TABLE gateway_processes (
    process_id TEXT NOT NULL PRIMARY KEY,
    started_at INTEGER NOT NULL,
    heartbeat_at INTEGER NOT NULL
) STRICT;

CREATE TABLE route_inflight (
    route_id TEXT NOT NULL,
    process_id TEXT NOT NULL REFERENCES gateway_processes (process_id) ON DELETE CASCADE,
    live INTEGER NOT NULL CHECK (live >= 0),
    updated_at INTEGER NOT NULL,
    PRIMARY KEY (route_id, process_id)
) STRICT;
CREATE INDEX route_inflight_of_process ON route_inflight (process_id);

CREATE TABLE runner_lease (
    single INTEGER NOT NULL PRIMARY KEY CHECK (single = 1),
    runner_id TEXT NOT NULL,
    lease_until INTEGER NOT NULL,
    locked INTEGER NOT NULL CHECK (locked IN (0, 1))
) STRICT;

CREATE TABLE audit_log (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    at INTEGER NOT NULL,
    action TEXT NOT NULL,
    workspace_id TEXT,
    actor_key_id TEXT,
    subject TEXT NOT NULL,
    details TEXT NOT NULL CHECK (json_valid(details))
) STRICT;
CREATE TRIGGER audit_log_insert_only BEFORE UPDATE ON audit_log
BEGIN SELECT RAISE(ABORT, 'audit_log: insert only'); END;
CREATE TRIGGER audit_log_kept BEFORE DELETE ON audit_log
BEGIN SELECT RAISE(ABORT, 'audit_log: insert only'); END;
