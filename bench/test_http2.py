"""What the fast gRPC server costs per call without sockets and model: bytes in to bytes out, and its parts.

Run: ``pytest bench/test_http2.py``. Figures are for a turn of 64 calls where the name says so, else per call.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hpack import Decoder, Encoder

from bench.grpc_double import EchoApp, EchoCall, echo_entry
from frontend.grpc_fast.service import Service
from frontend.http2 import frames
from frontend.http2.connection import Connection
from frontend.http2.fields import HeadDecoder
from frontend.http2.limits import limits_of
from frontend.inference import InferResponse, OutputTensor
from frontend.kserve.grpc_codec import decode_infer, encode_infer
from frontend.kserve.infer_templates import RequestTemplates, ResponseTemplates
from frontend.kserve.proto import message_class
from frontend.settings import EndpointSettings, GrpcSettings

LIMITS = EndpointSettings()
HTTP2 = limits_of(LIMITS, 4096)
CALLS = 64
FIELDS = [
    (":method", "POST"), (":scheme", "http"), (":path", "/inference.GRPCInferenceService/ModelInfer"),
    (":authority", "127.0.0.1:8001"), ("content-type", "application/grpc"), ("te", "trailers"),
    ("user-agent", "grpc-python/1.85.3 grpc-c/53.0.0 (linux; chttp2)"),
    ("grpc-accept-encoding", "identity, deflate, gzip"),
]  # fmt: skip


def message_of(elements: int) -> bytes:
    message: Any = message_class("ModelInferRequest")(model_name="echo", id="request-17")
    values = np.random.default_rng(1).random((1, elements), np.float32)
    message.inputs.add(name="x", datatype="FP32", shape=values.shape)
    message.raw_input_contents.append(values.tobytes())
    data: bytes = message.SerializeToString()
    return data


class Waiting:
    """Keeps calls until a turn is over; answers all with the same response, so that only the server is measured."""

    limits = LIMITS

    def __init__(self) -> None:
        self.table = [echo_entry()]
        self.done: list[Callable[[InferResponse], None]] = []
        self.array = np.zeros((1, 64), np.float32)

    def entries(self) -> list[Any]:
        return self.table

    def entry(self, model: str, version: str = "") -> Any:
        return self.table[0]

    def start(self, request: Any, arrival_ns: int, done: Any) -> EchoCall:
        self.done.append(done)
        return EchoCall(done)

    def answer(self) -> None:
        done, self.done = self.done, []
        for one in done:
            one(InferResponse("echo", "1", "request-17", [OutputTensor("y", "FP32", self.array)]))


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    made = asyncio.new_event_loop()
    yield made
    made.close()


@pytest.mark.parametrize("kind", ["repeated", "ordinary", "large"])
def test_a_turn_of_calls(benchmark: Any, kind: str, loop: asyncio.AbstractEventLoop) -> None:
    """64 calls of 256 B, or a large one of 1 MiB, in one read; answered together; one write."""
    elements = 1 << 18 if kind == "large" else 64
    serving: Any = Waiting()
    app: Any = EchoApp(loop) if kind == "repeated" else None
    settings = GrpcSettings(reflection=False)
    service = Service(serving, settings, LIMITS, HTTP2, asyncio.Event(), time.monotonic_ns, app)
    connection = Connection(service, HTTP2, lambda: None, 0)
    connection.start()
    connection.receive(frames.PREFACE + frames.settings({}))
    connection.receive(frames.window_update(0, 2**31 - 1 - 65_535))
    encoder = Encoder()
    body = message_of(elements)
    body = b"\0" + len(body).to_bytes(4, "big") + body
    chunks = [body[at : at + 16_384] for at in range(0, len(body), 16_384)]
    next_id = 1

    def data_of_a_turn() -> tuple[tuple[bytes], dict[str, Any]]:
        nonlocal next_id
        out = bytearray()
        for _ in range(CALLS if elements == 64 else 1):
            out += frames.frame(frames.HEADERS, frames.END_HEADERS, next_id, bytes(encoder.encode(FIELDS)))
            for chunk in chunks[:-1]:
                out += frames.frame(frames.DATA, 0, next_id, chunk)
            out += frames.frame(frames.DATA, frames.END_STREAM, next_id, chunks[-1])
            next_id += 2
        return (bytes(out),), {}

    def turn(data: bytes) -> int:
        connection.receive(data)
        serving.answer()
        if app is not None:
            app.channel.answer()
        parts, releases = connection.sender.take()
        for release in releases:
            release()
        connection.sender.window = 2**31 - 1
        return sum(map(len, parts))

    assert benchmark.pedantic(turn, setup=data_of_a_turn, rounds=200, warmup_rounds=20) > 0
    assert service.calls == 0 and not connection.over


def test_head_from_memo(benchmark: Any) -> None:
    decoder, encoder = HeadDecoder(HTTP2, lambda head: None), Encoder()
    for _ in range(2):
        block = bytes(encoder.encode(FIELDS))
        decoder.head(block)
    assert benchmark(decoder.head, block).method == b"POST"


def test_head_by_hpack(benchmark: Any) -> None:
    decoder, encoder = Decoder(), Encoder()
    for _ in range(2):
        block = bytes(encoder.encode(FIELDS))
        decoder.decode(block, raw=True)
    assert len(benchmark(decoder.decode, block, raw=True)) == len(FIELDS)


def test_decode_by_template(benchmark: Any) -> None:
    data, templates = message_of(64), RequestTemplates(LIMITS)
    assert benchmark(templates.decode, data) == decode_infer(data, LIMITS)


def test_decode_by_protobuf(benchmark: Any) -> None:
    assert benchmark(decode_infer, message_of(64), LIMITS).model == "echo"


def response() -> InferResponse:
    return InferResponse("echo", "1", "request-17", [OutputTensor("y", "FP32", np.zeros((1, 64), np.float32))])


def test_encode_by_template(benchmark: Any) -> None:
    templates, given = ResponseTemplates(), response()
    assert b"".join(benchmark(templates.encode, given)) == encode_infer(given)


def test_encode_by_protobuf(benchmark: Any) -> None:
    assert len(benchmark(encode_infer, response())) > 256
