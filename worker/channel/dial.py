"""How a frontend attaches: segment, Hello, Welcome."""

from __future__ import annotations

import asyncio
import contextlib
import os
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from engines.errors import InvalidInput
from worker.channel import attach, frames
from worker.channel.attach import AttachRefused
from worker.channel.attachment import Attachment
from worker.channel.doorbell import Barrier, open_doorbell, require_doorbell
from worker.channel.frames import FrameSocket
from worker.channel.layout import MAX_CHANNELS, SegmentLayout
from worker.channel.messages import (
    LAYOUT_VERSION,
    MAX_FRAME_BYTES,
    Hello,
    ModelEntry,
    Refused,
    ToFrontend,
    Welcome,
)
from worker.channel.segment import NoSharedMemory, Segment, WorkerPage, reserve
from worker.config import ChannelSettings

ATTACH_TIMEOUT_S: Final = 60.0
"""A worker that listens but does not answer: it may be loading models. Every try that is given up leaves a segment in
its queue of connections until it looks there, so tries are few and long."""

_decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(ToFrontend)


@dataclass(frozen=True, slots=True)
class Dialled:
    """A fresh attachment.

    Attributes:
        models: the table as it was on attach.
        later: frames that came behind the Welcome.
    """

    attachment: Attachment
    models: list[ModelEntry]
    later: list[bytes]


async def dial(
    socket_path: str,
    name: str,
    settings: ChannelSettings,
    generation: int,
    barrier: Barrier,
    first_request_id: int,
) -> Dialled:
    """Attach once.

    Raises:
        AttachRefused: the worker's reason.
        NoSharedMemory: the segment does not fit.
        InvalidInput: what the worker sent is not what it should be.
        ForeignUser: another user listens there.
        OSError: nobody listens, nobody answers, or the connection broke.
    """
    with ExitStack() as undo:
        connection = FrameSocket(attach.connect(socket_path), MAX_FRAME_BYTES)
        undo.callback(connection.close)
        doorbell = open_doorbell()
        undo.callback(os.close, doorbell)
        layout = SegmentLayout.of(settings.max_in_flight, settings.arena_bytes)
        with await _reserve(layout.segment_bytes) as reserved:
            segment = Segment(reserved.fd, layout)
            segment.initialise(generation, os.getpid(), settings.max_in_flight)
            hello = Hello(
                layout_version=LAYOUT_VERSION,
                name=name,
                pid=os.getpid(),
                records=settings.max_in_flight,
                arena_bytes=settings.arena_bytes,
                segment_bytes=layout.segment_bytes,
            )
            connection.send(frames.encode(hello), (reserved.fd, doorbell))
            async with asyncio.timeout(ATTACH_TIMEOUT_S):
                first, *later = await _payloads(connection)
        welcome = _welcome_in(first)
        page, worker_doorbell = _open_welcome(welcome, connection.take_fds())
        undo.pop_all()
    attachment = Attachment(
        connection,
        segment,
        page,
        welcome.channel_id,
        doorbell,
        worker_doorbell,
        barrier,
        settings.max_in_flight,
        first_request_id,
    )
    return Dialled(attachment, welcome.models, later)


@dataclass(frozen=True, slots=True)
class _Reserved:
    """A descriptor that is closed on leaving."""

    fd: int

    def __enter__(self) -> _Reserved:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.fd)


async def _reserve(size_bytes: int) -> _Reserved:
    """Reserve memory in a thread: clearing the pages takes a tenth of a second per GiB, and other callers wait."""
    work = asyncio.ensure_future(asyncio.to_thread(reserve, size_bytes))
    try:
        return _Reserved(await asyncio.shield(work))
    except asyncio.CancelledError:
        # The thread cannot be stopped, and what it makes must not stay.
        with contextlib.suppress(NoSharedMemory):
            os.close(await work)
        raise


async def _payloads(connection: FrameSocket) -> list[bytes]:
    """Return the first frames, at least one.

    Raises:
        ConnectionResetError: the worker went away before.
    """
    loop = asyncio.get_running_loop()
    while True:
        readable = loop.create_future()
        loop.add_reader(connection.fileno(), _wake, readable)
        try:
            await readable
        finally:
            loop.remove_reader(connection.fileno())
        payloads = connection.read()
        if payloads:
            return payloads
        if connection.eof:
            raise ConnectionResetError("the worker closed the connection before it answered")


def _wake(readable: asyncio.Future[None]) -> None:
    if not readable.done():
        readable.set_result(None)


def _welcome_in(payload: bytes) -> Welcome:
    try:
        message = _decoder.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidInput(f"the worker's answer is no message: {error}") from error
    match message:
        case Welcome(layout_version=version) if version != LAYOUT_VERSION:
            raise InvalidInput(f"the worker has layout version {version}, this frontend has {LAYOUT_VERSION}")
        case Welcome():
            return message
        case Refused(reason=reason, retryable=retryable):
            raise AttachRefused(reason, retryable)
        case _:
            raise InvalidInput(f"the worker answered Hello with {type(message).__name__}")


def _open_welcome(welcome: Welcome, fds: list[int]) -> tuple[WorkerPage, int]:
    """Return the worker's page, mapped, and its doorbell, which the caller owns."""
    try:
        if len(fds) != 2:
            raise InvalidInput(f"Welcome must carry two descriptors (page, doorbell), got {len(fds)}")
        page = WorkerPage(fds[0])
        page.check(welcome.generation)
        if not 0 <= welcome.channel_id < MAX_CHANNELS:
            raise InvalidInput(f"channel id {welcome.channel_id} is outside 0..{MAX_CHANNELS - 1}")
        require_doorbell(fds[1])
        return page, os.dup(fds[1])
    finally:
        for fd in fds:
            os.close(fd)
