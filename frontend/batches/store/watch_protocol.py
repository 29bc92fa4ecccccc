"""The store's part for people who look: live processes, what happened on a route, alerts, and rows joined for lists.

See protocol.py for the conventions; times are the store's, in microseconds since 1970.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from frontend.batches.store.route_rows import (
    BatchTotals,
    EdgeRow,
    IncidentEvent,
    IncidentRow,
    MinuteRow,
    PositionRow,
)
from frontend.batches.store.rows import BatchRow, Page

MINUTE_US = 60_000_000
EXPLAIN_KEEP_US = 15 * 24 * 3600 * 1_000_000
"""How long edges and minutes are kept."""
EDGES_LIMIT = 5_000
PRUNE_LIMIT = 10_000
"""Most rows that one ``prune`` takes out of a table: a claim never waits long for it."""


class Processes(Protocol):
    """Gateway processes and their live requests per route."""

    async def heartbeat(self, process_id: str, live: dict[str, int]) -> None:
        """Register the process and write its live counts (all of them; a route absent from ``live`` counts 0)."""

    async def live_elsewhere(self, process_id: str) -> dict[str, int]:
        """Return live requests per route of all other processes heard of within 6 s."""

    async def leave(self, process_id: str) -> None: ...


class Explain(Protocol):
    """Why a route's batch lines ran or did not run, for the last 15 days."""

    async def add_edges(self, rows: Sequence[EdgeRow]) -> None:
        """Append; an ``at`` of 0 becomes the store's time."""

    async def edges(self, route_id: str, since_us: int, until_us: int, limit: int = EDGES_LIMIT) -> tuple[EdgeRow, ...]:
        """Return the edges with ``since_us <= at < until_us``, oldest first; when too many, the newest ``limit``.

        If none was left out, the last edge before ``since_us`` comes first: it says what held then.
        """

    async def add_minutes(self, rows: Sequence[MinuteRow]) -> None:
        """Merge into the rows that are there: the greater of each ``*_max``, the last cap, the sum of all else."""

    async def minutes(self, route_id: str, since_us: int, until_us: int) -> tuple[MinuteRow, ...]:
        """Return the minutes that begin in ``since_us <= begin < until_us``, oldest first; unseen ones are absent."""

    async def open_share(self, route_id: str, since_us: int) -> tuple[float | None, ...]:
        """Return, for each of the 24 UTC hours, the share of observed time with open gates; None = never observed."""

    async def prune(self, keep_us: int = EXPLAIN_KEEP_US) -> int:
        """Delete what is older; return how many rows went (``PRUNE_LIMIT`` or more: call again)."""


class Alerts(Protocol):
    """Incidents, and who looks after them."""

    async def hold_duty(self, name: str, process_id: str, lease_us: int) -> bool:
        """Take or keep a job that one process of the installation does; False while another holds it.

        It writes only to take it or when half of the lease is over: call it as often as the job is done.
        """

    async def release_duties(self, process_id: str) -> None:
        """Let another process take all duties of this one at once."""

    async def open_incident(self, incident: IncidentRow) -> bool:
        """Open it; False (and nothing changed) if one is open for its rule and subject."""

    async def resolve(self, rule: str, subject: str, details: str | None = None) -> bool:
        """End the open incident, with other details (JSON object text) if they are given; False if there is none."""

    async def open_incidents(self) -> tuple[IncidentRow, ...]:
        """Return the unresolved ones, oldest first."""

    async def incidents(self, limit: int, *, offset: int = 0, resolved: bool = False) -> tuple[IncidentRow, ...]:
        """Return the newest; with ``resolved`` only those that have ended, newest end first."""

    async def undelivered(self, limit: int) -> tuple[tuple[IncidentRow, IncidentEvent], ...]:
        """Return what the outside was not told yet, oldest incident first, its opening before its end."""

    async def mark_delivered(self, incident_id: str, event: IncidentEvent) -> None:
        """Do not list this event as undelivered any more: it was told, or telling it was given up."""

    async def prune_incidents(self, keep_us: int) -> int:
        """Delete incidents resolved longer ago; return how many went."""


class Views(Protocol):
    """Rows joined for lists and pages."""

    async def key_names(self, key_ids: Sequence[str]) -> dict[str, str]: ...

    async def positions(self, batch_id: str) -> tuple[PositionRow, ...]:
        """Return where a batch waits or runs, by route: its place among all fresh waits in the fair order."""

    async def waiting_reasons(self, batch_ids: Sequence[str]) -> dict[str, str]:
        """Return the reason a list shows per batch: that of the route with most waiting lines, then by route id.

        Only batches with no running line are in it (rule 68).
        """

    async def ended_since(self, since_us: int) -> tuple[BatchRow, ...]:
        """Return batches that ended ``failed`` or ``expired`` at or after that moment, oldest first."""

    async def platform_batches(self, limit: int, *, offset: int = 0, active: bool | None = None) -> Page[BatchRow]:
        """Return batches of team and project workspaces, newest first."""

    async def personal_totals(self) -> BatchTotals:
        """Return the sums over all personal workspaces."""
