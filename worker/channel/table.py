"""Which channel ids are taken, and which of their request tails have moved."""

from __future__ import annotations

import numpy as np

from engines.tensor import NDArray
from worker.channel import layout as at
from worker.channel.channel import Channel
from worker.channel.segment import WorkerPage


class ChannelTable:
    """Ids of channels and the request tails that belong to them.

    An id is free when its channel was released *and* its frontend has closed its side: a frontend that was cut off but
    still runs may store its tail once more, which must not look like another channel's work.

    Attributes:
        read_up_to: of every id ever used, the tail up to which nothing is left to take; channels store their own.
    """

    def __init__(self, page: WorkerPage, max_channels: int) -> None:
        assert max_channels <= at.MAX_CHANNELS, f"the page holds {at.MAX_CHANNELS} channels, not {max_channels}"
        self._page = page
        self._max_channels = max_channels
        self._channels: list[Channel | None] = []
        self._connected: set[int] = set()
        self.read_up_to: list[int] = []
        self._tails: NDArray = np.empty(0, dtype=np.uint64)

    def claim(self) -> int | None:
        """Return a free id, now connected and with its tail at 0; None if all are taken."""
        for channel_id in range(self._max_channels):
            taken = channel_id < len(self._channels) and self._channels[channel_id] is not None
            if taken or channel_id in self._connected:
                continue
            self._connected.add(channel_id)
            if channel_id == len(self._channels):
                self._channels.append(None)
                self.read_up_to.append(0)
                self._tails = self._page.request_tails[: len(self.read_up_to)]
            self._page.request_tail(channel_id)[0] = 0
            self.read_up_to[channel_id] = 0
            return channel_id
        return None

    def put(self, channel: Channel) -> None:
        """Enter a channel under its claimed id."""
        self._channels[channel.id] = channel

    def disconnected(self, channel_id: int) -> None:
        """Note that nobody stores this id's tail any more."""
        self._connected.discard(channel_id)

    def released(self, channel: Channel) -> None:
        """Note that the worker has done with a channel."""
        self._channels[channel.id] = None

    def attached(self) -> list[Channel]:
        """Return every channel that is not closed."""
        return [channel for channel in self._channels if channel is not None and not channel.closed]

    def has_work(self) -> bool:
        """Return whether any channel has records that were not taken."""
        return bool(self._tails.tolist() != self.read_up_to)

    def rung(self) -> list[Channel]:
        """Return the channels with unread records."""
        tails: list[int] = self._tails.tolist()
        ringing: list[Channel] = []
        if tails == self.read_up_to:
            return ringing
        for channel_id, tail in enumerate(tails):
            if tail == self.read_up_to[channel_id]:
                continue
            channel = self._channels[channel_id]
            if channel is not None and not channel.closed:
                ringing.append(channel)
            else:
                # Stored by a frontend that is gone or was cut off; nobody will take it.
                self.read_up_to[channel_id] = tail
        return ringing
