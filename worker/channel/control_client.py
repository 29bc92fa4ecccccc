"""One question to a worker, for the supervisor and the command line; blocks, with a limit."""

from __future__ import annotations

import select
import time
from typing import Any, Final

import msgspec

from engines.errors import DeadlineExceeded, InvalidInput, Kind, Unavailable, error_of
from worker.channel import attach, frames
from worker.channel.frames import FrameSocket
from worker.channel.messages import MAX_FRAME_BYTES, Answer, Ask

_decoder: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)
_ID: Final = 1


def ask(socket_path: str, what: str, timeout_s: float, **args: Any) -> Any:
    """Return the worker's answer to one question, over a connection of its own.

    Raises:
        ServingError: of the kind that the worker answered with.
        Unavailable: nobody listens, or the worker went away.
        DeadlineExceeded: no answer within ``timeout_s``.
    """
    end_s = time.monotonic() + timeout_s
    payload = frames.encode(Ask(id=_ID, what=what, args=args))
    attach.check_payload_bytes(payload, f"question {what!r}", frames.MAX_ASK_BYTES)
    try:
        connection = FrameSocket(attach.connect(socket_path), MAX_FRAME_BYTES)
    except OSError as error:
        raise Unavailable(f"no worker answers on {socket_path!r}: {error}") from error
    try:
        connection.send(payload)
        answer = _answer(connection, what, end_s, timeout_s)
    except OSError as error:
        raise Unavailable(f"the worker on {socket_path!r} went away: {error}") from error
    finally:
        connection.close()
    if answer.kind == Kind.OK:
        return answer.value
    raise error_of(Kind(answer.kind) if answer.kind in Kind._value2member_map_ else Kind.INTERNAL, answer.text)


def _answer(connection: FrameSocket, what: str, end_s: float, timeout_s: float) -> Answer:
    poller = select.poll()
    while True:
        poller.register(connection, select.POLLIN | (select.POLLOUT if connection.unsent else 0))
        left_s = end_s - time.monotonic()
        if left_s <= 0 or not poller.poll(left_s * 1000):
            raise DeadlineExceeded(f"the worker did not answer {what!r} within {timeout_s:g} s")
        connection.flush()
        for payload in connection.read():
            try:
                return _decoder.decode(payload)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                raise InvalidInput(f"the worker's answer to {what!r} is no answer: {error}") from error
        if connection.eof:
            raise ConnectionResetError("connection closed before the answer")
