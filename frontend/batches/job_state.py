"""The state machines of a batch and of a line, as tables. The database repeats them as CHECKs and triggers.

Theory
    A batch moves forward only; terminal states are final. ``status_detail`` is what the API shows: it walks its own
    table and equals the state once that is terminal. A line exists from its claim on; ``failed -> running`` is a
    counted retry, ``interrupted`` means that its runner died and nobody may run it again. ``succeeded -> interrupted``
    and ``failed -> interrupted`` do not exist but for the takeover of a result that was not kept. A claim that is given
    back because its line was not sent is undone, which is no transition: the line, or its retry, is as it was before.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, get_args

from engines.errors import ServingError
from frontend.batches.store.rows import BatchState, LineState, StatusDetail, TerminalState

TERMINAL: Final[frozenset[str]] = frozenset(get_args(TerminalState))

BATCH_NEXT: Final[Mapping[BatchState, frozenset[BatchState]]] = {
    "queued": frozenset({"in_progress", "completed", "failed", "cancelled", "expired"}),
    "in_progress": frozenset({"completed", "failed", "cancelled", "expired"}),
    "completed": frozenset(),
    "failed": frozenset(),
    "cancelled": frozenset(),
    "expired": frozenset(),
}

STATUS_NEXT: Final[Mapping[StatusDetail, frozenset[StatusDetail]]] = {
    "validating": frozenset({"in_progress", "finalizing", "cancelling", "completed", "failed", "cancelled", "expired"}),
    "in_progress": frozenset({"finalizing", "cancelling", "completed", "failed", "cancelled", "expired"}),
    # A cancel that arrives while the files are written is too late to show; finalizing decides.
    "finalizing": frozenset({"completed", "failed", "cancelled", "expired"}),
    "cancelling": frozenset({"completed", "failed", "cancelled", "expired"}),
    "completed": frozenset(),
    "failed": frozenset(),
    "cancelled": frozenset(),
    "expired": frozenset(),
}

LINE_NEXT: Final[Mapping[LineState, frozenset[LineState]]] = {
    "running": frozenset({"succeeded", "failed", "interrupted"}),
    "failed": frozenset({"running"}),
    "succeeded": frozenset({"interrupted"}),
    "interrupted": frozenset(),
}


class IllegalTransition(ServingError):
    """A batch or line was asked to move against its table; nothing changed."""


def check_batch(now: BatchState, wanted: BatchState) -> None:
    """Raise IllegalTransition unless ``now`` may become ``wanted``."""
    if wanted not in BATCH_NEXT[now]:
        raise IllegalTransition(f"a batch cannot go from {now} to {wanted}")


def stop_state(*, budget_refused: bool, cancel_requested: bool, expired: bool) -> TerminalState:
    """Return how a batch ends: a budget refusal before a cancel before expiry (rule 9); ``completed`` without any.

    A lost lease comes before all of these: then the batch is someone else's to end.
    """
    if budget_refused:
        return "failed"
    if cancel_requested:
        return "cancelled"
    return "expired" if expired else "completed"
