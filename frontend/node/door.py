"""The node's own socket: status for the command line, and the way in for frontends started by hand."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import struct
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from frontend.node.link import Call
from worker.channel.node_link import encode

log = logging.getLogger("node")

MAX_CALLERS = 64
"""Callers served at once; further ones wait in the socket's backlog."""
MAX_CALL_BYTES = 64 * 1024
CALL_TIMEOUT_S = 5.0

OnAsk = Callable[[Call], Awaitable[Any]]
OnJoin = Callable[[socket.socket, int], Awaitable[bool]]


class Door:
    """Serves ``node.sock``.

    Args:
        on_ask: returns the answer (a msgspec struct) to ``{"ask": WHAT, "args": {...}}``.
        on_join: takes over a socket whose peer (with this pid) wants to join; False if it did not keep it.
    """

    def __init__(self, path: str, on_ask: OnAsk, on_join: OnJoin) -> None:
        self._path = path
        self._on_ask = on_ask
        self._on_join = on_join
        self._socket: socket.socket | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        self._socket.bind(self._path)
        os.chmod(self._path, 0o600)
        self._socket.listen(MAX_CALLERS)
        self._spawn(self._accept(self._socket))

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._socket is not None:
            self._socket.close()

    def _spawn(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        slots = asyncio.Semaphore(MAX_CALLERS)
        while True:
            await slots.acquire()
            try:
                caller, _ = await loop.sock_accept(listener)
            except OSError as error:
                # Out of descriptors: give callers that leave the time to free some.
                slots.release()
                log.warning("door.accept_failed error=%s", error)
                await asyncio.sleep(0.1)
                continue
            self._spawn(self._serve(caller, slots))

    async def _serve(self, caller: socket.socket, slots: asyncio.Semaphore) -> None:
        kept = False
        try:
            pid, uid, _ = struct.unpack("3i", caller.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
            if uid not in (os.geteuid(), 0):
                log.warning("door.refused pid=%d uid=%d", pid, uid)
                return
            async with asyncio.timeout(CALL_TIMEOUT_S):
                call = await self._read_call(caller)
                if call.join is not None:
                    # The kernel's word beats the caller's; it is 0 only across process namespaces.
                    kept = await self._on_join(caller, pid or call.join.pid)
                else:
                    answer = encode(await self._on_ask(call))
                    await asyncio.get_running_loop().sock_sendall(caller, answer)
        except (OSError, TimeoutError, msgspec.MsgspecError) as error:
            log.warning("door.failed error=%r", error)
        finally:
            slots.release()
            if not kept:
                caller.close()

    async def _read_call(self, caller: socket.socket) -> Call:
        loop = asyncio.get_running_loop()
        line = bytearray()
        while not line.endswith(b"\n"):
            data = await loop.sock_recv(caller, 4096)
            if not data or len(line) + len(data) > MAX_CALL_BYTES:
                raise ConnectionError(f"caller left, or sent more than {MAX_CALL_BYTES} bytes, before a line's end")
            line += data
        return msgspec.json.decode(line, type=Call)
