"""What one HTTP/2 connection may cost. Each is a named number, and reaching it has a defined answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from frontend.settings import EndpointSettings

MAX_STREAMS: Final = 1024


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one connection; the defaults suit inference: few streams of small messages, some of many MiB.

    Attributes:
        max_header_bytes: a header block as sent, and its fields as HTTP/2 counts them; a larger block ends the
            connection, larger fields refuse the request.
        idle_ns: connection without a stream; then it is drained.
        read_ns: until preface and SETTINGS have come, and for one request message from first to last byte.
        write_ns: a stream, or the connection, whose data nobody takes.
        max_streams: told as MAX_CONCURRENT_STREAMS; more are refused with REFUSED_STREAM.
        frame_bytes: told as MAX_FRAME_SIZE; a longer frame ends the connection. Data is taken from a frame as it
            comes, so a large one is never collected.
        stream_window_bytes: told as INITIAL_WINDOW_SIZE; widened at once to the size of a message that is announced.
        connection_window_bytes: data on its way on all streams, at least 65,536; holds back nothing but a sender
            faster than we read.
        max_continuations: frames of one header block; more ends the connection (the CONTINUATION flood).
        max_memo: header blocks remembered decoded.
        idle_frames, idle_frames_per_s: PING, SETTINGS, PRIORITY, WINDOW_UPDATE, unknown frames and DATA without
            content, saved up and renewed; those that answers call forth do not count. More ends the connection.
        resets, resets_per_s: streams cancelled by the client before they were answered (the rapid reset flood).
            Clients with deadlines of a few ms cancel thousands a second without harm.
        pending_bytes: bytes written while the client does not read; beyond it nothing more is read from it.
    """

    max_header_bytes: int
    idle_ns: int
    read_ns: int
    write_ns: int
    max_streams: int = MAX_STREAMS
    frame_bytes: int = 1 << 18
    stream_window_bytes: int = 1 << 20
    connection_window_bytes: int = 1 << 24
    max_continuations: int = 32
    max_memo: int = 256
    idle_frames: int = 10_000
    idle_frames_per_s: int = 1_000
    resets: int = 10_000
    resets_per_s: int = 1_000
    pending_bytes: int = 1 << 18


def limits_of(endpoints: EndpointSettings, max_streams: int) -> Limits:
    """Return the limits that the settings leave no choice about, the others at their defaults."""
    return Limits(
        max_header_bytes=endpoints.max_header_bytes,
        idle_ns=int(endpoints.idle_timeout_seconds * 1e9),
        read_ns=int(endpoints.read_timeout_seconds * 1e9),
        write_ns=int(endpoints.write_timeout_seconds * 1e9),
        max_streams=min(MAX_STREAMS, max_streams),
    )
