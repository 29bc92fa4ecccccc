"""What can go wrong in the store, as classes a caller can catch."""

from __future__ import annotations

from engines.errors import AlreadyExists, Internal, InvalidInput, NotReady, QueueFull, TooLarge, Unavailable


class StoreUnavailable(Unavailable):
    """The database does not answer, or the connection broke: it is unknown whether a write took effect.

    Claims and finishes may be sent again with the same ``execution_id``; other writes are re-read first.
    """


class SchemaMismatch(NotReady):
    """The database's schema is older or newer than this program; the message says which and what to do."""


class QuotaExceeded(TooLarge):
    """The workspace's files would exceed its storage quota (``storage_quota_exceeded``)."""


class ActiveBatchLimit(QueueFull):
    """The workspace has as many unfinished batches as it may (``job_limit_exceeded``)."""


class BatchNotCancellable(InvalidInput):
    """The batch has ended (``batch_not_cancellable``, HTTP 409); it is unchanged."""


class IdempotencyConflict(AlreadyExists):
    """The ``Idempotency-Key`` was used within 24 h with a different request."""


class SettingsChanged(AlreadyExists):
    """Other settings are there than those that were to be replaced; nothing changed."""


class InputInUse(InvalidInput):
    """A file that an unfinished, not yet validated batch still reads cannot be deleted."""


class RuleBroken(Internal):
    """The database refused a write that breaks an invariant of the tables; nothing changed."""
