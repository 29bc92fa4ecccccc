"""The fast gRPC server on real sockets: gRPC's own rules, hostile clients, and what it gives back afterwards."""

from __future__ import annotations

import asyncio
import gzip
import random
import socket
import subprocess
import sys
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from raw_grpc import INFER, STREAM, RawClient, framed, infer_message
from serving_double import DoubleServing, LoopThread

from frontend.grpc_fast.plans import read_timeout
from frontend.grpc_fast.server import FastGrpcServer
from frontend.http2 import frames
from frontend.http2.fields import encode_fields
from frontend.http2.frames import PREFACE, Code
from frontend.settings import EndpointSettings, GrpcSettings

SECOND = 1_000_000_000
HEALTH = "/grpc.health.v1.Health/Check"


async def until(condition: Callable[[], bool]) -> None:
    """Wait, at most 20 s, for something that has no event of its own."""
    for _ in range(4000):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise TimeoutError


class Clock:
    """Time that tests move; the timer of the server sees it too."""

    def __init__(self) -> None:
        self.now_ns = SECOND

    def __call__(self) -> int:
        return self.now_ns


class Bench:
    """A server with its double and clock."""

    def __init__(self, limits: EndpointSettings, settings: GrpcSettings) -> None:
        self.double = DoubleServing(limits)
        self.clock = Clock()
        self.server = FastGrpcServer(self.double, "127.0.0.1", 0, settings, limits, clock=self.clock)
        self.address = ""
        self.clients: list[RawClient] = []

    async def connect(self, window: int = 65_535) -> RawClient:
        client = await RawClient.open(self.address, window)
        self.clients.append(client)
        return client

    def pass_seconds(self, seconds: float) -> None:
        """Move the clock and tick."""
        self.clock.now_ns += int(seconds * SECOND)
        self.server.tick()

    async def settle(self) -> None:
        """Wait until the server has nothing under way."""
        server = self.server
        await until(lambda: not (server.calls or self.double.responses_out or server.buffered_bytes))


@asynccontextmanager
async def bench(settings: GrpcSettings, **limits: Any) -> AsyncIterator[Bench]:
    made = Bench(EndpointSettings(**limits), settings)
    made.address = f"127.0.0.1:{await made.server.start()}"
    try:
        yield made
    finally:
        for client in made.clients:
            await client.close()
        await made.server.close()
    assert made.server.connections == 0


Test = Callable[[Bench], Awaitable[None]]


@pytest.fixture
def serve(loop: LoopThread) -> Callable[..., None]:
    """Run a coroutine with a server of its own; nothing of it may be left at the end."""

    def run(test: Test, settings: GrpcSettings | None = None, **limits: Any) -> None:
        async def scenario() -> None:
            async with bench(settings or GrpcSettings(), **limits) as made:
                await test(made)
            assert (made.server.calls, made.double.responses_out, made.server.buffered_bytes) == (0, 0, 0)

        loop.run(scenario())

    return run


GOOD = framed(infer_message())
REFUSALS: list[tuple[str, bytes, dict[str, Any], int, str]] = [
    ("no message", b"", {}, 12, "without a request message"),
    ("half a prefix", b"\0\0", {}, 12, "without a request message"),
    ("half a message", GOOD[:-1], {}, 12, "without a request message"),
    ("two messages", GOOD + GOOD, {}, 12, "more than one request message"),
    ("flag 2", framed(infer_message(), 2), {}, 13, "compression flag is 2"),
    ("compressed, unnamed", framed(gzip.compress(GOOD), 1), {}, 13, "grpc-encoding names no compression"),
    ("unknown compression", GOOD, {"grpc_encoding": "br"}, 12, "'br' is not supported"),
    ("damaged compression", framed(b"xxxx", 1), {"grpc_encoding": "gzip"}, 3, "failed to decompress"),
    ("timeout without unit", GOOD, {"grpc_timeout": "10"}, 13, "malformed grpc-timeout '10'"),
    ("timeout of 9 digits", GOOD, {"grpc_timeout": "123456789S"}, 13, "malformed grpc-timeout"),
    ("long metadata", GOOD, {"x_long": "v" * 70_000}, 8, "max_header_bytes = 65536"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "fields", "status", "text"), [r[1:] for r in REFUSALS], ids=[r[0] for r in REFUSALS])
def test_broken_calls_are_told_what_is_wrong(
    serve: Callable[..., None], body: bytes, fields: dict[str, str], status: int, text: str
) -> None:
    async def test(made: Bench) -> None:
        client = await made.connect()
        answer = await client.call(body, **fields)
        assert (answer.headers[":status"], answer.status) == ("200", status)
        assert text in answer.text
        assert (await client.call(GOOD)).status == 0
        assert len(made.double.started) == 1

    serve(test)


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ({"content_type": "application/json"}, "415"),
        ({"content_type": None}, "415"),
        ({"content_type": "application/grpcx"}, "415"),
        ({"method": "GET"}, "405"),
    ],
)
def test_what_is_no_grpc_gets_an_http_status(
    serve: Callable[..., None], fields: dict[str, str | None], status: str
) -> None:
    async def test(made: Bench) -> None:
        answer = await (await made.connect()).call(b"", **fields)  # type: ignore[arg-type]
        assert answer.headers[":status"] == status

    serve(test)


@pytest.mark.parametrize("content_type", ["application/grpc", "application/grpc+proto", "application/grpc; charset=x"])
@pytest.mark.parametrize("encoding", ["identity", "gzip", "deflate"])
def test_right_calls_in_all_their_spellings(serve: Callable[..., None], content_type: str, encoding: str) -> None:
    async def test(made: Bench) -> None:
        client = await made.connect()
        message = infer_message("free", "i", 30_000)
        packed = {"identity": lambda m: m, "gzip": gzip.compress, "deflate": zlib.compress}[encoding](message)
        body = framed(packed, 0 if encoding == "identity" else 1)
        answer = await client.call(body, content_type=content_type, grpc_encoding=encoding)
        assert answer.status == 0
        assert answer.headers["grpc-accept-encoding"] == "identity, deflate, gzip"
        assert len(answer.data) > 120_000

    serve(test)


def test_a_message_of_many_small_frames_is_one_message(serve: Callable[..., None]) -> None:
    async def test(made: Bench) -> None:
        client = await made.connect()
        stream_id = client.start()
        for at in range(0, len(GOOD), 3):
            await client.send(stream_id, GOOD[at : at + 3], end=False)
        await client.send(stream_id, b"")
        assert (await client.answer(stream_id)).status == 0

    serve(test)


def test_the_size_is_refused_when_it_is_announced(serve: Callable[..., None]) -> None:
    async def test(made: Bench) -> None:
        client = await made.connect()
        for path in (INFER, STREAM, HEALTH):
            stream_id = client.start(path)
            await client.send(stream_id, b"\0" + (2 << 20).to_bytes(4, "big"), end=False)
            answer = await client.answer(stream_id)
            assert (answer.status, "max_request_bytes is 1048576" in answer.text) == (8, True)
        assert made.server.buffered_bytes == 0

    serve(test, max_request_bytes=1 << 20)


def test_messages_under_way_have_a_budget(serve: Callable[..., None]) -> None:
    async def test(made: Bench) -> None:
        client = await made.connect()
        prefix = b"\0" + (1 << 20).to_bytes(4, "big") + b"x"
        streams = [client.start() for _ in range(17)]
        for stream_id in streams:
            await client.send(stream_id, prefix, end=False)
        refused = await client.answer(streams[-1])
        assert (refused.status, refused.trailers or refused.headers) == (8, refused.headers)
        assert refused.headers["retry-after"] == "1"
        assert made.server.buffered_bytes == 16 << 20
        client.h2.reset_stream(streams[0], Code.CANCEL)
        client.flush()
        stream_id = client.start()
        await client.send(stream_id, framed(infer_message("free", elements=200_000)))
        assert (await client.answer(stream_id)).status == 0

    serve(test, max_request_bytes=1 << 20)


def test_deadlines_in_every_unit_arrive(serve: Callable[..., None]) -> None:
    async def test(made: Bench) -> None:
        client = await made.connect()
        for told, expected_ns in (("5S", 5 * SECOND), ("99999999n", 99_999_999), ("0m", 1), ("99999999H", None)):
            assert (await client.call(GOOD, grpc_timeout=told)).status == 0
            assert made.double.last_request is not None
            deadline_ns = made.double.last_request.deadline_ns
            assert deadline_ns == (None if expected_ns is None else made.clock.now_ns + expected_ns)

    serve(test)


@pytest.mark.parametrize(
    ("value", "ns"),
    [(b"1H", 3600 * SECOND), (b"2M", 120 * SECOND), (b"3S", 3 * SECOND), (b"4m", 4_000_000), (b"5u", 5000), (b"6n", 6),
     (b"99999999H", 99_999_999 * 3600 * SECOND), (b"", None), (b"S", None), (b"1", None), (b"1s", None), (b"-1S", None),
     (b"1.5S", None), (b" 1S", None), (b"123456789S", None), ("١S".encode(), None)],
)  # fmt: skip
def test_grpc_timeout(value: bytes, ns: int | None) -> None:
    assert read_timeout(value) == ns


def test_requests_that_never_end_are_ended(serve: Callable[..., None]) -> None:
    async def test(made: Bench) -> None:
        client = await made.connect()
        half, deadline, stream = client.start(), client.start(grpc_timeout="5S"), client.start(STREAM)
        for stream_id in (half, deadline, stream):
            await client.send(stream_id, GOOD[:20], end=False)
        open_stream = client.start(STREAM)
        await client.send(open_stream, GOOD, end=False)
        await made.double.until(lambda: len(made.double.started) == 1)
        made.pass_seconds(0)
        made.pass_seconds(6)
        assert (await client.answer(deadline)).status == 4
        made.pass_seconds(60)
        for stream_id in (half, stream):
            answer = await client.answer(stream_id)
            assert (answer.status, "read_timeout_seconds = 60 s" in answer.text) == (4, True)
        # A stream between two messages waits for as long as its client likes.
        made.pass_seconds(600)
        await client.send(open_stream, framed(infer_message(request_id="later")))
        assert (await client.answer(open_stream)).status == 0

    serve(test)


def test_a_client_that_never_opens_its_window_is_timed_out(serve: Callable[..., None]) -> None:
    async def test(made: Bench) -> None:
        client = await made.connect(window=1000)
        client.acknowledge = False
        stream_id = client.start()
        await client.send(stream_id, framed(infer_message("free", elements=50_000)))
        await made.double.until(lambda: made.double.responses_out == 1)
        while len(client.answers[stream_id].data) < 1000:
            await client._change()
        for _ in range(3):
            made.pass_seconds(31)
        assert (await client.answer(stream_id)).reset == Code.CANCEL
        await made.settle()
        client.acknowledge = True
        assert (await client.call(GOOD)).status == 0

    serve(test)


def test_a_client_that_does_not_read_is_dropped_and_its_memory_given_back(serve: Callable[..., None]) -> None:
    block = encode_fields(
        [(":method", "POST"), (":scheme", "http"), (":path", INFER), ("content-type", "application/grpc")]
    )
    body = framed(infer_message("free", elements=200_000))
    pieces = [PREFACE, frames.settings({frames.SETTINGS_INITIAL_WINDOW_SIZE: 2**31 - 1})]
    pieces.append(frames.window_update(0, 2**31 - 1 - 65_535))
    for stream_id in range(1, 61, 2):
        pieces.append(frames.frame(frames.HEADERS, frames.END_HEADERS, stream_id, block))
        cuts = range(0, len(body), 16_384)
        pieces += [frames.frame(frames.DATA, 0, stream_id, body[at : at + 16_384]) for at in cuts]
        pieces.append(frames.frame(frames.DATA, frames.END_STREAM, stream_id))
    sent = b"".join(pieces)

    async def test(made: Bench) -> None:
        host, _, port = made.address.rpartition(":")
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect((host, int(port)))
        sock.setblocking(False)
        sending = asyncio.create_task(asyncio.get_running_loop().sock_sendall(sock, sent))
        await until(lambda: any(one._sender.held for one in made.server._state.connections))  # type: ignore[union-attr]
        made.pass_seconds(0)
        assert made.double.responses_out > 0
        made.pass_seconds(61)
        await until(lambda: made.server.connections == 0)
        await asyncio.gather(sending, return_exceptions=True)
        sock.close()

    serve(test)


def test_connections_over_the_limit_are_told_so(serve: Callable[..., None]) -> None:
    async def test(made: Bench) -> None:
        clients = [await made.connect() for _ in range(2)]
        for client in clients:
            assert (await client.call(GOOD)).status == 0
        third = await made.connect()
        await third.until_closed()
        assert third.terminated is not None
        assert third.terminated.error_code == Code.ENHANCE_YOUR_CALM
        assert b"max_connections = 2" in (third.terminated.additional_data or b"")
        await third.close()
        await clients[0].close()
        await until(lambda: made.server.connections == 1)
        assert (await (await made.connect()).call(GOOD)).status == 0

    serve(test, max_connections=2)


def test_idle_connections_are_closed_in_good_order(serve: Callable[..., None]) -> None:
    async def test(made: Bench) -> None:
        client = await made.connect()
        assert (await client.call(GOOD)).status == 0
        made.pass_seconds(0)
        made.pass_seconds(121)
        await client.until_closed()
        assert client.terminated is not None
        assert client.terminated.error_code == Code.NO_ERROR

    serve(test)


def test_leaving_in_the_middle_of_anything_leaves_nothing_behind(serve: Callable[..., None]) -> None:
    async def test(made: Bench) -> None:
        for path, body in (
            (INFER, framed(infer_message("held"))),
            (INFER, framed(infer_message("free", elements=100_000))[:50_000]),
            (STREAM, framed(infer_message("held")) * 300),
            (STREAM, framed(infer_message("held")) * 3 + framed(infer_message())[:9]),
            ("/grpc.health.v1.Health/Watch", framed(b"")),
            (HEALTH, b"\0\0"),
        ):
            client = await made.connect()
            stream_id = client.start(path)
            await client.send(stream_id, body, end=path != STREAM)
            assert (await (await made.connect()).call(GOOD)).status == 0
            await client.close()
        await made.settle()

    serve(test)


def test_arbitrary_bytes_on_the_socket_never_stop_the_server(serve: Callable[..., None]) -> None:
    async def test(made: Bench) -> None:
        draw = random.Random(20)
        host, _, port = made.address.rpartition(":")
        settings = b"\0\0\0\4\0\0\0\0\0"
        for _ in range(60):
            reader, writer = await asyncio.open_connection(host, int(port))
            start = draw.choice([b"", PREFACE, PREFACE + settings, PREFACE + settings])
            for _ in range(draw.randint(1, 4)):
                length = draw.choice([0, 3, 4, 8, 20, 300])
                header = length.to_bytes(3, "big") + bytes((draw.randint(0, 10), draw.randint(0, 255)))
                start += header + draw.choice([0, 1, 3]).to_bytes(4, "big") + draw.randbytes(length)
            writer.write(start)
            if draw.random() < 0.5:
                writer.write_eof()
                await asyncio.wait_for(reader.read(), 20)
            writer.transport.abort()
        assert (await (await made.connect()).call(GOOD)).status == 0
        await made.settle()

    serve(test)


def test_answers_of_one_turn_leave_in_one_write(loop: LoopThread) -> None:
    """Requests that were answered together reach a client in one read."""

    async def scenario() -> None:
        async with bench(GrpcSettings()) as made:
            client = await made.connect()
            assert (await client.call(GOOD)).status == 0
            for number in range(20):
                await client.send(client.start(), framed(infer_message("held", str(number))))
            await made.double.until(lambda: len(made.double.held) == 20)
            (connection,) = made.server._state.connections  # type: ignore[union-attr]
            written: list[bytes] = []
            transport = connection._transport

            class Counting:
                def __getattr__(self, name: str) -> Any:
                    return getattr(transport, name)

                def write(self, data: bytes) -> None:
                    written.append(data)
                    transport.write(data)

            connection._transport = Counting()  # type: ignore[assignment]
            made.double.release_held()
            await client.answer(39 + 2)
            connection._transport = transport
            assert len(written) == 1

    loop.run(scenario())


def test_connections_can_be_handed_over(serve: Callable[..., None]) -> None:
    async def scenario() -> None:
        closed = asyncio.Event()
        double = DoubleServing()
        server = FastGrpcServer(double, "127.0.0.1", 7, GrpcSettings(), double.limits)
        assert await server.start(listen=False, closed=closed.set) == 7
        listener = socket.create_server(("127.0.0.1", 0))
        client = await RawClient.open(f"127.0.0.1:{listener.getsockname()[1]}")
        accepted, _ = listener.accept()
        listener.close()
        server.adopt(accepted)
        assert (await client.call(GOOD)).status == 0
        await client.close()
        async with asyncio.timeout(20):
            await closed.wait()
        await server.close()
        left, right = socket.socketpair()
        right.close()
        server.adopt(left)
        assert left.fileno() == -1

    serve(lambda made: scenario())


def test_grpcio_is_not_loaded_beside_the_fast_server() -> None:
    code = (
        "import sys\n"
        "from frontend.grpc_server import make_grpc_server\n"
        "from frontend.settings import EndpointSettings, GrpcSettings\n"
        "import asyncio\n"
        "class Serving: limits = EndpointSettings()\n"
        "async def main():\n"
        "    server = make_grpc_server(Serving(), '127.0.0.1', 0, GrpcSettings(server='fast'), EndpointSettings())\n"
        "    await server.start()\n"
        "    await server.close()\n"
        "asyncio.run(main())\n"
        "assert 'frontend.http2.protocol' in sys.modules\n"
        "assert not [name for name in sys.modules if name == 'grpc' or name.startswith('grpc.')]\n"
        "import frontend.process\n"
        "assert 'grpc' not in sys.modules\n"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
