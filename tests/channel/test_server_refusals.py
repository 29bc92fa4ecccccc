"""What the worker's end refuses, whom it cuts off, and that nobody else notices."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from channel_worker import SETTINGS, EchoWorker, echo_entry

from engines.errors import Kind
from worker.channel import attach, frames, reception
from worker.channel import layout as at
from worker.channel.doorbell import open_doorbell
from worker.channel.frames import FrameSocket
from worker.channel.layout import SegmentLayout
from worker.channel.messages import LAYOUT_VERSION, MAX_FRAME_BYTES, Answer, Ask, Hello, Refused, ToFrontend, Welcome
from worker.channel.reception import Events
from worker.channel.records import NO_DEADLINE, reply_words, request_words
from worker.channel.ring import Producer
from worker.channel.segment import Segment, WorkerPage, reserve

LAYOUT = SegmentLayout.of(SETTINGS.max_in_flight, SETTINGS.arena_bytes)
MILLISECOND = 1_000_000


class Peer:
    """A frontend by hand: it can be wrong in every way."""

    def __init__(self, worker: EchoWorker, socket_path: str) -> None:
        self.worker = worker
        self.frames = FrameSocket(attach.connect(socket_path), MAX_FRAME_BYTES)
        self.segment_fd = reserve(LAYOUT.segment_bytes)
        self.segment = Segment(self.segment_fd, LAYOUT)
        self.segment.initialise(1, os.getpid(), SETTINGS.max_in_flight)
        self.doorbell = open_doorbell()
        self.page: WorkerPage | None = None

    def hello(self, **changes: Any) -> Hello:
        fields: dict[str, Any] = {
            "layout_version": LAYOUT_VERSION,
            "name": "peer",
            "pid": os.getpid(),
            "records": SETTINGS.max_in_flight,
            "arena_bytes": SETTINGS.arena_bytes,
            "segment_bytes": LAYOUT.segment_bytes,
        }
        return Hello(**{**fields, **changes})

    def say(self, message: object, fds: tuple[int, ...] | None = None) -> Any:
        """Send a message, let the worker turn, and return its first answer; None if it ended the connection."""
        self.frames.send(frames.encode(message), (self.segment_fd, self.doorbell) if fds is None else fds)
        return self.heard()

    def heard(self) -> Any:
        for _ in range(50):
            self.worker.turn(MILLISECOND)
            payloads = self.frames.read()
            if payloads:
                return msgspec.msgpack.decode(payloads[0], type=ToFrontend)
            if self.frames.eof:
                return None
        raise AssertionError("the worker neither answered nor ended the connection")

    def attach(self) -> Welcome:
        welcome = self.say(self.hello())
        assert isinstance(welcome, Welcome), welcome
        page_fd, self.bell_fd = self.frames.take_fds()
        self.page = WorkerPage(page_fd)
        os.close(page_fd)
        self.tail = self.page.request_tail(welcome.channel_id)
        self.requests = Producer(self.segment.request_ring(self.tail))
        return welcome

    def works(self) -> bool:
        """Send a request and return whether its reply came."""
        before = self.segment.words[at.REPLY_TAIL_WORD]
        self.requests.push(request_words(1, 1, 0, 0, 0, 8, 0, 1, NO_DEADLINE, 1))
        self.worker.turn(0)
        return bool(self.segment.words[at.REPLY_TAIL_WORD] == before + 1)

    def close(self) -> None:
        self.frames.close()
        for fd in (self.segment_fd, self.doorbell):
            os.close(fd)
        if self.page is not None:
            os.close(self.bell_fd)


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


@pytest.fixture
def new_peer(worker: EchoWorker, socket_path: str) -> Iterator[Callable[[], Peer]]:
    peers: list[Peer] = []

    def make() -> Peer:
        peers.append(Peer(worker, socket_path))
        return peers[-1]

    yield make
    for peer in peers:
        peer.close()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"layout_version": 7}, f"the frontend has layout version 7, this worker has {LAYOUT_VERSION}"),
        ({"segment_bytes": 4096}, f"segment of 4096 bytes announced, 64 records .* make {LAYOUT.segment_bytes}"),
        ({"records": 0}, "records: expected 1 to 65536, got 0"),
        ({"records": 1 << 40}, "records: expected 1 to 65536, got 1099511627776"),
        ({"arena_bytes": 1}, "arena_bytes: expected 4096 to 1099511627776, got 1"),
        ({"arena_bytes": 8 << 20}, "segment of .* bytes announced"),
    ],
)
def test_a_hello_that_does_not_fit_is_refused_with_both_numbers(
    new_peer: Callable[[], Peer], changes: dict[str, int], reason: str
) -> None:
    good, bad = new_peer(), new_peer()
    good.attach()
    answer = bad.say(bad.hello(**changes))
    assert isinstance(answer, Refused)
    with pytest.raises(AssertionError, match=reason):
        raise AssertionError(answer.reason)
    assert good.works()


def test_a_hello_of_a_version_with_other_fields_is_refused_with_both_numbers(new_peer: Callable[[], Peer]) -> None:
    peer = new_peer()
    answer = peer.say({"type": "Hello", "layout_version": 2, "something": "new"})
    assert answer == Refused(reason=f"the frontend has layout version 2, this worker has {LAYOUT_VERSION}")


def test_descriptors_that_are_not_what_they_should_be_are_refused(new_peer: Callable[[], Peer]) -> None:
    peer = new_peer()
    short = reserve(4096)
    read_end, write_end = os.pipe()
    try:
        cases: list[tuple[tuple[int, ...], str]] = [
            ((), "two descriptors"),
            ((peer.segment_fd,), "two descriptors"),
            ((short, peer.doorbell), f"segment has 4096 bytes, {LAYOUT.segment_bytes} were announced"),
            ((read_end, peer.doorbell), "segment has"),
            ((peer.segment_fd, write_end), "expected an eventfd, got pipe"),
        ]
        for fds, reason in cases:
            bad = new_peer()
            answer = bad.say(bad.hello(), fds)
            assert isinstance(answer, Refused)
            assert reason in answer.reason
    finally:
        for fd in (short, read_end, write_end):
            os.close(fd)


def test_a_segment_with_another_header_or_a_used_one_is_refused(new_peer: Callable[[], Peer]) -> None:
    for word, value, reason in [
        (at.MAGIC_WORD, 1, "segment: magic is 1"),
        (at.VERSION_WORD, 9, f"segment: layout version is 9, expected {LAYOUT_VERSION}"),
        (at.RECORDS_WORD, 5, "segment: records is 5, expected 64"),
        (at.REQUEST_HEAD_WORD, 3, "used before"),
    ]:
        peer = new_peer()
        peer.segment.words[word] = value
        answer = peer.say(peer.hello())
        assert isinstance(answer, Refused)
        assert reason in answer.reason


def test_more_frontends_than_channels_are_told_the_limit_and_may_wait(new_peer: Callable[[], Peer]) -> None:
    peers = [new_peer() for _ in range(SETTINGS.max_channels)]
    ids = [peer.attach().channel_id for peer in peers]
    assert sorted(ids) == list(range(SETTINGS.max_channels))
    answer = (late := new_peer()).say(late.hello())
    assert answer == Refused(reason="all 4 channels are taken (global.channel.max_channels)", retryable=True)
    assert all(peer.works() for peer in peers)


def test_a_draining_worker_refuses_for_now(worker: EchoWorker, new_peer: Callable[[], Peer]) -> None:
    worker.server.draining()
    peer = new_peer()
    assert peer.say(peer.hello()) == Refused(reason="the worker is draining", retryable=True)


@pytest.mark.parametrize("tail", [1 << 40, 500, 2**64 - 1])
def test_a_corrupt_ring_cuts_its_frontend_off_and_nobody_else(
    worker: EchoWorker, new_peer: Callable[[], Peer], tail: int
) -> None:
    good, bad = new_peer(), new_peer()
    good.attach()
    bad.attach()
    bad.tail[0] = tail
    worker.turn(0)
    worker.turn(0)
    assert [channel.closed for channel in worker.attached] == [False, True]
    assert worker.detached == [worker.attached[1]]
    assert bad.heard() is None
    assert good.works()
    worker.turn(0)
    assert len(worker.detached) == 1


def test_an_id_is_given_again_only_after_the_frontend_closed_its_side(
    worker: EchoWorker, new_peer: Callable[[], Peer]
) -> None:
    bad = new_peer()
    assert bad.attach().channel_id == 0
    bad.tail[0] = 1 << 40
    worker.turn(0)
    worker.turn(0)
    second = new_peer()
    assert second.attach().channel_id == 1
    # Cut off but alive: its last store is nobody's work.
    bad.tail[0] = 3
    assert worker.turn(0).detached == []
    assert not worker.server.rung()
    bad.frames.sock.shutdown(socket.SHUT_RDWR)
    for _ in range(3):
        worker.turn(MILLISECOND)
    third = new_peer()
    assert third.attach().channel_id == 0
    assert third.works()
    assert second.works()


def test_more_requests_than_agreed_cut_the_frontend_off(worker: EchoWorker, new_peer: Callable[[], Peer]) -> None:
    peer = new_peer()
    peer.attach()
    worker.hold = True
    for number in range(SETTINGS.max_in_flight + 1):
        peer.requests.push(request_words(number + 1, 1, 0, 0, 0, 8, 0, 1, NO_DEADLINE, 1))
    worker.turn(0)
    worker.turn(0)
    assert worker.detached == worker.attached
    assert peer.heard() is None


@pytest.mark.parametrize(
    "raw",
    [
        b"\xff\xff\xff\xff",
        b"\x03\x00\x00\x00\xc1\xc1\xc1",
        b"\x01\x00\x00\x00\x90",
        b"\x00\x00\x00\x00",
        b"\x0a\x00\x00\x00" + msgspec.msgpack.encode({"type": "Ask"}),
    ],
)
def test_garbage_ends_the_connection_and_nothing_else(new_peer: Callable[[], Peer], raw: bytes) -> None:
    good, bad = new_peer(), new_peer()
    good.attach()
    bad.frames.sock.send(raw)
    assert bad.heard() is None
    assert good.works()


def test_garbage_on_an_attached_socket_detaches_its_channel_once(
    worker: EchoWorker, new_peer: Callable[[], Peer]
) -> None:
    peer = new_peer()
    peer.attach()
    peer.frames.sock.send(b"\xff\xff\xff\xff")
    assert peer.heard() is None
    peer.frames.sock.send(b"more of it" * 100)
    for _ in range(3):
        worker.turn(MILLISECOND)
    assert worker.detached == worker.attached


def test_a_second_hello_is_a_broken_protocol(worker: EchoWorker, new_peer: Callable[[], Peer]) -> None:
    peer = new_peer()
    peer.attach()
    assert peer.say(peer.hello()) is None
    assert worker.detached == worker.attached


def test_a_peer_that_does_not_read_its_answers_is_cut_off(worker: EchoWorker, new_peer: Callable[[], Peer]) -> None:
    good, deaf = new_peer(), new_peer()
    good.attach()
    deaf.frames.send(frames.encode(Ask(id=1, what="status")))
    asks: list[tuple[reception.Connection, Ask]] = []
    while not asks:
        asks = worker.server.poll(MILLISECOND).asks
    connection = asks[0][0]
    large = Answer(id=1, value="x" * (8 << 20))
    for _ in range(6):
        worker.server.answer(connection, large)
    assert connection.closed
    worker.server.answer(connection, large)
    assert good.works()


def test_an_answer_too_large_for_a_frame_says_so(worker: EchoWorker, new_peer: Callable[[], Peer]) -> None:
    peer = new_peer()
    peer.frames.send(frames.encode(Ask(id=4, what="status")))
    asks: list[tuple[reception.Connection, Ask]] = []
    while not asks:
        asks = worker.server.poll(MILLISECOND).asks
    worker.server.answer(asks[0][0], Answer(id=4, value="x" * (17 << 20)))
    answer = peer.heard()
    assert (answer.id, answer.kind) == (4, 7)
    assert "a frame holds 16777216" in answer.text


@pytest.mark.interpreted
def test_connections_beyond_the_limit_are_closed(
    worker: EchoWorker, new_peer: Callable[[], Peer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reception, "MAX_CONTROL_CONNECTIONS", 0)
    peers = [new_peer() for _ in range(SETTINGS.max_channels)]
    for peer in peers:
        peer.attach()
    assert new_peer().heard() is None
    assert peers[0].works()


@pytest.mark.interpreted
def test_a_silent_connection_gives_way(
    worker: EchoWorker, new_peer: Callable[[], Peer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reception, "MAX_CONTROL_CONNECTIONS", 0)
    silent = [new_peer() for _ in range(SETTINGS.max_channels)]
    worker.turn(MILLISECOND)
    monkeypatch.setattr(reception, "MAX_SILENT_NS", -1)
    new_peer().attach()
    assert silent[0].heard() is None


def test_watched_descriptors_are_reported_until_unwatched(worker: EchoWorker) -> None:
    fd = open_doorbell()
    worker.server.watch(fd)
    os.eventfd_write(fd, 1)
    assert worker.server.poll(-1).fds == [fd]
    worker.server.unwatch(fd)
    assert worker.server.poll(MILLISECOND).fds == []
    os.close(fd)


def test_records_neither_ring_nor_end_a_rest_and_watched_descriptors_do(
    worker: EchoWorker, new_peer: Callable[[], Peer]
) -> None:
    peer = new_peer()
    peer.attach()
    worker.turn(0)
    peer.requests.push(request_words(1, 1, 0, 0, 0, 8, 0, 1, NO_DEADLINE, 1))
    began_ns = time.monotonic_ns()
    assert worker.server.poll(-1, MILLISECOND) == Events()
    assert time.monotonic_ns() - began_ns >= MILLISECOND
    assert worker.server.rung() == [worker.attached[0]]
    assert worker.server.poll(0, 3600 * 1000 * MILLISECOND) == Events(), "whoever does not wait does not rest"
    fd = open_doorbell()
    worker.server.watch(fd)
    os.eventfd_write(fd, 1)
    assert worker.server.poll(-1, 3600 * 1000 * MILLISECOND).fds == [fd]
    worker.server.unwatch(fd)
    os.close(fd)


def test_sockets_are_looked_at_even_while_a_ring_always_has_work(
    worker: EchoWorker, new_peer: Callable[[], Peer]
) -> None:
    busy, asking = new_peer(), new_peer()
    busy.attach()
    worker.turn(0)
    busy.requests.push(request_words(1, 1, 0, 0, 0, 8, 0, 1, NO_DEADLINE, 1))
    asking.frames.send(frames.encode(Ask(id=1, what="status")))
    limit = 1_000_000
    for _ in range(limit):
        # Nobody takes the record, so that there is always something to do.
        events = worker.server.poll(0)
        assert worker.server.rung() == [worker.attached[0]]
        if events.asks:
            return
    raise AssertionError(f"not within {limit} turns")


def test_a_closed_channel_drops_replies_and_is_released_once(worker: EchoWorker, new_peer: Callable[[], Peer]) -> None:
    peer = new_peer()
    peer.attach()
    worker.turn(0)
    channel = worker.attached[0]
    worker.hold = True
    for number in range(3):
        peer.requests.push(request_words(number + 1, 1, 0, 0, 0, 8, 0, 1, NO_DEADLINE, 1))
    worker.turn(0)
    channel.reply(reply_words(1, 0))
    with pytest.raises(AssertionError, match="still attached"):
        channel.release()
    peer.frames.close()
    events = Events()
    while not events.detached:
        events = worker.server.poll(MILLISECOND)
    # A batch that was running when the frontend died still writes and answers.
    channel.arena[:] = 1
    channel.reply(reply_words(2, 0))
    channel.fail(3, Kind.INTERNAL, "too late")
    channel.flush()
    assert channel.in_flight == 0
    assert peer.segment.words[at.REPLY_TAIL_WORD] == 0
    channel.release()
    with pytest.raises(AssertionError, match="released before"):
        channel.release()
