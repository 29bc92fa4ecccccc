"""What all calls of one server share, and the table of its methods."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from frontend.grpc_fast import replies
from frontend.grpc_fast.calls import InferCall, MethodCall
from frontend.grpc_fast.messages import Message, Room
from frontend.grpc_fast.plans import Plan, plan_of
from frontend.grpc_fast.repeated_call import RepeatedStream
from frontend.grpc_fast.repeats import Templates
from frontend.grpc_fast.streams import EachCall, InferStreamCall, WatchCall
from frontend.grpc_health import CHECK_PATH, HEALTH_SERVICE, WATCH_PATH, Health
from frontend.grpc_methods import INFER_PATH, STREAM_PATH, GrpcMethods
from frontend.grpc_reflection import PATHS, Reflection
from frontend.http2.connection import Connection
from frontend.http2.fields import Head
from frontend.http2.limits import Limits
from frontend.http2.stream import Buffer, Receiver, Stream, WholeStream
from frontend.inference import InferRequest, InferResponse
from frontend.kserve import proto_schema
from frontend.kserve.infer_templates import RequestTemplates, ResponseTemplates
from frontend.serving import Serving
from frontend.settings import EndpointSettings, GrpcSettings

if TYPE_CHECKING:
    from frontend.app import FrontendApp

RETRY_AFTER_S: Final = 1


class Refused:
    """The receiver of a call that was answered before its body came."""

    def data(self, data: bytes, at: int, stop: int) -> None: ...
    def end(self) -> None: ...
    def cancel(self) -> None: ...
    def writable(self) -> None: ...
    def room(self) -> int:
        return 0

    def tick(self, now_ns: int) -> None: ...


class Service:
    """The application behind the connections of one gRPC server.

    Attributes:
        room: for messages that are not complete.
        find: looks up what is known of a message that repeats an earlier one.
        app: runs such calls; None if they take the ordinary way.
        infer_streams: open ModelStreamInfer calls, to be told of a drain.
        calls: open calls of all connections.
    """

    def __init__(
        self,
        serving: Serving,
        settings: GrpcSettings,
        limits: EndpointSettings,
        http2_limits: Limits,
        draining: asyncio.Event,
        clock: Callable[[], int],
        app: FrontendApp | None = None,
    ) -> None:
        self.serving = serving
        self.limits = limits
        self.http2_limits = http2_limits
        self.draining = draining
        self.clock = clock
        self.room = Room(limits)
        self.infer_streams: set[InferStreamCall] = set()
        self.calls = 0
        self.app = app
        self._templates = Templates(serving)
        self.find = self._templates.find
        self._max_calls = settings.max_concurrent_rpcs
        self._refused = Refused()
        self._requests = RequestTemplates(limits)
        self._responses = ResponseTemplates()
        self._methods = self._by_path(settings)

    # Application

    def interpret(self, head: Head) -> Plan:
        return plan_of(head, self._methods, self.limits.max_header_bytes)

    def open(self, connection: Connection, stream: Stream, value: Plan) -> Receiver:
        self.calls += 1
        if value.begin is not None and self.calls <= self._max_calls:
            receiver: Receiver = value.begin(self, connection, stream, value)
            return receiver
        refusal = value.refusal
        if refusal is None:
            text = f"Concurrent RPC limit exceeded: max_concurrent_rpcs = {self._max_calls}"
            refusal = replies.failure_tail((replies.RESOURCE_EXHAUSTED, text, RETRY_AFTER_S), alone=True)
        connection.sender.finish(stream, refusal)
        return self._refused

    def whole(self, stream_id: int, value: Plan, data: bytes, at: int, stop: int) -> WholeStream | None:
        if value.begin is not InferCall or self.calls >= self._max_calls:
            return None
        found = self.find(data, at, stop)
        if found is None:
            return None
        assert self.app is not None, "only then is anything learnt"
        self.calls += 1
        return RepeatedStream(self.app, stream_id, value, found, 0)

    def closed(self) -> None:
        self.calls -= 1

    # For calls

    def decode(self, message: Message) -> InferRequest:
        """Return the request in a ModelInferRequest; large tensors borrow the message. Raises as ``decode_infer``."""
        return self._requests.decode(message)

    def encode(self, response: InferResponse) -> tuple[list[Buffer], int]:
        """Return the parts of a ModelInferResponse, which borrow the response, and their size."""
        parts = self._responses.encode(response)
        return parts, sum(map(len, parts))

    def learn(self, now_ns: int, message: bytes, request: InferRequest, table: object, response: InferResponse,
              answer: list[Buffer]) -> None:  # fmt: skip
        """Remember an answered call for those that repeat it; as ``Templates.learn``."""
        if self.app is not None:
            self._templates.learn(now_ns, message, request, table, response, answer)

    def _by_path(self, settings: GrpcSettings) -> dict[bytes, Callable[..., Any]]:
        health = Health(self.serving, self.draining)
        unary = {**GrpcMethods(self.serving, self.limits).by_path(), CHECK_PATH: health.check}
        methods: dict[str, Callable[..., Any]] = {path: partial(MethodCall, method) for path, method in unary.items()}
        methods[INFER_PATH] = InferCall
        methods[STREAM_PATH] = InferStreamCall
        methods[WATCH_PATH] = partial(WatchCall, health.watch)
        if settings.reflection:
            reflection = Reflection((proto_schema.SERVICE, HEALTH_SERVICE))
            methods.update(dict.fromkeys(PATHS, partial(EachCall, reflection.answer)))
        return {path.encode(): begin for path, begin in methods.items()}
