"""What ``ringserve status`` and ``ringserve models`` show, as data and as tables."""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgspec

from worker.channel.node_link import ChannelStatus, ModelStatus


class ProcessStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One process; ``pid`` 0 and state ``down`` while it waits to be restarted. ``started_at`` is in Unix seconds."""

    role: str
    name: str
    pid: int
    state: str
    restarts: int
    started_at: int


class NodeStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A node; the fields of ``ringserve status --json``."""

    run_dir: str
    state: str
    http_port: int
    grpc_port: int
    metrics_port: int
    processes: tuple[ProcessStatus, ...]
    channels: tuple[ChannelStatus, ...]
    models: tuple[ModelStatus, ...]


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """The node's answer to ``{"ask": "status"}`` on its socket.

    Attributes:
        reasons: why it is not ready.
        control: what a client of the control service dials; empty if it is off.
    """

    status: NodeStatus
    reasons: tuple[str, ...] = ()
    control: str = ""


def status_text(answer: Answer, now_s: float | None = None) -> str:
    """Return a node's status for people."""
    status = answer.status
    now_s = time.time() if now_s is None else now_s
    lines = [f"{status.run_dir}: {status.state}" + (f" ({'; '.join(answer.reasons)})" if answer.reasons else "")]
    control = f"  control {answer.control}" if answer.control else ""
    lines.append(f"http {status.http_port}  grpc {status.grpc_port}  metrics {status.metrics_port}{control}")
    lines += ["", *table(("PROCESS", "ROLE", "PID", "STATE", "RESTARTS", "UP"), [
        (p.name, p.role, str(p.pid or "-"), p.state, str(p.restarts), _duration(now_s - p.started_at) if p.pid else "-")
        for p in status.processes
    ])]  # fmt: skip
    if status.channels:
        lines += ["", *table(("CHANNEL", "IN FLIGHT", "ARENA"), [
            (f"{c.frontend} -> {c.worker}", str(c.in_flight), f"{_size(c.arena_bytes_used)} of {_size(c.arena_bytes)}")
            for c in status.channels
        ])]  # fmt: skip
    lines += ["", models_text(status.models)]
    return "\n".join(lines)


def models_text(models: Sequence[ModelStatus]) -> str:
    """Return a table of models for people."""
    if not models:
        return "no models"
    rows = [
        (m.name, m.version, m.state, ",".join(map(str, m.batch_sizes)) or "-", str(m.queue_depth), m.reason)
        for m in models
    ]
    return "\n".join(table(("MODEL", "VERSION", "STATE", "BATCH SIZES", "QUEUED", "REASON"), rows))


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return lines with aligned columns."""
    # A reason may hold a traceback's line breaks; in a table it is one cell.
    cells = [tuple(head), *(tuple(" ".join(cell.split()) for cell in row) for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(head))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]


def _duration(seconds: float) -> str:
    whole = max(0, int(seconds))
    if whole < 120:
        return f"{whole}s"
    return f"{whole // 60}m" if whole < 7200 else f"{whole // 3600}h"


def _size(count: int) -> str:
    return f"{count / (1 << 20):.1f} MiB"
