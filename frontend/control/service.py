"""``ringserve.control.v1`` on grpcio: what the node schedules, and changes to it. Loaded when somebody first calls."""

from __future__ import annotations

import logging
import os
from collections.abc import Awaitable, Callable
from typing import Any, Final, Protocol
from urllib.parse import quote

import grpc
import grpc.aio
from google.protobuf import descriptor_pool, json_format
from google.protobuf.message import DecodeError
from grpc_reflection.v1alpha import reflection, reflection_pb2

from engines.errors import Internal, InvalidInput, ServingError, Unsupported
from frontend.control.messages import control_file, message_class
from frontend.control.schema import RPCS, SERVICE
from frontend.kserve.status import error_text, status_of

log = logging.getLogger("node")

MAX_MESSAGE_BYTES: Final = 1 << 20
MAX_CONCURRENT_RPCS: Final = 16
"""Each waits in a thread for a worker's answer; more are told RESOURCE_EXHAUSTED."""
STOP_GRACE_S: Final = 1.0
_CODES: Final = {code.value[0]: code for code in grpc.StatusCode}
_NOT_YET: Final = {
    "SetModelResidency": "SetModelResidency is not available yet: every model's weights stay on the device",
    "Compact": "Compact is not available yet: weights are not loaded on demand, so nothing gets fragmented",
}

Body = Callable[[bytes], Awaitable[bytes]]


class Operator(Protocol):
    """What the service does its work with."""

    async def control_status(self, model: str = "") -> list[dict[str, Any]]: ...

    async def set_weight(self, model: Any, weight: Any) -> dict[str, Any]: ...


class ControlServer:
    """The service on a Unix socket that only the node's user may open."""

    def __init__(self, operator: Operator) -> None:
        self._operator = operator
        self._server: Any = None

    async def start(self, path: str) -> None:
        """Listen on the socket file ``path``, which must not exist."""
        server = grpc.aio.server(
            options=[("grpc.max_receive_message_length", MAX_MESSAGE_BYTES)],
            maximum_concurrent_rpcs=MAX_CONCURRENT_RPCS,
        )
        server.add_generic_rpc_handlers((_Service(self._handlers()),))
        pool = descriptor_pool.DescriptorPool()
        pool.AddSerializedFile(control_file().SerializeToString())
        pool.AddSerializedFile(reflection_pb2.DESCRIPTOR.serialized_pb)
        reflection.enable_server_reflection((SERVICE, reflection.SERVICE_NAME), server, pool=pool)
        # The library binds with whatever the mask allows; afterwards would be too late.
        mask = os.umask(0o177)
        try:
            server.add_insecure_port(f"unix:{quote(path)}")
        finally:
            os.umask(mask)
        await server.start()
        self._server = server

    async def close(self) -> None:
        """Let calls under way end for a moment, then stop."""
        server, self._server = self._server, None
        if server is not None:
            await server.stop(STOP_GRACE_S)

    def _handlers(self) -> dict[str, Any]:
        bodies: dict[str, Body] = {"ModelControlStatus": self._status, "SetModelPolicy": self._set_policy}
        return {
            f"/{SERVICE}/{rpc}": grpc.unary_unary_rpc_method_handler(_guarded(bodies.get(rpc) or _not_yet(rpc)))
            for rpc in RPCS
        }

    async def _status(self, data: bytes) -> bytes:
        request = _parsed("ModelControlStatusRequest", data)
        workers = await self._operator.control_status(request.model)
        return _rendered("ModelControlStatusResponse", {"workers": workers})

    async def _set_policy(self, data: bytes) -> bytes:
        request = _parsed("SetModelPolicyRequest", data)
        return _rendered("SetModelPolicyResponse", await self._operator.set_weight(request.model, request.weight))


class _Service(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Finds the handler of a method path."""

    def __init__(self, handlers: dict[str, Any]) -> None:
        self._handlers = handlers

    def service(self, details: Any) -> Any:
        return self._handlers.get(details.method)


def _guarded(body: Body) -> Callable[[bytes, Any], Awaitable[bytes]]:
    async def handler(data: bytes, context: Any) -> bytes:
        try:
            return await body(data)
        except ServingError as error:
            failure = error
        except Exception:
            log.exception("control.failed")
            failure = Internal("internal error")
        await context.abort(_CODES[status_of(failure).grpc], error_text(failure))
        return b""

    return handler


def _not_yet(rpc: str) -> Body:
    async def body(data: bytes) -> bytes:
        raise Unsupported(_NOT_YET[rpc])

    return body


def _parsed(name: str, data: bytes) -> Any:
    try:
        return message_class(name).FromString(data)
    except DecodeError as error:
        raise InvalidInput(f"failed to parse the {name} message: {error}") from error


def _rendered(name: str, document: dict[str, Any]) -> bytes:
    message = json_format.ParseDict(document, message_class(name)(), ignore_unknown_fields=True)
    data: bytes = message.SerializeToString()
    return data
