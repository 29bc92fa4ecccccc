"""``gateway`` of the node file: who may call, which models go where, where batches and files live.

Empty (the default) means no gateway: ``/v1`` does not exist. Secrets are named, not written: ``api_key_env`` names an
environment variable of the node.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from worker.config import Count, Positive

AlertKind = Literal["batch_stalled", "batch_failed", "batch_at_risk"]
UpstreamKind = Literal["vllm", "openai_compatible", "openai", "local"]
Routing = Literal["ordered", "weighted", "least_in_flight"]
Identifier = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")]


class RouteSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One deployment: a public model served through one upstream.

    Attributes:
        id: unique over all models; batch scheduling settings and counters belong to it.
        endpoint: base URL ending in ``/v1``; empty for ``local``.
        addresses: pinned IP addresses of the endpoint's host; required for every kind but ``local`` and ``openai``, so
            that no name is resolved at request time.
        upstream_model: the model's name there; the public name if empty. For ``local``, the bundle's name.
        api_key_env: environment variable that holds the upstream's key; empty for none.
        weight: share under ``weighted``.
        timeout_seconds: connect to last byte, of one attempt.
        cooldown_seconds, failures_to_open: circuit breaker.
        supports_priority: the upstream understands ``priority``.
    """

    id: Identifier
    kind: UpstreamKind
    endpoint: str = ""
    addresses: tuple[str, ...] = ()
    upstream_model: str = ""
    api_key_env: str = ""
    weight: Positive = 1.0
    timeout_seconds: Positive = 600.0
    connect_timeout_seconds: Positive = 5.0
    cooldown_seconds: Positive = 30.0
    failures_to_open: Count = 5
    supports_priority: bool = False


class GatewayModel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A public model name and its routes, in order of preference."""

    name: Annotated[str, Meta(min_length=1, max_length=256)]
    routes: Annotated[tuple[RouteSettings, ...], Meta(min_length=1, max_length=64)]
    routing: Routing = "ordered"


class FileSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Files and results. ``url``: empty for ``STATE/files``, ``file:///dir`` or ``s3://bucket/prefix``."""

    url: str = ""
    max_file_bytes: Count = 200 * 1024 * 1024
    quota_bytes_per_workspace: Count = 50 * 1024**3
    batch_retention_days: Annotated[int, Meta(ge=1, le=365)] = 7


class BatchSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Gateway-run batches. ``workers`` 0 switches the runner off; ``batch_concurrency`` 0 means no cap per batch.

    Attributes:
        default_max_concurrency: lines that a route without scheduling settings of its own runs at once.
    """

    enabled: bool = True
    workers: Annotated[int, Meta(ge=0, le=4096)] = 64
    batch_concurrency: Annotated[int, Meta(ge=0, le=4096)] = 0
    default_max_concurrency: Annotated[int, Meta(ge=1, le=256)] = 2
    max_lines: Count = 50_000
    max_line_bytes: Count = 4 * 1024 * 1024
    active_batches_per_workspace: Count = 1000
    validation: Literal["sync", "async"] = "sync"
    lease_seconds: Positive = 60.0
    lease_renew_seconds: Positive = 15.0


class AlertRule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When people are told about a batch.

    Attributes:
        name: unique; an incident belongs to a rule and a batch.
        workspace: whose batches are watched; empty for every workspace's.
        window_minutes: without progress, for ``batch_stalled``; the other kinds ignore it.
    """

    name: Identifier
    kind: AlertKind
    workspace: Annotated[str, Meta(max_length=256)] = ""
    window_minutes: Annotated[int, Meta(ge=5, le=1440)] = 60


class WebhookSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where incidents are sent; empty ``url`` for nowhere.

    Attributes:
        addresses: pinned IP addresses of the URL's host.
        secret_env: environment variable with the key of the signatures; required with a URL.
    """

    url: Annotated[str, Meta(max_length=2048)] = ""
    addresses: tuple[str, ...] = ()
    secret_env: str = ""


DEFAULT_RULES: Final = (
    AlertRule(name="stalled", kind="batch_stalled"),
    AlertRule(name="failed", kind="batch_failed"),
    AlertRule(name="at_risk", kind="batch_at_risk"),
)


class AlertSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Alerts about batches. An empty list of ``rules`` switches them off."""

    rules: Annotated[tuple[AlertRule, ...], Meta(max_length=100)] = DEFAULT_RULES
    webhook: WebhookSettings = WebhookSettings()


class PageSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The admin pages, on the HTTP port.

    Attributes:
        public_url: scheme, host and port as browsers see them, if a proxy changes them; what a form's origin must be.
        session_hours: how long a sign-in lasts.
        secret_env: environment variable with at least 32 characters that sign sessions; the same on every machine of
            a store. Empty: a secret of its own in ``state_dir``.
    """

    enabled: bool = True
    public_url: Annotated[str, Meta(max_length=2048)] = ""
    secret_env: str = ""
    session_hours: Annotated[int, Meta(ge=1, le=168)] = 12


class GatewaySettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All of ``gateway``.

    Attributes:
        state_dir: keys, SQLite store and local files; ``RUN_DIR/gateway`` if empty.
        store: empty for SQLite in ``state_dir``, or ``postgresql://...``.
        store_password_env: environment variable with the database password, if the URL has none.
        development: one workspace with one printed key, loopback upstreams allowed: one command is enough to try.
        max_body_bytes: of a live ``/v1`` request; files have their own limit.
        allow_client_priority: whether a client's own ``priority`` field reaches upstreams.
    """

    enabled: bool = False
    development: bool = False
    state_dir: str = ""
    store: str = ""
    store_password_env: str = ""
    max_body_bytes: Count = 16 * 1024 * 1024
    allow_client_priority: bool = False
    models: Annotated[tuple[GatewayModel, ...], Meta(max_length=1024)] = ()
    files: FileSettings = FileSettings()
    batches: BatchSettings = BatchSettings()
    alerts: AlertSettings = AlertSettings()
    pages: PageSettings = PageSettings()

    @property
    def runs_batches(self) -> bool:
        """Whether a node starts a batch runner."""
        return self.enabled and self.batches.enabled and self.batches.workers > 0
