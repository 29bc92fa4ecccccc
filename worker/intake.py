"""From request records to scheduler requests: every number a frontend wrote is checked before it is used.

Frontends run users' hooks, so their memory may be scribbled on; a record that does not hold is answered with an error
and touches nothing. What can be checked once is: frontends use the same few blocks over and over, so a block's place in
the arena and its arrays are remembered, and a record costs one look-up.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from engines.bundle.signature import LINE_BYTES
from engines.errors import Kind
from worker.arrival import Arrival, Attached, Block, block_views
from worker.channel.records import FLAG_CANCEL, MASK_32
from worker.models import LoadedModel

MAX_BLOCKS: Final = 1024
"""Blocks remembered per channel."""
_CANCEL: Final = FLAG_CANCEL << 48


@dataclass(frozen=True, slots=True)
class Refusal:
    """A record that cannot become a request, and what to answer."""

    request_id: int
    kind: Kind
    text: str


class Intake:
    """Reads records of attached channels into requests. ``loaded`` finds a model by id."""

    def __init__(self, loaded: Callable[[int], LoadedModel | None]) -> None:
        self._loaded = loaded
        self._next_key = 1
        self._next_block = 1

    def read(self, attached: Attached) -> tuple[list[Arrival], list[int], list[Refusal]]:
        """Take every published record: new requests, request ids to cancel, refusals to answer."""
        requests: list[Arrival] = []
        cancels: list[int] = []
        refusals: list[Refusal] = []
        live = attached.live
        blocks = attached.blocks
        key = self._next_key
        for request_id, head, block_offset, extent, rows, deadline_ns, arrival_ns, _ in attached.channel.take():
            if head & _CANCEL:
                cancels.append(request_id)
                continue
            block_rows = extent & MASK_32
            block = blocks.get((head, block_offset, block_rows))
            if block is None:
                found = self._block(attached, head, block_offset, block_rows)
                if isinstance(found, Refusal):
                    refusals.append(Refusal(request_id, found.kind, found.text))
                    continue
                block = found
            row_start = extent >> 32
            if row_start + rows > block_rows:
                refusals.append(Refusal(request_id, Kind.INTERNAL, "record points outside its block"))
            elif rows != block_rows and not block.loaded.shares_blocks:
                refusals.append(Refusal(request_id, Kind.INTERNAL, "record shares a block that cannot be shared"))
            elif request_id in live:
                refusals.append(Refusal(request_id, Kind.INTERNAL, f"request id {request_id} is in use"))
            else:
                request = Arrival(key, attached, request_id, block, row_start, rows, head, deadline_ns, arrival_ns)
                key += 1
                live[request_id] = request
                requests.append(request)
        self._next_key = key
        return requests, cancels, refusals

    def _block(self, attached: Attached, head: int, block_offset: int, block_rows: int) -> Block | Refusal:
        """Return the block that a record names, and remember it; or why there is none (for request id 0)."""
        loaded = self._loaded(head & MASK_32)
        if loaded is None:
            return Refusal(0, Kind.NOT_READY, "the model was unloaded")
        variant = head >> 32 & 0xFFFF
        if variant >= len(loaded.layouts):
            return Refusal(0, Kind.INTERNAL, f"record names variant {variant} of {len(loaded.layouts)}")
        arena = attached.channel.arena
        layout = loaded.layouts[variant]
        if block_offset % LINE_BYTES or block_offset + layout.block_bytes(block_rows) > len(arena):
            return Refusal(0, Kind.INTERNAL, "record points outside its arena")
        if len(attached.blocks) >= MAX_BLOCKS:
            attached.blocks.clear()
        views = block_views(arena, loaded.signature, variant, layout, block_offset, block_rows)
        block = Block(loaded, self._next_block << 32, block_rows, *views)
        self._next_block += 1
        attached.blocks[head, block_offset, block_rows] = block
        return block
