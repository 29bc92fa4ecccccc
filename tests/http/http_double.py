"""A server on its own loop thread, an application that does as it is told, and a raw client. For the tests here."""

from __future__ import annotations

import asyncio
import re
import socket
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any

import uvloop

from frontend.http import HttpServer
from frontend.httpd.body import BodySink
from frontend.httpd.exchange import Application, Exchange
from frontend.settings import EndpointSettings

WAIT_S = 10.0
TEXT = [(b"Content-Type", b"text/plain")]


class Told:
    """An application that records what it is given.

    /echo answers the body, /held waits for the test, /raise raises, /big answers ``big``, /task/* runs a coroutine.
    """

    def __init__(self) -> None:
        self.seen: list[Exchange] = []
        self.held: list[Exchange] = []
        self.changed = threading.Condition()
        self.disconnected = 0
        self.released = 0
        self.big: memoryview = memoryview(b"")
        self.sink: Callable[[Exchange], BodySink | None] = lambda exchange: None
        self.task: Callable[[Exchange], Coroutine[Any, Any, None]] | None = None
        self.failures: list[BaseException] = []
        self._tasks: set[asyncio.Task[None]] = set()

    def begin(self, exchange: Exchange) -> BodySink | None:
        return self.sink(exchange)

    def handle(self, exchange: Exchange) -> None:
        with self.changed:
            self.seen.append(exchange)
            self.changed.notify_all()
        path = exchange.path
        if path == "/echo":
            exchange.respond(200, TEXT, [exchange.body])
        elif path.startswith("/held"):
            exchange.on_disconnect = self._gone
            with self.changed:
                self.held.append(exchange)
                self.changed.notify_all()
        elif path == "/raise":
            raise LookupError("told to")
        elif path == "/big":
            exchange.on_disconnect = self._gone
            exchange.respond(200, TEXT, [self.big], self._free)
        elif path.startswith("/task") and self.task is not None:
            task = asyncio.get_running_loop().create_task(self._run(self.task, exchange))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        else:
            exchange.respond(200, TEXT, [f"{exchange.method} {path}".encode()])

    def error_body(self, exchange: Exchange, status: int, message: str) -> tuple[bytes, bytes]:
        return b"application/json", b'{"error": "%b"}' % message.encode()

    def wait(self, condition: Callable[[], bool]) -> None:
        with self.changed:
            assert self.changed.wait_for(condition, WAIT_S), "never happened"

    async def _run(self, task: Callable[[Exchange], Coroutine[Any, Any, None]], exchange: Exchange) -> None:
        try:
            await task(exchange)
        except BaseException as error:
            with self.changed:
                self.failures.append(error)
                self.changed.notify_all()

    def _gone(self) -> None:
        with self.changed:
            self.disconnected += 1
            self.changed.notify_all()

    def _free(self) -> None:
        with self.changed:
            self.released += 1
            self.changed.notify_all()


class Running:
    """A server that runs until ``stop``; ``now_ns`` is its clock."""

    def __init__(self, app: Application, limits: EndpointSettings) -> None:
        self.now_ns = 1_000_000_000
        self.loop = uvloop.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()
        self.server = HttpServer(app, "127.0.0.1", 0, limits, clock=lambda: self.now_ns)
        self.port = self.wait(self.server.start())

    def spawn(self, coroutine: Coroutine[Any, Any, Any]) -> Future[Any]:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    def wait(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return self.spawn(coroutine).result(WAIT_S)

    def call(self, function: Callable[[], Any]) -> Any:
        """Run ``function`` on the loop's thread."""

        async def once() -> Any:
            return function()

        return self.wait(once())

    def until(self, condition: Callable[[], bool]) -> None:
        """Wait for something on the loop's thread that announces itself to nobody."""

        async def look() -> None:
            async with asyncio.timeout(WAIT_S):
                while not condition():  # noqa: ASYNC110
                    await asyncio.sleep(0)

        self.wait(look())

    def pass_time(self, seconds: float) -> None:
        """Let every connection be observed, jump, and observe again."""
        self.call(self.server.tick)
        self.now_ns += int(seconds * 1e9)
        self.call(self.server.tick)

    def stop(self) -> None:
        self.wait(self.server.close())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(WAIT_S)
        self.loop.close()

    def client(self, **options: Any) -> Client:
        return Client(self.port, **options)


class Answer:
    """One parsed answer."""

    def __init__(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.status = status
        self.headers = headers
        self.body = body

    def __repr__(self) -> str:
        return f"Answer({self.status}, {self.body[:80]!r})"


class Client:
    """A blocking socket that sends bytes as given and parses answers."""

    def __init__(self, port: int, *, receive_buffer: int = 0) -> None:
        self.sock = socket.socket()
        if receive_buffer:
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        self.sock.settimeout(WAIT_S)
        self.sock.connect(("127.0.0.1", port))
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.buffer = b""

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.sock.close()

    def send(self, *pieces: bytes) -> None:
        for piece in pieces:
            self.sock.sendall(piece)

    def ask(self, data: bytes, *, head: bool = False) -> Answer:
        self.send(data)
        return self.answer(head=head)

    def more(self) -> bool:
        data = self.sock.recv(1 << 20)
        self.buffer += data
        return bool(data)

    def head(self) -> tuple[int, dict[str, str]]:
        while b"\r\n\r\n" not in self.buffer:
            if not self.more():
                raise EOFError(f"closed after {self.buffer!r}")
        head, _, self.buffer = self.buffer.partition(b"\r\n\r\n")
        lines = head.decode().split("\r\n")
        match = re.fullmatch(r"HTTP/1\.1 (\d{3}) .*", lines[0])
        assert match, f"not a status line: {lines[0]!r}"
        headers: dict[str, str] = {}
        for line in lines[1:]:
            name, _, value = line.partition(": ")
            assert name.lower() not in headers, f"repeated header {name}"
            headers[name.lower()] = value
        return int(match[1]), headers

    def answer(self, *, head: bool = False) -> Answer:
        """Return the next final answer; ``head``: it answers a HEAD request."""
        status, headers = self.head()
        if status < 200:
            return Answer(status, headers, b"")
        if head:
            return Answer(status, headers, b"")
        if headers.get("transfer-encoding") == "chunked":
            return Answer(status, headers, self._chunks())
        if "content-length" in headers:
            return Answer(status, headers, self._exactly(int(headers["content-length"])))
        while self.more():
            pass
        body, self.buffer = self.buffer, b""
        return Answer(status, headers, body)

    def closed(self) -> bool:
        """Wait for the end; return whether nothing but the end came."""
        rest = self.buffer
        while self.more():
            rest = self.buffer
        return not rest

    def _exactly(self, count: int) -> bytes:
        pieces = [self.buffer]
        got = len(self.buffer)
        while got < count:
            data = self.sock.recv(1 << 20)
            if not data:
                raise EOFError(f"closed after {got} of {count} bytes")
            pieces.append(data)
            got += len(data)
        whole = b"".join(pieces)
        self.buffer = whole[count:]
        return whole[:count]

    def _chunks(self) -> bytes:
        body = b""
        while True:
            while b"\r\n" not in self.buffer:
                if not self.more():
                    raise EOFError("closed within a chunked body")
            size, _, self.buffer = self.buffer.partition(b"\r\n")
            piece = self._exactly(int(size, 16) + 2)
            assert piece[-2:] == b"\r\n"
            if len(piece) == 2:
                return body
            body += piece[:-2]


class Recorder:
    """A transport that keeps what is written."""

    def __init__(self) -> None:
        self.written = b""
        self.closed = False

    def write(self, data: Any) -> None:
        assert not self.closed, "written after close"
        self.written += bytes(data)

    def writelines(self, parts: Any) -> None:
        self.write(b"".join(parts))

    def set_write_buffer_limits(self, high: int) -> None: ...
    def pause_reading(self) -> None: ...
    def resume_reading(self) -> None: ...

    def get_write_buffer_size(self) -> int:
        return 0

    def close(self) -> None:
        self.closed = True

    write_eof = abort = close

    def is_closing(self) -> bool:
        return self.closed


def get(path: str = "/echo", *headers: str, method: str = "GET", version: str = "1.1") -> bytes:
    lines = [f"{method} {path} HTTP/{version}", "Host: test", *headers, "", ""]
    return "\r\n".join(lines).encode()


def post(body: bytes = b"", path: str = "/echo", *headers: str, version: str = "1.1") -> bytes:
    return get(path, f"Content-Length: {len(body)}", *headers, method="POST", version=version) + body


def chunked(pieces: list[bytes], path: str = "/echo", *headers: str) -> bytes:
    head = get(path, "Transfer-Encoding: chunked", *headers, method="POST")
    return head + b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"
