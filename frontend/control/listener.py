"""The control endpoint: listens from the start, loads the gRPC library when somebody first connects.

A node that nobody controls over gRPC should not carry the library (some 12 MB, a fifth of a second). gRPC cannot take
over a connection that was accepted elsewhere, so bytes are relayed between each caller and gRPC's own socket in the run
directory: two copies on a path that carries a few small messages.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import struct
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

from frontend.control.endpoint import INNER_SOCKET, UnixEndpoint, parse_endpoint
from frontend.settings import ControlSettings

if TYPE_CHECKING:
    from frontend.control.service import Operator

log = logging.getLogger("node")

MAX_CALLERS: Final = 32
"""Connections at once; gRPC carries any number of calls on one."""
_COPY_BYTES: Final = 64 * 1024


class ControlError(Exception):
    """The endpoint cannot be had; the text names it and says why."""


class ControlListener:
    """Serves the control service at its endpoint between ``start`` and ``close``; does nothing if that is ``none``.

    Attributes:
        address: what a gRPC client dials, such as ``unix:/run/node/control.sock``; empty while nothing listens.
    """

    def __init__(self, settings: ControlSettings, run_dir: str, operator: Operator) -> None:
        self._endpoint = parse_endpoint(settings.endpoint, allow_remote=settings.allow_remote, workers=())
        self._run_dir = run_dir
        self._operator = operator
        self._server: asyncio.Server | None = None
        self._service: Any = None
        self._loading = asyncio.Lock()
        self._callers: set[asyncio.Task[None]] = set()
        self.address = ""

    @property
    def socket_names(self) -> tuple[str, ...]:
        """Names of the files that are made in the run directory."""
        if self._endpoint is None:
            return ()
        return (INNER_SOCKET, self._endpoint.name) if isinstance(self._endpoint, UnixEndpoint) else (INNER_SOCKET,)

    async def start(self) -> None:
        """Listen.

        Raises:
            ControlError: the address is in use or not this machine's.
        """
        endpoint = self._endpoint
        if endpoint is None:
            return
        if isinstance(endpoint, UnixEndpoint):
            path = os.path.join(self._run_dir, endpoint.name)
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            listener.bind(path)
            # Before it listens, so that nobody else gets in first.
            os.chmod(path, 0o600)
            self._server = await asyncio.start_unix_server(self._accept, sock=listener)
            # Clients decode percent signs in what they dial.
            self.address = f"unix:{quote(path)}"
        else:
            try:
                self._server = await asyncio.start_server(self._accept, endpoint.host, endpoint.port)
            except OSError as error:
                raise ControlError(
                    f"global.control.endpoint: cannot listen on {endpoint.host}:{endpoint.port}: {error.strerror}; "
                    "choose another in the node file or with INFERENCE_SERVER_CONTROL_ENDPOINT"
                ) from None
            host, port = self._server.sockets[0].getsockname()[:2]
            self.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        log.info("control.listening address=%s", self.address)

    async def close(self) -> None:
        """Stop listening, cut callers, and remove what was made in the run directory."""
        if self._server is not None:
            self._server.close()
        for caller in self._callers:
            caller.cancel()
        await asyncio.gather(*self._callers, return_exceptions=True)
        if self._service is not None:
            await self._service.close()
        if self._server is not None:
            for name in self.socket_names:
                with contextlib.suppress(OSError):
                    os.unlink(os.path.join(self._run_dir, name))
            self._server, self.address = None, ""

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._callers) >= MAX_CALLERS:
            log.warning("control.refused callers=%d", len(self._callers))
            writer.transport.abort()
            return
        task = asyncio.current_task()
        assert task is not None
        self._callers.add(task)
        try:
            if _is_ours(writer):
                await self._relay(reader, writer)
        except (OSError, asyncio.CancelledError):
            # Either end went away, or the node stops: gRPC tells its callers.
            pass
        except Exception:
            # Such as a gRPC library that does not load: this caller is cut, and the node goes on.
            log.exception("control.failed")
        finally:
            self._callers.discard(task)
            writer.transport.abort()

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self._load()
        inner_reader, inner_writer = await asyncio.open_unix_connection(os.path.join(self._run_dir, INNER_SOCKET))
        pumps = [asyncio.create_task(_pump(reader, inner_writer)), asyncio.create_task(_pump(inner_reader, writer))]
        try:
            # HTTP/2 has no half-closed connections worth keeping: the first end that closes ends both.
            done, _ = await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
            for pump in done:
                pump.result()
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)
            inner_writer.transport.abort()

    async def _load(self) -> None:
        async with self._loading:
            if self._service is None:
                # On a thread: the node has pulses to watch meanwhile.
                module = await asyncio.to_thread(_import_service)
                service = module.ControlServer(self._operator)
                await service.start(os.path.join(self._run_dir, INNER_SOCKET))
                self._service = service
                log.info("control.loaded")


def _import_service() -> Any:
    from frontend.control import service

    return service


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(_COPY_BYTES):
        writer.write(data)
        await writer.drain()


def _is_ours(writer: asyncio.StreamWriter) -> bool:
    """Whether a caller on a Unix socket is the node's user or root; a TCP peer was judged by the endpoint's address."""
    sock = writer.get_extra_info("socket")
    if sock.family != socket.AF_UNIX:
        return True
    pid, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    if uid in (os.geteuid(), 0):
        return True
    log.warning("control.refused pid=%d uid=%d", pid, uid)
    return False
