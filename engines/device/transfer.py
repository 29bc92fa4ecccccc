"""One direction of one execution: which bytes pass through the slot's pinned room, and which lie with the caller.

The room is laid out as the span on the device. Whatever the caller keeps elsewhere, whole tensors or runs of rows, is
copied straight from or to where it lies if that memory is registered. If not, it passes through the room as well, one
copy of the host more. The rest of the room takes as few copies as there are gaps between what lies elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from engines.device.base import Span, Stream
from engines.device.shared import SharedDevice
from engines.tensor import NDArray

DIRECT_BYTES: Final = 16 * 1024
"""Rows that lie together and have at least so many bytes get a copy of their own; fewer are brought together by the
host first. Enqueueing a copy takes some microseconds of Python and driver (``scripts/gpu_check`` measures them), in
which a host moves about as much. Frontends place rows side by side from this size on."""


class Transfer:
    """Tensors of one execution on their way to the device, or back.

    Args:
        room: pinned bytes, used as long as the transfer is.
        extents: offset and size in bytes of every tensor in the room, in order; a tensor of size 0 does not travel.
    """

    def __init__(self, shared: SharedDevice, room: NDArray, extents: Sequence[tuple[int, int]]) -> None:
        self._shared = shared
        self._room = room
        self._extents = tuple(extents)
        self._elsewhere: list[tuple[int, NDArray]] = []
        self._through_room: list[tuple[int, NDArray]] = []
        self._whole = self._own_ranges([])

    @property
    def straight_bytes(self) -> int:
        """Bytes of the last copies that no array of ours held."""
        through = sum(raw.nbytes for _, raw in self._through_room)
        return sum(raw.nbytes for _, raw in self._elsewhere) - through

    def reset(self) -> None:
        """Let everything pass through the room."""
        self._elsewhere.clear()
        self._through_room.clear()

    def use(self, tensor: int, at_bytes: int, array: NDArray) -> None:
        """Let a contiguous array of the caller stand for the bytes of a tensor from ``at_bytes`` on."""
        offset, size = self._extents[tensor]
        raw = array.reshape(-1).view(np.uint8)
        assert at_bytes + raw.nbytes <= size, f"{raw.nbytes} bytes at {at_bytes} of a tensor of {size}"
        if raw.nbytes:
            self._elsewhere.append((offset + at_bytes, raw))

    def collect(self) -> None:
        """Bring what the device cannot reach into the room; before ``copy_in``, and without the device's lock."""
        self._sort_out()
        for start, raw in self._through_room:
            self._room[start : start + raw.nbytes] = raw

    def copy_in(self, target: Span, stream: Stream) -> None:
        """Enqueue the copies to the device; see ``collect``."""
        device = self._shared.device
        straight = self._straight()
        for start, stop in self._own_ranges(straight) if straight else self._whole:
            device.copy_in(target.part(start, stop - start), self._room[start:stop], stream)
        for start, raw in straight:
            device.copy_in(target.part(start, raw.nbytes), raw, stream)

    def copy_out(self, source: Span, stream: Stream) -> None:
        """Enqueue the copies from the device; see ``deliver``."""
        device = self._shared.device
        self._sort_out()
        straight = self._straight()
        for start, stop in self._own_ranges(straight) if straight else self._whole:
            device.copy_out(self._room[start:stop], source.part(start, stop - start), stream)
        for start, raw in straight:
            device.copy_out(raw, source.part(start, raw.nbytes), stream)

    def deliver(self) -> None:
        """Write what could not go straight to where the caller has it; after the copies are done."""
        for start, raw in self._through_room:
            raw[...] = self._room[start : start + raw.nbytes]

    def close(self) -> None:
        """Let go of every array."""
        self.reset()
        self._room = np.empty(0, np.uint8)

    def _sort_out(self) -> None:
        reaches = self._shared.reaches
        self._elsewhere.sort(key=_start_of)
        self._through_room = [entry for entry in self._elsewhere if not reaches(entry[1])]

    def _straight(self) -> list[tuple[int, NDArray]]:
        if not self._through_room:
            return self._elsewhere
        through = {start for start, _ in self._through_room}
        return [entry for entry in self._elsewhere if entry[0] not in through]

    def _own_ranges(self, straight: Sequence[tuple[int, NDArray]]) -> list[tuple[int, int]]:
        """Return where the room's own bytes lie; one range over neighbours, the gap between them included."""
        ranges: list[tuple[int, int]] = []
        pieces = iter([*straight, (1 << 62, self._room[:0])])
        piece_start, raw = next(pieces)
        joins = False
        for offset, size in self._extents:
            at, end = offset, offset + size
            while piece_start < end:
                if at < piece_start:
                    _add(ranges, at, piece_start, joins)
                at, joins = piece_start + raw.nbytes, False
                piece_start, raw = next(pieces)
            if at < end:
                _add(ranges, at, end, joins)
            # The next tensor's bytes go with these if nothing lies between but the gap.
            joins = at < end
        return ranges


def _add(ranges: list[tuple[int, int]], start: int, stop: int, joins: bool) -> None:
    if joins and ranges:
        ranges[-1] = (ranges[-1][0], stop)
    else:
        ranges.append((start, stop))


def _start_of(entry: tuple[int, NDArray]) -> int:
    return entry[0]
