-- What batch scheduling adds: adaptive caps, weights, the explain log, alerts.

ALTER TABLE workspaces ADD COLUMN batch_weight INTEGER NOT NULL DEFAULT 1 CHECK (batch_weight BETWEEN 1 AND 100);

-- A workspace's place in the weighted order: virtual time, in turns times a fixed scale.
ALTER TABLE batch_route_turns ADD COLUMN turn_pass INTEGER NOT NULL DEFAULT 0 CHECK (turn_pass >= 0);
ALTER TABLE batch_route_turns ADD COLUMN turn_base INTEGER NOT NULL DEFAULT 0 CHECK (turn_base >= 0);

ALTER TABLE deployment_batch_scheduling ADD COLUMN min_concurrency INTEGER
    CHECK (min_concurrency BETWEEN 1 AND 256 AND min_concurrency <= max_concurrency);
ALTER TABLE deployment_batch_scheduling ADD COLUMN latency_share_percent INTEGER
    CHECK (latency_share_percent IS NULL OR (latency_share_percent BETWEEN 1 AND 1000 AND min_concurrency IS NOT NULL));

CREATE TABLE deployment_batch_caps (
    route_id TEXT NOT NULL PRIMARY KEY,
    cap INTEGER NOT NULL CHECK (cap BETWEEN 1 AND 256),
    why TEXT NOT NULL CHECK (length(why) BETWEEN 1 AND 64 AND why NOT GLOB '*[^a-z_]*'),
    changed_at INTEGER NOT NULL
) STRICT;

CREATE TABLE batch_route_edges (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    route_id TEXT NOT NULL,
    at INTEGER NOT NULL,
    process_id TEXT NOT NULL,
    reason TEXT CHECK (length(reason) BETWEEN 1 AND 64 AND reason NOT GLOB '*[^a-z_]*'),
    live_in_flight INTEGER CHECK (live_in_flight >= 0),
    metrics_waiting INTEGER CHECK (metrics_waiting >= 0),
    metrics_running INTEGER CHECK (metrics_running >= 0),
    metrics_kv_cache_permille INTEGER CHECK (metrics_kv_cache_permille BETWEEN 0 AND 1000),
    metrics_error TEXT CHECK (length(metrics_error) BETWEEN 1 AND 64 AND metrics_error NOT GLOB '*[^a-z_]*'),
    cap INTEGER CHECK (cap BETWEEN 0 AND 256),
    why TEXT CHECK (length(why) BETWEEN 1 AND 64 AND why NOT GLOB '*[^a-z_]*')
) STRICT;
CREATE INDEX batch_route_edges_of_route ON batch_route_edges (route_id, at, seq);
CREATE INDEX batch_route_edges_by_age ON batch_route_edges (at);

CREATE TABLE batch_route_minutes (
    route_id TEXT NOT NULL,
    minute INTEGER NOT NULL CHECK (minute >= 0),
    live_max INTEGER NOT NULL CHECK (live_max >= 0),
    running_max INTEGER NOT NULL CHECK (running_max >= 0),
    queued_max INTEGER NOT NULL CHECK (queued_max >= 0),
    cap INTEGER NOT NULL CHECK (cap BETWEEN 0 AND 256),
    open_us INTEGER NOT NULL CHECK (open_us >= 0),
    observed_us INTEGER NOT NULL CHECK (observed_us >= 0),
    lines_done INTEGER NOT NULL CHECK (lines_done >= 0),
    line_s_sum REAL NOT NULL CHECK (line_s_sum >= 0),
    line_s_sq_sum REAL NOT NULL CHECK (line_s_sq_sum >= 0),
    overloads INTEGER NOT NULL CHECK (overloads >= 0),
    PRIMARY KEY (route_id, minute)
) STRICT;
CREATE INDEX batch_route_minutes_by_age ON batch_route_minutes (minute);

CREATE TABLE gateway_duties (
    name TEXT NOT NULL PRIMARY KEY CHECK (length(name) BETWEEN 1 AND 64),
    process_id TEXT NOT NULL,
    lease_until INTEGER NOT NULL
) STRICT;

CREATE TABLE batch_incidents (
    id TEXT NOT NULL PRIMARY KEY,
    rule TEXT NOT NULL CHECK (length(rule) BETWEEN 1 AND 64 AND rule NOT GLOB '*[^a-z_]*'),
    subject TEXT NOT NULL CHECK (length(subject) BETWEEN 1 AND 256),
    workspace_id TEXT,
    summary TEXT NOT NULL,
    details TEXT NOT NULL CHECK (json_valid(details)),
    opened_at INTEGER NOT NULL,
    resolved_at INTEGER,
    opened_delivered_at INTEGER,
    resolved_delivered_at INTEGER,
    CHECK (resolved_delivered_at IS NULL OR resolved_at IS NOT NULL)
) STRICT;
CREATE UNIQUE INDEX batch_incidents_open ON batch_incidents (rule, subject) WHERE resolved_at IS NULL;
CREATE INDEX batch_incidents_by_age ON batch_incidents (opened_at, id);
CREATE INDEX batch_incidents_untold ON batch_incidents (opened_at, id)
    WHERE opened_delivered_at IS NULL OR (resolved_at IS NOT NULL AND resolved_delivered_at IS NULL);

CREATE INDEX batches_unsuccessful ON batches (completed_at) WHERE state IN ('failed', 'expired');
