"""An OpenAI-compatible upstream that does as it is told and remembers what it saw. On its own thread, raw asyncio.

Answers are scripted one call at a time (``say``), in order; calls without a script get a plausible answer. Written on
sockets, not on our own server, so that it can also break the protocol.
"""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
import struct
import threading
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

WAIT_S = 60.0
Raw = bytes | Callable[[asyncio.StreamWriter], Awaitable[None]]
"""An answer as it is, or what writes it."""


@dataclass(slots=True)
class Seen:
    """A call as it arrived; ``head`` in lower case."""

    path: str
    headers: dict[str, str]
    body: bytes
    at_s: float
    head: str

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def is_line(self) -> bool:
        """Whether this is a line of a batch."""
        return self.headers.get("x-ringserve-traffic") == "batch"


@dataclass(slots=True)
class Say:
    """What to answer.

    Attributes:
        body: bytes as they are, or a value told as JSON.
        pieces: sent one by one, chunked, instead of ``body``.
        hold: waited for before the answer, or, with pieces, before every piece but the first.
        fault: "reset" (RST instead of an answer), "cut" (the connection ends in the middle of the body),
            "garbage" (no HTTP), "silence" (nothing, until the client goes away).
        raw: instead of everything else.
    """

    status: int = 200
    body: bytes | Any = None
    headers: dict[str, str] = field(default_factory=dict)
    content_type: str = "application/json"
    pieces: list[bytes] | None = None
    hold: threading.Event | None = None
    delay_s: float = 0.0
    fault: str = ""
    raw: Raw | None = None


class StubUpstream:
    """Use as a context manager.

    Attributes:
        calls: every call whose body has arrived.
        in_flight, max_in_flight: calls being answered.
        lost: calls whose client went away before the answer was complete.
        live_in_flight: of these, those that are no lines of batches.
        most_lines: most lines of batches at once, by model. A line counts from its arrival until its answer begins, or
            until its client is seen to be gone: whoever has the answer may start the next one at once.
    """

    def __init__(self, port: int = 0, tls: ssl.SSLContext | None = None) -> None:
        self._tls = tls
        self.calls: list[Seen] = []
        self.in_flight = 0
        self.max_in_flight = 0
        self.live_in_flight = 0
        self.lost = 0
        self.connections = 0
        self.most_lines: Counter[str] = Counter()
        self._lines: dict[asyncio.StreamReader, str] = {}
        self.default: Callable[[Seen], Say] = plausible
        self._script: deque[Say] = deque()
        self._changed = threading.Condition()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.port = port

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    @property
    def metrics_url(self) -> str:
        return f"http://127.0.0.1:{self.port}/metrics"

    def say(self, *answers: Say) -> None:
        """Script the next answers."""
        self._script.extend(answers)

    def bodies(self) -> list[Any]:
        """Return the decoded bodies of all calls."""
        return [call.json for call in list(self.calls)]

    def wait(self, what: Callable[[StubUpstream], bool], timeout_s: float = WAIT_S) -> None:
        """Wait until something holds, such as ``lambda stub: stub.lost == 1``."""
        with self._changed:
            assert self._changed.wait_for(lambda: what(self), timeout_s), f"not within {timeout_s} s: {self!r}"

    def __repr__(self) -> str:
        return f"StubUpstream(calls={len(self.calls)}, in_flight={self.in_flight}, lost={self.lost})"

    def __enter__(self) -> StubUpstream:
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(WAIT_S)
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result(WAIT_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(WAIT_S)
        self._loop.close()

    async def _start(self) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", self.port, limit=1 << 26, ssl=self._tls)
        self.port = self._server.sockets[0].getsockname()[1]

    async def _stop(self) -> None:
        assert self._server is not None
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self.connections += 1
        begun: list[asyncio.Task[Any]] = []
        try:
            while (seen := await _read(reader)) is not None:
                self._note(seen, reader)
                answer = self._script.popleft() if self._script else self.default(seen)
                # Whoever waits for an answer sends nothing meanwhile: a read that ends means that it left.
                gone = asyncio.ensure_future(reader.read(1))
                telling = asyncio.ensure_future(self._answer(reader, writer, answer))
                begun = [gone, telling]
                await asyncio.wait((gone, telling), return_when=asyncio.FIRST_COMPLETED)
                left = not telling.done() or telling.exception() is not None
                telling.cancel()
                await asyncio.gather(telling, return_exceptions=True)
                self._lines.pop(reader, None)
                self._over(seen, lost=left and answer.fault not in ("reset", "cut", "garbage"))
                if left or answer.fault:
                    gone.cancel()
                    break
                gone.cancel()
                await asyncio.gather(gone, return_exceptions=True)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        except asyncio.CancelledError:
            for one in begun:
                one.cancel()
            await asyncio.gather(*begun, return_exceptions=True)
        finally:
            self._lines.pop(reader, None)
            self._tasks.discard(task)
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, answer: Say) -> None:
        await _due(answer)
        self._lines.pop(reader, None)
        await _tell(writer, answer)

    def _note(self, seen: Seen, reader: asyncio.StreamReader) -> None:
        with self._changed:
            self.calls.append(seen)
            if seen.is_line:
                self._lines[reader] = seen.json["model"]
                # A killed client's connection may have ended without our having been told yet.
                open_ones = (one for one in self._lines if not (one.at_eof() or one.exception()))
                self.most_lines |= Counter(self._lines[one] for one in open_ones)
            self.in_flight += 1
            self.live_in_flight += not seen.is_line
            self.max_in_flight = max(self.max_in_flight, self.in_flight)
            self._changed.notify_all()

    def _over(self, seen: Seen, *, lost: bool) -> None:
        with self._changed:
            self.in_flight -= 1
            self.live_in_flight -= not seen.is_line
            self.lost += lost
            self._changed.notify_all()


async def _read(reader: asyncio.StreamReader) -> Seen | None:
    head = await reader.readuntil(b"\r\n\r\n")
    lines = head.decode("latin-1").split("\r\n")
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines[1:] if line)}
    body = await reader.readexactly(int(headers.get("content-length", 0)))
    return Seen(lines[0].split(" ")[1], headers, body, time.monotonic(), head.decode("latin-1").lower())


async def _due(answer: Say) -> None:
    """Wait until the answer is to begin."""
    if answer.delay_s:
        await asyncio.sleep(answer.delay_s)
    if answer.hold is not None and answer.pieces is None:
        await _until(answer.hold)
    if answer.fault == "silence":
        await asyncio.Event().wait()


async def _tell(writer: asyncio.StreamWriter, answer: Say) -> None:
    if answer.raw is not None:
        if isinstance(answer.raw, bytes):
            writer.write(answer.raw)
        else:
            await answer.raw(writer)
        await writer.drain()
        return
    if answer.fault == "reset":
        sock = writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()
        return
    if answer.fault == "garbage":
        writer.write(b"\x16\x03 this is not HTTP\r\n\r\n")
        await writer.drain()
        return
    body = answer.body if isinstance(answer.body, bytes) else json.dumps(answer.body).encode()
    framing = "Transfer-Encoding: chunked" if answer.pieces is not None else f"Content-Length: {len(body)}"
    more = "".join(f"{name}: {value}\r\n" for name, value in answer.headers.items())
    head = f"HTTP/1.1 {answer.status} X\r\nContent-Type: {answer.content_type}\r\n{more}{framing}\r\n\r\n".encode()
    if answer.pieces is None:
        writer.write(head + (body[: len(body) // 2] if answer.fault == "cut" else body))
        await writer.drain()
        return
    writer.write(head)
    for index, piece in enumerate(answer.pieces):
        if index and answer.hold is not None:
            await _until(answer.hold)
        writer.write(b"%x\r\n%b\r\n" % (len(piece), piece))
        await writer.drain()
    if answer.fault != "cut":
        writer.write(b"0\r\n\r\n")
        await writer.drain()


async def _until(event: threading.Event) -> None:
    await asyncio.get_running_loop().run_in_executor(None, event.wait, WAIT_S)


def plausible(seen: Seen) -> Say:
    """Return what a model server might answer."""
    asked = seen.json
    if seen.path == "/v1/embeddings":
        texts = asked["input"] if isinstance(asked["input"], list) else [asked["input"]]
        data = [{"object": "embedding", "index": i, "embedding": [0.5, -0.25]} for i in range(len(texts))]
        usage = {"prompt_tokens": len(texts), "total_tokens": len(texts)}
        return Say(body={"object": "list", "data": data, "model": asked["model"], "usage": usage})
    if asked.get("stream"):
        words = ("Hel", "lo", " there")
        chunks = [sse(chunk(asked["model"], word)) for word in words]
        return Say(pieces=[*chunks, b"data: [DONE]\n\n"], content_type="text/event-stream")
    return Say(body=completion(asked["model"]))


def completion(model: str, text: str = "Hello there") -> dict[str, Any]:
    """Return a chat completion."""
    message = {"role": "assistant", "content": text}
    return {
        "id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": model,
        "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15},
    }  # fmt: skip


def chunk(model: str, text: str) -> dict[str, Any]:
    """Return a piece of a streamed chat completion."""
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": None}
    return {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": model, "choices": [choice]}


def sse(value: Any) -> bytes:
    """Return an event of a stream."""
    return b"data: " + json.dumps(value).encode() + b"\n\n"
