"""The private copy of a batch's input with its line index, as one object: written by validation, read by runners.

Format (little-endian)
    lines     every non-blank line of the input, trimmed, each followed by one ``\\n``
    models    UTF-8 JSON array of the lanes' public models, in order of first appearance
    records   one per line, 20 bytes: offset u64, length u32 (without ``\\n``), lane u32, CRC-32 of the line u32
    footer    32 bytes: magic ``RSWORK02``, records' offset u64, models' length u64, lines u32, CRC-32 of all from
              ``models`` to before the CRC

One object and not two: index and lines cannot be separated by a crash, a sweep or a copy. Lines have checksums of their
own because they are read one by one: a damaged request must not be sent as if it were the one that was asked for.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt

from frontend.batches.objects import ObjectCorrupt, Objects

MAGIC: Final = b"RSWORK02"
FOOTER: Final = struct.Struct("<8sQQII")
RECORD: Final = np.dtype([("offset", "<u8"), ("length", "<u4"), ("lane", "<u4"), ("crc", "<u4")])
MAX_INDEX_BYTES: Final = 256 * 1024 * 1024
READ_AHEAD_BYTES: Final = 1024 * 1024
"""``read_lines`` fetches neighbouring lines together up to this much."""


class IndexBuilder:
    """Collects where each line is while the lines are written; ``finish`` returns what follows them."""

    def __init__(self) -> None:
        self._records = bytearray()
        self._lanes: dict[str, int] = {}
        self._counts: list[int] = []
        self._end = 0

    @property
    def lines(self) -> int:
        return len(self._records) // RECORD.itemsize

    @property
    def models(self) -> tuple[str, ...]:
        """Public models so far, in order of first appearance: one lane each."""
        return tuple(self._lanes)

    @property
    def counts(self) -> tuple[int, ...]:
        """Lines so far of each of ``models``."""
        return tuple(self._counts)

    def add(self, line: bytes, model: str) -> None:
        """Note a line, which its newline follows."""
        lane = self._lanes.setdefault(model, len(self._lanes))
        if lane == len(self._counts):
            self._counts.append(0)
        self._counts[lane] += 1
        self._records += struct.pack("<QIII", self._end, len(line), lane, zlib.crc32(line))
        self._end += len(line) + 1

    def finish(self) -> bytes:
        """Return the bytes to write after the last line."""
        models = msgspec.json.encode(list(self._lanes))
        head = FOOTER.pack(MAGIC, self._end + len(models), len(models), self.lines, 0)[:-4]
        body = models + bytes(self._records) + head
        return body + struct.pack("<I", zlib.crc32(body))


@dataclass(frozen=True, slots=True)
class Lane:
    """The lines of one model, in input order."""

    model: str
    line_nos: npt.NDArray[np.int64]


class LineIndex:
    """Where each line of a work file is and which lane it belongs to: 20 bytes a line, nothing of their content."""

    def __init__(self, models: tuple[str, ...], records: npt.NDArray[Any]) -> None:
        self.models = models
        self._records = records

    def __len__(self) -> int:
        return len(self._records)

    def span(self, line_no: int) -> tuple[int, int]:
        """Return (byte offset, length without newline) of a line, counted from 0."""
        record = self._records[line_no]
        return int(record["offset"]), int(record["length"])

    def is_intact(self, line_no: int, line: bytes) -> bool:
        return zlib.crc32(line) == int(self._records[line_no]["crc"])

    def model(self, line_no: int) -> str:
        return self.models[int(self._records[line_no]["lane"])]

    def lanes(self) -> tuple[Lane, ...]:
        """Return one lane per model, in order of first appearance."""
        lanes = self._records["lane"]
        return tuple(Lane(model, np.flatnonzero(lanes == lane)) for lane, model in enumerate(self.models))


class WorkFile:
    """A work file open for reading: its index in memory, its lines fetched on demand."""

    def __init__(self, objects: Objects, path: str, index: LineIndex) -> None:
        self._objects = objects
        self._path = path
        self.index = index

    async def read_line(self, line_no: int) -> bytes:
        """Return one line without its newline. Raises: as ``read_lines``."""
        return (await self.read_lines([line_no]))[0]

    async def read_lines(self, line_nos: Sequence[int]) -> list[bytes]:
        """Return lines in the order asked; ascending neighbours cost one read together.

        Raises:
            ObjectMissing, StorageUnavailable: they cannot be read.
            ObjectCorrupt: one of them is not what was written.
        """
        lines: list[bytes] = []
        for group in _groups(self.index, line_nos):
            first = self.index.span(group[0])[0]
            offset, length = self.index.span(group[-1])
            data = memoryview(await self._objects.read(self._path, first, offset + length - first))
            for line_no in group:
                offset, length = self.index.span(line_no)
                line = bytes(data[offset - first : offset - first + length])
                if not self.index.is_intact(line_no, line):
                    raise _corrupt()
                lines.append(line)
        return lines


async def open_work_file(objects: Objects, path: str, size_bytes: int) -> WorkFile:
    """Return a work file of ``size_bytes`` (as its row says) for reading.

    Raises:
        ObjectMissing, StorageUnavailable: it cannot be read.
        ObjectCorrupt: it is not what validation wrote.
    """
    if size_bytes < FOOTER.size:
        raise _corrupt()
    footer = await objects.read(path, size_bytes - FOOTER.size, FOOTER.size)
    magic, records_at, models_bytes, lines, checksum = FOOTER.unpack(footer)
    records_bytes = lines * RECORD.itemsize
    start = records_at - models_bytes
    whole = models_bytes + records_bytes
    if magic != MAGIC or start < 0 or start + whole != size_bytes - FOOTER.size or whole > MAX_INDEX_BYTES:
        raise _corrupt()
    data = await objects.read(path, start, whole)
    if zlib.crc32(footer[:-4], zlib.crc32(data)) != checksum:
        raise _corrupt()
    models = msgspec.json.decode(data[:models_bytes], type=tuple[str, ...])
    return WorkFile(objects, path, LineIndex(models, np.frombuffer(data, RECORD, lines, models_bytes)))


def _groups(index: LineIndex, line_nos: Sequence[int]) -> Iterator[list[int]]:
    group: list[int] = []
    for line_no in line_nos:
        if group:
            offset, length = index.span(line_no)
            if line_no <= group[-1] or offset + length - index.span(group[0])[0] > READ_AHEAD_BYTES:
                yield group
                group = []
        group.append(line_no)
    if group:
        yield group


def _corrupt() -> ObjectCorrupt:
    return ObjectCorrupt("the private copy of the input is damaged")
