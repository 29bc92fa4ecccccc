"""Tensors received where the worker reads them: answers as when they are collected first, and nothing left over."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from direct_world import BIG, CHANNEL, World, entry, infer, split, tensor
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.errors import ArenaFull
from engines.tensor import TensorSpec
from frontend.httpd.body import BodyBuffer
from frontend.kserve import http_routes
from frontend.late_call import LateCall
from worker.channel.client import Placement

pytestmark = pytest.mark.interpreted

BINARY = {"parameters": {"binary_data_output": True}}
X = np.arange(8, dtype=np.float32).reshape(2, 4)
A = np.arange(6, dtype=np.float32).reshape(2, 3)
FLAG = np.array([[1, 0, 1, 1, 0], [0, 0, 1, 0, 1]], np.uint8)
C = np.arange(8, dtype=np.uint16).reshape(2, 2, 2)
ECHO = infer("echo", {"id": "e", "inputs": [tensor("x", "FP32", X)], **BINARY}, X.tobytes())
THREE_INPUTS = [tensor("c", "BF16", C), tensor("a", "FP32", A), tensor("flag", "BOOL", FLAG)]
THREE = infer("three", {"inputs": THREE_INPUTS, **BINARY}, C.tobytes() + A.tobytes() + FLAG.tobytes())
HUGE = np.ones((20, 4), np.float32)
TEXT = b"\x02\0\0\0hi"
TEXT_TENSOR = {"name": "x", "datatype": "BYTES", "shape": [1], "parameters": {"binary_data_size": len(TEXT)}}


def one(change: dict[str, Any], binary: bytes = X.tobytes(), model: str = "echo", *headers: str) -> bytes:
    return infer(model, {"inputs": [tensor("x", "FP32", X) | change], **BINARY}, binary, *headers)


GOOD = {
    "echo": ECHO,
    "three": THREE,
    "fixed": infer("fixed", {"inputs": [tensor("x", "INT64", np.arange(3))], **BINARY}, np.arange(3).tobytes()),
    "hooked": one({}, model="hooked"),
    "cut into pieces": infer("echo", {"inputs": [tensor("x", "FP32", HUGE)], **BINARY}, HUGE.tobytes()),
    "explained": one({}, X.tobytes(), "echo", "x-ringserve-explain: 1"),
    "JSON answer": infer("echo", {"inputs": [tensor("x", "FP32", X)]}, X.tobytes()),
}
BAD = {
    "no such model": one({}, model="nobody"),
    "datatype": one({"datatype": "INT32"}),
    "no datatype": one({"datatype": "X"}),
    "shape": one({"shape": [2, 5]}),
    "rank": one({"shape": [8]}),
    "negative": one({"shape": [-2, 4]}),
    "name": one({"name": "y"}),
    "zero rows": infer("echo", {"inputs": [tensor("x", "FP32", X[:0])]}, b""),
    "zero rows with bytes": one({"shape": [0, 4]}),
    "size does not fit shape": one({"parameters": {"binary_data_size": 28}}, X.tobytes()[:28]),
    "size beyond the body": one({"parameters": {"binary_data_size": 36}}),
    "bytes too many": one({}, X.tobytes() + b"more"),
    "size is no number": one({"parameters": {"binary_data_size": "32"}}),
    "data and size": one({"data": [1, 2]}),
    "neither": one({"parameters": {}}),
    "no JSON": infer("echo", b"{oops", X.tobytes()),
    "not UTF-8": infer("echo", b'{"inputs": "\xff"}', X.tobytes()),
    "JSON length beyond the body": infer("echo", {"inputs": []}, b"", length=5000),
    "JSON length is no number": infer("echo", {"inputs": []}, b"12345", length=-5),
    "output": infer("echo", {"inputs": [tensor("x", "FP32", X)], "outputs": [{"name": "z"}]}, X.tobytes()),
    "too few inputs": infer("three", {"inputs": [tensor("a", "FP32", A)]}, A.tobytes()),
    "an input twice": infer("echo", {"inputs": [tensor("x", "FP32", X)] * 2}, X.tobytes() * 2),
    "rows differ": infer(
        "three",
        {"inputs": [tensor("c", "BF16", C[:1]), *THREE_INPUTS[1:]]},
        C[:1].tobytes() + A.tobytes() + FLAG.tobytes(),
    ),
    "bool": infer(
        "three", {"inputs": THREE_INPUTS, **BINARY}, C.tobytes() + A.tobytes() + b"\x01\x02" + FLAG.tobytes()[2:]
    ),
    "timeout header": one({}, X.tobytes(), "echo", "x-request-timeout-ms: soon"),
    "explain header": one({}, X.tobytes(), "echo", "x-ringserve-explain: yes"),
    "region": one({"parameters": {"shared_memory_region": "r", "shared_memory_byte_size": 32}}),
    "text": infer("text", {"inputs": [TEXT_TENSOR | {"shape": [2]}]}, TEXT),
    "method": ECHO.replace(b"POST", b"PUT", 1),
    "path": ECHO.replace(b"/infer", b"/inf%65r", 1),
}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    made = World(tmp_path_factory.mktemp("direct"))
    yield made
    made.close()


@pytest.fixture(autouse=True)
def every_body(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_routes, "DIRECT_BYTES", 1)


def ordinary(world: World, request: bytes) -> list[tuple[int, bytes]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(http_routes, "DIRECT_BYTES", 1 << 40)
        return world.run(world.answers([request]))


def cut(stream: bytes, places: Sequence[int]) -> list[bytes]:
    return [stream[start:end] for start, end in pairwise(sorted({0, len(stream), *places}))]


@pytest.mark.parametrize("name", GOOD)
def test_answers_are_those_of_collected_bodies(world: World, name: str) -> None:
    expected = ordinary(world, GOOD[name])
    assert [status for status, _ in expected] == [200], expected
    assert world.run(world.answers([GOOD[name]])) == expected
    stream = GOOD[name]
    assert world.run(world.answers(cut(stream, range(0, len(stream), 3)))) == expected


@pytest.mark.parametrize("name", BAD)
def test_mistakes_are_told_as_of_collected_bodies(world: World, name: str) -> None:
    expected = ordinary(world, BAD[name])
    assert expected and expected[0][0] >= 400, expected
    assert world.run(world.answers([BAD[name]])) == expected
    assert world.run(world.answers(cut(BAD[name], range(0, len(BAD[name]), 5)))) == expected


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_any_segmentation_gives_the_same_answers(world: World, data: st.DataObject) -> None:
    requests = data.draw(st.lists(st.sampled_from([*GOOD.values(), *BAD.values()]), min_size=1, max_size=5))
    stream = b"".join(requests)
    places = data.draw(st.lists(st.integers(0, len(stream)), max_size=30))
    step = data.draw(st.sampled_from([0, 1, 7, 300]))
    expected: list[tuple[int, bytes]] = []
    for request in requests:
        answer = ordinary(world, request)
        expected += answer
        if answer[0][0] >= 400:
            break  # answered with its body unread, or not: what follows may be cut off
    places += range(0, len(stream), step) if step else ()
    got = world.run(world.answers(cut(stream, places), len(expected)))
    assert got[: len(expected)] == expected


def test_elements_are_written_where_the_worker_reads_them(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BodyBuffer, "__init__", lambda *_: pytest.fail("a body was collected"))
    assert world.run(world.answers(cut(THREE, range(0, len(THREE), 40))))[0][0] == 200


def test_a_mistake_is_answered_before_its_tensors_are_read(world: World) -> None:
    async def work() -> None:
        connection, transport = world.connect()
        await world.feed(connection, transport, [BAD["shape"][: -X.nbytes]])
        [(status, body)] = split(bytes(transport.written))
        assert (status, "unexpected shape" in body.decode()) == (400, True)
        assert b"Connection: close" in bytes(transport.written)
        # What else the client sends is swallowed, so that it can read the answer.
        await world.feed(connection, transport, [BAD["shape"][-X.nbytes :]])
        assert transport.eof and not transport.closed
        connection.connection_lost(None)
        await world.at_rest()

    world.run(work())


@pytest.mark.parametrize("how", ["lost", "end of input", "read timeout", "abort"])
@pytest.mark.parametrize("name", ["echo", "three", "hooked"])
def test_whatever_is_received_is_given_back_at_every_stage(world: World, name: str, how: str) -> None:
    request = GOOD[name]

    async def work(sent: int) -> None:
        connection, transport = world.connect()
        await world.feed(connection, transport, [request[:sent]])
        if how == "end of input":
            connection.eof_received()
        elif how == "read timeout":
            connection.tick(world.clock())
            connection.tick(world.clock() + 61_000_000_000)
        elif how == "abort":
            connection.abort()
        connection.connection_lost(None)
        await world.at_rest()

    for sent in [*range(0, len(request), 11), len(request) - 1]:
        world.run(work(sent))


def test_a_client_that_leaves_while_its_request_runs(world: World) -> None:
    async def work() -> None:
        world.worker.hold = True
        connection, transport = world.connect()
        await world.feed(connection, transport, [ECHO])
        assert world.channel.in_flight == 1
        connection.connection_lost(None)
        assert world.app.traffic.in_flight == 0
        world.worker.hold = False
        # The worker here drops what it held; a new attachment is what ends it.
        await restart(world)
        await world.at_rest()

    world.run(work())


async def restart(world: World) -> None:
    """Replace the worker."""
    old = world.channel._attachment
    world.thread.__exit__()
    await world.until(lambda: world.channel._attachment is not old)
    world.worker = type(world.worker)(world.socket_path, world.models)
    world.thread = type(world.thread)(world.worker, world.models)
    world.thread.__enter__()
    await world.until(lambda: world.channel.state == "attached")


def test_a_worker_that_is_replaced_meanwhile_gets_the_request(world: World) -> None:
    expected = ordinary(world, THREE)

    async def work() -> list[tuple[int, bytes]]:
        connection, transport = world.connect()
        await world.feed(connection, transport, [THREE[:-10]])
        assert world.channel.arena_bytes_used > 0
        await restart(world)
        await world.feed(connection, transport, [THREE[-10:]])
        await world.until(lambda: bool(split(bytes(transport.written))))
        connection.connection_lost(None)
        await world.at_rest()
        return split(bytes(transport.written))

    assert world.run(work()) == expected


def test_a_worker_that_is_gone_is_told_when_the_body_is_complete(world: World) -> None:
    async def work() -> None:
        connection, transport = world.connect()
        await world.feed(connection, transport, [ECHO[:-10]])
        world.thread.__exit__()
        await world.until(lambda: world.channel.state != "attached")
        await world.feed(connection, transport, [ECHO[-10:]])
        [(status, _)] = split(bytes(transport.written))
        assert status == 503
        connection.connection_lost(None)
        await restart_after_end(world)
        await world.at_rest()

    world.run(work())


async def restart_after_end(world: World) -> None:
    world.worker = type(world.worker)(world.socket_path, world.models)
    world.thread = type(world.thread)(world.worker, world.models)
    world.thread.__enter__()
    await world.until(lambda: world.channel.state == "attached")


def test_a_model_that_is_replaced_meanwhile_gets_the_request(world: World) -> None:
    async def work(entries: list[Any], expect: tuple[int, str]) -> None:
        connection, transport = world.connect()
        await world.feed(connection, transport, [ECHO[:-10]])
        world.worker.server.publish_models(entries)
        heard = world.table.entries()
        await world.until(lambda: world.table.entries() is not heard)
        await world.feed(connection, transport, [ECHO[-10:]])
        await world.until(lambda: bool(split(bytes(transport.written))))
        [(status, body)] = split(bytes(transport.written))
        assert (status, expect[1] in body.decode("latin-1")) == (expect[0], True), body
        connection.connection_lost(None)
        await world.at_rest()
        await world.until(lambda: not world.hooked.loading())

    swapped = entry(17, "echo", TensorSpec("x", "f32", (-1, 4), 0))
    world.worker.layouts[17] = world.worker.layouts[1]
    rest = world.models[1:]
    try:
        world.run(work([swapped, *rest], (200, "x_out")))
        world.run(work([*rest], (404, "unknown model")))
    finally:
        world.worker.server.publish_models(world.models)
        world.run(world.until(lambda: "echo" in {one.name for one in world.table.entries()}))
        world.run(world.until(lambda: not world.hooked.loading()))
    other = entry(18, "echo", TensorSpec("x", "f32", (-1, 5), 0))
    try:
        world.run(work([other, *rest], (400, "unexpected shape")))
    finally:
        world.worker.server.publish_models(world.models)
        world.run(world.until(lambda: world.table.entry("echo").model_id == 1))
        world.run(world.until(lambda: not world.hooked.loading()))


def test_the_deadline_counts_from_the_headers_and_ends_the_body(world: World) -> None:
    request = one({}, X.tobytes(), "echo", "x-request-timeout-ms: 50")

    async def work() -> None:
        connection, transport = world.connect()
        await world.feed(connection, transport, [request[:-4]])
        assert world.channel.arena_bytes_used > 0
        await transport.wrote.wait()
        assert world.channel.arena_bytes_used == 0
        [(status, body)] = split(bytes(transport.written))
        assert (status, "50.000 ms" in body.decode()) == (504, True)
        # The place may be another's by now.
        await world.feed(connection, transport, [request[-4:]])
        connection.connection_lost(None)
        await world.at_rest()

    world.run(work())


def test_a_deadline_that_passes_before_its_turn_is_told_in_turn(world: World) -> None:
    late = one({}, X.tobytes(), "echo", "x-request-timeout-ms: 50")

    async def work() -> None:
        connection, transport = world.connect()
        transport.stuck = True
        # Waits behind a client that does not read: complete, but not started.
        connection.data_received(b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\n\r\n" + late[:-4])
        connection.pause_writing()
        connection._feed(late[-4:])
        assert len(world.kserve._direct) == 1
        await world.until(lambda: world.channel.arena_bytes_used == 0)
        transport.drain()
        connection.resume_writing()
        assert [status for status, _ in split(bytes(transport.written))] == [200, 504]
        await world.feed(connection, transport, [ECHO])
        await world.until(lambda: len(split(bytes(transport.written))) == 3)
        assert split(bytes(transport.written))[2][0] == 200
        connection.connection_lost(None)
        await world.at_rest()

    world.run(work())


def fill(world: World) -> list[Placement]:
    """Take all room that there is for ``big``."""
    held: list[Placement] = []
    with contextlib.suppress(ArenaFull):
        while len(held) < 1000:
            held.append(world.channel.place(world.table.entry("big"), 0, 1))
    return held


def test_rule_3_6_a_full_arena_refuses_before_reading_on(world: World) -> None:
    big = np.zeros((1, BIG), np.uint8)
    request = infer("big", {"inputs": [tensor("x", "UINT8", big)]}, big.tobytes())

    async def work() -> None:
        held = fill(world)
        connection, transport = world.connect()
        await world.feed(connection, transport, [request[:1000]])
        [(status, body)] = split(bytes(transport.written))
        assert (status, "arena_bytes" in body.decode()) == (429, True)
        assert b"Retry-After" in bytes(transport.written)
        connection.connection_lost(None)
        for placement in held:
            placement.release()
        await world.at_rest()

    world.run(work())


def test_a_crowded_arena_is_left_to_requests_that_are_ready(world: World) -> None:
    """Slow senders hold at most half of it, the request that crosses the half included."""
    big = np.zeros((1, BIG), np.uint8)
    request = infer("big", {"inputs": [tensor("x", "UINT8", big)]}, big.tobytes())

    async def work() -> None:
        pairs = [world.connect() for _ in range(6)]
        for connection, transport in pairs:
            await world.feed(connection, transport, [request[:1000]])
        assert 0 < world.channel.arena_bytes_used <= CHANNEL.arena_bytes // 2
        assert not any(transport.written for _, transport in pairs)
        assert world.state.buffered_bytes > 0
        for connection, transport in pairs:
            await world.feed(connection, transport, [request[1000:]])
            await world.until(lambda one=transport: bool(split(bytes(one.written))))
            assert split(bytes(transport.written))[0][0] == 200
            connection.connection_lost(None)
        await world.at_rest()

    world.run(work())


def test_outputs_are_lent_from_the_arena_until_the_client_has_them(world: World) -> None:
    big = np.random.default_rng(1).integers(0, 255, (1, BIG), np.uint8)
    request = infer("big", {"inputs": [tensor("x", "UINT8", big)], **BINARY}, big.tobytes())

    async def work() -> None:
        connection, transport = world.connect()
        transport.stuck = True
        await world.feed(connection, transport, [request])
        await transport.wrote.wait()
        assert world.channel.in_flight == 0
        arena = world.channel._attachment.memory
        assert np.shares_memory(np.frombuffer(transport.lent[-1], np.uint8), arena)
        assert world.channel.arena_bytes_used > 0
        connection.pause_writing()
        transport.drain()
        connection.resume_writing()
        assert world.channel.arena_bytes_used == 0
        assert split(bytes(transport.written))[0][1].endswith(big.tobytes())
        connection.connection_lost(None)
        await world.at_rest()

    world.run(work())


def test_other_requests_of_the_connection_go_on(world: World) -> None:
    answers = world.run(world.answers([ECHO * 3 + THREE + GOOD["hooked"]], 5))
    assert [status for status, _ in answers] == [200] * 5


def test_small_bodies_are_collected(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(LateCall, "expect", lambda self: pytest.fail("received directly"))
    assert world.run(world.answers([ECHO]))[0][0] == 200


def test_the_largest_json_in_front(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    text = json.dumps({"inputs": [tensor("x", "FP32", X)], **BINARY}).encode()
    for size in (http_routes.MAX_JSON_BYTES, http_routes.MAX_JSON_BYTES + 1):
        request = infer("echo", text + b" " * (size - len(text)), X.tobytes())
        assert world.run(world.answers(cut(request, range(0, len(request), 9000)))) == ordinary(world, request)


def test_a_drain_lets_the_body_come(world: World) -> None:
    async def work() -> None:
        connection, transport = world.connect()
        await world.feed(connection, transport, [ECHO[:-10]])
        world.state.draining = True
        connection.drain()
        assert not transport.closed
        await world.feed(connection, transport, [ECHO[-10:]])
        await asyncio.wait_for(transport.wrote.wait(), 10)
        assert split(bytes(transport.written))[0][0] == 200
        assert b"Connection: close" in bytes(transport.written)
        world.state.draining = False
        connection.connection_lost(None)
        await world.at_rest()

    world.run(work())
