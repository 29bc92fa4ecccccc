"""The worker's socket file: whose it is, and when it goes."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from channel_worker import SETTINGS, EchoWorker, echo_entry

from engines.errors import AlreadyExists, InvalidInput
from worker.channel.server import ChannelServer


@pytest.fixture
def socket_path(tmp_path: Path) -> str:
    return str(tmp_path / "worker.sock")


@pytest.fixture
def worker(socket_path: str) -> Iterator[EchoWorker]:
    one = EchoWorker(socket_path)
    one.server.open()
    one.server.publish_models([echo_entry()])
    yield one
    one.server.close()


def test_a_stale_socket_file_is_replaced_and_a_live_one_is_not(worker: EchoWorker, socket_path: str) -> None:
    second = ChannelServer(socket_path, SETTINGS, 2)
    with pytest.raises(AlreadyExists, match="another worker listens"):
        second.open()
    stale = socket_path + "2"
    dead = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    dead.bind(stale)
    dead.close()
    third = ChannelServer(stale, SETTINGS, 3)
    third.open()
    assert os.stat(stale).st_mode & 0o777 == 0o600
    third.close()
    assert not os.path.exists(stale)


def test_closing_leaves_a_successors_socket_alone(socket_path: str) -> None:
    first = ChannelServer(socket_path, SETTINGS, 1)
    first.open()
    os.unlink(socket_path)
    second = ChannelServer(socket_path, SETTINGS, 2)
    second.open()
    first.close()
    assert os.path.exists(socket_path)
    second.close()


def test_a_path_too_long_for_a_socket_is_named(tmp_path: Path) -> None:
    server = ChannelServer(str(tmp_path / ("x" * 120)), SETTINGS, 1)
    with pytest.raises(InvalidInput, match="has more than 107 bytes"):
        server.open()
