"""The control endpoint with a real gRPC client: relayed whole, limited, private, and gone afterwards."""

from __future__ import annotations

import asyncio
import os
import stat
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from engines.errors import NotFound
from frontend.control import listener
from frontend.control.endpoint import INNER_SOCKET
from frontend.control.listener import ControlError, ControlListener
from frontend.control.messages import control_file, message_class
from frontend.control.schema import RPCS, SERVICE
from frontend.settings import ControlSettings

STATUS = f"/{SERVICE}/ModelControlStatus"
SET = f"/{SERVICE}/SetModelPolicy"


class Operator:
    """Stands for a node; models that were asked for are remembered."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.gate: asyncio.Event | None = None
        self.entered = asyncio.Event()

    async def control_status(self, model: str = "") -> list[dict[str, Any]]:
        self.asked.append(model)
        self.entered.set()
        if self.gate is not None:
            await self.gate.wait()
        if model == "broken":
            raise RuntimeError("secret detail")
        one = {"name": model or "m", "version": "1", "weight": 1.5, "queue_depth": 1 << 60, "batch_axis": None}
        return [{"worker": "worker0", "models": [one], "later": "ignored"}]

    async def set_weight(self, model: Any, weight: Any) -> dict[str, Any]:
        raise NotFound(f"no {model} for {weight}")


@asynccontextmanager
async def serving(
    run_dir: Path, endpoint: str = "unix:control.sock", operator: Operator | None = None
) -> AsyncIterator[ControlListener]:
    served = ControlListener(ControlSettings(endpoint=endpoint), str(run_dir), operator or Operator())
    await served.start()
    try:
        yield served
    finally:
        await served.close()


def run(body: Callable[[], Awaitable[None]]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(30):
            await body()

    asyncio.run(limited())


@pytest.mark.parametrize("endpoint", ["unix:control.sock", "127.0.0.1:0", "[::1]:0"])
def test_calls_are_answered_at_the_endpoint(tmp_path: Path, endpoint: str) -> None:
    async def body() -> None:
        async with serving(tmp_path, endpoint) as served, grpc.aio.insecure_channel(served.address) as channel:
            request = message_class("ModelControlStatusRequest")(model="x" * 200_000)
            data = await channel.unary_unary(STATUS)(request.SerializeToString())
            (worker,) = message_class("ModelControlStatusResponse").FromString(data).workers  # type: ignore[attr-defined]
            (model,) = worker.models
            assert (len(model.name), model.weight, model.queue_depth) == (200_000, 1.5, 1 << 60)
            assert not model.HasField("batch_axis")

    run(body)


@pytest.mark.parametrize("name", ["plain", "with space", "50%25", "umläut"])
def test_a_unix_endpoint_is_the_users_alone_whatever_the_mask_and_the_path(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()

    async def body() -> None:
        async with serving(tmp_path / name) as served, grpc.aio.insecure_channel(served.address) as channel:
            await channel.unary_unary(STATUS)(b"")
            modes = {entry.name: stat.S_IMODE(entry.stat().st_mode) for entry in os.scandir(tmp_path / name)}
            assert modes == {"control.sock": 0o600, INNER_SOCKET: 0o600}
        assert os.listdir(tmp_path / name) == []

    mask = os.umask(0)
    try:
        run(body)
        assert os.umask(0) == 0, "the mask was not put back"
    finally:
        os.umask(mask)


def test_none_makes_nothing(tmp_path: Path) -> None:
    async def body() -> None:
        async with serving(tmp_path, "none") as served:
            assert (served.address, served.socket_names) == ("", ())
            assert os.listdir(tmp_path) == []

    run(body)


def test_a_port_in_use_is_named(tmp_path: Path) -> None:
    async def body() -> None:
        async with serving(tmp_path, "127.0.0.1:0") as first:
            port = first.address.rpartition(":")[2]
            with pytest.raises(ControlError, match=rf"global\.control\.endpoint: cannot listen on 127\.0\.0\.1:{port}"):
                async with serving(tmp_path, first.address):
                    pass

    run(body)


def test_failures_leave_as_statuses_and_unforeseen_ones_without_details(tmp_path: Path) -> None:
    async def outcome(channel: grpc.aio.Channel, path: str, data: bytes) -> tuple[str, str]:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.unary_unary(path)(data)
        return caught.value.code().name, caught.value.details() or ""

    async def body() -> None:
        async with serving(tmp_path) as served, grpc.aio.insecure_channel(served.address) as channel:
            change = message_class("SetModelPolicyRequest")(model="m", weight=2.0).SerializeToString()
            assert await outcome(channel, SET, change) == ("NOT_FOUND", "no m for 2.0")
            broken = message_class("ModelControlStatusRequest")(model="broken").SerializeToString()
            assert await outcome(channel, STATUS, broken) == ("INTERNAL", "internal error")
            assert (await outcome(channel, f"/{SERVICE}/Nothing", b""))[0] == "UNIMPLEMENTED"
            assert (await outcome(channel, STATUS, b"\xff" * 9))[0] == "INVALID_ARGUMENT"
            assert (await outcome(channel, STATUS, b"\n" + b"\xff" * (2 << 20)))[0] == "RESOURCE_EXHAUSTED"
            await channel.unary_unary(STATUS)(b"")

    run(body)


def test_callers_beyond_the_limit_are_cut_and_room_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "MAX_CALLERS", 2)

    async def body() -> None:
        async with serving(tmp_path) as served:
            path = str(tmp_path / "control.sock")
            held = [await asyncio.open_unix_connection(path) for _ in range(2)]
            # The server's half of HTTP/2 begins with its settings: both are being served.
            for reader, _ in held:
                assert await reader.read(9)
            reader, writer = await asyncio.open_unix_connection(path)
            assert await reader.read(9) == b""
            writer.close()
            for _, one in held:
                one.close()
            async with grpc.aio.insecure_channel(served.address) as channel:
                # Until the room is seen to be back the client is cut, and dials again.
                await channel.unary_unary(STATUS)(b"", wait_for_ready=True)

    run(body)


def test_closing_ends_calls_under_way(tmp_path: Path) -> None:
    operator = Operator()

    async def body() -> None:
        operator.gate = asyncio.Event()
        async with grpc.aio.insecure_channel(f"unix:{tmp_path}/control.sock") as channel:
            async with serving(tmp_path, operator=operator):
                call = channel.unary_unary(STATUS)(b"")
                task = asyncio.ensure_future(call.code())
                await operator.entered.wait()
            assert await task in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)

    run(body)


def test_the_description_has_a_request_and_a_response_for_each_rpc() -> None:
    file = control_file()
    names = {message.name for message in file.message_type}
    assert {f"{rpc}{part}" for rpc in RPCS for part in ("Request", "Response")} <= names
    assert file.package == "ringserve.control.v1"
    for message in file.message_type:
        numbers = [field.number for field in message.field]
        assert len(numbers) == len(set(numbers)), message.name
