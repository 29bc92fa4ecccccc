"""From outlooks under two settings to what people see of them. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from frontend.batches.scheduling.outlook import Outlook
from frontend.batches.store.rows import BatchRow, WorkspaceRow
from frontend.platform.read_models import BatchEffect, Effects

MAX_EFFECTS: Final = 50
Pair = tuple[Outlook, Outlook]
"""As things are, and under other settings."""


def earliest(found: Mapping[str, Pair], limit: int) -> Sequence[str]:
    """Return the batches that end first as things are; those nobody can tell of last."""

    def place(batch_id: str) -> tuple[bool, int, str]:
        eta = found[batch_id][0].eta_p50
        return eta is None, eta or 0, batch_id

    return sorted(found, key=place)[:limit]


def effects(
    found: Mapping[str, Pair], rows: Iterable[BatchRow], workspaces: Mapping[str, WorkspaceRow]
) -> Effects:  # fmt: skip
    """Return what is shown; ``rows`` are the batches that there is room for, in their order."""
    shown = []
    personal = looked_at = 0
    for row in rows:
        looked_at += 1
        workspace = workspaces.get(row.workspace_id)
        if workspace is not None and workspace.kind == "personal":
            personal += 1
            continue
        name = row.workspace_id if workspace is None else workspace.name
        shown.append(BatchEffect(row.id, name, row.public_model, *found[row.id]))
    return Effects(tuple(shown), len(found) - looked_at, personal)
