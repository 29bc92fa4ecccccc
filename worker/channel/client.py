"""The frontend's end of a channel: attaches, places tensors, submits requests, and survives the worker.

Theory
    ``connecting``: nobody to talk to; a task tries to attach, waiting 20 ms to 1 s between tries, for ever.
    ``attached``: requests flow. ``draining``: those in flight are answered, no new ones.
    ``closed``: ``close`` was called, or the first attach failed for a reason that waiting cannot cure.

    When the socket ends, published replies are handed out, everything else in flight fails with UNAVAILABLE in the same
    callback, and the state is ``connecting`` again. Nobody waits for a worker that is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Any, Final

import msgspec

from engines.errors import Kind, QueueFull, ServingError, Unavailable, error_of
from worker.channel import attach, frames
from worker.channel.attach import AttachRefused
from worker.channel.attachment import Attachment, Turn
from worker.channel.dial import Dialled, dial
from worker.channel.doorbell import Barrier
from worker.channel.frames import BadFrame
from worker.channel.messages import Answer, Ask, Draining, ModelEntry, Models, ToFrontend
from worker.channel.placement import OnReply, Placement, Reply
from worker.channel.ring import RingCorrupt, require_ordered_machine
from worker.config import ChannelSettings

__all__ = ["Placement", "Reply", "WorkerChannel"]

log = logging.getLogger(__name__)

FIRST_WAIT_S: Final = 0.02
LONGEST_WAIT_S: Final = 1.0
MAX_ASKS: Final = 256
"""Questions without an answer yet."""

_decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(ToFrontend)


class WorkerChannel:
    """A frontend's channel to one worker; used on one event loop.

    Args:
        name: how the worker lists this frontend.
        on_models: called with the whole model table on attach, before the state changes, and on every change.
        on_state: called with the new state.
        turn: told before and after the callbacks of several replies.
    """

    def __init__(
        self,
        socket_path: str,
        name: str,
        settings: ChannelSettings,
        on_models: Callable[[list[ModelEntry]], None],
        on_state: Callable[[str], None],
        turn: Turn | None = None,
    ) -> None:
        self._turn = turn
        self._socket_path = socket_path
        self._name = name
        self._settings = settings
        self._on_models = on_models
        self._on_state = on_state
        self._state = "connecting"
        self._why = "the worker has not been reached yet"
        self._attachment: Attachment | None = None
        self._barrier = Barrier()
        self._attaches = 0
        self._next_request_id = 1
        self._late_replies = 0
        self._asks: dict[int, asyncio.Future[Any]] = {}
        self._next_ask_id = 1
        self._task: asyncio.Task[None] | None = None
        self._gone = asyncio.Event()

    @property
    def state(self) -> str:
        """``connecting`` | ``attached`` | ``draining`` | ``closed``."""
        return self._state

    @property
    def in_flight(self) -> int:
        """Requests submitted and not answered."""
        return len(self._attachment.pending) if self._attachment is not None else 0

    @property
    def arena_bytes_used(self) -> int:
        """See ``Arena.bytes_used``."""
        return self._attachment.arena.bytes_used if self._attachment is not None else 0

    @property
    def late_replies(self) -> int:
        """Answers that came when nobody waited any more."""
        return self._late_replies + (self._attachment.late_replies if self._attachment is not None else 0)

    async def start(self) -> None:
        """Attach; waits for as long as no worker listens.

        Raises:
            AttachRefused: the worker does not take this frontend and will not later.
            NoSharedMemory: the segment does not fit.
            ForeignUser, UnsupportedMachine: see there.
        """
        assert self._task is None, "a channel is started once"
        require_ordered_machine()
        self._barrier.start()
        first: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._keep_attached(first))
        await first

    async def close(self) -> None:
        """Detach: what is in flight fails with UNAVAILABLE. May be called twice, or before ``start``."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        self._lose("the frontend is closing", "closed")

    def place(self, entry: ModelEntry, variant: int, rows: int) -> Placement:
        """Return room for a request's executable inputs and outputs, whose inputs the caller fills.

        Raises:
            ArenaFull, QueueFull: no room now.
            TooLarge: no room ever.
            NotReady: this worker does not have that model (any more).
            Unavailable: no worker, or it is draining.
        """
        attachment = self._attachment
        if attachment is None or self._state != "attached":
            raise Unavailable(self._why)
        return attachment.place(entry, variant, rows)

    def submit(self, placement: Placement, deadline_ns: int, arrival_ns: int, on_reply: OnReply, flags: int = 0) -> int:
        """Hand a filled placement to the worker; return the request's id, unique in this channel's life.

        ``on_reply`` is called exactly once, from the event loop, unless the request is abandoned.

        Raises:
            Unavailable: the worker that it was placed for is gone; the caller still releases the placement.
        """
        return placement.attachment.submit(placement, deadline_ns, arrival_ns, on_reply, flags)

    def cancel(self, request_id: int) -> bool:
        """Ask the worker to drop a request; the reply still comes. False if it was answered or cancelled before."""
        return self._attachment is not None and self._attachment.cancel(request_id)

    def abandon(self, request_id: int) -> None:
        """Cancel and forget: ``on_reply`` is not called, the rows go back when the worker answers."""
        if self._attachment is not None:
            self._attachment.abandon(request_id)

    async def ask(self, what: str, **args: Any) -> Any:
        """Return the worker's answer to a question.

        Raises:
            ServingError: of the kind that the worker answered with.
            QueueFull: too many questions are open.
            Unavailable: no worker, or it went away before it answered.
        """
        attachment = self._attachment
        if attachment is None:
            raise Unavailable(self._why)
        if len(self._asks) >= MAX_ASKS:
            raise QueueFull(f"{MAX_ASKS} questions to the worker are open")
        ask_id = self._next_ask_id
        self._next_ask_id += 1
        payload = frames.encode(Ask(id=ask_id, what=what, args=args))
        attach.check_payload_bytes(payload, f"question {what!r}", frames.MAX_ASK_BYTES)
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._asks[ask_id] = answer
        try:
            self._send(attachment, payload)
            return await answer
        finally:
            self._asks.pop(ask_id, None)

    async def _keep_attached(self, first: asyncio.Future[None]) -> None:
        wait_s = FIRST_WAIT_S
        while True:
            try:
                dialled = await dial(
                    self._socket_path,
                    self._name,
                    self._settings,
                    self._attaches + 1,
                    self._barrier,
                    self._next_request_id,
                )
            except Exception as error:
                if not isinstance(error, (ServingError, OSError)):
                    # Nobody waits for this task's result: whatever it is, it must be seen and must not end the tries.
                    log.exception("channel.attach_broke")
                self._note_failure(error)
                if not first.done() and _is_final(error):
                    self._set_state("closed")
                    first.set_exception(error)
                    return
                await asyncio.sleep(wait_s)
                wait_s = min(2 * wait_s, LONGEST_WAIT_S)
                continue
            wait_s = FIRST_WAIT_S
            self._attaches += 1
            self._adopt(dialled)
            if not first.done():
                first.set_result(None)
            await self._gone.wait()

    def _note_failure(self, error: Exception) -> None:
        why = f"the worker cannot be reached: {error}"
        if why != self._why:
            # Once per reason, not once per try.
            log.info("channel.attach_failed socket=%s reason=%r", self._socket_path, str(error))
        self._why = why

    def _adopt(self, dialled: Dialled) -> None:
        attachment = dialled.attachment
        self._gone.clear()
        attachment.turn = self._turn
        self._attachment = attachment
        loop = asyncio.get_running_loop()
        loop.add_reader(attachment.own_doorbell, self._on_doorbell, attachment)
        loop.add_reader(attachment.frames.fileno(), self._on_frames, attachment)
        attachment.start()
        self._models_came(attachment, dialled.models)
        self._set_state("attached")
        self._receive(attachment, dialled.later)

    def _on_doorbell(self, attachment: Attachment) -> None:
        if attachment is not self._attachment:
            return
        try:
            attachment.drain()
        except RingCorrupt as error:
            self._lose(f"the worker's replies are corrupt: {error}", "connecting")

    def _on_frames(self, attachment: Attachment) -> None:
        if attachment is not self._attachment:
            return
        try:
            payloads = attachment.frames.read()
        except BadFrame as error:
            self._lose(f"the worker's messages are corrupt: {error}", "connecting")
            return
        self._receive(attachment, payloads)

    def _receive(self, attachment: Attachment, payloads: list[bytes]) -> None:
        try:
            for payload in payloads:
                self._understand(attachment, _decoder.decode(payload))
        except (BadFrame, msgspec.DecodeError, UnicodeDecodeError) as error:
            self._lose(f"the worker's messages are corrupt: {error}", "connecting")
            return
        if attachment.frames.eof:
            self._lose("the worker is gone", "connecting")

    def _understand(self, attachment: Attachment, message: object) -> None:
        match message:
            case Models(models=models):
                self._models_came(attachment, models)
            case Draining():
                self._why = "the worker is draining"
                self._set_state("draining")
            case Answer(id=ask_id, kind=kind, text=text, value=value):
                waiting = self._asks.get(ask_id)
                if waiting is None or waiting.done():
                    self._late_replies += 1
                elif kind == Kind.OK:
                    waiting.set_result(value)
                else:
                    known = kind if kind in Kind._value2member_map_ else Kind.INTERNAL
                    waiting.set_exception(error_of(Kind(known), text))
            case _:
                raise BadFrame(f"unexpected {type(message).__name__}")

    def _models_came(self, attachment: Attachment, models: list[ModelEntry]) -> None:
        attachment.set_models(models)
        try:
            self._on_models(models)
        except Exception:
            log.exception("channel.on_models_failed")

    def _send(self, attachment: Attachment, payload: bytes) -> None:
        try:
            attachment.frames.send(payload)
        except OSError as error:
            raise Unavailable(f"the worker is gone: {error}") from error
        if attachment.frames.unsent:
            asyncio.get_running_loop().add_writer(attachment.frames.fileno(), self._on_writable, attachment)

    def _on_writable(self, attachment: Attachment) -> None:
        # A broken connection shows as the end of what can be read.
        with contextlib.suppress(OSError):
            attachment.frames.flush()
        if not attachment.frames.unsent:
            asyncio.get_running_loop().remove_writer(attachment.frames.fileno())

    def _lose(self, why: str, state: str) -> None:
        """Leave the worker: answer everybody who waits for it, then give the descriptors back."""
        attachment, self._attachment = self._attachment, None
        self._why = why
        if attachment is not None:
            loop = asyncio.get_running_loop()
            loop.remove_reader(attachment.own_doorbell)
            loop.remove_reader(attachment.frames.fileno())
            loop.remove_writer(attachment.frames.fileno())
            in_flight = len(attachment.pending)
            log.info("channel.lost socket=%s reason=%r in_flight=%d", self._socket_path, why, in_flight)
            attachment.fail_all(why)
            self._next_request_id = attachment.next_request_id
            self._late_replies += attachment.late_replies
            attachment.close()
        for answer in self._asks.values():
            if not answer.done():
                answer.set_exception(Unavailable(why))
        self._set_state(state)
        self._gone.set()

    def _set_state(self, state: str) -> None:
        if state == self._state:
            return
        self._state = state
        try:
            self._on_state(state)
        except Exception:
            log.exception("channel.on_state_failed")


def _is_final(error: Exception) -> bool:
    """Return whether the first attach should give up rather than wait for a worker."""
    if isinstance(error, AttachRefused):
        return not error.wait_may_help
    return not isinstance(error, OSError)
