"""A gRPC client of h2 and a bare socket: sends what no gRPC library would."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import h2.config
import h2.connection
import h2.events
import h2.exceptions
import h2.settings
import numpy as np

from frontend.kserve.proto import message_class

INFER = "/inference.GRPCInferenceService/ModelInfer"
STREAM = "/inference.GRPCInferenceService/ModelStreamInfer"


def framed(message: bytes, flag: int = 0) -> bytes:
    """Return a message as it stands in a body."""
    return bytes((flag,)) + len(message).to_bytes(4, "big") + message


def infer_message(model: str = "echo_f32", request_id: str = "", elements: int = 4) -> bytes:
    """Return a serialised ModelInferRequest of one row."""
    message: Any = message_class("ModelInferRequest")(model_name=model, id=request_id)
    message.inputs.add(name="x", datatype="FP32", shape=[1, elements])
    message.raw_input_contents.append(np.zeros(elements, dtype=np.float32).tobytes())
    data: bytes = message.SerializeToString()
    return data


@dataclass
class Answer:
    """What came on one stream."""

    headers: dict[str, str] = field(default_factory=dict)
    data: bytearray = field(default_factory=bytearray)
    trailers: dict[str, str] = field(default_factory=dict)
    reset: int | None = None
    ended: bool = False

    @property
    def status(self) -> int:
        """The gRPC status, wherever it stood."""
        return int((self.trailers or self.headers)["grpc-status"])

    @property
    def text(self) -> str:
        """The gRPC message, still percent-encoded."""
        return (self.trailers or self.headers).get("grpc-message", "")


class RawClient:
    """One connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, window: int) -> None:
        self.reader, self.writer = reader, writer
        config = h2.config.H2Configuration(
            client_side=True, header_encoding="utf-8", validate_outbound_headers=False, normalize_outbound_headers=False
        )
        self.h2 = h2.connection.H2Connection(config)
        self.answers: dict[int, Answer] = defaultdict(Answer)
        self.terminated: h2.events.ConnectionTerminated | None = None
        self.acknowledge = True
        self.h2.initiate_connection()
        self.h2.update_settings({h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: window})
        self._changed = asyncio.Event()
        self._reading = asyncio.create_task(self._read())
        self.closed = False

    @classmethod
    async def open(cls, address: str, window: int = 65_535) -> RawClient:
        host, _, port = address.rpartition(":")
        client = cls(*await asyncio.open_connection(host, int(port)), window)
        client.flush()
        return client

    async def close(self) -> None:
        self.writer.transport.abort()
        self._reading.cancel()
        await asyncio.gather(self._reading, return_exceptions=True)

    def flush(self) -> None:
        self.writer.write(self.h2.data_to_send())

    def start(self, path: str = INFER, method: str = "POST", **fields: str | None) -> int:
        """Send headers; fields replace or remove (None) the usual ones. Return the stream."""
        usual: dict[str, str | None] = {"content-type": "application/grpc", "te": "trailers"}
        usual.update({name.replace("_", "-"): value for name, value in fields.items()})
        stream_id = self.h2.get_next_available_stream_id()
        pseudo = [(":method", method), (":scheme", "http"), (":path", path), (":authority", "here")]
        self.h2.send_headers(stream_id, [*pseudo, *((n, v) for n, v in usual.items() if v is not None)])
        self.flush()
        return stream_id

    async def send(self, stream_id: int, data: bytes, *, end: bool = True) -> None:
        """Send data as the windows allow."""
        view = memoryview(data)
        while len(view):
            room = min(self.h2.local_flow_control_window(stream_id), self.h2.max_outbound_frame_size, len(view))
            if room:
                self.h2.send_data(stream_id, bytes(view[:room]))
                view = view[room:]
                self.flush()
            else:
                await self._change()
        if end:
            self.h2.end_stream(stream_id)
            self.flush()

    async def call(self, body: bytes, path: str = INFER, method: str = "POST", **fields: str | None) -> Answer:
        stream_id = self.start(path, method, **fields)
        await self.send(stream_id, body)
        return await self.answer(stream_id)

    async def answer(self, stream_id: int) -> Answer:
        """Wait until the stream is over."""
        answer = self.answers[stream_id]
        while not answer.ended and answer.reset is None and not self.closed:
            await self._change()
        return answer

    async def until_closed(self) -> None:
        while not self.closed:
            await self._change()

    async def _change(self) -> None:
        async with asyncio.timeout(20):
            await self._changed.wait()
        self._changed.clear()

    async def _read(self) -> None:
        try:
            while True:
                # Frame by frame: h2 ends at a GOAWAY, and would lose what it saw in the same bytes.
                header = await self.reader.readexactly(9)
                frame = header + await self.reader.readexactly(int.from_bytes(header[:3], "big"))
                for event in self.h2.receive_data(frame):
                    self._take(event)
                self.flush()
                self._changed.set()
        except (ConnectionError, asyncio.IncompleteReadError, h2.exceptions.ProtocolError):
            pass
        finally:
            self.closed = True
            self._changed.set()

    def _take(self, event: Any) -> None:
        match event:
            case h2.events.ResponseReceived():
                self.answers[event.stream_id].headers = dict(event.headers)
            case h2.events.TrailersReceived():
                self.answers[event.stream_id].trailers = dict(event.headers)
            case h2.events.DataReceived():
                self.answers[event.stream_id].data += event.data
                if self.acknowledge:
                    self.h2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
            case h2.events.StreamEnded():
                self.answers[event.stream_id].ended = True
            case h2.events.StreamReset():
                self.answers[event.stream_id].reset = event.error_code
            case h2.events.ConnectionTerminated():
                self.terminated = event
