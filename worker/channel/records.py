"""The fixed records that travel in a channel's two rings: eight aligned u64 words each.

Words, not packed structs: every store is one aligned 8-byte store (a record can be torn only between words, and the
tail store that publishes it comes last), and a consumer can view a whole published range as an (n, 8) uint64 array.

Request record                                   Reply record
  0  request_id                                    0  request_id
  1  model_id | variant << 32 | flags << 48        1  kind | reason << 8 | batch_size << 32
  2  block_offset, bytes from the arena's start    2  queue_ns: arrival to start of the execution
  3  block_rows | row_start << 32                  3  compute_ns of the execution that served it
  4  rows                                          4  batch_rows | requests in the batch << 32
  5  deadline_ns; NO_DEADLINE if none              5  text_slot | text_bytes << 32 (errors only)
  6  arrival_ns                                    6  finished_ns
  7  spare, 0                                      7  dispatch sequence number

A cancel record has FLAG_CANCEL and a request_id; its other words are 0. Every request record gets exactly one reply
record, cancelled ones too: the reply is what gives the block back.
"""

from __future__ import annotations

from enum import IntEnum, unique

RECORD_WORDS = 8
RECORD_BYTES = 64

FLAG_CANCEL = 1
FLAG_BACKGROUND = 2
FLAG_COMMITTED = 4

NO_DEADLINE = 2**63 - 1
"""Later than any monotonic clock: 'no deadline' needs no branch."""

MASK_32 = 0xFFFF_FFFF


@unique
class Reason(IntEnum):
    """Why a batch had the size it had; told to clients that ask. Append, never renumber."""

    NONE = 0
    FILLED = 1
    """The queued rows filled the compiled size."""
    QUEUE_DRAINED = 2
    """No more rows were queued; the rest is padding."""
    CAPPED = 3
    """max_batch_size stopped it."""
    NOT_COALESCING = 4
    """The model has no batch axis on every tensor."""
    OTHER_SHAPE = 5
    """The next request had another shape variant."""
    OVERSIZE = 6
    """One request alone was larger than the size chosen for the queue."""
    RETRIED = 7
    """The request ran alone, once more, after the batch it was in had failed."""


def head_word(model_id: int, variant: int, flags: int = 0) -> int:
    """Return word 1 of a request record."""
    return model_id | variant << 32 | flags << 48


def request_words(
    request_id: int,
    model_id: int,
    variant: int,
    flags: int,
    block_offset: int,
    block_rows: int,
    row_start: int,
    rows: int,
    deadline_ns: int,
    arrival_ns: int,
) -> tuple[int, int, int, int, int, int, int, int]:
    """Return the words of a request record."""
    return (
        request_id,
        head_word(model_id, variant, flags),
        block_offset,
        block_rows | row_start << 32,
        rows,
        deadline_ns,
        arrival_ns,
        0,
    )


def cancel_words(request_id: int) -> tuple[int, int, int, int, int, int, int, int]:
    """Return the words of a cancel record."""
    return (request_id, FLAG_CANCEL << 48, 0, 0, 0, 0, 0, 0)


def reply_words(
    request_id: int,
    kind: int,
    reason: int = 0,
    batch_size: int = 0,
    queue_ns: int = 0,
    compute_ns: int = 0,
    batch_rows: int = 0,
    batch_requests: int = 0,
    text_slot: int = 0,
    text_bytes: int = 0,
    finished_ns: int = 0,
    dispatch_seq: int = 0,
) -> tuple[int, int, int, int, int, int, int, int]:
    """Return the words of a reply record."""
    return (
        request_id,
        kind | reason << 8 | batch_size << 32,
        queue_ns,
        compute_ns,
        batch_rows | batch_requests << 32,
        text_slot | text_bytes << 32,
        finished_ns,
        dispatch_seq,
    )
