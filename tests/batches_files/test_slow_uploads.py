"""Large files over slow lines: progress keeps an upload alive, standing still ends it."""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Iterator

import pytest
from live_gateway import LiveGateway, live_gateway
from test_files_api import form

from frontend.batches.body_pipe import STEP_BYTES

MANY_TURNS = 5_000
PART = STEP_BYTES * 5 // 4
SIZE = 4 * STEP_BYTES
LIMITS = {"max_file_bytes": 2 * SIZE, "quota_bytes_per_workspace": 2 * SIZE}


@pytest.fixture
def roomy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveGateway]:
    with live_gateway(tmp_path_factory.mktemp("roomy"), files=LIMITS) as running:
        yield running


def begin(gateway: LiveGateway) -> tuple[socket.socket, bytes]:
    body = form([("purpose", b"batch", None), ("file", b"{" * SIZE, "x")])
    head = (
        f"POST /v1/files HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {gateway.key(gateway.new_workspace())}\r\n"
        f"Content-Type: multipart/form-data; boundary=xyz\r\nContent-Length: {len(body)}\r\n\r\n"
    ).encode()
    sender = socket.create_connection(("127.0.0.1", gateway.port), timeout=30)
    sender.sendall(head)
    return sender, body


def written(gateway: LiveGateway) -> int:
    return sum(path.stat().st_size for path in gateway.files_dir.glob("tmp/*"))


def until_written(gateway: LiveGateway, size: int) -> None:
    """Wait until so much of the upload has gone through the gateway; each turn of its loop brings it further."""
    for _ in range(MANY_TURNS):
        if written(gateway) >= size:
            return
        gateway.pass_time(0)
    raise AssertionError(f"{written(gateway)} bytes arrived, expected {size}")


def test_case_bf_14_an_upload_may_take_longer_than_a_request(roomy: LiveGateway) -> None:
    sender, body = begin(roomy)
    with sender:
        for start in range(0, len(body), PART):
            sender.sendall(body[start : start + PART])
            if start + PART < SIZE:
                until_written(roomy, start + PART - 4096)
                roomy.pass_time(50)
        response = http.client.HTTPResponse(sender)
        response.begin()
        assert json.loads(response.read())["bytes"] == SIZE


def test_an_upload_that_stands_still_is_given_up(roomy: LiveGateway) -> None:
    sender, body = begin(roomy)
    with sender:
        sender.sendall(body[: SIZE // 2])
        until_written(roomy, SIZE // 2 - 4096)
        roomy.pass_time(61)
        response = http.client.HTTPResponse(sender)
        response.begin()
        assert response.status == 408
        assert set(json.loads(response.read())["error"]) == {"message", "type", "param", "code"}
    for _ in range(MANY_TURNS):
        if not roomy.stored():
            return
        roomy.pass_time(0)
    raise AssertionError("what had arrived was not removed")
