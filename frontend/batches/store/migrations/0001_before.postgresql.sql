-- Times: UTC microseconds since 1970. Booleans: 0 or 1. JSON columns hold text.

CREATE FUNCTION ringserve_refuse() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION '%', TG_ARGV[0] USING ERRCODE = 'integrity_constraint_violation';
END $$;

CREATE TABLE workspaces (
    id TEXT COLLATE "C" NOT NULL PRIMARY KEY,
    name TEXT COLLATE "C" NOT NULL UNIQUE CHECK (length(name) BETWEEN 1 AND 256),
    kind TEXT COLLATE "C" NOT NULL CHECK (kind IN ('personal', 'team', 'project')),
    created_at BIGINT NOT NULL
);

CREATE TABLE api_keys (
    id TEXT COLLATE "C" NOT NULL PRIMARY KEY,
    workspace_id TEXT COLLATE "C" NOT NULL REFERENCES workspaces (id),
    role TEXT COLLATE "C" NOT NULL CHECK (role IN ('member', 'workspace_admin', 'platform_admin', 'auditor')),
    name TEXT COLLATE "C" NOT NULL CHECK (length(name) <= 256),
    prefix TEXT COLLATE "C" NOT NULL CHECK (length(prefix) BETWEEN 1 AND 16),
    key_hash TEXT COLLATE "C" NOT NULL UNIQUE CHECK (length(key_hash) = 64),
    created_at BIGINT NOT NULL,
    revoked_at BIGINT
);
CREATE INDEX api_keys_of_workspace ON api_keys (workspace_id, created_at);

CREATE TABLE files (
    id TEXT COLLATE "C" NOT NULL PRIMARY KEY,
    workspace_id TEXT COLLATE "C" NOT NULL REFERENCES workspaces (id),
    purpose TEXT COLLATE "C" NOT NULL CHECK (purpose IN ('batch_input', 'batch_output', 'user_file')),
    api_purpose TEXT COLLATE "C",
    filename TEXT COLLATE "C" NOT NULL CHECK (length(filename) BETWEEN 1 AND 255),
    content_type TEXT COLLATE "C" NOT NULL,
    bytes BIGINT NOT NULL CHECK (bytes >= 0),
    sha256 TEXT COLLATE "C" NOT NULL CHECK (length(sha256) IN (0, 64)),
    created_by_key_id TEXT COLLATE "C",
    created_by_user_id TEXT COLLATE "C",
    created_at BIGINT NOT NULL,
    committed_at BIGINT,
    expires_at BIGINT,
    deleted_at BIGINT,
    storage_path TEXT COLLATE "C",
    key_id TEXT COLLATE "C",
    CHECK (committed_at IS NULL OR length(sha256) = 64)
);
CREATE INDEX files_of_workspace ON files (workspace_id, created_at, id) WHERE api_purpose IS NOT NULL;
CREATE INDEX files_to_sweep ON files (created_at)
    WHERE storage_path IS NOT NULL AND (deleted_at IS NOT NULL OR expires_at IS NOT NULL OR committed_at IS NULL);

CREATE TABLE batches (
    id TEXT COLLATE "C" NOT NULL PRIMARY KEY,
    workspace_id TEXT COLLATE "C" NOT NULL REFERENCES workspaces (id),
    api_key_id TEXT COLLATE "C" NOT NULL,
    user_id TEXT COLLATE "C",
    mode TEXT COLLATE "C" NOT NULL CHECK (mode IN ('gateway', 'native')),
    endpoint TEXT COLLATE "C" NOT NULL,
    public_model TEXT COLLATE "C" NOT NULL,
    state TEXT COLLATE "C" NOT NULL CHECK (state IN ('queued', 'in_progress', 'completed', 'failed', 'cancelled', 'expired')),
    status_detail TEXT COLLATE "C" NOT NULL CHECK (status_detail IN
        ('validating', 'in_progress', 'finalizing', 'cancelling', 'completed', 'failed', 'cancelled', 'expired')),
    input_file_id TEXT COLLATE "C" NOT NULL,
    work_file_id TEXT COLLATE "C",
    output_file_id TEXT COLLATE "C",
    error_file_id TEXT COLLATE "C",
    completion_window_hours BIGINT NOT NULL CHECK (completion_window_hours IN (24, 48, 72, 168)),
    retry_limit BIGINT NOT NULL CHECK (retry_limit BETWEEN 0 AND 2),
    request_total BIGINT NOT NULL CHECK (request_total >= 0),
    request_completed BIGINT NOT NULL DEFAULT 0 CHECK (request_completed >= 0),
    request_failed BIGINT NOT NULL DEFAULT 0 CHECK (request_failed >= 0),
    error_code TEXT COLLATE "C" CHECK (error_code ~ '^[a-z_]{1,64}$'),
    errors TEXT COLLATE "C" CHECK (errors::json IS NOT NULL OR errors IS NULL),
    metadata TEXT COLLATE "C" CHECK (metadata::json IS NOT NULL OR metadata IS NULL),
    output_expires_after_seconds BIGINT CHECK (output_expires_after_seconds BETWEEN 3600 AND 2592000),
    reserved_output_id TEXT COLLATE "C",
    reserved_error_id TEXT COLLATE "C",
    created_at BIGINT NOT NULL,
    in_progress_at BIGINT,
    finalizing_at BIGINT,
    completed_at BIGINT,
    cancel_requested_at BIGINT,
    expires_at BIGINT NOT NULL,
    last_progress_at BIGINT,
    last_waited_at BIGINT,
    settled_at BIGINT,
    runner_id TEXT COLLATE "C",
    runner_lease_until BIGINT,
    CHECK (request_completed + request_failed <= request_total),
    CHECK ((completed_at IS NOT NULL) = (state IN ('completed', 'failed', 'cancelled', 'expired'))),
    CHECK ((state IN ('completed', 'failed', 'cancelled', 'expired')) = (status_detail = state AND state <> 'in_progress')),
    CHECK (state <> 'in_progress' OR (in_progress_at IS NOT NULL AND work_file_id IS NOT NULL)),
    CHECK (settled_at IS NULL OR completed_at IS NOT NULL),
    CHECK (completed_at IS NOT NULL OR (output_file_id IS NULL AND error_file_id IS NULL)),
    CHECK ((runner_id IS NULL) = (runner_lease_until IS NULL))
);
CREATE INDEX batches_of_workspace ON batches (workspace_id, created_at, id);
CREATE INDEX batches_by_age ON batches (created_at, id);
CREATE INDEX batches_unsettled ON batches (created_at, id) WHERE settled_at IS NULL;
CREATE INDEX batches_active ON batches (workspace_id) WHERE completed_at IS NULL;

CREATE TRIGGER batches_immutable BEFORE UPDATE OF id, workspace_id, api_key_id, user_id, mode, endpoint, input_file_id,
    completion_window_hours, retry_limit, created_at, expires_at ON batches FOR EACH ROW
WHEN (old.id IS DISTINCT FROM new.id OR old.workspace_id IS DISTINCT FROM new.workspace_id OR old.api_key_id IS DISTINCT FROM new.api_key_id
    OR old.user_id IS DISTINCT FROM new.user_id OR old.mode IS DISTINCT FROM new.mode OR old.endpoint IS DISTINCT FROM new.endpoint
    OR old.input_file_id IS DISTINCT FROM new.input_file_id OR old.completion_window_hours IS DISTINCT FROM new.completion_window_hours
    OR old.retry_limit IS DISTINCT FROM new.retry_limit OR old.created_at IS DISTINCT FROM new.created_at
    OR old.expires_at IS DISTINCT FROM new.expires_at)
EXECUTE FUNCTION ringserve_refuse('batches: an immutable column was changed');

CREATE TRIGGER batches_write_once BEFORE UPDATE OF work_file_id, output_file_id, error_file_id, reserved_output_id,
    reserved_error_id, settled_at, cancel_requested_at, in_progress_at, completed_at ON batches FOR EACH ROW
WHEN ((old.work_file_id IS NOT NULL AND old.work_file_id IS DISTINCT FROM new.work_file_id)
    OR (old.output_file_id IS NOT NULL AND old.output_file_id IS DISTINCT FROM new.output_file_id)
    OR (old.error_file_id IS NOT NULL AND old.error_file_id IS DISTINCT FROM new.error_file_id)
    OR (old.reserved_output_id IS NOT NULL AND old.reserved_output_id IS DISTINCT FROM new.reserved_output_id)
    OR (old.reserved_error_id IS NOT NULL AND old.reserved_error_id IS DISTINCT FROM new.reserved_error_id)
    OR (old.settled_at IS NOT NULL AND old.settled_at IS DISTINCT FROM new.settled_at)
    OR (old.cancel_requested_at IS NOT NULL AND old.cancel_requested_at IS DISTINCT FROM new.cancel_requested_at)
    OR (old.in_progress_at IS NOT NULL AND old.in_progress_at IS DISTINCT FROM new.in_progress_at)
    OR (old.completed_at IS NOT NULL AND old.completed_at IS DISTINCT FROM new.completed_at))
EXECUTE FUNCTION ringserve_refuse('batches: a write-once column was changed');

CREATE TRIGGER batches_final BEFORE UPDATE OF output_file_id, error_file_id, request_total, request_completed,
    request_failed ON batches FOR EACH ROW
WHEN (old.completed_at IS NOT NULL AND (old.output_file_id IS DISTINCT FROM new.output_file_id
    OR old.error_file_id IS DISTINCT FROM new.error_file_id OR old.request_total <> new.request_total
    OR old.request_completed <> new.request_completed OR old.request_failed <> new.request_failed))
EXECUTE FUNCTION ringserve_refuse('batches: an ended batch was changed');

CREATE TRIGGER batches_state BEFORE UPDATE OF state ON batches FOR EACH ROW
WHEN (old.state <> new.state AND NOT (
    (old.state = 'queued' AND new.state IN ('in_progress', 'completed', 'failed', 'cancelled', 'expired'))
    OR (old.state = 'in_progress' AND new.state IN ('completed', 'failed', 'cancelled', 'expired'))))
EXECUTE FUNCTION ringserve_refuse('batches: illegal state transition');

CREATE TRIGGER batches_status BEFORE UPDATE OF status_detail ON batches FOR EACH ROW
WHEN (old.status_detail <> new.status_detail AND NOT (
    (old.status_detail = 'validating' AND new.status_detail <> 'validating')
    OR (old.status_detail = 'in_progress' AND new.status_detail <> 'validating')
    OR (old.status_detail IN ('finalizing', 'cancelling')
        AND new.status_detail IN ('completed', 'failed', 'cancelled', 'expired'))))
EXECUTE FUNCTION ringserve_refuse('batches: illegal status transition');

CREATE TRIGGER batches_kept BEFORE DELETE ON batches FOR EACH ROW
EXECUTE FUNCTION ringserve_refuse('batches: rows are never deleted');

CREATE TABLE batch_lines (
    batch_id TEXT COLLATE "C" NOT NULL REFERENCES batches (id),
    line_no BIGINT NOT NULL CHECK (line_no BETWEEN 0 AND 49999),
    workspace_id TEXT COLLATE "C" NOT NULL,
    route_id TEXT COLLATE "C",
    state TEXT COLLATE "C" NOT NULL CHECK (state IN ('running', 'succeeded', 'failed', 'interrupted')),
    attempts BIGINT NOT NULL CHECK (attempts BETWEEN 1 AND 3),
    execution_id TEXT COLLATE "C" NOT NULL,
    status_code BIGINT CHECK (status_code BETWEEN 100 AND 599),
    error_code TEXT COLLATE "C" CHECK (error_code ~ '^[a-z_]{1,64}$'),
    segment BIGINT CHECK (segment >= 0),
    runner_id TEXT COLLATE "C" NOT NULL,
    started_at BIGINT NOT NULL,
    finished_at BIGINT,
    PRIMARY KEY (batch_id, line_no),
    CHECK ((state = 'running') = (finished_at IS NULL)),
    CHECK (state <> 'running' OR (segment IS NULL AND route_id IS NOT NULL))
);
CREATE INDEX batch_lines_running_on_route ON batch_lines (route_id, workspace_id) WHERE state = 'running';
CREATE INDEX batch_lines_running_in_batch ON batch_lines (batch_id) WHERE state = 'running';

CREATE TRIGGER batch_lines_immutable BEFORE UPDATE OF batch_id, line_no, workspace_id, route_id ON batch_lines FOR EACH ROW
WHEN (old.batch_id IS DISTINCT FROM new.batch_id OR old.line_no IS DISTINCT FROM new.line_no OR old.workspace_id IS DISTINCT FROM new.workspace_id
    OR old.route_id IS DISTINCT FROM new.route_id)
EXECUTE FUNCTION ringserve_refuse('batch_lines: an immutable column was changed');

CREATE TRIGGER batch_lines_segment BEFORE UPDATE OF segment ON batch_lines FOR EACH ROW
WHEN (old.segment IS NOT NULL AND old.segment IS DISTINCT FROM new.segment)
EXECUTE FUNCTION ringserve_refuse('batch_lines: segment is written once');

CREATE TRIGGER batch_lines_state BEFORE UPDATE OF state, attempts, segment ON batch_lines FOR EACH ROW
WHEN (NOT (
    (old.state = new.state AND old.attempts = new.attempts)
    OR (old.state = 'running' AND new.state IN ('succeeded', 'failed', 'interrupted') AND old.attempts = new.attempts)
    OR (old.state = 'failed' AND new.state = 'running' AND new.attempts = old.attempts + 1 AND old.segment IS NULL)
    OR (old.state = 'succeeded' AND new.state = 'interrupted' AND new.attempts = old.attempts AND old.segment IS NULL)))
EXECUTE FUNCTION ringserve_refuse('batch_lines: illegal state transition');

CREATE TRIGGER batch_lines_kept BEFORE DELETE ON batch_lines FOR EACH ROW
EXECUTE FUNCTION ringserve_refuse('batch_lines: rows are never deleted');

CREATE TABLE batch_records (
    batch_id TEXT COLLATE "C" NOT NULL REFERENCES batches (id),
    line_no BIGINT NOT NULL,
    is_error BIGINT NOT NULL CHECK (is_error IN (0, 1)),
    record BYTEA NOT NULL,
    PRIMARY KEY (batch_id, line_no)
);

CREATE TABLE batch_segments (
    batch_id TEXT COLLATE "C" NOT NULL REFERENCES batches (id),
    seq BIGINT NOT NULL CHECK (seq >= 0),
    workspace_id TEXT COLLATE "C" NOT NULL,
    file_id TEXT COLLATE "C" NOT NULL REFERENCES files (id),
    lines BIGINT NOT NULL CHECK (lines BETWEEN 1 AND 50000),
    created_at BIGINT NOT NULL,
    PRIMARY KEY (batch_id, seq)
);
CREATE TRIGGER batch_segments_insert_only BEFORE UPDATE ON batch_segments FOR EACH ROW
EXECUTE FUNCTION ringserve_refuse('batch_segments: insert only');
CREATE TRIGGER batch_segments_kept BEFORE DELETE ON batch_segments FOR EACH ROW
EXECUTE FUNCTION ringserve_refuse('batch_segments: insert only');

CREATE TABLE idempotency_keys (
    workspace_id TEXT COLLATE "C" NOT NULL REFERENCES workspaces (id),
    key TEXT COLLATE "C" NOT NULL CHECK (length(key) BETWEEN 1 AND 256),
    body_sha256 TEXT COLLATE "C" NOT NULL CHECK (length(body_sha256) = 64),
    batch_id TEXT COLLATE "C" NOT NULL REFERENCES batches (id),
    created_at BIGINT NOT NULL,
    PRIMARY KEY (workspace_id, key)
);
CREATE INDEX idempotency_keys_by_age ON idempotency_keys (created_at);

CREATE TABLE batch_route_waits (
    route_id TEXT COLLATE "C" NOT NULL,
    batch_id TEXT COLLATE "C" NOT NULL REFERENCES batches (id),
    workspace_id TEXT COLLATE "C" NOT NULL,
    waiting_lines BIGINT NOT NULL CHECK (waiting_lines BETWEEN 0 AND 50000),
    reason TEXT COLLATE "C" CHECK (reason IN ('rate_limited', 'outside_window', 'live_traffic', 'metrics_unavailable',
        'server_busy', 'workers', 'concurrency', 'fair_share', 'route_cooling')),
    ready BIGINT NOT NULL CHECK (ready IN (0, 1)),
    since BIGINT NOT NULL,
    last_claim_at BIGINT,
    updated_at BIGINT NOT NULL,
    PRIMARY KEY (route_id, batch_id)
);
CREATE INDEX batch_route_waits_of_batch ON batch_route_waits (batch_id);

CREATE TABLE batch_route_turns (
    route_id TEXT COLLATE "C" NOT NULL,
    workspace_id TEXT COLLATE "C" NOT NULL,
    last_claim_at BIGINT NOT NULL,
    PRIMARY KEY (route_id, workspace_id)
);

CREATE TABLE deployment_batch_scheduling (
    route_id TEXT COLLATE "C" NOT NULL PRIMARY KEY,
    max_concurrency BIGINT NOT NULL DEFAULT 2 CHECK (max_concurrency BETWEEN 1 AND 256),
    yield_live_threshold BIGINT CHECK (yield_live_threshold BETWEEN 1 AND 100000),
    metrics_url TEXT COLLATE "C" CHECK (length(metrics_url) BETWEEN 12 AND 2048),
    metrics_max_waiting BIGINT CHECK (metrics_max_waiting BETWEEN 0 AND 100000),
    metrics_max_running BIGINT CHECK (metrics_max_running BETWEEN 0 AND 100000),
    metrics_max_kv_cache_percent BIGINT CHECK (metrics_max_kv_cache_percent BETWEEN 1 AND 100),
    priority BIGINT CHECK (priority BETWEEN 1 AND 1000000),
    window_timezone TEXT COLLATE "C" CHECK (length(window_timezone) BETWEEN 1 AND 64),
    window_days BIGINT CHECK (window_days BETWEEN 1 AND 127),
    window_start_minute BIGINT CHECK (window_start_minute BETWEEN 0 AND 1439),
    window_end_minute BIGINT CHECK (window_end_minute BETWEEN 0 AND 1439),
    updated_at BIGINT NOT NULL,
    updated_by TEXT COLLATE "C" NOT NULL,
    CHECK ((metrics_url IS NULL) = (metrics_max_waiting IS NULL AND metrics_max_running IS NULL
        AND metrics_max_kv_cache_percent IS NULL)),
    CHECK ((window_timezone IS NULL) = (window_days IS NULL) AND (window_days IS NULL) = (window_start_minute IS NULL)
        AND (window_start_minute IS NULL) = (window_end_minute IS NULL))
);
CREATE TRIGGER deployment_batch_scheduling_kept BEFORE DELETE ON deployment_batch_scheduling FOR EACH ROW
EXECUTE FUNCTION ringserve_refuse('deployment_batch_scheduling: rows are never deleted');

CREATE TABLE deployment_batch_signals (
    route_id TEXT COLLATE "C" NOT NULL PRIMARY KEY,
    paused_reason TEXT COLLATE "C" CHECK (paused_reason IN ('outside_window', 'live_traffic', 'server_busy', 'metrics_unavailable')),
    checked_at BIGINT NOT NULL,
    live_in_flight BIGINT CHECK (live_in_flight >= 0),
    metrics_checked_at BIGINT,
    metrics_ok BIGINT CHECK (metrics_ok IN (0, 1)),
    metrics_waiting BIGINT CHECK (metrics_waiting >= 0),
    metrics_running BIGINT CHECK (metrics_running >= 0),
    metrics_kv_cache_permille BIGINT CHECK (metrics_kv_cache_permille BETWEEN 0 AND 1000),
    metrics_error TEXT COLLATE "C" CHECK (metrics_error ~ '^[a-z_]{1,64}$')
);

CREATE TABLE gateway_processes (
    process_id TEXT COLLATE "C" NOT NULL PRIMARY KEY,
    started_at BIGINT NOT NULL,
    heartbeat_at BIGINT NOT NULL
);

CREATE TABLE route_inflight (
    route_id TEXT COLLATE "C" NOT NULL,
    process_id TEXT COLLATE "C" NOT NULL REFERENCES gateway_processes (process_id) ON DELETE CASCADE,
    live BIGINT NOT NULL CHECK (live >= 0),
    updated_at BIGINT NOT NULL,
    PRIMARY KEY (route_id, process_id)
);
CREATE INDEX route_inflight_of_process ON route_inflight (process_id);

CREATE TABLE runner_lease (
    single BIGINT NOT NULL PRIMARY KEY CHECK (single = 1),
    runner_id TEXT COLLATE "C" NOT NULL,
    lease_until BIGINT NOT NULL,
    locked BIGINT NOT NULL CHECK (locked IN (0, 1))
);

CREATE TABLE audit_log (
    seq BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    at BIGINT NOT NULL,
    action TEXT COLLATE "C" NOT NULL,
    workspace_id TEXT COLLATE "C",
    actor_key_id TEXT COLLATE "C",
    subject TEXT COLLATE "C" NOT NULL,
    details TEXT COLLATE "C" NOT NULL CHECK (details::json IS NOT NULL OR details IS NULL)
);
CREATE TRIGGER audit_log_insert_only BEFORE UPDATE ON audit_log FOR EACH ROW
EXECUTE FUNCTION ringserve_refuse('audit_log: insert only');
CREATE TRIGGER audit_log_kept BEFORE DELETE ON audit_log FOR EACH ROW
EXECUTE FUNCTION ringserve_refuse('audit_log: insert only');
