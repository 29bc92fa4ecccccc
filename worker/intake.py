"""From request records to scheduler requests: every number a frontend wrote is checked before it is used.

Frontends run users' hooks, so their memory may be scribbled on; a record that does not hold is answered with an error
and touches nothing. One object per live request; a channel's requests are remembered so that its death withdraws them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from engines.bundle.signature import LINE_BYTES
from engines.errors import Kind
from worker.channel.channel import Channel
from worker.channel.records import FLAG_BACKGROUND, FLAG_CANCEL, FLAG_COMMITTED, MASK_32
from worker.dispatch import Place
from worker.models import LoadedModel
from worker.scheduling.types import Request


@dataclass(slots=True)
class Attached:
    """A channel and the requests it has in the worker, by the frontend's request id.

    Attributes:
        executing: dispatches under way that touch this channel's arena.
    """

    channel: Channel
    live: dict[int, Request] = field(default_factory=dict)
    executing: int = 0
    gone: bool = False


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

    def read(self, attached: Attached) -> tuple[list[Request], list[int], list[Refusal]]:
        """Take every published record: new requests, request ids to cancel, refusals to answer."""
        requests: list[Request] = []
        cancels: list[int] = []
        refusals: list[Refusal] = []
        channel = attached.channel
        for words in channel.take().tolist():
            request_id = words[0]
            if words[1] >> 48 & FLAG_CANCEL:
                cancels.append(request_id)
                continue
            outcome = self._request(attached, channel, words)
            if isinstance(outcome, Request):
                attached.live[request_id] = outcome
                requests.append(outcome)
            else:
                refusals.append(Refusal(request_id, *outcome))
        return requests, cancels, refusals

    def _request(self, attached: Attached, channel: Channel, words: list[int]) -> Request | tuple[Kind, str]:
        request_id, head, block_offset, block, rows, deadline_ns, arrival_ns, _ = words
        loaded = self._loaded(head & MASK_32)
        if loaded is None:
            return Kind.NOT_READY, "the model was unloaded"
        variant = head >> 32 & 0xFFFF
        flags = head >> 48
        block_rows = block & MASK_32
        row_start = block >> 32
        if variant >= len(loaded.layouts):
            return Kind.INTERNAL, f"record names variant {variant} of {len(loaded.layouts)}"
        end = block_offset + loaded.layouts[variant].block_bytes(block_rows)
        if block_offset % LINE_BYTES or end > len(channel.arena) or row_start + rows > block_rows:
            return Kind.INTERNAL, "record points outside its arena"
        if not loaded.shares_blocks and (row_start or rows != block_rows):
            return Kind.INTERNAL, "record shares a block that cannot be shared"
        if request_id in attached.live:
            return Kind.INTERNAL, f"request id {request_id} is in use"
        key = self._next_key
        self._next_key += 1
        place = Place(channel, request_id, block_offset, block_rows, row_start, rows)
        return Request(
            key,
            loaded.entry.model_id,
            variant,
            rows,
            arrival_ns,
            deadline_ns,
            bool(flags & FLAG_BACKGROUND),
            bool(flags & FLAG_COMMITTED),
            place,
        )
