"""The gRPC server of a frontend on grpcio's asyncio server: the complete one, and the reference for the fast one.

Handlers take and give bytes: the codecs decide when protobuf is worth its copies. Every failure leaves as the status
that ``status.STATUS`` says, its text as the details; one nobody foresaw is logged and leaves as INTERNAL.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from typing import Any, Final

import grpc
import grpc.aio

from frontend.grpc_health import CHECK_PATH, HEALTH_SERVICE, WATCH_PATH, Health
from frontend.grpc_methods import (
    INFER_PATH,
    STREAM_PATH,
    GrpcMethods,
    Method,
    deadline_ns,
    failure_of,
    outcome_of,
)
from frontend.grpc_reflection import PATHS, Reflection
from frontend.grpc_stream import STOPPING_TEXT, InferStream
from frontend.kserve import proto_schema
from frontend.kserve.grpc_codec import decode_infer, encode_infer
from frontend.serving import Serving
from frontend.settings import EndpointSettings, GrpcSettings

MESSAGE_ROOM_BYTES: Final = 16 * 1024 * 1024
"""How far above ``max_request_bytes`` a message is still read, to be refused with a text that names the setting; gRPC's
own refusal, which only gives a number, stands beyond."""
MIN_PING_INTERVAL_MS: Final = 10_000
"""Pings of idle clients are tolerated from this interval on; gRPC's default of 5 minutes closes their connections."""


class GrpcServer:
    """KServe over gRPC on one port, which other processes may share (SO_REUSEPORT).

    Life: ``start``, ``drain`` (optional), ``close``; closing twice, or before the start, is harmless.
    """

    def __init__(
        self, serving: Serving, host: str, port: int, settings: GrpcSettings, limits: EndpointSettings
    ) -> None:
        self._serving = serving
        self._host = host
        self._port = port
        self._settings = settings
        self._limits = limits
        self._draining = asyncio.Event()
        self._server: Any = None

    async def start(self) -> int:
        """Bind, serve, and return the port.

        Raises:
            OSError: the address cannot be bound.
        """
        server = grpc.aio.server(
            options=_options(self._limits), maximum_concurrent_rpcs=self._settings.max_concurrent_rpcs
        )
        server.add_generic_rpc_handlers((_Service(self._handlers()),))
        host = f"[{self._host}]" if ":" in self._host else self._host
        try:
            port: int = server.add_insecure_port(f"{host}:{self._port}")
        except RuntimeError as error:
            raise OSError(f"gRPC cannot listen on {host}:{self._port}: {error}") from error
        await server.start()
        self._server = server
        return port

    async def drain(self, timeout_s: float) -> None:
        """Stop accepting, let RPCs under way finish, and cancel what is left after ``timeout_s``.

        Streams answer what they have read and end; health watchers are told NOT_SERVING and end.
        """
        self._draining.set()
        if self._server is not None:
            await self._server.stop(timeout_s)

    async def close(self) -> None:
        """Stop at once; RPCs under way are cancelled."""
        self._draining.set()
        server, self._server = self._server, None
        if server is not None:
            await server.stop(None)

    def _handlers(self) -> dict[str, Any]:
        health = Health(self._serving, self._draining)
        methods = {
            **GrpcMethods(self._serving, self._limits).by_path(),
            CHECK_PATH: health.check,
        }
        unary = grpc.unary_unary_rpc_method_handler
        handlers: dict[str, Any] = {path: unary(_guarded(method)) for path, method in methods.items()}
        handlers[INFER_PATH] = unary(self._model_infer)
        handlers[STREAM_PATH] = grpc.stream_stream_rpc_method_handler(self._model_stream_infer)
        handlers[WATCH_PATH] = grpc.unary_stream_rpc_method_handler(_guarded_stream(health.watch))
        if self._settings.reflection:
            reflection = Reflection((proto_schema.SERVICE, HEALTH_SERVICE))
            handlers.update(dict.fromkeys(PATHS, grpc.stream_stream_rpc_method_handler(_each(reflection.answer))))
        return handlers

    async def _model_infer(self, data: bytes, context: Any) -> bytes:
        arrival_ns = time.monotonic_ns()
        try:
            request = decode_infer(data, self._limits)
            request.deadline_ns = deadline_ns(context.time_remaining(), arrival_ns)
            response = await self._serving.infer(request, arrival_ns)
            try:
                return encode_infer(response)
            finally:
                response.release()
        except Exception as error:
            failure = error
        await _abort(context, failure)
        return b""

    async def _model_stream_infer(self, requests: Any, context: Any) -> None:
        deadline = deadline_ns(context.time_remaining(), time.monotonic_ns())
        await _StreamCall(self._serving, self._limits, context, deadline, self._draining).run()


class _StreamCall:
    """Moves the messages of one ModelStreamInfer call between grpcio and ``InferStream``."""

    def __init__(
        self,
        serving: Serving,
        limits: EndpointSettings,
        context: Any,
        deadline: int | None,
        draining: asyncio.Event,
    ) -> None:
        self._context = context
        self._draining = draining
        self._awake = asyncio.Event()
        self._room = asyncio.Event()
        self._read_all = False
        self._half_closed = False
        self._stream = InferStream(serving, limits, deadline, self._awake.set)

    async def run(self) -> None:
        """Answer until the client half-closes or the server drains; a cancelled stream withdraws what waits."""
        reading = asyncio.create_task(self._read_until_drained())
        try:
            while True:
                self._awake.clear()
                while (answer := self._stream.next_answer()) is not None:
                    parts, release = answer
                    data = b"".join(parts)
                    if release is not None:
                        release()
                    await self._context.write(data)
                    self._room.set()
                if self._read_all and not len(self._stream):
                    break
                await self._awake.wait()
        finally:
            reading.cancel()
            self._stream.withdraw()
        if not self._half_closed:
            # What the client sent meanwhile was not read: an orderly end would tell it that all was answered.
            await self._context.abort(grpc.StatusCode.UNAVAILABLE, STOPPING_TEXT)

    async def _read_until_drained(self) -> None:
        reading = asyncio.create_task(self._read())
        draining = asyncio.create_task(self._draining.wait())
        try:
            await asyncio.wait((reading, draining), return_when=asyncio.FIRST_COMPLETED)
        finally:
            reading.cancel()
            draining.cancel()
            await asyncio.gather(reading, draining, return_exceptions=True)
        self._read_all = True
        self._awake.set()

    async def _read(self) -> None:
        while True:
            while self._stream.full:
                self._room.clear()
                await self._room.wait()
            data = await self._context.read()
            if data is grpc.aio.EOF:
                self._half_closed = True
                return
            if self._draining.is_set():
                self._stream.drain()
            self._stream.accept(data)


class _Service(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Finds the handler of a method path."""

    def __init__(self, handlers: dict[str, Any]) -> None:
        self._handlers = handlers

    def service(self, details: Any) -> Any:
        return self._handlers.get(details.method)


_CODES: Final = {code.value[0]: code for code in grpc.StatusCode}


async def _abort(context: Any, error: Exception) -> None:
    """End an RPC with an error's status; raises, as every abort does."""
    status, text, retry_after_s = outcome_of(failure_of(error))
    trailing = () if retry_after_s is None else (("retry-after", str(retry_after_s)),)
    await context.abort(_CODES[status], text, trailing)


def _guarded(method: Method) -> Callable[[bytes, Any], Any]:
    async def handler(data: bytes, context: Any) -> bytes:
        try:
            return await method(data)
        except Exception as error:
            failure = error
        await _abort(context, failure)
        return b""

    return handler


def _guarded_stream(method: Callable[[bytes], AsyncIterator[bytes]]) -> Callable[[bytes, Any], Any]:
    async def handler(data: bytes, context: Any) -> AsyncIterator[bytes]:
        try:
            async for message in method(data):
                yield message
            return
        except Exception as error:
            failure = error
        await _abort(context, failure)

    return handler


def _each(answer: Callable[[bytes], bytes]) -> Callable[[Any, Any], Any]:
    async def handler(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        try:
            async for request in requests:
                yield answer(request)
            return
        except Exception as error:
            failure = error
        await _abort(context, failure)

    return handler


def _options(limits: EndpointSettings) -> list[tuple[str, int]]:
    return [
        ("grpc.so_reuseport", 1),
        ("grpc.max_receive_message_length", min(limits.max_request_bytes + MESSAGE_ROOM_BYTES, 2**31 - 1)),
        ("grpc.max_send_message_length", -1),
        ("grpc.max_metadata_size", limits.max_header_bytes),
        ("grpc.max_connection_idle_ms", min(int(limits.idle_timeout_seconds * 1000), 2**31 - 1)),
        ("grpc.http2.min_ping_interval_without_data_ms", MIN_PING_INTERVAL_MS),
        ("grpc.keepalive_permit_without_calls", 1),
    ]
