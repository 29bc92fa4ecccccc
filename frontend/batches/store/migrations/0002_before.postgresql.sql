-- What batch scheduling adds: adaptive caps, weights, the explain log, alerts.

ALTER TABLE workspaces ADD COLUMN batch_weight BIGINT NOT NULL DEFAULT 1 CHECK (batch_weight BETWEEN 1 AND 100);

-- A workspace's place in the weighted order: virtual time, in turns times a fixed scale.
ALTER TABLE batch_route_turns ADD COLUMN turn_pass BIGINT NOT NULL DEFAULT 0 CHECK (turn_pass >= 0);
ALTER TABLE batch_route_turns ADD COLUMN turn_base BIGINT NOT NULL DEFAULT 0 CHECK (turn_base >= 0);

ALTER TABLE deployment_batch_scheduling ADD COLUMN min_concurrency BIGINT
    CHECK (min_concurrency BETWEEN 1 AND 256 AND min_concurrency <= max_concurrency);
ALTER TABLE deployment_batch_scheduling ADD COLUMN latency_share_percent BIGINT
    CHECK (latency_share_percent IS NULL OR (latency_share_percent BETWEEN 1 AND 1000 AND min_concurrency IS NOT NULL));

CREATE TABLE deployment_batch_caps (
    route_id TEXT COLLATE "C" NOT NULL PRIMARY KEY,
    cap BIGINT NOT NULL CHECK (cap BETWEEN 1 AND 256),
    why TEXT COLLATE "C" NOT NULL CHECK (why ~ '^[a-z_]{1,64}$'),
    changed_at BIGINT NOT NULL
);

CREATE TABLE batch_route_edges (
    seq BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    route_id TEXT COLLATE "C" NOT NULL,
    at BIGINT NOT NULL,
    process_id TEXT COLLATE "C" NOT NULL,
    reason TEXT COLLATE "C" CHECK (reason ~ '^[a-z_]{1,64}$'),
    live_in_flight BIGINT CHECK (live_in_flight >= 0),
    metrics_waiting BIGINT CHECK (metrics_waiting >= 0),
    metrics_running BIGINT CHECK (metrics_running >= 0),
    metrics_kv_cache_permille BIGINT CHECK (metrics_kv_cache_permille BETWEEN 0 AND 1000),
    metrics_error TEXT COLLATE "C" CHECK (metrics_error ~ '^[a-z_]{1,64}$'),
    cap BIGINT CHECK (cap BETWEEN 0 AND 256),
    why TEXT COLLATE "C" CHECK (why ~ '^[a-z_]{1,64}$')
);
CREATE INDEX batch_route_edges_of_route ON batch_route_edges (route_id, at, seq);
CREATE INDEX batch_route_edges_by_age ON batch_route_edges (at);

CREATE TABLE batch_route_minutes (
    route_id TEXT COLLATE "C" NOT NULL,
    minute BIGINT NOT NULL CHECK (minute >= 0),
    live_max BIGINT NOT NULL CHECK (live_max >= 0),
    running_max BIGINT NOT NULL CHECK (running_max >= 0),
    queued_max BIGINT NOT NULL CHECK (queued_max >= 0),
    cap BIGINT NOT NULL CHECK (cap BETWEEN 0 AND 256),
    open_us BIGINT NOT NULL CHECK (open_us >= 0),
    observed_us BIGINT NOT NULL CHECK (observed_us >= 0),
    lines_done BIGINT NOT NULL CHECK (lines_done >= 0),
    line_s_sum DOUBLE PRECISION NOT NULL CHECK (line_s_sum >= 0),
    line_s_sq_sum DOUBLE PRECISION NOT NULL CHECK (line_s_sq_sum >= 0),
    overloads BIGINT NOT NULL CHECK (overloads >= 0),
    PRIMARY KEY (route_id, minute)
);
CREATE INDEX batch_route_minutes_by_age ON batch_route_minutes (minute);

CREATE TABLE gateway_duties (
    name TEXT COLLATE "C" NOT NULL PRIMARY KEY CHECK (length(name) BETWEEN 1 AND 64),
    process_id TEXT COLLATE "C" NOT NULL,
    lease_until BIGINT NOT NULL
);

CREATE TABLE batch_incidents (
    id TEXT COLLATE "C" NOT NULL PRIMARY KEY,
    rule TEXT COLLATE "C" NOT NULL CHECK (rule ~ '^[a-z_]{1,64}$'),
    subject TEXT COLLATE "C" NOT NULL CHECK (length(subject) BETWEEN 1 AND 256),
    workspace_id TEXT COLLATE "C",
    summary TEXT COLLATE "C" NOT NULL,
    details TEXT COLLATE "C" NOT NULL CHECK (details::json IS NOT NULL OR details IS NULL),
    opened_at BIGINT NOT NULL,
    resolved_at BIGINT,
    opened_delivered_at BIGINT,
    resolved_delivered_at BIGINT,
    CHECK (resolved_delivered_at IS NULL OR resolved_at IS NOT NULL)
);
CREATE UNIQUE INDEX batch_incidents_open ON batch_incidents (rule, subject) WHERE resolved_at IS NULL;
CREATE INDEX batch_incidents_by_age ON batch_incidents (opened_at, id);
CREATE INDEX batch_incidents_untold ON batch_incidents (opened_at, id)
    WHERE opened_delivered_at IS NULL OR (resolved_at IS NOT NULL AND resolved_delivered_at IS NULL);

CREATE INDEX batches_unsuccessful ON batches (completed_at) WHERE state IN ('failed', 'expired');
