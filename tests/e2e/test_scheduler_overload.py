"""More work than the device can do: refused at once and retryably on every path, and nobody else's trouble."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import numpy as np
import pytest

from bench.load import HttpConnection
from frontend.kserve.proto import message_class
from real_node import Node, raw_output
from scheduler_node import (
    INFER,
    STREAM_INFER,
    add_affine,
    add_slow,
    add_steps,
    close_all,
    connections,
    counted,
    grpc_request,
    node_file,
    post,
    request,
    rows,
)

pytestmark = pytest.mark.process

CAP = 5
SENT = 20


@pytest.fixture(scope="module")
def capped_node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Node, dict[str, int]]]:
    directory = tmp_path_factory.mktemp("overload")
    models = directory / "models"
    add_slow(models, "slow", 150)
    add_affine(models)
    with Node(models, directory / "run", node_file=node_file(directory, max_queue_depth=CAP)) as node:
        node.wait_full_strength()
        yield node, node.ports


def check_counts(node: Node, before: dict[str, int], accepted: int) -> None:
    """What was accepted ran; what was refused was counted; never more than the cap waited beside the running one."""
    after = counted(node, "slow")
    assert after["requests_served"] - before["requests_served"] == accepted
    assert after["shed"].get("queue_full", 0) - before["shed"].get("queue_full", 0) == SENT - accepted
    assert CAP <= accepted < SENT


def test_rule_23_do_02_over_http_429_with_retry_after(capped_node: tuple[Node, dict[str, int]]) -> None:
    node, ports = capped_node
    before = counted(node, "slow")
    with ThreadPoolExecutor(SENT) as pool:
        answers = [*pool.map(lambda _: post(ports["http_port"], "slow", rows(1)), range(SENT))]
    statuses = Counter(status for status, _, _ in answers)
    assert set(statuses) == {200, 429}, statuses
    for status, headers, body in answers:
        if status == 429:
            assert int(headers["retry-after"]) >= 1
            assert headers["content-type"] == "application/json"
            text = json.loads(body)["error"]
            assert "queue of model 'slow' is full" in text
            assert f"max_queue_depth is {CAP}" in text
            assert "Traceback" not in text
    check_counts(node, before, statuses[200])


def test_rule_23_do_02_over_grpc_resource_exhausted(capped_node: tuple[Node, dict[str, int]]) -> None:
    node, ports = capped_node
    before = counted(node, "slow")

    async def run() -> int:
        done = 0
        async with grpc.aio.insecure_channel(f"127.0.0.1:{ports['grpc_port']}") as channel:
            call = channel.unary_unary(INFER)
            calls = [call(grpc_request("slow", rows(1))) for _ in range(SENT)]
            for outcome in await asyncio.gather(*calls, return_exceptions=True):
                if isinstance(outcome, bytes):
                    done += 1
                    continue
                assert isinstance(outcome, grpc.aio.AioRpcError)
                assert outcome.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
                assert "queue of model 'slow' is full" in (outcome.details() or "")
                assert int(dict(outcome.trailing_metadata() or ())["retry-after"]) >= 1
        return done

    check_counts(node, before, asyncio.run(run()))


def test_rule_23_do_09_a_stream_answers_each_request(capped_node: tuple[Node, dict[str, int]]) -> None:
    node, ports = capped_node
    before = counted(node, "slow")

    async def sent() -> AsyncIterator[bytes]:
        for number in range(SENT):
            yield grpc_request("slow", rows(1, float(number)), str(number))

    async def run() -> int:
        done = 0
        async with grpc.aio.insecure_channel(f"127.0.0.1:{ports['grpc_port']}") as channel:
            call = channel.stream_stream(
                STREAM_INFER, response_deserializer=message_class("ModelStreamInferResponse").FromString
            )
            answers = [answer async for answer in call(sent())]
        assert [answer.infer_response.id for answer in answers] == [str(number) for number in range(SENT)]
        for answer in answers:
            if answer.error_message:
                assert "queue of model 'slow' is full" in answer.error_message
            else:
                done += 1
        return done

    check_counts(node, before, asyncio.run(run()))


def test_do_03_refusals_do_not_wait_and_other_models_go_on(capped_node: tuple[Node, dict[str, int]]) -> None:
    """Everything is judged by what is answered before what: a refusal waits for no execution, and neither does the
    other model for more than the one that runs."""
    _, ports = capped_node

    async def run() -> None:
        opened = await connections(ports["http_port"], 1 + SENT)
        other, *crowd = opened
        answered: list[int] = []

        async def one_of_crowd(connection: HttpConnection) -> None:
            status, _ = await connection.call(request("slow", rows(1)))
            answered.append(status)

        waiting = [asyncio.ensure_future(one_of_crowd(one)) for one in crowd]
        served = 0
        while not all(call.done() for call in waiting):
            status, body = await other.call(request("affine", rows(2)))
            assert status == 200, body
            np.testing.assert_array_equal(raw_output(body, 4), rows(2) * 2 + 1)
            served += 1
        await asyncio.gather(*waiting)
        assert set(answered) == {200, 429}
        assert answered[: len(answered) - answered[::-1].index(429)].count(200) <= 1, answered
        # Fair: between two executions of the crowded model the other one has its turn, each time that it asks.
        assert served >= CAP - 1
        close_all(opened)

    asyncio.run(run())


def test_a_full_queue_is_empty_again_afterwards(capped_node: tuple[Node, dict[str, int]]) -> None:
    node, ports = capped_node

    async def run() -> None:
        opened = await connections(ports["http_port"], 12)
        await asyncio.gather(*(one.call(request("slow", rows(1))) for one in opened))
        status, _ = await opened[0].call(request("slow", rows(1)))
        assert status == 200
        close_all(opened)

    asyncio.run(run())
    assert counted(node, "slow")["queue_depth"] == 0


def until_back(node: Node) -> None:
    """Wait until the worker has ended and the node is ready again."""
    node.wait_line("process.ended name=worker0")
    node.wait_line("node.state degraded")
    node.wait_full_strength()


def test_rule_24_do_08_a_hanging_model_is_ended_and_service_comes_back(
    tmp_path: Path, record_property: pytest.RecordProperty
) -> None:
    """An input makes the model run for an hour: the worker is killed after 2 x dispatch_timeout_seconds, callers are
    told, the node is not ready meanwhile, and then every model serves again."""
    models = tmp_path / "models"
    add_steps(models, "steps")
    add_affine(models)
    settings = node_file(tmp_path, dispatch_timeout_seconds=1)

    async def run(node: Node, ports: dict[str, int]) -> Counter[int]:
        opened = await connections(ports["http_port"], 5)
        lone, *others = opened
        statuses: Counter[int] = Counter()
        hung = asyncio.ensure_future(lone.call(request("steps", rows(1, 1e9))))
        loop = asyncio.get_running_loop()
        killed = loop.run_in_executor(None, node.wait_line, "process.hang name=worker0")
        killed_s: list[float] = []
        killed.add_done_callback(lambda _: killed_s.append(time.monotonic()))
        back = loop.run_in_executor(None, until_back, node)

        async def client(number: int) -> None:
            while not back.done():
                status, body = await others[number].call(request("affine", rows(1, float(number))))
                statuses[status] += 1
                if status == 200:
                    np.testing.assert_array_equal(raw_output(body, 4), rows(1, float(number)) * 2 + 1)
                await asyncio.sleep(0.01)

        async with asyncio.timeout(60):
            await asyncio.gather(*(client(number) for number in range(len(others))))
        assert "device execution without an end" in await killed
        await back
        back_s = time.monotonic() - killed_s[0]
        record_property("seconds_from_kill_to_full_strength", f"{back_s:.1f}")
        print(f"\nfrom kill to full strength: {back_s:.1f} s")
        # Its deadline is dispatch_timeout_seconds as well, so it was answered before the worker was given up.
        assert (await hung)[0] in (503, 504)
        for model in ("affine", "steps"):
            status, body = await lone.call(request(model, rows(1)))
            assert status == 200, body
        close_all(opened)
        return statuses

    with Node(models, tmp_path / "run", frontends=2, node_file=settings) as node:
        node.wait_full_strength()
        statuses = asyncio.run(run(node, node.ports))
        assert set(statuses) <= {200, 503, 504}, statuses
        assert statuses[503] > 0, "callers of a worker that was killed are told UNAVAILABLE"
        status = node.status()
        assert status is not None
        assert {one["name"]: one["restarts"] for one in status["processes"] if one["restarts"]} == {"worker0": 1}
        assert node.stop() == 0
