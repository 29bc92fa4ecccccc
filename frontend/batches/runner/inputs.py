"""Reads lines of a private copy of which a part may be damaged: what can be read is, the rest is None."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from frontend.batches.objects import ObjectCorrupt, ObjectMissing
from frontend.batches.work_file import WorkFile

log = logging.getLogger("batches")


async def read_what_is_there(work: WorkFile | None, numbers: Sequence[int]) -> list[bytes | None]:
    """Return the lines, None for each that is damaged or gone; ``work`` None: all are.

    Raises:
        StorageUnavailable: they cannot be read now.
    """
    if work is None:
        return [None] * len(numbers)
    try:
        return [*await work.read_lines(numbers)]
    except (ObjectCorrupt, ObjectMissing) as error:
        log.error("batch.input_damaged lines=%d-%d error=%s", min(numbers), max(numbers), error)
    lines: list[bytes | None] = []
    for line_no in numbers:
        try:
            lines.append(await work.read_line(line_no))
        except (ObjectCorrupt, ObjectMissing):
            lines.append(None)
    return lines
